"""Functions of a product are cut into a graph and what XLA does after it, and mean the same."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.functions import interpret, random_operand
from support.fused_functions import assert_same, fused, normal, shape

from jax_hopper_gemm.fusion import NotFusable, fuse
from jax_hopper_gemm.gemm.dtypes import EPILOGUE, QUANTIZED
from jax_hopper_gemm.gemm.epilogue_checks import graph_violations
from jax_hopper_gemm.gemm.epilogue_graph import Node, Operand, Result

ACTIVATIONS = (
    "relu", "gelu", "silu", "swish", "softplus", "leaky_relu", "elu", "mish", "hard_swish", "celu",
    "selu", "hard_tanh", "relu6", "log_sigmoid", "sigmoid", "hard_sigmoid", "soft_sign",
    "squareplus", "sparse_plus", "sparse_sigmoid", "tanh",
)  # fmt: skip
FUNCTIONS = {name: getattr(jax.nn, name) for name in ACTIVATIONS} | {
    "exact gelu": partial(jax.nn.gelu, approximate=False),
    "squared relu": lambda x: jnp.square(jax.nn.relu(x)),
    "clip": lambda x: jnp.clip(x, -1.0, 2.0),
    "logaddexp": lambda x: jnp.logaddexp(x, 0.5 * x),
    "where": lambda x: jnp.where((x > 0) & jnp.isfinite(x) | ~(x != x), x, -x),
    "nan_to_num": jnp.nan_to_num,
    "clamp": lambda x: lax.clamp(-1.0, x, 1.0),
    "round away from zero": lambda x: lax.round(x),
    "jnp.round": jnp.round,
    "float16 precision": lambda x: lax.reduce_precision(x, 5, 10),
    "bfloat16 precision": lambda x: lax.reduce_precision(x, 8, 7),
    "pow": lambda x: jnp.abs(x) ** 1.5 + x**-3,
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "jit": jax.jit(lambda x: jax.jit(jnp.exp)(x) - 1),
    "xor": lambda x: jnp.where((x > 0) ^ (x < 1) ^ (x == 2), x, 2 * x),
    "equal truths": lambda x: jnp.where((x > 0) == (x < 1), x, 2 * x),
    "nested where": lambda x: jnp.where(jnp.where(x > 0, x < 1, x > -1), x, 3.0),
}

LINEAR = {"round away from zero", "jnp.round", "float16 precision", "bfloat16 precision"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_functions_are_fused_whole(name: str):
    fusion = assert_same(FUNCTIONS[name], normal("mn"))
    assert fusion.uncovered == ()
    assert [result.kind for result in fusion.graph.results] == ["matrix"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_their_gradients_are_fused_whole(name: str):
    def gradient(x: Any, cotangent: Any) -> Any:
        return jax.vjp(FUNCTIONS[name], x)[1](cotangent)

    if name in LINEAR:
        with pytest.raises(NotFusable, match="depends on the product"):
            fused(gradient, normal("mn"), normal("mn", 1))
        return
    fusion = assert_same(gradient, normal("mn"), normal("mn", 1))
    assert fusion.uncovered == ()
    assert len(fusion.graph.results) == 1


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-40, -1.5, 2.5])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_come_out_alike(name: str, value: float):
    x = jnp.full(shape("mn"), value, jnp.float32)
    fusion = fused(FUNCTIONS[name], x)
    with jax.disable_jit():
        want = FUNCTIONS[name](x)
    (got,) = interpret(fusion, [x], [], "mn", "m", "n")
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("first", [True, False, None])
@pytest.mark.parametrize("second", [True, False, None])
@pytest.mark.parametrize("op", [jnp.logical_and, jnp.logical_or, jnp.logical_xor, jnp.equal])
def test_constant_truths_are_no_nodes(op: Any, first: bool | None, second: bool | None):
    def function(x: Any) -> Any:
        one, other = (x > 0 if truth is None else truth for truth in (first, second))
        return jnp.where(jnp.where(op(one, other), one, other), x, 2 * x) + op(one, other)

    assert assert_same(function, normal("mn")).uncovered == ()


@pytest.mark.parametrize(
    ("given", "kind", "labels"),
    [
        ((), "scalar", ""), ((1, 1, 1), "scalar", ""), ((2, 1, 1), "scalar", "b"),
        ((16,), "row", "n"), ((1, 16), "row", "n"), ((2, 1, 16), "row", "bn"),
        ((8, 1), "column", "m"), ((2, 8, 1), "column", "bm"), ((8, 16), "matrix", "mn"),
        ((2, 8, 16), "matrix", "bmn"),
    ],
)  # fmt: skip
def test_operands_are_told_apart_by_shape(given: tuple[int, ...], kind: Any, labels: str):
    operand = jax.device_put(np.random.default_rng(0).normal(size=given).astype(np.float32))
    fusion = assert_same(lambda acc, x: acc * x, normal("bmn"), operand, out="bmn")
    assert fusion.graph.operands == (Operand(kind, "float32"),)
    assert (fusion.labels, fusion.operands) == ((labels,), (0,))


def test_an_operand_used_in_several_broadcast_forms_is_read_once():
    def function(acc: Any, bias: Any) -> Any:
        return acc * bias + jnp.broadcast_to(bias[None, :], acc.shape) + jnp.tanh(bias)[None]

    fusion = assert_same(function, normal("mn"), normal("n"))
    assert fusion.graph.operands == (Operand("row", "float32"),)


def test_an_operand_used_along_both_axes_is_two_operands():
    acc = normal("nn")
    fusion = fuse(
        jax.make_jaxpr(lambda acc, x: acc + x + x[:, None])(acc, normal("n")), 1, "mn", "m", "n"
    )
    assert fusion.operands == (0, 0)
    assert fusion.labels == ("m", "n")


@pytest.mark.parametrize("dtype", EPILOGUE)
@pytest.mark.parametrize("labels", ["n", "mn"])
def test_operands_keep_the_dtypes_that_kernels_read(dtype: str, labels: str):
    operand = jax.device_put(random_operand(random.Random(0), labels, dtype, {"m": 8, "n": 16}))

    def function(acc: Any, x: Any) -> Any:
        return jnp.where(x if dtype == "bool" else x > 0, acc, -acc)

    fusion = assert_same(function, normal("mn"), operand)
    assert [o.dtype for o in fusion.graph.operands] == [dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bool"])
def test_scalars_are_converted_to_float32(dtype: str):
    scalar = jnp.asarray(1.5).astype(dtype)
    fusion = assert_same(lambda acc, x: jnp.where(x.astype(bool), acc, -acc), normal("mn"), scalar)
    assert fusion.graph.operands == (Operand("scalar", "float32"),)


@pytest.mark.parametrize("labels", ["", "n", "m"])
def test_integers_are_converted_as_the_function_does(labels: str):
    numbers = np.arange(np.prod(shape(labels), dtype=int)) + 2**24
    operand = jax.device_put(numbers.reshape(shape(labels) + (1,) * (labels == "m")))
    fusion = assert_same(lambda acc, x: acc * x, normal("mn"), operand)
    assert [o.dtype for o in fusion.graph.operands] == ["float32"]
    assert fusion.uncovered == ()


def test_a_matrix_of_integers_is_left_to_xla():
    operand = jnp.arange(8 * 16, dtype=jnp.int32).reshape(8, 16)
    fusion = assert_same(lambda acc, x: jnp.tanh(acc) * x, normal("mn"), operand)
    assert fusion.uncovered == ("convert_element_type", "mul")
    assert fusion.graph.nodes[0].op == "tanh"


def test_the_last_conversion_is_the_rounding_of_the_store():
    fusion = assert_same(lambda x: jnp.tanh(x).astype(jnp.bfloat16), normal("mn"))
    assert fusion.graph.nodes == (Node("tanh", (0,)),)
    assert fusion.graph.results == (Result("matrix", 1, "bfloat16"),)


def test_roundings_inside_are_kept():
    def function(x: Any) -> Any:
        rounded = x.astype(jnp.bfloat16)
        return rounded, jnp.tanh(rounded.astype(jnp.float32).astype(jnp.bfloat16) * 3)

    fusion = assert_same(function, normal("mn"))
    converts = [node for node in fusion.graph.nodes if node.op == "convert"]
    assert len(converts) == 2  # of x, of the product; that of tanh is the store's
    assert fusion.graph.results[0] == Result("matrix", 0, "bfloat16")


def test_arithmetic_of_16_bit_operands_is_rounded_as_written():
    def function(acc: Any, x: Any, y: Any) -> Any:
        return acc + (x + y) * y

    x, y = normal("n", 1, jnp.bfloat16), normal("n", 2, jnp.bfloat16)
    assert_same(function, normal("mn"), x, y, ulps=0)


def test_equal_functions_share_a_graph_and_dead_code_is_left_out():
    def one(acc: Any, bias: Any) -> Any:
        return jax.nn.gelu(acc + bias)

    def other(product: Any, vector: Any) -> Any:
        del_ = jnp.sort(product)  # noqa: F841  dead
        return jax.jit(jax.nn.gelu)(product + vector)

    first, second = fused(one, normal("mn"), normal("n")), fused(other, normal("mn"), normal("n"))
    assert first.graph == second.graph
    assert hash(first.graph) == hash(second.graph)


def test_equal_operations_are_computed_once():
    fusion = fused(lambda x: (jnp.tanh(x) * 2, jnp.tanh(x) + 1, jnp.tanh(x) * 2), normal("mn"))
    assert [node.op for node in fusion.graph.nodes].count("tanh") == 1
    assert len(fusion.graph.results) == 2


def test_a_transposed_product_is_followed():
    fusion = assert_same(lambda x, b: (x.T * b[:, None]).T + b, normal("mn"), normal("n"))
    assert (fusion.uncovered, fusion.labels) == ((), ("n",))


@pytest.mark.parametrize("join", ["stack", "concatenate"])
def test_two_stacked_matrices_are_planes_of_one_array(join: str):
    def function(x: Any) -> Any:
        pair = (jnp.tanh(x).astype("bfloat16"), x.astype("bfloat16"))
        if join == "stack":
            return jnp.stack(pair, axis=-2)
        return jnp.concatenate([y[:, None, :] for y in pair], axis=1)

    fusion = assert_same(function, normal("mn"))
    assert fusion.graph.results == (
        Result("matrix", 1, "bfloat16", plane=0, planes=2),
        Result("matrix", 0, "bfloat16", plane=1, planes=2),
    )
    assert fusion.results == (("m", "?", "n"),) * 2
    assert fusion.uncovered == ()


def test_matrices_stacked_elsewhere_are_left_to_xla():
    fusion = assert_same(lambda x: jnp.stack([jnp.tanh(x), x], axis=0), normal("mn"))
    assert fusion.uncovered == ("tanh", "stack")  # one matrix stored, not two


def test_what_no_kernel_knows_is_named_and_left_to_xla():
    fusion = assert_same(
        lambda x, b: jnp.cumsum(jnp.tanh(x + b), -1) * 2, normal("mn"), normal("n")
    )
    assert fusion.uncovered == ("cumsum", "mul")
    assert [result.dtype for result in fusion.graph.results] == ["float32"]
    assert fusion.graph.nodes[-1].op == "tanh"


def test_fewer_matrices_are_stored_when_xla_recomputes_from_the_product():
    def function(x: Any) -> Any:
        return jnp.sort(jnp.tanh(x)) + jnp.sort(jnp.exp(x))[::-1], jnp.sum(jnp.sin(x), 0)

    fusion = assert_same(function, normal("mn"))
    assert [result.kind for result in fusion.graph.results] == ["matrix", "column_sum"]
    assert fusion.graph.results[0].value == 0


def test_positions_are_left_to_xla():
    fusion = assert_same(lambda x: jnp.where(jnp.arange(16) < 5, jnp.tanh(x), 0.0), normal("mn"))
    assert "iota" in fusion.uncovered


@pytest.mark.parametrize("name", ["truth", "integers", "transposed"])
def test_outputs_that_no_kernel_stores_are_converted_by_xla(name: str):
    functions = {
        "truth": (lambda x: x > 0, "convert_element_type"),
        "integers": (lambda x: jnp.round(x).astype(jnp.int16), "convert_element_type"),
        "transposed": (lambda x: (2 * x).T, "transpose"),
    }
    function, operation = functions[name]
    assert assert_same(function, normal("mn")).uncovered == (operation,)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_outputs_of_8_bits_are_cast_by_the_kernel(dtype: str):
    def function(x: Any, scale: Any) -> Any:
        return (x * 200 * scale).astype(dtype), jnp.max(jnp.abs(x))

    fusion = assert_same(function, normal("mn"), np.float32(1.5))
    assert fusion.uncovered == ()
    assert [(result.kind, result.dtype) for result in fusion.graph.results] == [
        ("matrix", dtype), ("max", "float32"),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_numbers_may_pass_through_8_bits(dtype: str):
    fusion = assert_same(lambda x: (x * 40).astype(dtype).astype(jnp.float32) / 3, normal("mn"))
    assert fusion.uncovered == () and fusion.graph.results[0].dtype == "float32"


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_arithmetic_in_8_bits_is_left_to_xla(dtype: str):
    fusion = assert_same(lambda x: x.astype(dtype) + x.astype(dtype), normal("mn"))
    assert "add" in fusion.uncovered


def test_outputs_without_the_product_are_computed_after_the_kernel():
    fusion = assert_same(lambda x, b: (b * 2, x + b, jnp.float32(3), b), normal("mn"), normal("n"))
    assert len(fusion.graph.results) == 1
    assert fusion.uncovered == ()


def test_gate_and_up_meet_in_one_graph():
    def function(gate: Any, up: Any) -> Any:
        return (jax.nn.silu(gate) * up).astype("bfloat16")

    gate, up = normal("mn"), normal("mn", 1)
    fusion = fuse(jax.make_jaxpr(function)(gate, up), 2, "mn", "m", "n")
    assert [*graph_violations(fusion.graph)] == []
    assert fusion.graph.accumulators == 2
    (got,) = interpret(fusion, [gate, up], [], "mn", "m", "n")
    with jax.disable_jit():
        assert np.array_equal(got, function(gate, up))


@pytest.mark.slow
@pytest.mark.parametrize("extents", [(1, 16), (8, 1), (1, 1)])
def test_extents_of_one(extents: tuple[int, int]):
    x, bias, scale = (np.asarray(normal(labels)) for labels in ("mn", "n", "m"))
    m, n = extents
    x, bias, scale = x[:m, :n], bias[:n], scale[:m, None]

    def function(x: Any, bias: Any, scale: Any) -> Any:
        y = jax.nn.gelu(x * scale + bias)
        return y, jnp.sum(y, 0), jnp.max(y, 1), y - jnp.max(y, 1, keepdims=True), jnp.max(y)

    fusion = assert_same(function, x, bias, scale)
    assert fusion.uncovered == ()


def test_effects_are_kept():
    seen = []

    def function(x: Any) -> Any:
        jax.debug.callback(lambda y: seen.append(np.asarray(y)), jnp.tanh(x))
        return x * 2

    x = normal("mn")
    fusion = fused(function, x)
    interpret(fusion, [x], [], "mn", "m", "n")
    jax.effects_barrier()
    np.testing.assert_allclose(seen[0], np.tanh(x), rtol=1e-6)


def test_what_a_kernel_reduced_is_compared_with_what_it_stored():
    """In the bits of what XLA computes again, no element may be the least, and 1 / 0 follows."""

    def function(x: Any, scale: Any) -> Any:
        y = x / scale
        return x, y == jnp.min(y)

    fusion = assert_same(function, normal("mn"), jnp.float32(3))
    assert [result.kind for result in fusion.graph.results].count("matrix") == 2
    assert "div" not in fusion.uncovered


def test_finish_can_be_traced():
    x = normal("mn")
    fusion = fused(lambda x: jax.nn.softmax(x, -1), x, tile_limit=8)
    largest = jnp.max(x, -1)
    total = jnp.sum(jnp.exp(x - largest[:, None]), -1)
    (got,) = jax.jit(fusion.finish)(x, largest, total)
    np.testing.assert_allclose(got, jax.nn.softmax(x, -1), rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (lambda x, b: b * 2, (normal("mn"), normal("n")), "no output .* depends on the product"),
        (lambda x: x * 2, (normal("mn").astype("bfloat16"),), "product is bfloat16"),
        (lambda x: x + np.arange(16.0, dtype="float32"), (normal("mn"),), r"float32\[16\]"),
    ],
)
def test_what_cannot_be_fused_says_why(function: Any, args: Any, reason: str):
    with pytest.raises(NotFusable, match=reason):
        fused(function, *args)
