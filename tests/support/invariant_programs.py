"""Products whose rows must have the same bits in every batch: what a GPU run checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

MOST = 512
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257, 384, MOST)


@dataclass(frozen=True)
class InvariantProgram:
    """A function of rows, (M, K), and of weights; its results have an entry for each row.

    Attributes:
      k: columns of the rows.
      weights: their shapes; the first extent is K.
      dtype: of rows and weights.
      stored: dtype and block of quantized weights, or None where they are as the rows.
    """

    function: Callable[..., Any]
    k: int
    weights: tuple[tuple[int, ...], ...]
    dtype: Any = jnp.bfloat16
    stored: tuple[Any, tuple[int | None, ...]] | None = None

    def run(self, x: Any, *weights: Any) -> tuple[Any, ...]:
        """Returns the results of rows that are asked to have the same bits in every batch."""
        with jhg.batch_invariant():
            results = self.function(x, *weights)
        return results if isinstance(results, tuple) else (results,)

    def arguments(self, seed: int = 0) -> list[Any]:
        """Returns `MOST` rows and the weights: normal random numbers."""
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((MOST, self.k)).astype(self.dtype)
        weights = (self.k**-0.5 * rng.standard_normal(shape) for shape in self.weights)
        return [rows, *(self._as_stored(w.astype(self.dtype)) for w in weights)]

    def _as_stored(self, weights: Any) -> Any:
        return weights if self.stored is None else jhg.quantize(weights, *self.stored)

    def specs(self) -> list[GemmSpec]:
        """Returns the kernels for all numbers of rows."""
        arrays = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.weights]
        weights = [jax.eval_shape(self._as_stored, array) for array in arrays]
        rows = [jax.ShapeDtypeStruct((m, self.k), self.dtype) for m in ROWS]
        return list(dict.fromkeys(s for x in rows for s in specs_of(self.run, x, *weights)))


def _squares(y: Any) -> Any:
    return y, jnp.sum(y * y, axis=-1)


def _logsumexp(y: Any) -> Any:
    return jax.nn.logsumexp(y, axis=-1)


def _float8(x: Any, w: Any) -> Any:
    return jhg.matmul(jhg.quantize(x, jnp.float8_e4m3fn, block=(1, 128)), w)


def _stored_nk(x: Any, w: Any) -> Any:
    return jhg.dot_general(x, w, (((1,), (1,)), ((), ())))


INVARIANT_PROGRAMS = {
    "4096x4096": InvariantProgram(jhg.matmul, 4096, ((4096, 4096),)),
    "512x16384": InvariantProgram(jhg.matmul, 16384, ((16384, 512),)),
    "1536x7168": InvariantProgram(jhg.matmul, 7168, ((7168, 1536),)),
    "1408x4104": InvariantProgram(jhg.matmul, 4104, ((4104, 1408),)),
    "stored_nk": InvariantProgram(_stored_nk, 4096, ((4096, 4096),)),
    "float32": InvariantProgram(
        partial(jhg.matmul, preferred_element_type=jnp.float32), 2048, ((2048, 2048),)
    ),
    "gelu": InvariantProgram(
        lambda x, w, b: jhg.matmul(x, w, bias=b, activation="gelu"), 2048, ((2048, 3072), (3072,))
    ),
    "squares": InvariantProgram(
        lambda x, w: jhg.matmul(x, w, epilogue=_squares), 2048, ((2048, 5120),)
    ),
    "logsumexp": InvariantProgram(
        lambda x, w: jhg.matmul(x, w, epilogue=_logsumexp), 1024, ((1024, 4096),)
    ),
    "softmax": InvariantProgram(
        lambda x, w: jhg.matmul(x, w, epilogue=jax.nn.softmax), 2048, ((2048, 128),)
    ),
    "gated": InvariantProgram(jhg.gated_linear_unit, 2048, ((2048, 2, 1536),)),
    "int8": InvariantProgram(jhg.matmul, 4096, ((4096, 2048),), stored=(jnp.int8, (None, 1))),
    "int4": InvariantProgram(jhg.matmul, 4096, ((4096, 2048),), stored=(jnp.int4, (128, 1))),
    "gated_int8": InvariantProgram(
        jhg.gated_linear_unit, 2048, ((2048, 2, 1536),), stored=(jnp.int8, (None, 1, 1))
    ),
    "float8": InvariantProgram(
        _float8, 2048, ((2048, 8192),), stored=(jnp.float8_e4m3fn, (128, 128))
    ),
    "tf32": InvariantProgram(jhg.matmul, 4096, ((4096, 2048),), jnp.float32),
    "parts": InvariantProgram(
        partial(jhg.matmul, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3),
        2048, ((2048, 2048),), jnp.float32,
    ),
    "highest": InvariantProgram(
        partial(jhg.matmul, precision=lax.Precision.HIGHEST), 2048, ((2048, 2048),), jnp.float32
    ),
}  # fmt: skip


def invariant_specs() -> list[GemmSpec]:
    """Returns the kernels of all programs."""
    return [spec for program in INVARIANT_PROGRAMS.values() for spec in program.specs()]
