"""Ragged products that XLA partitions: each device has rows, groups or columns of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import placed as places
from support.collectives import run_counted
from support.placed import EXTENTS, array, mesh, placed
from support.program_inspection import integers, lowered

import jax_hopper_gemm as jhg
from jax_hopper_gemm.sharding import custom_call

SIZES = {
    "all rows": [9, 0, 13, 7, 1, 20, 5, 9],
    "too few": [9, 0, 3, 7, 1, 2, 5, 0],
    "too many": [9, 0, 13, 70, 1, 20, 5, 9],
    "negative": [9, -4, 13, 7, 1, 20, 5, 2**31 - 1],
}
XLA = partial(jhg.ragged_dot, implementation="xla")


def sizes_of(name: str, *spec: Any) -> jax.Array:
    return placed(np.array(SIZES[name], np.int32), *spec)


def name_of(where: Any) -> str | None:
    """Names a test by shardings; what else it is given says nothing new."""
    if isinstance(where, dict) and not where.keys() <= EXTENTS.keys():
        return ""
    return "whole" if where == {} else places.name_of(where)


def product_and_gradients(product: Any, lhs: Any, rhs: Any, sizes: Any) -> Any:
    out, transpose = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes), lhs, rhs)
    return out, *transpose(out)


def moved(found: dict[str, tuple[int, int]]) -> int:
    return sum(nbytes for _, nbytes in found.values())


OF_OUT, OF_LHS, OF_RHS = 4 * 64 * 16, 4 * 64 * 32, 4 * 8 * 32 * 16  # bytes


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where, count, nbytes", [
    ({"m": "y"}, 1, OF_RHS),
    ({"k": "y"}, 1, OF_OUT),
    ({"n": "y"}, 1, OF_LHS),
    ({"g": "y"}, 2, OF_OUT + OF_LHS),
    ({"m": "x", "n": "y"}, 2, OF_LHS // 2 + OF_RHS // 4),
    ({"m": "x", "g": "y"}, 3, OF_OUT // 2 + OF_LHS // 2 + OF_RHS // 4),
], ids=name_of)  # fmt: skip
def test_nothing_moves_but_sums(where, count, nbytes):
    lhs, rhs, sizes = array("mk", where), array("gkn", where, 1), sizes_of("all rows")
    program = partial(product_and_gradients, jhg.ragged_dot)
    shardings = None, lhs.sharding, rhs.sharding
    ours, found = run_counted(program, lhs, rhs, sizes, out_shardings=shardings)
    assert found == {"all-reduce": (count, nbytes)}
    alone = jax.jit(partial(product_and_gradients, XLA))
    theirs = alone(*map(np.asarray, (lhs, rhs, sizes)))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "where",
    [{"k": "x", "g": "y"}, {"g": ("x", "y")}, {"m": "y", "n": "y"}, {"m": "y", "g": "y"}],
    ids=name_of,
)
def test_no_more_moves_than_with_lax(where):
    lhs, rhs = array("mk", where), array("gkn", where, 1)
    sizes = sizes_of("all rows", where.get("g"))
    shardings = None, lhs.sharding, rhs.sharding
    ours, theirs = (
        run_counted(
            partial(product_and_gradients, product), lhs, rhs, sizes, out_shardings=shardings
        )
        for product in (jhg.ragged_dot, jax.lax.ragged_dot)
    )
    jax.tree.map(np.testing.assert_array_equal, ours[0], theirs[0])
    assert moved(ours[1]) <= moved(theirs[1])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where", [{"m": "y"}, {"g": "y"}, {"m": "x", "g": "y"}], ids=name_of)
def test_rows_meet_their_matrices_whatever_the_sizes(where):
    lhs, rhs = array("mk", where), array("gkn", where, 1)
    program = jax.jit(partial(product_and_gradients, jhg.ragged_dot))
    assert program.lower(lhs, rhs, sizes_of("too few")).as_text().count(custom_call.TARGET) == 3
    expected = jax.jit(partial(product_and_gradients, XLA))
    for name in SIZES:
        sizes = sizes_of(name)
        alone = expected(*map(np.asarray, (lhs, rhs, sizes)))
        jax.tree.map(np.testing.assert_array_equal, program(lhs, rhs, sizes), alone)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where", [{"m": "y"}, {"m": "y", "g": "x"}], ids=name_of)
def test_groups_after_an_offset(where):
    """The first span of rows belongs to no group then."""
    lhs, rhs = array("mk", where), placed(array("gkn", {}, 1)[2:6], where.get("g"))

    def program(lhs, rhs, implementation=None):
        product = partial(jhg.ragged_dot, group_offset=2, implementation=implementation)
        return product_and_gradients(product, lhs, rhs, sizes_of("too few"))

    alone = jax.jit(partial(program, implementation="xla"))
    expected = alone(*map(np.asarray, (lhs, rhs)))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(program)(lhs, rhs), expected)


@pytest.mark.usefixtures("on_cpu")
def test_a_scattered_gradient_of_weights():
    """Rows and groups over one axis: the gradient is summed into the groups of each device."""
    lhs, out = array("mk", {"m": "y"}), array("mn", {"m": "y"}, 2)
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    program = partial(jhg.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
    sharding = NamedSharding(mesh(), P("y"))
    found, counted = run_counted(program, lhs, out, sizes_of("too few"), out_shardings=sharding)
    expected = program(integers((64, 32)), np.asarray(out), sizes_of("too few"))
    np.testing.assert_array_equal(found, expected)
    assert counted == {"reduce-scatter": (1, OF_RHS // 4)}


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("axes, left, right, expected", [
    ((0, 0, 0), {"b": "y"}, {"b": "y"}, {}),
    ((0, 0, 0), {"b": "x", "m": "y"}, {"b": "x"}, {"all-reduce": (1, 4 * OF_RHS)}),
    ((0, 0, 0), {"b": "x"}, {"b": "x", "g": "y"}, {"all-reduce": (2, 4 * (OF_OUT + OF_LHS))}),
    ((0, None, 0), {"b": "y"}, {}, {"all-reduce": (1, OF_RHS)}),
], ids=name_of)  # fmt: skip
def test_mapped_products_keep_their_devices(axes, left, right, expected):
    lhs = array("bmk", left)
    rhs = array("gkn" if axes[1] is None else "bgkn", right, 1)
    sizes = np.stack([np.roll(x, i) for i in range(2) for x in SIZES.values()]).astype(np.int32)

    def program(product, lhs, rhs):
        return product_and_gradients(jax.vmap(product, axes), lhs, rhs, sizes)

    shardings = None, lhs.sharding, rhs.sharding
    ours, found = run_counted(partial(program, jhg.ragged_dot), lhs, rhs, out_shardings=shardings)
    theirs = jax.jit(partial(program, XLA))(*map(np.asarray, (lhs, rhs)))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert found == expected


@pytest.mark.usefixtures("on_cpu")
def test_one_axis_that_shard_map_leaves():
    lhs, rhs = array("mk", {"m": "x"}), array("gkn", {"g": "y"}, 1)
    sizes = np.array([5, 0, 6, 3, 1, 9, 5, 3], np.int32)

    def program(lhs, rhs):
        return jax.shard_map(
            lambda lhs, rhs: jhg.ragged_dot(lhs, rhs, sizes), mesh=mesh(),
            in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"},
        )(lhs, rhs)  # fmt: skip

    ours, found = run_counted(program, lhs, rhs)
    assert found == {"all-reduce": (1, OF_OUT // 2)}
    halves = [XLA(x, np.asarray(rhs), sizes) for x in np.split(np.asarray(lhs), 2)]
    np.testing.assert_array_equal(ours, np.concatenate(halves))


# What is emitted for CUDA.


def cuda_operands(where: dict[str, Any]) -> list[jax.Array]:
    lhs, rhs = integers((1024, 256), "bfloat16"), integers((8, 256, 512), "bfloat16", seed=1)
    sizes = np.full(8, 128, np.int32)
    pairs = (lhs, "mk"), (rhs, "gkn"), (sizes, "s")
    return [placed(x, *(where.get(letter) for letter in letters)) for x, letters in pairs]


@pytest.mark.usefixtures("launcher")
def test_a_program_for_cuda_leaves_ragged_products_to_the_partitioner():
    text = lowered(partial(product_and_gradients, jhg.ragged_dot), *cuda_operands({"m": "x"}))
    assert text.count(f"stablehlo.custom_call @{custom_call.TARGET}") == 3
    assert "need_replication={" in text and "dot_general" not in text
    short = [x.astype(jnp.int16) for x in cuda_operands({"m": "x"})[:2]]
    assert custom_call.TARGET not in lowered(jhg.ragged_dot, *short, np.full(8, 128, np.int32))
