"""Products of 8-bit operands as users write them: what a GPU run checks, and its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from support.casts import cast
from support.graphs import EIGHT_BIT

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch.candidates import model_specs
from jax_hopper_gemm.gemm.dtypes import QUANTIZED
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Result
from jax_hopper_gemm.gemm.problem import VarlenAxis
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

M, N, K = 520, 336, 400
NK: Any = (((1,), (1,)), ((), ()))
KN: Any = (((1,), (0,)), ((), ()))
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclass(frozen=True)
class Program:
    """A product of two arrays.

    Attributes:
      function: of `lhs` (M, K), `rhs` and one float32 scale for each.
      dtypes: of the operands.
      rhs: shape of the right operand.
      scaled: whether the result is times the scales.
      promoted: whether sums keep the digits of float32.
    """

    function: Callable[..., Any]
    dtypes: tuple[Any, Any]
    rhs: tuple[int, ...] = (N, K)
    scaled: bool = True
    promoted: bool = False

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        factors = [40 if dtype == jnp.int8 else 1 for dtype in self.dtypes]
        lhs, rhs = (
            cast((factor * rng.standard_normal(shape)).astype(np.float32), jnp.dtype(dtype).name)
            for shape, dtype, factor in zip(((M, K), self.rhs), self.dtypes, factors, strict=True)
        )
        return lhs, rhs, np.float32(0.25), np.float32(1.5)

    def specs(self) -> list[GemmSpec]:
        return specs_of(self.function, *self.arguments())


def _scaled(dims: Any, preferred: Any, precision: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    return jhg.dot_general(
        a, b, dims, precision=precision, preferred_element_type=jnp.bfloat16,
        epilogue=lambda acc, x, y: (acc.astype(jnp.float32) * x * y).astype(preferred),
        epilogue_operands=(x, y), implementation="hopper",
    )  # fmt: skip


def _plain(dims: Any, preferred: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    return jhg.dot_general(a, b, dims, preferred_element_type=preferred, implementation="hopper")


def _accelerated(a: Any, b: Any, x: Any, y: Any) -> Any:
    """A program as Flax and Qwix leave it: JAX's product, then scales."""

    def program(a: Any, b: Any, x: Any, y: Any) -> Any:
        acc = lax.dot_general(a, b, NK, preferred_element_type=jnp.float32)
        return (acc * (x * y)).astype(jnp.bfloat16)

    return jhg.accelerate(program, implementation="hopper")(a, b, x, y)


PROGRAMS: dict[str, Program] = {
    "e4m3, scales": Program(partial(_scaled, NK, jnp.bfloat16, None), (E4M3, E4M3)),
    "e4m3 by e5m2, promoted": Program(
        partial(_scaled, NK, jnp.float32, "highest"), (E4M3, E5M2), promoted=True
    ),
    "e5m2 by e4m3, stored (K, N)": Program(
        partial(_scaled, KN, jnp.bfloat16, None), (E5M2, E4M3), (K, N)
    ),
    "e4m3 into e4m3": Program(partial(_scaled, NK, E4M3, None), (E4M3, E4M3)),
    "e4m3, an algorithm": Program(
        partial(_scaled, NK, jnp.float32, lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32), (E4M3, E4M3),
        promoted=True,
    ),
    "int8 into int32": Program(partial(_plain, NK, jnp.int32), (jnp.int8,) * 2, scaled=False),
    "int8 into float32": Program(partial(_plain, NK, jnp.float32), (jnp.int8,) * 2, scaled=False),
    "int8, scales": Program(partial(_scaled, NK, jnp.bfloat16, None), (jnp.int8,) * 2),
    "accelerate": Program(_accelerated, (E4M3, E4M3)),
    "accelerate, int8": Program(_accelerated, (jnp.int8,) * 2),
}  # fmt: skip


def cast_spec(dtype: str) -> GemmSpec:
    """Returns a kernel that stores accumulators of bfloat16 operands in 8 bits."""
    graph = EpilogueGraph(results=(Result("matrix", 0, dtype),))
    return GemmSpec(
        "bfloat16", "bfloat16", dtype, "k", "n", 128, 64, num_stages=2, epi_stages=2,
        epilogue=graph,
    )  # fmt: skip


LONG_K = 65536


def long_specs() -> list[GemmSpec]:
    """Returns the kernels of a long sum, fast and promoted."""
    return [
        GemmSpec(
            "float8_e4m3fn", "float8_e4m3fn", "float32", "k", "k", 128, 128, 128,
            epi_tile_n=32, epi_stages=2, promoted=promoted,
        )
        for promoted in (False, True)
    ]  # fmt: skip


def chosen_specs() -> list[GemmSpec]:
    """Returns the kernels among which dispatch chooses for promoted sums: of e4m3 with scales of
    blocks, as forward, dgrad and wgrad have them, and without; of wgrad with scales of tensors."""
    kinds: list[tuple[VarlenAxis | None, int, int]] = [
        (None, 0, 0), (None, 1, 128), ("m", 0, 0), ("m", 1, 128),
        ("k", 0, 0), ("k", 1, 1), ("k", 1, 128), (None, 1, 1),
    ]  # fmt: skip
    types = (
        ProblemType(
            "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "k", "k", grouped=axis, promoted=True,
            a_block=a_block, b_block=b_block,
        )
        for axis, a_block, b_block in kinds
    )  # fmt: skip
    of_tensors = ProblemType(
        "float8_e4m3fn", "float8_e5m2", "bfloat16", "k", "k", epilogue=EIGHT_BIT["scaled"],
        grouped="k", promoted=True,
    )  # fmt: skip
    return [spec for kind in (*types, of_tensors) for spec in model_specs(kind)]


def specs() -> list[GemmSpec]:
    """Returns every kernel of this module."""
    found = [cast_spec(dtype) for dtype in QUANTIZED] + long_specs() + chosen_specs()
    return found + [spec for program in PROGRAMS.values() for spec in program.specs()]
