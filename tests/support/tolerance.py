"""How far a result of the tensor cores may be from the exact product: derived, not tuned.

The model. One `wgmma` of 16-bit floats adds 16 products to a float32 accumulator. The products
are exact; the 17 terms are aligned to the largest exponent among them and cut off after F = 25
binary digits; their sum is exact and is cut off (not rounded) to float32. This is what was found
by testing the hardware bit for bit:

  Xie et al., MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores,
  https://arxiv.org/abs/2511.10909 (Hopper: F = 25);
  Khattak and Mikaitis, Accurate Models of NVIDIA Tensor Cores, https://arxiv.org/abs/2512.07004;
  Fasi et al., Numerical behavior of NVIDIA tensor cores, https://peerj.com/articles/cs-330/.

One instruction. Let S be the sum of |a_k b_k| over the K terms of one element, S_j the part of
it up to instruction j, and c_j the accumulator after it, so |c_j| <= S_j (1 + delta). Cutting a
term off loses less than 2**(e - F), where 2**e is at most the largest term, itself at most S_j.
Cutting the sum off to 24 significant bits loses less than 2**-23 of it. Together

  |c_j - (c_(j-1) + products)|  <=  (17 * 2**-25 + 2**-23) S_j  =  5.25 * 2**-23 S_j.

All of them. There are J = ceil(K / 16), and S_j <= S:

  |c_J - exact|  <=  g / (1 - g) * S,   g = 5.25 * 2**-23 * J,

where 1 / (1 - g) covers delta, as in Higham, Accuracy and Stability of Numerical Algorithms,
section 3.1. Where a library may have answered with float32 additions, in any order, the same
section gives g = K * 2**-24, about half as much again: the larger of the two.

8-bit floats. One instruction adds 32 products, keeps F = 13 digits of each, and cuts the sum off
to as many (the same sources), so that J = ceil(K / 32) instructions err by

  |c_j - (c_(j-1) + products)|  <=  delta S_j,   delta = 34 * 2**-13.

J delta may exceed 1; each error is part of what the next instruction sums, so g / (1 - g) becomes
(1 + delta)**J - 1. Kernels that promote accumulators sum 128 of K that way, from 0, and add the
parts in float32, times the scales of blocks: (1 + delta)**4 (1 + 2**-24)**(ceil(K / 128) + 3) - 1.

Products of int8 are summed without any error, and their sum is rounded once to float32.

float32 as bfloat16 parts (`gemm.bf16_parts`). The terms leave out l |a b|, and all together are at
most 1.008 |a b|. So many of them, t, are added up by t P / 16 instructions over P of K, from 0, and
then in float32: of them l + 1.008 ((1 + delta)**(t P / 16) (1 + 2**-24)**(ceil(K / P) + 1) - 1).

float32 in TF32. One instruction adds 8 products of numbers that were rounded to 11 digits:
(1 + 2**-11)**2 (1 + g) - 1, where g is the error of the sums.

float32 by FMA units (`gemm.simt`). Each of K fused multiply-adds rounds once: (1 + 2**-24)**K - 1.

The store rounds c_J to nearest in the result's dtype: relative error u, or half the smallest
subnormal number; nothing where D is float32. So

  |d - exact|  <=  u |exact| + (1 + u) g / (1 - g) S + eta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jax_hopper_gemm.gemm.bf16_parts import LEFT_OUT, PROMOTED_K, TILE_K
from jax_hopper_gemm.gemm.dtypes import DTYPES
from jax_hopper_gemm.gemm.spec import PROMOTION_K

# By our kernels; by those that promote accumulators; by any float32 code; by kernels that sum so
# many products of bfloat16 parts of float32 operands; by those for FMA units.
TF32_DIGITS = 11
Summation = Literal["wgmma", "promoted", "float32", "bf16x3", "bf16x6", "bf16x9", "fma"]


@dataclass(frozen=True)
class Worst:
    """The element nearest to, or farthest beyond, its bound."""

    ratio: float  # its error over its bound; 1 is the limit, infinite for a NaN
    index: tuple[int, ...]
    got: float
    expected: float  # the exact value
    bound: float  # the error allowed


def accumulation_error(k: int, summation: Summation = "wgmma", operands: str = "bfloat16") -> float:
    """Returns the largest error of a float32 accumulator over K terms, relative to |a| @ |b|.

    Args:
      operands: dtype of a and b.
    """
    if summation.startswith("bf16x"):
        return _error_of_parts(k, int(summation.removeprefix("bf16x")))
    if summation == "fma":
        return _compounded(2.0**-24, k)
    dtype = DTYPES[operands]
    parts = -(-k // PROMOTION_K)
    if dtype.accumulator != "float32":
        # Of block scales: their product, each part times it, and the sums of the parts.
        return _compounded(2.0**-24, parts + 3) if summation == "promoted" else 2.0**-24
    terms = dtype.mma_k + 1  # of one wgmma: its products and the accumulator
    delta = terms * 2.0**-dtype.fraction_bits + 2.0 ** -min(23, dtype.fraction_bits)
    if summation == "promoted":
        one = _compounded(delta, -(-min(k, PROMOTION_K) // dtype.mma_k))
        return (1 + one) * (1 + _compounded(2.0**-24, parts + 3)) - 1
    g = delta * -(-k // dtype.mma_k)
    if summation == "float32":
        g = max(g, k * 2.0**-24)
    summed = g / (1 - g) if g < 0.1 else _compounded(delta, -(-k // dtype.mma_k))
    if dtype.rounding_map and summation == "wgmma":
        return _compounded(2.0**-TF32_DIGITS, 2) * (1 + summed) + summed
    return summed


def _error_of_parts(k: int, terms: int) -> float:
    """Returns the largest error of a sum of products of bfloat16 parts."""
    row = DTYPES["bfloat16"]
    delta = (row.mma_k + 1) * 2.0**-row.fraction_bits + 2.0**-23
    interval = min(PROMOTED_K[terms], -(-k // TILE_K) * TILE_K)
    one = _compounded(delta, terms * interval // row.mma_k)
    added = _compounded(2.0**-24, -(-k // interval) + 1)
    return LEFT_OUT[terms] + 1.008 * ((1 + one) * (1 + added) - 1)


def _compounded(delta: float, steps: int) -> float:
    """Returns (1 + delta)**steps - 1."""
    return math.expm1(steps * math.log1p(delta))


def error_bound(
    expected: np.ndarray,
    magnitude: np.ndarray,
    k: int,
    dtype: str | np.dtype,
    summation: Summation = "wgmma",
    operands: str = "bfloat16",
) -> np.ndarray:
    """Returns the largest error that each element of a correct result may have.

    Args:
      expected: a @ b in float64.
      magnitude: |a| @ |b| in float64, same shape.
      k: length of the sums.
      dtype: dtype of the result.
      summation: what added the products up.
      operands: dtype of a and b.
    """
    accumulated = accumulation_error(k, summation, operands) * magnitude
    if jnp.dtype(dtype) == np.float32:
        return accumulated
    if np.issubdtype(dtype, np.integer):  # sums as they are
        return np.zeros_like(accumulated)
    info = jnp.finfo(dtype)
    unit = float(info.eps) / 2
    return unit * np.abs(expected) + (1 + unit) * accumulated + float(info.smallest_subnormal) / 2


def worst(
    result: np.ndarray,
    expected: np.ndarray,
    magnitude: np.ndarray,
    k: int,
    summation: Summation = "wgmma",
    operands: str = "bfloat16",
) -> Worst:
    """Returns the element of `result` whose error is the largest share of its bound."""
    bound = error_bound(expected, magnitude, k, result.dtype, summation, operands)
    return farthest(result, expected, bound)


def farthest(got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> Worst:
    """Returns the element of `got` whose error is the largest share of its bound.

    A NaN is right where a NaN is expected, and anything is where the bound is infinite.
    """
    numbers = np.asarray(got).astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(numbers - expected)
        ratio = np.where(error == 0, 0.0, error / bound)
    right = (numbers == expected) | (np.isnan(numbers) & np.isnan(expected)) | np.isposinf(bound)
    ratio = np.where(right, np.where(np.isfinite(ratio), ratio, 0.0), ratio)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    index = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    there, *rest = (float(x[index]) for x in (ratio, numbers, expected, bound))
    return Worst(there, tuple(int(i) for i in index), *rest)
