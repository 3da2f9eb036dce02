"""Arrays that kernels quantize, and what NumPy makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.primitives.quantize import hopper_quantize
from jax_hopper_gemm.testing.lowered import all_specs_of

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

# As one program, not one for each of their operations.
quantize = jax.jit(jhg.quantize, static_argnames=("dtype", "block", "symmetric"))
dequantize = jax.jit(jhg.Quantized.dequantize)


@dataclass(frozen=True)
class Case:
    """A quantization: of which array, and which ways are asked for.

    Attributes:
      ways: how many lines share a scale, as the array lies and transposed; 0: it is not asked for.
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    to: str = "float8_e4m3fn"
    ways: tuple[int, int] = (1, 1)
    picked: int = 0  # how many rows are picked

    def run(self, x: Any, *rows: Any) -> list[tuple[jax.Array, jax.Array]]:
        picks = rows[0] if rows else None
        return [
            hopper_quantize(x, self.to, block, transposed=transposed, rows=picks)
            for transposed, block in self.asked
        ]

    @property
    def asked(self) -> list[tuple[bool, int]]:
        """Whether each result is transposed, and how many lines share a scale."""
        return [(bool(way), block) for way, block in enumerate(self.ways) if block]

    def arguments(self, special: float | None = None) -> tuple[jax.Array, ...]:
        """Returns numbers of all magnitudes, blocks of zeros, and rows some of which are none."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal(self.shape) * np.exp(6 * rng.standard_normal(self.shape[-1:]))
        x[..., : self.shape[-2] // 2, : self.shape[-1] // 2] *= 2.0**-20
        x[..., -16:, -16:] = 0.0
        if special is not None:
            x[..., 1, 2] = special
        arrays = [jnp.asarray(np.clip(x, -6e4, 6e4) if special is None else x, self.dtype)]
        if self.picked:
            rows = rng.permutation(self.shape[-2] + self.picked)[: self.picked]
            arrays.append(jnp.asarray(rows, jnp.int32))
        return tuple(arrays)

    def expected(self, x: Any, *rows: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        wide = np.asarray(x, np.float32)
        if rows:
            there = np.asarray(rows[0])
            padding = np.zeros((1, wide.shape[-1]), np.float32)
            wide = np.concatenate([wide, padding])[np.minimum(there, len(wide))]
        turned = {False: wide, True: np.swapaxes(wide, -1, -2)}
        return [quantized(turned[way], self.to, block) for way, block in self.asked]

    def specs(self) -> list[KernelSpec]:
        return all_specs_of(self.run, *self.arguments())


def quantized(x: np.ndarray, to: str, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns values, as float32, and scales of (..., R, C) in blocks along C."""
    *lead, rows, columns = x.shape
    down, along = -(-rows // block), -(-columns // 128)
    padded = np.zeros((*lead, down * block, along * 128), np.float32)
    padded[..., :rows, :columns] = x
    split = padded.reshape(*lead, down, block, along, 128)
    largest = np.abs(split).max((-3, -1), keepdims=True)
    scale = np.maximum(largest * np.float32(1 / LARGEST[to]), np.float32(2.0**-126))
    scale = np.where(largest == 0, np.float32(1), scale)
    with np.errstate(invalid="ignore"):
        values = np.clip(split / scale, -LARGEST[to], LARGEST[to])
    values = values.astype(getattr(ml_dtypes, to)).astype(np.float32).reshape(padded.shape)
    return values[..., :rows, :columns], scale[..., 0, :, 0]


CASES = [
    Case((256, 384)), Case((256, 384), ways=(128, 128)), Case((144, 272), to="float8_e5m2"),
    Case((3, 144, 272)), Case((2, 400, 176), ways=(128, 128)), Case((1040, 16), dtype="float16"),
    Case((16, 1040), dtype="float32"), Case((272, 528), dtype="float32", ways=(128, 128)),
    Case((272, 528), ways=(1, 0)), Case((272, 528), ways=(0, 1)),
    Case((2, 272, 528), ways=(0, 128)), Case((272, 528), ways=(128, 0)),
    Case((272, 528), ways=(1, 128)), Case((400, 176), dtype="float32", ways=(128, 1)),
    Case((300, 528), ways=(0, 1), picked=384), Case((300, 528), ways=(0, 128), picked=384),
    Case((300, 528), ways=(0, 1), picked=256, to="float8_e5m2", dtype="float16"),
    Case((2048, 4096)),
]  # fmt: skip


def specs() -> list[KernelSpec]:
    return list(dict.fromkeys(spec for case in CASES for spec in case.specs()))
