"""What the derivative of an epilogue keeps: the argument of its nonlinear part, or a mask."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_hopper_gemm as jhg
from jax_hopper_gemm.fusion.jaxprs import traced
from jax_hopper_gemm.fusion.residuals import Tangent, tangent
from jax_hopper_gemm.ops.activations import ACTIVATIONS

M, N = 4, 8
ACC, ROW, MATRIX, SCALAR = (
    jax.ShapeDtypeStruct(s, jnp.float32) for s in ((M, N), (N,), (M, N), ())
)
BF16 = np.dtype(jnp.bfloat16)


def kept(function: Any, *operands: Any, count: int = 1, still: tuple[int, ...] = (),
         recompute: bool = False) -> tuple[Tangent, list[str]]:  # fmt: skip
    """Returns the derivative by all inputs that are not `still`, and its residuals' dtypes."""
    avals = [ACC] * count + list(operands)
    wrt = tuple(i for i in range(len(avals)) if i not in still)
    derivative = tangent(traced(function, *avals), wrt, count, BF16, recompute)
    assert all(aval.shape == (M, N) for aval in derivative.residuals.out_avals)
    return derivative, [aval.dtype.name for aval in derivative.residuals.out_avals]


SMOOTH = ("gelu", "gelu_exact", "mish", "sigmoid", "silu", "softplus", "tanh")
AT_ZERO = ("celu", "elu", "leaky_relu", "relu", "relu_squared", "selu", "softsign")
MASKED = ("hard_sigmoid", "relu6")
ELSEWHERE = ("hard_swish", "hard_tanh")


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"identity", "swish"}))
def test_an_activation_keeps_its_argument(name):
    derivative, dtypes = kept(lambda y, b: ACTIVATIONS[name](y + b), ROW)
    assert name in (*SMOOTH, *AT_ZERO, *MASKED, *ELSEWHERE)
    assert dtypes == (["float32"] if name in ELSEWHERE else ["bfloat16"])
    assert derivative.accumulators == (None,) and derivative.operands == (False,)
    primitives = {e.primitive.name for e in derivative.residuals.jaxpr.eqns}
    assert ("add" in primitives) and ("lt" in primitives) == (name in MASKED)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"identity", "swish"}))
def test_a_recomputed_product_is_rounded_only_without_jumps(name):
    activation = ACTIVATIONS[name]
    derivative, dtypes = kept(lambda y, b: activation(y + b), ROW, recompute=True)
    assert dtypes == (["bfloat16"] if name in SMOOTH else ["float32"])
    assert derivative.accumulators == (0,) and derivative.operands == (True,)


@pytest.mark.parametrize(
    "function, dtype",
    [
        (jnp.abs, "bfloat16"),
        (lambda z: jnp.sign(z) * z, "bfloat16"),
        (lambda z: jnp.maximum(z + 0.1 * z, 0), "bfloat16"),
        (lambda z: jax.nn.relu(z + 3) * z, "float32"),
        (lambda z: jnp.maximum(z, 0), "bfloat16"),
        (lambda z: jnp.maximum(0.1 * z, z), "bfloat16"),
        (lambda z: jnp.maximum(z, 0.1), "float32"),
        (lambda z: jnp.where(z > 0, z, jnp.sin(z)), "bfloat16"),
        (lambda z: jnp.where(z > 0.5, z, jnp.sin(z)), "float32"),
        (lambda z: jnp.where(jnp.sin(z) > 0, z, jnp.sin(z)), "float32"),
        (lambda z: jnp.where(z > 0.5, z, -z), "bfloat16"),  # a mask
        (lambda z: jnp.floor(z) * z, "float32"),
        (lambda z: jnp.max(z, -1, keepdims=True), "float32"),
        (lambda z: jax.lax.top_k(z, N)[0], "float32"),
        (lambda z: jnp.clip(z.astype(jnp.bfloat16), -1, 1), "bfloat16"),  # exact
        (partial(jax.nn.softmax, axis=-1), "bfloat16"),
        (jax.nn.log_softmax, "bfloat16"),
        (lambda z: z.astype(jnp.float8_e4m3fn).astype(jnp.float32) * z, "float32"),
        (lambda z: jax.lax.reduce_precision(z, 8, 3) * z, "float32"),
        (lambda z: z.astype(jnp.bfloat16).astype(jnp.float32) * z, "bfloat16"),  # as it is kept
        (lambda z: jnp.sin(2 * z).astype(jnp.float16) * z, "bfloat16"),
        (lambda z: jnp.tanh(z).astype(jnp.float8_e4m3fn), "bfloat16"),  # a tangent is rounded
        (lambda z: jax.lax.cond(z[0, 0] > 1, jnp.sin, jnp.cos, z), "float32"),
    ],
)
def test_what_a_comparison_reads_is_rounded_only_if_it_keeps_its_side(function, dtype):
    _, dtypes = kept(lambda y, b: function(y + b), ROW)
    assert dtypes == [dtype]


def test_a_matrix_that_is_added_is_not_kept():
    derivative, dtypes = kept(lambda y, c, b: jnp.tanh(0.5 * y + c + b), MATRIX, ROW)
    assert dtypes == ["bfloat16"] and derivative.operands == (False, False)


def test_both_products_of_a_gate_keep_their_arguments():
    def gate(g, u, b, c):
        return jax.nn.hard_swish(g + b) * (u + c)

    derivative, dtypes = kept(gate, ROW, ROW, count=2)
    assert sorted(dtypes) == ["bfloat16", "float32"]
    assert derivative.accumulators == (None, None) and derivative.operands == (False, False)
    assert len(set(kept(gate, ROW, ROW, count=2, recompute=True)[1])) == 1  # one product


def test_a_factor_that_moves_keeps_the_product():
    def function(y, s, b):
        return jax.nn.relu(s * y + b)

    derivative, dtypes = kept(function, SCALAR, ROW)
    assert derivative.accumulators == (0,) and dtypes == ["float32"]
    derivative, dtypes = kept(function, SCALAR, ROW, still=(1,))
    assert derivative.accumulators == (None,) and dtypes == ["bfloat16"]


def test_a_product_before_a_factor_keeps_its_range_beside_float16():
    avals = (ACC, ROW, ROW)
    scaled, squared = (lambda y, s, b: y * s + b), (lambda y, s, b: y * y)
    for function, dtype in ((scaled, "float32"), (squared, "float16")):
        derivative = tangent(traced(function, *avals), (0, 1, 2), 1, np.dtype("float16"), False)
        assert [aval.dtype for aval in derivative.residuals.out_avals] == [dtype]


def test_nothing_is_kept_of_what_is_linear():
    derivative, dtypes = kept(lambda y, s, r: y * s + r, SCALAR, MATRIX, still=(1,))
    assert dtypes == [] and derivative.operands == (True, False)


@pytest.mark.parametrize(
    "rounded", [lambda y: y.astype(jnp.float8_e4m3fn), lambda y: jax.lax.reduce_precision(y, 8, 3)]
)
@pytest.mark.parametrize("save_preactivation", [True, False])
def test_a_product_is_rounded_once(rounded, save_preactivation):
    a = jnp.array([[1.0625, 2.0**-6]], jnp.bfloat16)  # 1.0625 + 2**-12, just above a tie
    b = jnp.array([[1.0], [2.0**-6]], jnp.bfloat16)

    def loss(product: Any, **options: Any) -> Any:
        def function(y: Any) -> Any:
            return rounded(y).astype(jnp.float32) * y

        options |= dict(epilogue=function, preferred_element_type=(jnp.float32,))
        return jax.grad(lambda a: jnp.sum(product(a, b, **options)))(a)

    ours = loss(jhg.matmul, save_preactivation=save_preactivation)
    np.testing.assert_array_equal(ours, loss(partial(jhg.matmul, implementation="xla")))


def test_cotangents_of_several_results_are_added_before_they_are_rounded():
    x, one = jnp.ones((1, 8), "bfloat16"), jnp.eye(8, dtype="bfloat16")
    cotangents = [jnp.asarray(c, "bfloat16").reshape(1, 8) for c in np.random.default_rng(0).normal(
        size=(2, 8))]  # fmt: skip

    def results(x):
        return jhg.matmul(x, one, epilogue=lambda y: (y * 0.7, y.astype("bfloat16")))

    (gradient,) = jax.vjp(results, x)[1](tuple(cotangents))
    first, second = (c.astype("float32") for c in cotangents)
    expected = (jnp.float32(0.7) * first + second).astype("bfloat16")
    np.testing.assert_array_equal(gradient, expected)
