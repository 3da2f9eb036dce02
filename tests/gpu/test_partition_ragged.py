"""Ragged products that XLA partitions over two GPUs: each runs kernels on its rows or groups."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    OTHERS,
    TARGET,
    assert_as_near_as_plain,
    assert_same_bits_in_repeats,
    assert_within_bound,
    compiled,
    mesh,
    moved,
    note,
    placed,
    runs_on_kernels,
)
from support.grouped_programs import Exact, gradients
from support.mesh_programs import AXIS, RAGGED, SIZES

import jax_hopper_gemm as jhg

__all__ = ["mesh"]  # the fixture

PRODUCTS = [name for name in RAGGED if "product" in name]
LAYERS = [name for name in RAGGED if name not in PRODUCTS]


def exact_of(name: str) -> tuple[Exact, Exact, Exact]:
    """Returns what the product of a program and its gradients are."""
    cotangent, lhs, rhs = RAGGED[name].arguments()
    return gradients({"lhs": lhs, "rhs": rhs, "cotangent": cotangent}, SIZES)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_gradients_run_on_shares(name, mesh, checked):
    program = RAGGED[name]
    found, text = runs_on_kernels(program, mesh)
    # Of groups that a device has not, it adds zeros: nothing is rounded once more.
    for result, exact, summed in zip(found, exact_of(name), "knm", strict=True):
        partial = summed in program.sharded
        assert_within_bound(result, exact.value, exact.magnitude, exact.terms, partial)
    note(program, text, checked)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_on_shares_with_their_functions(name, mesh, checked):
    program = RAGGED[name]
    found, text = runs_on_kernels(program, mesh)
    assert_as_near_as_plain(program, mesh, found)
    note(program, text, checked)


ROWS_SHARDED = {"m of a ragged product sharded", "experts, rows sharded"}


# A bias has its gradient summed in float32, which moves more.
@pytest.mark.parametrize("name", [x for x in RAGGED if "bias" not in x and x not in ROWS_SHARDED])
def test_no_more_moves_than_with_lax(name, mesh):
    program = RAGGED[name]
    given = placed(program, mesh)
    ours, theirs = (compiled(program, f, given) for f in (program.ours, program.plain))
    assert sum(moved(ours).values()) <= sum(moved(theirs).values())


@pytest.mark.parametrize("name", ROWS_SHARDED)
def test_of_sharded_rows_only_gradients_of_the_weights_are_summed(name, mesh):
    """As of dense products. `jax.lax.ragged_dot` instead gathers all rows on each device."""
    program = RAGGED[name]
    given = placed(program, mesh)
    weights = [x for x in given if x.sharding.is_fully_replicated]
    assert moved(compiled(program, program.ours, given)) == {
        "all-reduce": sum(x.nbytes for x in weights)
    }
    assert "all-gather" in moved(compiled(program, program.plain, given))


@pytest.mark.parametrize("name", RAGGED)
def test_results_have_the_same_bits_in_repeats(name, mesh):
    assert_same_bits_in_repeats(RAGGED[name], mesh)


@pytest.mark.parametrize("letter", "mng")
def test_a_row_has_the_bits_of_one_gpu(letter, mesh):
    program = RAGGED[f"{letter} of a ragged product sharded"]
    _, *given = placed(program, mesh)
    _, *here = map(jnp.asarray, program.arguments())
    spread, alone = (jax.jit(program.ours)(*args) for args in (given, here))
    np.testing.assert_array_equal(np.asarray(spread), np.asarray(alone))


def test_a_gradient_is_scattered_to_the_groups_of_each_gpu(mesh):
    name = "m of a ragged product sharded"
    program = RAGGED[name]
    cotangent, lhs, rhs = placed(program, mesh)
    out = NamedSharding(mesh, P(AXIS))

    def of_rhs(cotangent: jax.Array, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return program.step(program.ours, cotangent, lhs, rhs)[2]

    step = jax.jit(of_rhs, out_shardings=out).lower(cotangent, lhs, rhs).compile()
    assert moved(step) == {"reduce-scatter": rhs.nbytes // mesh.size}
    exact = exact_of(name)[2]
    found = step(cotangent, lhs, rhs)
    assert_within_bound(found, exact.value, exact.magnitude, exact.terms, True)


def test_explicit_axes(mesh):
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))
    name = "g of a ragged product sharded"
    _, lhs, rhs = RAGGED[name].arguments()
    with jax.set_mesh(explicit):
        given = jax.reshard(lhs, P()), jax.reshard(rhs, P(AXIS))
        step = jax.jit(lambda lhs, rhs: jhg.ragged_dot(lhs, rhs, SIZES, out_sharding=P(AXIS)))
        text = step.lower(*given).compile().as_text() or ""
        found = step(*given)
    assert TARGET in text and not re.search(OTHERS, text)
    assert jax.typeof(found).sharding.spec == P(AXIS, None)
    exact = exact_of(name)[0]
    assert_within_bound(found, exact.value, exact.magnitude, exact.terms, False)
