"""Functions of ragged products, and mixtures of experts, in programs that XLA partitions."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.collectives import collectives
from support.placed import array, mesh, name_of
from support.program_inspection import integers, lowered

import jax_hopper_gemm as jhg
from jax_hopper_gemm import moe

SIZES = np.array([9, 0, 3, 7, 1, 20, 5, 3], np.int32)
CALL = r"name\\22: \\22(\w+)"


def gated(x: Any, weights: Any, scale: Any, implementation: Any = None) -> jax.Array:
    return jhg.gated_linear_unit(
        x, weights, activation="relu", group_sizes=SIZES, row_scale=scale,
        implementation=implementation,
    )  # fmt: skip


def biased(x: Any, weights: Any, bias: Any, implementation: Any = None) -> jax.Array:
    return jhg.ragged_dot(
        x, weights, SIZES, bias=bias, activation="relu", implementation=implementation
    )


PROGRAMS = {"gated": (gated, ("mk", "gkcn", "m")), "biased": (biased, ("mk", "gkn", "gn"))}


def value_and_gradients(function: Any, *args: Any) -> Any:
    result, transpose = jax.vjp(function, *args)
    return result, transpose(result)


def moved(program: Any) -> int:
    return sum(size for _, size in collectives(program.as_text()).values())


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "where", [{"m": "y"}, {"g": "y"}, {"k": "y"}, {"m": "x", "n": "y"}, {"g": "x", "k": "y"}],
    ids=name_of,
)  # fmt: skip
@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_and_gradients_on_shares(name, where):
    function, letters = PROGRAMS[name]
    given = [array(x, where, seed) for seed, x in enumerate(letters)]
    shardings = None, tuple(x.sharding for x in given)

    def built(implementation):
        step = partial(value_and_gradients, partial(function, implementation=implementation))
        return jax.jit(step, out_shardings=shardings).lower(*given)

    ours, theirs = built(None), built("xla")
    assert Counter(re.findall(CALL, ours.as_text()))["hopper_fused_ragged"] == 1
    ours, theirs = ours.compile(), theirs.compile()
    alone = jax.jit(partial(value_and_gradients, partial(function, implementation="xla")))
    expected = alone(*map(np.asarray, given))
    jax.tree.map(np.testing.assert_array_equal, ours(*given), expected)
    # What a function has for each group is read whole.
    entries = given[2].nbytes if "g" in where and "g" in letters[2] else 0
    assert moved(ours) <= moved(theirs) + entries


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name, entries", [("gated", {}), ("biased", {"all-gather": (1, 512)})])
def test_what_is_stored_adds_up_where_groups_are_sharded(name, entries):
    """Without a gradient one result moves, half of what gate and up would."""
    function, letters = PROGRAMS[name]
    given = [array(x, {"g": "y"}, seed) for seed, x in enumerate(letters)]
    program = jax.jit(function).lower(*given).compile()
    assert collectives(program.as_text() or "") == entries | {"all-reduce": (1, 4 * 64 * 16)}
    alone = jax.jit(partial(function, implementation="xla"))
    np.testing.assert_array_equal(program(*given), alone(*map(np.asarray, given)))


@pytest.mark.usefixtures("on_cpu")
def test_added_gradients_of_weights():
    """A contraction with a function: rows sharded, so that the function waits for the sum."""
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    lhs, rhs, c = array("mk", {"m": "x"}), array("mn", {"m": "x"}, 1), array("gkn", {"g": "y"}, 2)

    def added(lhs, rhs, c, implementation=None):
        return jhg.ragged_dot_general(
            lhs, rhs, SIZES, numbers, alpha=0.5, c=c, implementation=implementation
        )

    program = jax.jit(added, out_shardings=c.sharding).lower(lhs, rhs, c)
    assert re.findall(CALL, program.as_text()) == ["hopper_fused_ragged"]
    compiled = program.compile()
    assert collectives(compiled.as_text() or "") == {"all-reduce": (1, 4 * 8 * 32 * 16 // 4)}
    expected = added(*map(np.asarray, (lhs, rhs, c)), implementation="xla")
    np.testing.assert_array_equal(compiled(lhs, rhs, c), expected)


def layer(x: Any, router: Any, gate_up: Any, down: Any, implementation: Any = None) -> jax.Array:
    y, _ = moe.mixture_of_experts(
        x, router, gate_up, down, experts_per_token=2, activation="relu",
        implementation=implementation,
    )  # fmt: skip
    return y


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("of_x, of_gate_up, of_down", [
    (P("x"), P(), P()),
    (P("y"), P("y"), P("y")),
    (P("x"), P(None, None, None, "y"), P(None, "y")),
], ids=["tokens", "experts", "hidden"])  # fmt: skip
def test_experts_are_spread_by_annotation_alone(of_x, of_gate_up, of_down):
    shapes = (64, 32), (32, 8), (8, 32, 2, 16), (8, 16, 32)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape, np.float32) * 0.3 for shape in shapes]
    given = [
        jax.device_put(x, NamedSharding(mesh(), spec))
        for x, spec in zip(values, (of_x, P(), of_gate_up, of_down), strict=True)
    ]
    shardings = given[0].sharding, tuple(x.sharding for x in given)
    step = jax.jit(partial(value_and_gradients, layer), out_shardings=shardings)
    names = Counter(re.findall(CALL, step.lower(*given).as_text()))
    # Gate and up, and in the backward pass what follows the gradient by the hidden values.
    assert names["hopper_fused_ragged"] == 2
    expected = jax.jit(partial(value_and_gradients, partial(layer, implementation="xla")))(*values)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), step(*given), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_explicit_axes_of_gate_and_up():
    where = {"m": "x", "n": "y"}
    arrays = [array(x, {}, seed) for seed, x in enumerate(PROGRAMS["gated"][1])]
    expected = value_and_gradients(partial(gated, implementation="xla"), *map(np.asarray, arrays))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        given = [
            jax.reshard(np.asarray(x), P(*(where.get(letter) for letter in letters)))
            for x, letters in zip(arrays, PROGRAMS["gated"][1], strict=True)
        ]
        step = jax.jit(partial(value_and_gradients, gated))
        assert "hopper_fused_ragged" in step.lower(*given).as_text()
        result, gradients = step(*given)
    assert jax.typeof(result).sharding.spec == P("x", "y")
    for x, gradient in zip(given, gradients, strict=True):
        assert jax.typeof(gradient) == jax.typeof(x)
    jax.tree.map(np.testing.assert_array_equal, (result, gradients), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("launcher")
def test_a_program_for_cuda_leaves_the_function_to_the_partitioner():
    x, weights = integers((1024, 256), "bfloat16"), integers((8, 256, 2, 512), "bfloat16", seed=1)
    x = jax.device_put(x, NamedSharding(mesh(), P("x")))
    text = lowered(lambda x, w: gated(x, w, jnp.ones(1024)), x, weights)
    assert re.findall(CALL, text) == ["hopper_fused_ragged"] and "dot_general" not in text
