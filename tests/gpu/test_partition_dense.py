"""Products that XLA partitions over two GPUs: each runs our kernels on its share."""

from __future__ import annotations

import re
from typing import Any

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
    collectives,
    compiled,
    mesh,
    moved,
    note,
    placed,
    runs_on_kernels,
)
from support import reference
from support.mesh_programs import AXIS, DEVICES, EXTENTS, LAYERS, PRODUCTS

import jax_hopper_gemm as jhg

__all__ = ["mesh"]  # the fixture


def assert_sum(result: Any, a: np.ndarray, b: np.ndarray, k: int, partial: bool) -> None:
    expected, magnitude = reference.product(a, b), reference.magnitude(a, b)
    assert_within_bound(result, expected, magnitude, k, partial)


def assert_bits_of_one_gpu(program: Any, mesh: Mesh) -> None:
    _, *given = placed(program, mesh)
    _, *here = map(jnp.asarray, program.arguments())
    spread, alone = (jax.jit(program.ours)(*args) for args in (given, here))
    assert len(spread.sharding.device_set) == DEVICES
    np.testing.assert_array_equal(np.asarray(spread).view("u2"), np.asarray(alone).view("u2"))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_gradients_run_on_shares(name, mesh, checked):
    program = PRODUCTS[name]
    found, text = runs_on_kernels(program, mesh)
    ct, a, b = program.arguments()
    swap = lambda x: x.swapaxes(-1, -2)  # noqa: E731
    for result, lhs, rhs, summed in zip(
        found, (a, ct, swap(a)), (b, swap(b), ct), "knm", strict=True
    ):
        assert_sum(result, lhs, rhs, EXTENTS[summed], summed in program.sharded)
    note(program, text, checked)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_on_shares_with_their_functions(name, mesh, checked):
    program = LAYERS[name]
    found, text = runs_on_kernels(program, mesh)
    assert_as_near_as_plain(program, mesh, found)
    note(program, text, checked)


@pytest.mark.parametrize("name", LAYERS)
def test_collectives_of_layers_are_those_of_jnp(name, mesh):
    program = LAYERS[name]
    given = placed(program, mesh)
    ours, theirs = (moved(compiled(program, f, given)) for f in (program.ours, program.plain))
    if program.sharded == "m":  # gradients of biases are summed in float32, XLA's in bfloat16
        for bias in (x for x in given if x.ndim == 1):
            theirs["all-reduce"] += 2 * bias.size
    assert ours == theirs


@pytest.mark.parametrize("letter", "mn")
def test_a_layer_without_a_sum_has_the_bits_of_one_gpu(letter, mesh):
    assert_bits_of_one_gpu(LAYERS[f"bias and gelu, {letter} sharded"], mesh)


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
    assert_same_bits_in_repeats(PRODUCTS[name], mesh)


@pytest.mark.parametrize("letter", "bmn")
def test_a_product_without_a_sum_has_the_bits_of_one_gpu(letter, mesh):
    assert_bits_of_one_gpu(PRODUCTS[f"{letter} sharded"], mesh)


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
