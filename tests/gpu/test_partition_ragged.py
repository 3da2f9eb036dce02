"""Ragged products that XLA partitions over two GPUs: each runs kernels on its rows or groups."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_partition import TARGET, compiled, largest_errors, mesh, moved, note, placed

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing import tolerance
from jax_hopper_gemm.testing.grouped_programs import Exact, gradients
from jax_hopper_gemm.testing.mesh_programs import AXIS, RAGGED, SIZES

__all__ = ["mesh"]  # the fixture

OTHERS = r' dot\(|ragged-dot\(|custom_call_target="__cublas|jax_hopper_gemm.v1.partition'
PRODUCTS = [name for name in RAGGED if "product" in name]
LAYERS = [name for name in RAGGED if name not in PRODUCTS]


def runs_on_kernels(name: str, mesh: Mesh) -> tuple[jax.Array, str]:
    """Returns the results of a program's step, and its text, which is checked."""
    program = RAGGED[name]
    given = placed(program, mesh)
    step = compiled(program, program.ours, given)
    text = step.as_text()
    assert text.count(TARGET) == program.launches
    assert not re.search(OTHERS, text)
    return step(*given), text


def assert_within_bound(result: jax.Array, exact: Exact, partial: bool) -> None:
    """Checks a product; if `partial`, the sum of two that are rounded to bfloat16 each."""
    value, magnitude, terms = exact.value, exact.magnitude, exact.terms
    bound = tolerance.error_bound(value, magnitude, terms, "bfloat16")
    if partial:
        unit = float(jnp.finfo(jnp.bfloat16).eps) / 2
        bound += (unit + unit**2) * (1 + tolerance.accumulation_error(terms)) * magnitude
    tolerance.assert_within(np.asarray(result), value, bound)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_gradients_run_on_shares(name, mesh, checked):
    found, text = runs_on_kernels(name, mesh)
    program = RAGGED[name]
    named = dict(zip(("cotangent", "lhs", "rhs"), program.arguments(), strict=True))
    # Of groups that a device has not, it adds zeros: nothing is rounded once more.
    for result, exact, summed in zip(found, gradients(named, SIZES), "knm", strict=True):
        assert_within_bound(result, exact, summed in program.sharded)
    note(program, text, checked)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_on_shares_with_their_functions(name, mesh, checked):
    program = RAGGED[name]
    found, text = runs_on_kernels(name, mesh)
    wide = [x.astype(np.float32) for x in program.arguments()]
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        exact = jax.jit(lambda *args: program.step(program.plain, *args))(*wide)
        exact = [np.asarray(x) for x in exact]
    given = placed(program, mesh)
    theirs = largest_errors(compiled(program, program.plain, given)(*given), exact)
    for got, xla, value in zip(largest_errors(found, exact), theirs, exact, strict=True):
        unit = float(np.max(np.abs(value))) * 2.0**-8  # half a unit of the last place of bfloat16
        assert got <= 1.5 * max(xla, unit), f"error {got}, XLA's {xla}"
    note(program, text, checked)


# A bias has its gradient summed in float32, which moves more.
@pytest.mark.parametrize("name", [name for name in RAGGED if "bias" not in name])
def test_no_more_moves_than_with_lax(name, mesh):
    program = RAGGED[name]
    given = placed(program, mesh)
    ours, theirs = (compiled(program, f, given) for f in (program.ours, program.plain))
    assert sum(moved(ours).values()) <= sum(moved(theirs).values())


@pytest.mark.parametrize("name", RAGGED)
def test_results_have_the_same_bits_in_repeats(name, mesh):
    program = RAGGED[name]
    given = placed(program, mesh)
    step = compiled(program, program.ours, given)
    first = [np.asarray(x).view("u2") for x in step(*given)]
    for _ in range(5):
        for one, other in zip(first, step(*given), strict=True):
            assert np.array_equal(one, np.asarray(other).view("u2"))


@pytest.mark.parametrize("letter", "mng")
def test_a_row_has_the_bits_of_one_gpu(letter, mesh):
    program = RAGGED[f"{letter} of a ragged product sharded"]
    _, *given = placed(program, mesh)
    _, *here = map(jnp.asarray, program.arguments())
    spread, alone = (jax.jit(program.ours)(*args) for args in (given, here))
    np.testing.assert_array_equal(np.asarray(spread), np.asarray(alone))


def test_a_gradient_is_scattered_to_the_groups_of_each_gpu(mesh):
    program = RAGGED["m of a ragged product sharded"]
    cotangent, lhs, rhs = placed(program, mesh)
    out = NamedSharding(mesh, P(AXIS))

    def of_rhs(cotangent: jax.Array, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return program.step(program.ours, cotangent, lhs, rhs)[2]

    step = jax.jit(of_rhs, out_shardings=out).lower(cotangent, lhs, rhs).compile()
    assert moved(step) == {"reduce-scatter": rhs.nbytes // mesh.size}
    named = dict(zip(("cotangent", "lhs", "rhs"), program.arguments(), strict=True))
    assert_within_bound(step(cotangent, lhs, rhs), gradients(named, SIZES)[2], True)


def test_explicit_axes(mesh):
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))
    _, lhs, rhs = RAGGED["g of a ragged product sharded"].arguments()
    with jax.set_mesh(explicit):
        given = jax.reshard(lhs, P()), jax.reshard(rhs, P(AXIS))
        step = jax.jit(lambda lhs, rhs: jhg.ragged_dot(lhs, rhs, SIZES, out_sharding=P(AXIS)))
        text = step.lower(*given).compile().as_text() or ""
        found = step(*given)
    assert TARGET in text and not re.search(OTHERS, text)
    assert jax.typeof(found).sharding.spec == P(AXIS, None)
    named = {"lhs": lhs, "rhs": rhs, "cotangent": np.zeros_like(found)}
    assert_within_bound(found, gradients(named, SIZES)[0], False)
