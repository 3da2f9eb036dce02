"""What users read when what is to follow a product does not fit."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jax_hopper_gemm as jhg
from jax_hopper_gemm.ops.activations import ACTIVATIONS


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


A, B = bf16(128, 64), bf16(64, 32)
X, W = bf16(128, 64), bf16(64, 2, 32)
MATMUL: Any = jhg.matmul  # taken with arguments of other types than it declares
GATED: Any = jhg.gated_linear_unit
KNOWN = ", ".join(ACTIVATIONS)


def add(y, x):
    return y + x


def nothing(y):
    del y


class Pair(NamedTuple):
    y: Any
    z: Any


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, y):
        return y


CASES = [
    (lambda: MATMUL(A, B, bias=bf16(64), residual=bf16(128, 31), c=bf16(2, 128, 32)), ValueError,
     "matmul: bias is bf16[64], which does not broadcast to the result's shape (128, 32); "
     "residual is bf16[128,31], which does not broadcast to the result's shape (128, 32); "
     "c is bf16[2,128,32], which does not broadcast to the result's shape (128, 32)"),
    (lambda: MATMUL(A, B, bias=bf16(128)), ValueError,
     "matmul: bias is bf16[128], which does not broadcast to the result's shape (128, 32). Is "
     "it one value a row? Pass bias[:, None]"),
    (lambda: MATMUL(A, B, bias="b", c=[1.0]), TypeError,
     "matmul: c is a list, expected an array: convert it with jnp.asarray; "
     "bias is a str, expected an array: convert it with jnp.asarray"),
    (lambda: MATMUL(A, A, activation="geloo", beta=2.0), ValueError,
     "matmul: K differs: a is bf16[128,64], b is bf16[128,64]. Is b stored (N, K)? Contract it "
     "with dot_general(a, b, (((1,), (1,)), ((), ()))); beta came without c: it is the factor "
     "of c in alpha * (a @ b) + beta * c; activation is 'geloo', expected a function or one of "
     f"{KNOWN}"),
    (lambda: MATMUL(A, B, alpha=bf16(32), beta=bf16(1, 1), c=bf16(32)), ValueError,
     "matmul: alpha is bf16[32], expected a number or a scalar array; "
     "beta is bf16[1,1], expected a number or a scalar array"),
    (lambda: MATMUL(A, B, c=jnp.zeros((128, 32), jnp.int32)), ValueError,
     "matmul: c is i32[128,32], whose dtype the result takes and which cannot hold the product "
     "of bf16[128,64] and bf16[64,32]: convert c, or pass preferred_element_type"),
    (lambda: MATMUL(*(x.astype(jnp.int32) for x in (A, B)), c=bf16(128, 32)), ValueError,
     "matmul: c is bf16[128,32], whose dtype the result takes and which cannot hold the product "
     "of i32[128,64] and i32[64,32]: convert c, or pass preferred_element_type"),
    (lambda: MATMUL(A, B, bias=jnp.zeros(32, jnp.complex64), alpha=1j), ValueError,
     "matmul: alpha is c64[], which is complex, and the product is not: convert one of them, or "
     "pass preferred_element_type; bias is c64[32], which is complex, and the product is not: "
     "convert one of them, or pass preferred_element_type"),
    (lambda: MATMUL(A, B, activation=3), TypeError,
     "matmul: activation is a int, expected a function"),
    (lambda: MATMUL(A, B, activation=jnp.sum), ValueError,
     "matmul: activation returned f32[] for f32[128,32], expected the same shape: a function "
     "that is not elementwise is an epilogue"),
    (lambda: MATMUL(A, B, activation=lambda y: (y, y)), TypeError,
     "matmul: activation returned a tuple, expected an array: a function of several results is "
     "an epilogue"),
    (lambda: MATMUL(A, B, activation=lambda y: y.shape[3]), ValueError,
     "matmul: activation failed when it was traced with (f32[128,32]): IndexError: tuple index "
     "out of range"),
    (
        lambda: MATMUL(A, B, epilogue="gelu", epilogue_operands=A, save_preactivation="keep",
                       implementation="cublas"),
        TypeError,
        "matmul: epilogue is a str, expected a function; epilogue_operands is a ArrayImpl, "
        "expected a tuple of arrays: (x,); save_preactivation is 'keep', expected True or "
        "False; implementation is 'cublas', expected None, 'hopper' or 'xla'",
    ),
    (lambda: MATMUL(A, B, epilogue=Unhashable()), TypeError,
     "matmul: epilogue is a Unhashable, which cannot be hashed: pass a function, and "
     "the arrays that it needs as epilogue_operands"),
    (lambda: MATMUL(A, B, epilogue_operands=(A, B)), ValueError,
     "matmul: 2 epilogue_operands came without an epilogue, the function that takes them after "
     "the product"),
    (lambda: MATMUL(A, B, epilogue=add, epilogue_operands=(bf16(128), "x")), TypeError,
     "matmul: epilogue_operands[1] is a str, expected an array: convert it with jnp.asarray"),
    (lambda: MATMUL(A, B, epilogue=add, epilogue_operands=(bf16(128),)), ValueError,
     "matmul: epilogue failed when it was traced with (f32[128,32], bf16[128]): ValueError: "
     "Incompatible shapes for broadcasting: shapes=[(128, 32), (128,)]"),
    (lambda: MATMUL(A, B, epilogue=add), TypeError,
     "matmul: epilogue failed when it was traced with (f32[128,32]): TypeError: add() missing 1 "
     "required positional argument: 'x'"),
    (lambda: MATMUL(A, B, epilogue=lambda y: y if y[0, 0] > 0 else -y), TypeError,
     "matmul: epilogue failed when it was traced with (f32[128,32]): TracerBoolConversionError"),
    (lambda: MATMUL(A, B, epilogue=nothing), TypeError,
     "matmul: epilogue returned a NoneType, expected an array or a tuple of arrays. Has it a "
     "return statement?"),
    (lambda: MATMUL(A, B, epilogue=lambda y: (y, jax.random.key(0))), TypeError,
     "matmul: epilogue returned key<fry>[], expected numbers"),
    (lambda: MATMUL(A, B, epilogue=lambda y: [y, y]), TypeError,
     "matmul: epilogue returned a list, expected an array or a tuple of arrays: return tuple(...) "
     "of it"),
    (lambda: MATMUL(A, B, epilogue=lambda y: Pair(y, y)), TypeError,
     "matmul: epilogue returned a Pair, expected an array or a tuple of arrays: return tuple(...) "
     "of it"),
    (lambda: MATMUL(A, B, epilogue=lambda y: ()), TypeError,
     "matmul: epilogue returned an empty tuple, expected an array or a tuple of arrays"),
    (lambda: MATMUL(A, B, epilogue=lambda y: (y, {"sum": y.sum()})), TypeError,
     "matmul: epilogue returned a tuple with a dict, expected an array or a tuple of arrays"),
    (lambda: jhg.dot_general(A, A, (((1,), (1,)), ((), ())), epilogue=lambda y: [y]), TypeError,
     "dot_general: epilogue returned a list, expected an array or a tuple of arrays"),
    (lambda: MATMUL(A, B, epilogue=lambda y: (y, y.sum(0)), preferred_element_type=["bfloat16"]),
     ValueError, "matmul: preferred_element_type has 1 dtype, (bf16), and there are 2 results, "
     "f32[128,32], f32[32]: expected one for each"),
    (lambda: MATMUL(A, B, preferred_element_type=(jnp.float32,)), ValueError,
     "matmul: preferred_element_type is (f32), expected one dtype: only the results of an "
     "epilogue have one each"),
    (lambda: GATED(X, bf16(64, 64), activation="x"), ValueError,
     "gated_linear_unit: weights is bf16[64,64], expected (K, 2, N): reshape (K, 2 * N) to "
     "(K, 2, N), or pass the pair (gate, up); activation is 'x', expected a function or one of "
     f"{KNOWN}"),
    (lambda: GATED(X, bf16(2, 64, 32)), ValueError,
     "gated_linear_unit: weights is bf16[2,64,32], expected (K, 2, N): is it (2, K, N)? Pass "
     "the pair (weights[0], weights[1])"),
    (lambda: GATED(X, bf16(64, 3, 32)), ValueError,
     "gated_linear_unit: weights is bf16[64,3,32], expected (K, 2, N): stack gate and up with "
     "jnp.stack((gate, up), 1), or pass the pair (gate, up)"),
    (lambda: GATED(X, (B, B.astype(jnp.float32)), save_preactivation=None), ValueError,
     "gated_linear_unit: gate and up differ: weights[0] is bf16[64,32], weights[1] is "
     "f32[64,32]; save_preactivation is None, expected True or False"),
    (lambda: GATED(X, (B, bf16(64))), ValueError,
     "gated_linear_unit: weights[1] is bf16[64], expected (K, N)"),
    (lambda: GATED(X, (B, B, B)), ValueError,
     "gated_linear_unit: weights is 3 arrays, expected one or the pair (gate, up)"),
    (lambda: GATED(bf16(128, 32), W, bias=bf16(32)), ValueError,
     "gated_linear_unit: K differs: x is bf16[128,32], weights is bf16[64,2,32], expected "
     "(..., K) and (K, 2, N); bias is bf16[32], expected (2, 32)"),
    (lambda: GATED(X, (B, B), bias=(bf16(32), bf16(2))), ValueError,
     "gated_linear_unit: bias is bf16[32] and bf16[2], expected (32,)"),
    (lambda: GATED(X, ()), ValueError,
     "gated_linear_unit: weights is 0 arrays, expected one or the pair (gate, up)"),
    (lambda: GATED(X, W, row_scale=(bf16(128), bf16(128))), TypeError,
     "gated_linear_unit: row_scale is a tuple, expected an array: convert it with jnp.asarray"),
    (lambda: GATED(X, W, row_scale=jnp.zeros(128, jnp.complex64)), ValueError,
     "gated_linear_unit: row_scale is c64[128], and the products are not complex"),
    (lambda: GATED(2.0, "w"), TypeError,
     "gated_linear_unit: weights is a str, expected an array: convert it with jnp.asarray"),
    (lambda: GATED(2.0, W), ValueError,
     "gated_linear_unit: x is a scalar, f32[], expected (..., K)"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, message", CASES)
def test_the_message_says_what_came_and_the_way_out(call, error, message):
    with pytest.raises(error, match=re.escape(message) + r"(\n|$|:)"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda **follow: jhg.matmul(A, B, **follow),
        lambda **follow: jhg.ragged_dot(A, B[None], jnp.array([128]), **follow),
    ],
)
@pytest.mark.parametrize("name", ["activation", "epilogue"])
def test_what_follows_is_a_function_though_it_may_be_false_or_an_array(call, name):
    class Layers(list):
        __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

        def __call__(self, y):
            return y + 1

    assert (call(**{name: Layers()}) == 1).all()
    with pytest.raises(TypeError, match=f"{name} is a ArrayImpl, expected a function"):
        call(**{name: B})


def test_the_error_of_an_epilogue_is_the_cause():
    with pytest.raises(TypeError, match="matmul: epilogue failed") as caught:
        jhg.matmul(A, B, epilogue=lambda y: add(y))  # type: ignore[call-arg]
    assert "missing 1 required" in str(caught.value.__cause__)


def test_errors_are_raised_while_tracing():
    with pytest.raises(ValueError, match="bias is bf16"):
        jax.eval_shape(lambda a, b: jhg.matmul(a, b, bias=bf16(3)), A, B)
