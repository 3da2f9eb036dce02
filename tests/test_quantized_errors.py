"""Mistakes with quantized arrays are named, with what was expected."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import normal

import jax_hopper_gemm as jhg

Q = jhg.quantize(normal((64, 256)), block=(1, 128))
WIDE = jhg.Quantized(jnp.ones((64, 64)), jnp.ones((1, 1)))  # of a dtype that no kernel takes


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: jhg.matmul(Q, normal((256, 64))), TypeError,
         "b is .* quantize it, too, or convert"),
        (lambda: jhg.matmul(jhg.Quantized(Q.values, Q.scale[0]), Q), ValueError, "K differs"),
        (lambda: jhg.dot_general(jhg.Quantized(Q.values, Q.scale[0]), Q, (((1,), (1,)), ((), ()))),
         ValueError, "expected the rank"),
        (lambda: jhg.dot_general(jhg.Quantized(Q.values, Q.scale[:5]), Q, (((1,), (1,)), ((), ()))),
         ValueError, "an axis of 64 has 64, .* 1 .* or 1"),
        (lambda: jhg.dot_general(jhg.Quantized(Q.values, None), Q, (((1,), (1,)), ((), ()))),  # type: ignore[arg-type]
         TypeError, "lhs.scale is a NoneType, expected an array"),
        (lambda: jhg.Quantized(Q.values, 1.0).dequantize(), ValueError,  # type: ignore[arg-type]
         r"the scale of self is f32\[\], expected the rank of its values, f8_e4m3fn\[64,256\]"),
        (lambda: jhg.einsum("mk,nk->mn", jhg.Quantized(Q.values, Q.scale.astype(int)), Q),
         TypeError, r"the scale of lhs is i32\[64,2\], expected floats: convert it to float32"),
        (lambda: jhg.Quantized(Q.values, Q.scale + 1j).dequantize(), TypeError,
         r"the scale of self is c64\[64,2\], expected floats"),
        (lambda: jhg.quantize(3.0, "int4").pack_weights(), ValueError, "values are a scalar"),
        (lambda: jhg.quantize(normal((4, 4)), None), TypeError, "dtype is None, expected"),  # type: ignore[arg-type]
        (lambda: jhg.dot_general(Q, Q, (((0, 1), (0, 1)), ((), ()))), NotImplementedError,
         "2 axes of quantized arrays are contracted"),
        (lambda: jhg.ragged_dot(normal((8, 64)), jhg.quantize(jnp.ones((1, 64, 8))), np.array([3])),
         TypeError, r"lhs is f32\[8,64\] beside a quantized array: quantize it, too"),
        (lambda: jhg.matmul(WIDE, WIDE),
         TypeError, "a is of float32 .* expected .*float8_e4m3fn.*: quantize it to one of them"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_scale_for_each_element_of_k_is_refused():
    a = jhg.Quantized(Q.values, jnp.ones((64, 256)))
    with pytest.raises(NotImplementedError, match="each element of the contracted axis"):
        jhg.dot_general(a, a, (((1,), (1,)), ((), ())))
