"""Ragged and gated products of two quantized operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import quantization

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.testing.lowered import all_specs_of

FORCED = {"precision": "highest", "implementation": "hopper"}  # promoted sums
E4M3 = "float8_e4m3fn"
M, K, N, G = 96, 256, 160, 4
SIZES = np.array([30, 0, 41, 20], np.int32)  # of 96 rows
ROWS = np.arange(M, dtype=np.int32)[::-1] - 1
# Blocks of rows (M, K) and of weights (G, K, N); those of a kernel's scales along K, or None.
BLOCKS: dict[str, tuple[Any, Any, Any]] = {
    "tensors": (None, None, None),
    "rows and columns": ((1, None), (1, None, 1), None),
    "blocks": ((1, 128), (1, 128, 128), (1, 128)),
    "blocks of columns": ((1, 128), (1, 128, 1), (1, 1)),
    "blocks of rows": ((128, 128), (None, 128, 128), (1, 128)),
    "one block of K": ((1, None), (1, 128, 128), (1, 128)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps": {"bias": np.ones((G, N), np.float32), "activation": "gelu"},
    "picked": {"row_indices": ROWS},
    "offset": {"group_offset": 1, "sizes": np.array([5, 30, 0, 41, 20, 9], np.int32)},
}


@dataclass(frozen=True)
class Program:
    """A product: `function` of operands, quantized or not, with further options."""

    function: Callable[..., jax.Array]
    operands: tuple[Any, ...]

    def ours(self, **options: Any) -> Callable[..., jax.Array]:
        return jax.jit(partial(self.function, **options))

    def wanted(self) -> jax.Array:
        """Returns the result of the operands multiplied by their scales, in float32."""
        wide = jax.tree.map(
            quantization.dequantize, self.operands,
            is_leaf=lambda x: isinstance(x, jhg.Quantized),
        )  # fmt: skip
        return self.function(*wide, precision="highest", implementation="xla")

    def specs(self, **options: Any) -> list[KernelSpec]:
        return all_specs_of(self.ours(**options), *self.operands)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / 8


def quantize(x: np.ndarray, dtype: str, block: Any) -> jhg.Quantized:
    """Returns what the CPU makes of an array, so that no kernel of a GPU takes part."""
    with jax.default_device(jax.devices("cpu")[0]):
        return quantization.quantize(x, dtype, block)


def ragged(kind: str, name: str, dtype: str) -> Program:
    rows, columns, _ = BLOCKS[kind]
    named = {"sizes": SIZES} | OPTIONS[name]
    sizes = jnp.asarray(named.pop("sizes"))
    x, w = quantize(normal(M, K), dtype, rows), quantize(normal(G, K, N), dtype, columns)

    def function(x: Any, w: Any, **options: Any) -> jax.Array:
        return jhg.ragged_dot(x, w, sizes, **named, **options)

    return Program(function, (x, w))


def gated(kind: str, stacked: bool, grouped: bool) -> Program:
    rows, columns, _ = BLOCKS[kind]
    gate, up = (normal(G, K, N, seed=i) for i in (1, 2))
    bias = np.ones((2, G, N), np.float32) / [[[1]], [[2]]]
    named: dict[str, Any] = {"row_scale": np.arange(M, dtype=np.float32) / M}
    if grouped:
        named |= {"group_sizes": jnp.asarray(SIZES), "row_indices": ROWS}
    else:
        gate, up, bias, columns = gate[0], up[0], bias[:, 0], columns and columns[1:]
    weights: Any = tuple(quantize(w, E4M3, columns) for w in (gate, up))
    if stacked:
        block = columns and (*columns[:-1], 1, columns[-1])
        weights = quantize(np.stack((gate, up), -2), E4M3, block)
    biases = tuple(b.astype(np.float32) for b in bias)

    def function(x: Any, weights: Any, **options: Any) -> jax.Array:
        return jhg.gated_linear_unit(x, weights, bias=biases, **named, **options)

    return Program(function, (quantize(normal(M, K), E4M3, rows), weights))


# Each makes its operands, which takes a while.
PROGRAMS: dict[str, Callable[[], Program]] = {
    **{
        f"{kind}, {name}": partial(ragged, kind, name, dtype)
        for kind in BLOCKS
        for name, dtype in zip(OPTIONS, (E4M3, "int8") * 2, strict=True)
    },
    **{
        f"gated, {kind}, {stacked}, {grouped}": partial(gated, kind, stacked, grouped)
        for kind in ("rows and columns", "blocks")
        for stacked in (False, True)
        for grouped in (False, True)
    },
}


def specs() -> list[KernelSpec]:
    return [spec for program in PROGRAMS.values() for spec in program().specs(**FORCED)]
