"""Products whose rows must have the same bits in every batch: what a GPU run checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

MOST = 512
ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 192, 200,
        255, 256, 257, 320, 384, 448, 511, MOST)  # fmt: skip


@dataclass(frozen=True)
class InvariantProgram:
    """A function of rows, (M, K), and of weights; its results have an entry for each row."""

    function: Callable[..., Any]
    k: int
    weights: tuple[tuple[int, ...], ...]

    def run(self, x: Any, *weights: Any) -> tuple[Any, ...]:
        """Returns the results of rows that are asked to have the same bits in every batch."""
        with jhg.batch_invariant():
            results = self.function(x, *weights)
        return results if isinstance(results, tuple) else (results,)

    def arguments(self, seed: int = 0) -> list[Any]:
        """Returns `MOST` rows and the weights: normal random numbers, bfloat16."""
        rng = np.random.default_rng(seed)
        shapes = ((MOST, self.k), *self.weights)
        scales = (1.0, *(self.k**-0.5 for _ in self.weights))
        pairs = zip(shapes, scales, strict=True)
        return [(s * rng.standard_normal(shape)).astype(jnp.bfloat16) for shape, s in pairs]

    def specs(self) -> list[GemmSpec]:
        """Returns the kernels for all numbers of rows."""
        weights = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in self.weights]
        rows = [jax.ShapeDtypeStruct((m, self.k), jnp.bfloat16) for m in ROWS]
        return list(dict.fromkeys(s for x in rows for s in specs_of(self.run, x, *weights)))


def _squares(y: Any) -> Any:
    return y, jnp.sum(y * y, axis=-1)


def _logsumexp(y: Any) -> Any:
    return jax.nn.logsumexp(y, axis=-1)


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
}  # fmt: skip


def invariant_specs() -> list[GemmSpec]:
    """Returns the kernels of all programs."""
    return [spec for program in INVARIANT_PROGRAMS.values() for spec in program.specs()]
