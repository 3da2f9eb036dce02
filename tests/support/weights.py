"""Products of 16-bit arrays and weights of 8 and 4 bits, as users write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.program_inspection import normal
from support.quantization import quantize

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import all_specs_of, specs_of

M, N, K, GROUPS = 200, 384, 640, 5
DTYPES = {"int8": jnp.int8, "int4": jnp.int4, "e4m3": jnp.float8_e4m3fn, "packed": jnp.int4}
BLOCKS = {"columns": None, "k32": 32, "k64": 64, "k128": 128}


def quantized(shape: tuple[int, ...], axis: int, dtype: str, block: int | None, seed: int) -> Any:
    """Returns weights with a scale for each column, or for each `block` along `axis`."""
    blocks: list[int | None] = [1] * len(shape)
    blocks[axis] = block
    found = quantize(normal(shape, seed=seed) / 8, DTYPES[dtype], tuple(blocks))
    return found.pack_weights() if dtype == "packed" else found


@dataclass(frozen=True)
class Program:
    """A function of activations and weights, and the exact one.

    Attributes:
      function: of (x, weights), and of the implementation that it asks for.
      exact: of the same in float64, the weights dequantized: value and bound of its error, where
        every product errs by `delta` times that of magnitudes and results are rounded by `unit`.
    """

    function: Callable[..., Any]
    exact: Callable[..., tuple[np.ndarray, np.ndarray]]
    x: tuple[int, ...]
    weights: tuple[tuple[int, ...], int]  # shape, and the axis that is contracted
    kernels: int = 1  # that convert weights

    def arguments(self, dtype: str, block: str, half: Any) -> tuple[Any, Any]:
        shape, axis = self.weights
        return normal(self.x, half), quantized(shape, axis, dtype, BLOCKS[block], 1)

    def specs(self, dtype: str, block: str, half: Any) -> list[GemmSpec]:
        return specs_of(self.function, *self.arguments(dtype, block, half))


def _of(subscripts: str) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    def exact(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        magnitude = np.einsum(subscripts, np.abs(x), np.abs(w), optimize=True)
        return np.einsum(subscripts, x, w, optimize=True), magnitude

    return exact


def _dot_general(axes: Any, batch: Any = ((), ())) -> Callable[..., Any]:
    def product(x: Any, w: Any, only: Any = "hopper") -> Any:
        return jhg.dot_general(x, w, (axes, batch), implementation=only)

    return product


SIZES = np.array([40, 0, 77, 3, 50], np.int32)  # 30 rows of no group


def _ragged(x: Any, w: Any, only: Any = "hopper") -> Any:
    return jhg.ragged_dot(x, w, jnp.asarray(SIZES), implementation=only)


def _ragged_exact(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    value, magnitude = np.zeros((M, N)), np.zeros((M, N))
    ends = np.cumsum(SIZES)
    for group, (start, end) in enumerate(zip(ends - SIZES, ends, strict=True)):
        value[start:end] = x[start:end] @ w[group]
        magnitude[start:end] = np.abs(x[start:end]) @ np.abs(w[group])
    return value, magnitude


def _gated(x: Any, w: Any, only: Any = "hopper") -> Any:
    return jhg.gated_linear_unit(x, w, activation=None, implementation=only)


def _gated_exact(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    (gate, of_gate), (up, of_up) = (_of("mk,kn->mn")(x, w[:, i]) for i in range(2))
    # (g + e)(u + f) - g u = g f + u e + e f, and e, f are small parts of the magnitudes.
    return gate * up, np.abs(gate) * of_up + np.abs(up) * of_gate + 1e-3 * of_gate * of_up


def _epilogue(x: Any, w: Any, only: Any = "hopper") -> Any:
    bias = jnp.arange(N, dtype=jnp.float32) / N
    return jhg.matmul(x, w, bias=bias, activation="relu", implementation=only)


def _epilogue_exact(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    value, magnitude = _of("mk,kn->mn")(x, w)
    return np.maximum(value + np.arange(N) / N, 0), magnitude + 1


def _gradient(x: Any, w: Any, only: Any = "hopper") -> Any:
    """dgrad of a product with a cotangent of ones, which has (M, K) of activations."""
    return jax.grad(lambda x: jnp.sum(jhg.matmul(x, w, implementation=only)))(x)


def _gradient_exact(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _of("mn,kn->mk")(np.ones((x.shape[0], w.shape[1])), w)


PROGRAMS = {
    "few rows": Program(_dot_general(((1,), (0,))), _of("mk,kn->mn"), (3, K), ((K, N), 0)),
    "rows": Program(_dot_general(((1,), (0,))), _of("mk,kn->mn"), (M, K), ((K, N), 0)),
    "along K": Program(_dot_general(((1,), (1,))), _of("mk,nk->mn"), (M, K), ((N, K), 1)),
    "few rows along K": Program(_dot_general(((1,), (1,))), _of("mk,nk->mn"), (1, K), ((N, K), 1)),
    "batched": Program(
        _dot_general(((2,), (1,)), ((0,), (0,))), _of("bmk,bkn->bmn"), (3, 40, K), ((3, K, N), 1)
    ),
    "ragged": Program(_ragged, _ragged_exact, (M, K), ((GROUPS, K, N), 1)),
    "gated": Program(_gated, _gated_exact, (24, K), ((K, 2, N), 0)),
    "epilogue": Program(_epilogue, _epilogue_exact, (M, K), ((K, N), 0)),
    "gradient": Program(_gradient, _gradient_exact, (M, K), ((K, N), 0)),
}
CASES = [
    (name, dtype, block, half)
    for i, (name, dtype, block) in enumerate(
        (name, dtype, block) for name in PROGRAMS for dtype in DTYPES for block in BLOCKS
    )
    for half in (("bfloat16", "float16")[i % 2],)
]


def number_specs() -> list[GemmSpec]:
    """Returns kernels of every pair of dtypes, of weights stored (K, N) and (N, K)."""
    narrow = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")
    majors: tuple[Any, ...] = ("n", "k")
    return [
        GemmSpec(half, dtype, "float32", "k", major, 64, 128)
        for half, dtype, major in itertools.product(("bfloat16", "float16"), narrow, majors)
    ]


def weight_specs() -> list[KernelSpec]:
    """Returns the kernels of all programs, and those that quantize their weights."""
    found: list[KernelSpec] = []
    for name, dtype, block, half in CASES:
        shape, axis = PROGRAMS[name].weights
        weights = partial(quantized, shape, axis, dtype, BLOCKS[block], seed=1)
        found += PROGRAMS[name].specs(dtype, block, jnp.dtype(half)) + all_specs_of(weights)
    return list(dict.fromkeys(found))
