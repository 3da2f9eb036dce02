"""Products that XLA partitions over two GPUs: each runs our kernels on its share."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing import reference, tolerance
from jax_hopper_gemm.testing.mesh_programs import AXIS, DEVICES, EXTENTS, LAYERS, PRODUCTS

sys.path.append(str(Path(__file__).parents[1]))
from collectives import collectives  # noqa: E402

TARGET = 'custom_call_target="jax_hopper_gemm.v1.launch"'
OTHERS = r' dot\(|custom_call_target="__cublas|jax_hopper_gemm.v1.partition'


@pytest.fixture
def mesh() -> Mesh:
    if len(jax.devices()) < DEVICES:
        pytest.skip(f"needs {DEVICES} GPUs")
    return Mesh(np.array(jax.devices()[:DEVICES]), (AXIS,), axis_types=(AxisType.Auto,))


def placed(program: Any, mesh: Mesh) -> list[jax.Array]:
    pairs = zip(program.arguments(), program.partition_specs(), strict=True)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def compiled(program: Any, function: Any, arguments: list[jax.Array]) -> Any:
    return jax.jit(lambda *args: program.step(function, *args)).lower(*arguments).compile()


def moved(program: Any) -> dict[str, int]:
    """Returns the bytes that each kind of collective gives; XLA may make one of several."""
    return {kind: size for kind, (_, size) in collectives(program.as_text()).items()}


def assert_sum(result: Any, a: np.ndarray, b: np.ndarray, k: int, partial: bool) -> None:
    """Checks a product; if `partial`, the sum of two that are rounded to bfloat16 each."""
    expected, magnitude = reference.product(a, b), reference.magnitude(a, b)
    bound = tolerance.error_bound(expected, magnitude, k, "bfloat16")
    if partial:
        unit = float(jnp.finfo(jnp.bfloat16).eps) / 2
        bound += (unit + unit**2) * (1 + tolerance.accumulation_error(k)) * magnitude
    tolerance.assert_within(np.asarray(result), expected, bound)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_gradients_run_on_shares(name, mesh, checked):
    program = PRODUCTS[name]
    given = placed(program, mesh)
    step = compiled(program, program.ours, given)
    text = step.as_text()
    assert text.count(TARGET) == program.launches
    assert not re.search(OTHERS, text)
    found = step(*given)
    ct, a, b = program.arguments()
    swap = lambda x: x.swapaxes(-1, -2)  # noqa: E731
    for result, lhs, rhs, summed in zip(
        found, (a, ct, swap(a)), (b, swap(b), ct), "knm", strict=True
    ):
        assert_sum(result, lhs, rhs, EXTENTS[summed], summed in program.sharded)
    note(program, text, checked)


def note(program: Any, text: str, checked: Any) -> None:
    for spec in program.specs():
        assert f"{spec.name} M=" in text
        checked(spec)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_on_shares_with_their_functions(name, mesh, checked):
    program = LAYERS[name]
    given = placed(program, mesh)
    step = compiled(program, program.ours, given)
    text = step.as_text()
    assert text.count(TARGET) == program.launches
    assert not re.search(OTHERS, text)
    arguments = program.arguments()
    wide = [x.astype(np.float32) for x in arguments]
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        exact = jax.jit(lambda *args: program.step(program.plain, *args))(*wide)
        exact = [np.asarray(x) for x in exact]
    ours = largest_errors(step(*given), exact)
    theirs = largest_errors(compiled(program, program.plain, given)(*given), exact)
    for got, xla, value in zip(ours, theirs, exact, strict=True):
        unit = float(np.max(np.abs(value))) * 2.0**-8  # half a unit of the last place of bfloat16
        assert got <= 1.5 * max(xla, unit), f"error {got}, XLA's {xla}"
    note(program, text, checked)


def largest_errors(results: Any, exact: list[np.ndarray]) -> list[float]:
    pairs = zip(results, exact, strict=True)
    return [float(np.max(np.abs(np.float64(np.asarray(x)) - np.float64(y)))) for x, y in pairs]


@pytest.mark.parametrize("name", LAYERS)
def test_collectives_of_layers_are_those_of_jnp(name, mesh):
    program = LAYERS[name]
    given = placed(program, mesh)
    ours, theirs = (compiled(program, f, given) for f in (program.ours, program.plain))
    assert moved(ours) == moved(theirs)


@pytest.mark.parametrize("letter", "mn")
def test_a_layer_without_a_sum_has_the_bits_of_one_gpu(letter, mesh):
    program = LAYERS[f"bias and gelu, {letter} sharded"]
    _, *given = placed(program, mesh)
    _, *here = map(jnp.asarray, program.arguments())
    spread, alone = (jax.jit(program.ours)(*args) for args in (given, here))
    np.testing.assert_array_equal(np.asarray(spread).view("u2"), np.asarray(alone).view("u2"))


@pytest.mark.parametrize("name", ["bias and gelu, k sharded", "MLP, hidden sharded"])
def test_layers_inside_shard_map_over_another_axis(name, mesh):
    """Of a mesh of one row of GPUs: `jax.shard_map` takes the row, XLA partitions along it."""
    program = LAYERS[name]
    both = Mesh(mesh.devices.reshape(1, DEVICES), ("row", AXIS), axis_types=(AxisType.Auto,) * 2)
    whole = P()
    mapped = jax.shard_map(
        program.ours, mesh=both, axis_names={"row"}, out_specs=whole,
        in_specs=(whole,) * (len(program.letters) - 1),
    )  # fmt: skip
    _, *given = placed(program, both)
    step = jax.jit(lambda *args: mapped(*args)).lower(*given).compile()
    expected = jax.jit(program.ours)(*placed(program, mesh)[1:])
    assert TARGET in (step.as_text() or "") and not re.search(OTHERS, step.as_text() or "")
    np.testing.assert_array_equal(np.asarray(step(*given)), np.asarray(expected))


@pytest.mark.parametrize("name", PRODUCTS)
def test_collectives_are_those_of_jnp(name, mesh):
    program = PRODUCTS[name]
    given = placed(program, mesh)
    ours, theirs = (compiled(program, f, given) for f in (program.ours, program.plain))
    assert moved(ours) == moved(theirs)


@pytest.mark.parametrize("name", PRODUCTS)
def test_results_have_the_same_bits_in_repeats(name, mesh):
    program = PRODUCTS[name]
    given = placed(program, mesh)
    step = compiled(program, program.ours, given)
    first = [np.asarray(x).view("u2") for x in step(*given)]
    for _ in range(5):
        for one, other in zip(first, step(*given), strict=True):
            assert np.array_equal(one, np.asarray(other).view("u2"))


@pytest.mark.parametrize("letter", "bmn")
def test_a_product_without_a_sum_has_the_bits_of_one_gpu(letter, mesh):
    program = PRODUCTS[f"{letter} sharded"]
    _, *given = placed(program, mesh)
    _, *here = map(jnp.asarray, program.arguments())
    spread, alone = (jax.jit(program.ours)(*args) for args in (given, here))
    assert len(spread.sharding.device_set) == DEVICES
    np.testing.assert_array_equal(np.asarray(spread).view("u2"), np.asarray(alone).view("u2"))


def test_a_sharded_result_of_a_sharded_k_is_scattered(mesh):
    program = PRODUCTS["k sharded"]
    _, *given = placed(program, mesh)
    out = NamedSharding(mesh, P(None, AXIS))
    step = jax.jit(lambda a, b: program.ours(a, b), out_shardings=out).lower(*given).compile()
    whole = 2 * EXTENTS["b"] * EXTENTS["m"] * EXTENTS["n"]
    assert collectives(step.as_text() or "")["reduce-scatter"][1] == whole // DEVICES
    _, a, b = program.arguments()
    assert_sum(step(*given), a, b, EXTENTS["k"], True)


def test_explicit_axes(mesh):
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))
    program = PRODUCTS["k sharded"]
    _, a, b = program.arguments()
    with jax.set_mesh(explicit):
        given = jax.reshard(a, P(None, None, AXIS)), jax.reshard(b, P(None, AXIS))
        step = jax.jit(lambda a, b: jhg.matmul(a, b, out_sharding=P(None, AXIS)))
        found = step(*given)
        assert TARGET in (step.lower(*given).compile().as_text() or "")
    assert jax.typeof(found).sharding.spec == P(None, AXIS, None)
    assert_sum(found, a, b, EXTENTS["k"], True)
