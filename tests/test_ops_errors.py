"""What users read when their arguments do not fit."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.quantization import quantize

import jax_hopper_gemm as jhg


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


A, B = bf16(128, 64), bf16(64, 32)
NO_BATCH = ((), ())
MATMUL: Any = jhg.matmul  # taken with arguments of other types than it declares
EINSUM: Any = jhg.einsum
LIST: Any = [1]

CASES = [
    (lambda: jhg.matmul(bf16(128, 64), bf16(32, 64)), ValueError,
     "matmul: K differs: a is bf16[128,64], b is bf16[32,64]. Is b stored (N, K)? Contract it "
     "with dot_general(a, b, (((1,), (1,)), ((), ())))"),
    (lambda: jhg.matmul(bf16(128, 64), jnp.zeros(32)), ValueError,
     "matmul: K differs: a is bf16[128,64], b is f32[32]"),
    (lambda: jhg.matmul(bf16(2, 8, 4), bf16(3, 5, 8)), ValueError,
     "matmul: K differs: a is bf16[2,8,4], b is bf16[3,5,8]; batch axes (2,) and (3,) do not "
     "broadcast: a is bf16[2,8,4], b is bf16[3,5,8]"),
    (lambda: jhg.matmul(2.0, jnp.int32(3)), ValueError,
     "matmul: a is a scalar, f32[], expected at least one axis: scale with *; "
     "b is a scalar, i32[], expected at least one axis: scale with *"),
    (lambda: MATMUL([[1.0]], "b"), TypeError,
     "matmul: a is a list, expected an array: convert it with jnp.asarray; "
     "b is a str, expected an array: convert it with jnp.asarray"),
    (lambda: MATMUL(np.array(["x"]), jax.random.key(0)), TypeError,
     "matmul: a is a ndarray, expected an array of numbers: Dtype <U1 is not a valid JAX array "
     "type. Only arrays of numeric types are supported by JAX.; b is key<fry>[], expected numbers"),
    (lambda: MATMUL(jax.ShapeDtypeStruct((3, 64), "float32"), B), TypeError,
     "matmul: a is a ShapeDtypeStruct, expected an array: jax.eval_shape and explain take shapes"),
    (lambda: MATMUL(A, B, implementation="cublas"), ValueError,
     "matmul: implementation is 'cublas', expected None, 'hopper' or 'xla'"),
    (lambda: MATMUL(A, B, implementation=np.array(["xla"])), ValueError,
     "matmul: implementation is array(['xla'], dtype='<U3'), expected None, 'hopper' or 'xla'"),
    (lambda: MATMUL(A, B, preferred_element_type="fp8"), TypeError,
     "matmul: preferred_element_type is 'fp8', expected a dtype such as jnp.float32, or a tuple of "
     "them for several results, or None"),
    (lambda: EINSUM("mk,kn->mn", A, B, preferred_element_type=(object,)), TypeError,
     "einsum: preferred_element_type is <class 'object'>, expected a dtype such as jnp.float32 or "
     "None"),
    (lambda: MATMUL(A, B, preferred_element_type=jnp.float32(1)), TypeError,
     "matmul: preferred_element_type is Array(1., dtype=float32), expected a dtype such as "
     "jnp.float32, or a tuple of them for several results, or None"),
    (lambda: jhg.ragged_dot(A, B[None], jnp.array([128]), B), TypeError,
     "precision is a ArrayImpl, expected what jax.numpy.matmul takes, such as "
     "jax.lax.Precision.HIGHEST or its name"),
    (lambda: jhg.gated_linear_unit(A, jnp.stack((B, B), 1), out_sharding="x"), TypeError,
     "`out_sharding` argument of dot_general only supports instances of `NamedSharding` or "
     "`PartitionSpec`. Got x of type: <class 'str'>"),
    (lambda: jhg.einsum("mk,kn->nm", quantize(A), quantize(B), out_sharding="x"), TypeError,
     "`out_sharding` argument of dot_general only supports instances of `NamedSharding` or "
     "`PartitionSpec`. Got x of type: <class 'str'>"),
    (lambda: MATMUL(A, B, batch_invariant=1), TypeError,
     "matmul: batch_invariant is 1, expected True or False"),
    (lambda: jhg.dot_general(A, B, (((1,), (1,)), NO_BATCH)), ValueError,
     "dot_general: contracting axes (1,) and (1,) have extents (64,) and (32,): "
     "lhs is bf16[128,64], rhs is bf16[64,32]"),
    (lambda: jhg.dot_general(A, B, (((2,), (0, 0)), NO_BATCH)), ValueError,
     "dot_general: lhs axes (2,) are not all between 0 and 1: lhs is bf16[128,64]; "
     "rhs axes (0, 0) repeat: each is contracted or batched once; "
     "contracting axes (2,) and (0, 0) do not pair up"),
    (lambda: jhg.dot_general(bf16(2, 3, 4), bf16(5, 4, 3), (((2,), (1,)), ((0,), (0,)))),
     ValueError, "dot_general: batch axes (0,) and (0,) have extents (2,) and (5,): "
     "lhs is bf16[2,3,4], rhs is bf16[5,4,3]"),
    (lambda: jhg.dot_general(A, B, (((1.5,), (0,)), NO_BATCH)), TypeError,
     "dot_general: dimension_numbers is (((1.5,), (0,)), ((), ())), expected "
     "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), each an axis or several"),
    (lambda: jhg.dot_general(A, B, ((1,), (0,))), TypeError,
     "dot_general: dimension_numbers is ((1,), (0,)), expected "
     "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), each an axis or several"),
    (lambda: jhg.einsum("mk,kn,no->mo", A, B, B.T, epilogue=jnp.tanh), ValueError,
     "einsum: 3 operands came with an epilogue, which follows a product of two"),
    (lambda: jhg.einsum("mk,nk->mn", A, B), ValueError, "einsum: 'k' in 'mk,nk->mn' is 64 and 32"),
    (lambda: jhg.einsum("lmk,kn,k->mn", A, B), ValueError,
     "einsum: subscripts 'lmk,kn,k->mn' name 3 operands, 2 operands came; "
     "subscripts 'lmk' name 3 axes of an operand that is bf16[128,64]"),
    (lambda: jhg.einsum("mk,kn->mn", quantize(A[0]), B), ValueError,
     "einsum: subscripts 'mk' name 2 axes of an operand that is f8_e4m3fn[64]"),
    (lambda: jhg.einsum("mk,kn->mn", quantize(A), B.astype(float)), TypeError,
     "einsum: rhs is f32[64,32] beside a quantized array: quantize it, too, or convert it to "
     "bfloat16 or float16"),
    (lambda: EINSUM("mk,kn->mn", A, B, recipe=8), TypeError,
     "einsum: recipe is 8, expected one of jax_hopper_gemm.recipes, such as "
     "recipes.BlockScaling()"),
    (lambda: jhg.einsum("mk,kn->", A, B, recipe=jhg.recipes.BlockScaling()), NotImplementedError,
     "einsum: subscripts 'mk,kn->' of quantized arrays, or by a recipe, are not those of one "
     "product, such as '...mk,kn->...mn': write them so, dequantize the arrays, or "
     "leave the recipe out"),
    (lambda: EINSUM(A, B), TypeError,
     "einsum: subscripts is a ArrayImpl, expected a string such as 'mk,kn->mn'"),
    (lambda: EINSUM("mk,kn->mn", None, "b"), TypeError,
     "einsum: lhs is a NoneType, expected an array: convert it with jnp.asarray; "
     "rhs is a str, expected an array: convert it with jnp.asarray"),
    (lambda: EINSUM("mk,kn->mn", A, jhg.Quantized(LIST, B)), TypeError,
     "einsum: rhs.values is a list, expected an array: convert it with jnp.asarray"),
    (lambda: jhg.einsum("mk,kn->mo", A, B), ValueError,
     "einsum: 'o' in 'mk,kn->mo' is an axis of the result alone"),
    (lambda: jhg.matmul(A, B, implementation="hopper"), NotImplementedError,
     "implementation='hopper': the kernels run on CUDA, and this program is lowered for "
     "another platform. With implementation=None it runs on either."),
]  # fmt: skip


@pytest.mark.parametrize("call, error, message", CASES)
def test_the_message_says_what_came_and_the_way_out(call, error, message):
    with pytest.raises(error, match=re.escape(message) + r"(\n|$)"):
        call()


def ragged(module: Any, *shapes: tuple[int, ...], contracted: Any = ([1], [1])) -> Any:
    numbers = lax.RaggedDotDimensionNumbers((contracted, NO_BATCH), [0], [0])
    sizes = jnp.ones(shapes[2], jnp.int32)
    return module.ragged_dot_general(bf16(*shapes[0]), bf16(*shapes[1]), sizes, numbers)


MISFITS = [
    (jnp, lambda module: module.matmul(A, A)),
    (jnp, lambda module: module.matmul(A, B[0])),
    (jnp, lambda module: module.matmul(bf16(2, 8, 4), bf16(3, 4, 5))),
    (jnp, lambda module: module.matmul(A, 2.0)),
    (lax, lambda module: module.dot_general(A, B, (((1,), (1,)), NO_BATCH))),
    (lax, lambda module: module.dot_general(A, B, (((2,), (0,)), NO_BATCH))),
    (lax, lambda module: module.dot_general(A, B, (((1,), (0, 1)), NO_BATCH))),
    (jnp, lambda module: module.einsum("mk,nk->mn", A, B)),
    (jnp, lambda module: module.einsum("lmk,kn->mn", A, B)),
    (jnp, lambda module: module.einsum("mk,kn,no->mo", A, B)),
    (lax, lambda module: module.ragged_dot(A, bf16(2, 32, 8), jnp.array([3, 4]))),
    (lax, lambda module: module.ragged_dot(A, bf16(2, 64, 8), jnp.array([3]))),
    (lax, lambda module: module.ragged_dot(A, B, jnp.array([3, 4]))),
    (lax, lambda module: ragged(module, (8, 4), (2, 5, 6), (2,))),
    (lax, lambda module: ragged(module, (8, 4), (2, 4, 6), (3,))),
    (lax, lambda module: ragged(module, (8, 4), (2, 4, 6), (2, 2))),
    (lax, lambda module: ragged(module, (8, 4), (2, 4, 6), (2,), contracted=([1], []))),
]


@pytest.mark.parametrize("module, call", MISFITS)
def test_code_that_expects_errors_of_jax_gets_them(module, call):
    with pytest.raises((TypeError, ValueError)) as theirs:
        call(module)
    with pytest.raises(theirs.type):
        call(jhg)
    with pytest.raises(ValueError):
        call(jhg)


def test_errors_are_raised_while_tracing():
    with pytest.raises(ValueError, match="K differs: a is bf16"):
        jax.eval_shape(jhg.matmul, A, A)
