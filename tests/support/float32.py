"""Products of float32 operands as users write them: what a GPU run checks, and its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.bf16_parts import PRESETS, RUN_K, num_parts
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import all_specs_of

M, N, K, BATCH, GROUPS = 520, 336, 400, 3, 4
# The largest error in norm, relative to the product, of normal random numbers, by terms; 0: TF32.
NORMS = {0: 5e-4, 3: 6e-6, 6: 3e-7, 9: 3e-7}
LONG_K = 8192


def preset(terms: int) -> Any:
    return lax.DotAlgorithmPreset[PRESETS[terms]]


@dataclass(frozen=True)
class Program:
    """A function of float32 arrays, and the same in float64 and NumPy."""

    function: Callable[..., Any]
    exact: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    terms: int
    depth: int = K  # products of the sums

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.standard_normal(shape).astype(np.float32) for shape in self.shapes]

    def specs(self) -> list[KernelSpec]:
        return all_specs_of(self.function, *self.arguments())


def _matmul(terms: int, a: Any, b: Any) -> Any:
    return jhg.matmul(a, b, precision=preset(terms), implementation="hopper")


def _default(a: Any, b: Any) -> Any:
    with jax.default_matmul_precision(PRESETS[6]):
        return jhg.matmul(a, b, implementation="hopper")


def _batched_layer(a: Any, b: Any, bias: Any) -> Any:
    options: Any = {"precision": preset(6), "implementation": "hopper"}
    return jhg.matmul(a, b, bias=bias, activation="relu", **options)


def _accelerated(a: Any, b: Any, bias: Any) -> Any:
    def program(a: Any, b: Any, bias: Any) -> Any:
        return jnp.maximum(jnp.matmul(a, b, precision=preset(6)) + bias, 0)

    return jhg.accelerate(program, implementation="hopper")(a, b, bias)


def _gradients(terms: int, a: Any, b: Any, cotangent: Any) -> Any:
    _, pullback = jax.vjp(partial(_matmul, terms), a, b)
    return pullback(cotangent)


def _in_tf32(subscripts: str, a: Any, b: Any) -> Any:
    return jhg.einsum(subscripts, a, b, implementation="hopper")


def _layer_in_tf32(a: Any, b: Any, bias: Any) -> Any:
    return jhg.matmul(a, b, bias=bias, activation="relu", implementation="hopper")


def _ragged(terms: int, x: Any, w: Any) -> Any:
    sizes, precision = jnp.array(SIZES, jnp.int32), preset(terms) if terms else None
    return jhg.ragged_dot(x, w, sizes, precision=precision, implementation="hopper")


SIZES = (200, 0, 300, 20)


def _ragged_exact(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    ends = np.cumsum(SIZES)
    pairs = zip(np.split(x, ends)[: len(SIZES)], w, strict=True)
    return np.concatenate([rows @ matrix for rows, matrix in pairs])


AB = (M, K), (K, N)
EXTENTS = {"m": M, "n": N, "k": K}
CUT_K = 2501
CUT_AB = (2040, CUT_K), (CUT_K, 2056)
PROGRAMS: dict[str, Program] = {
    **{f"matmul, {t} terms": Program(partial(_matmul, t), np.matmul, AB, t) for t in (3, 6, 9)},
    "a batch": Program(partial(_matmul, 6), np.matmul, ((BATCH, M, K), (BATCH, K, N)), 6),
    "default_matmul_precision": Program(_default, np.matmul, AB, 6),
    "accelerate": Program(
        _accelerated, lambda a, b, bias: np.maximum(a @ b + bias, 0), (*AB, (N,)), 6
    ),
    "gradients": Program(
        partial(_gradients, 3), lambda a, b, c: (c @ b.T, a.T @ c),
        ((264, 200), (200, 168), (264, 168)), 3, depth=264,
    ),
    **{f"cut before, {t} terms": Program(partial(_matmul, t), np.matmul, CUT_AB, t, CUT_K)
       for t in (3, 6, 9)},
    "cut before, a batch with an epilogue": Program(
        _batched_layer, lambda a, b, bias: np.maximum(a @ b + bias, 0),
        ((2, 1536, CUT_K), (2, CUT_K, 1536), (1536,)), 6, CUT_K,
    ),
    "cut before, gradients": Program(
        partial(_gradients, 3), lambda a, b, c: (c @ b.T, a.T @ c),
        ((2048, 2304), (2304, 2200), (2048, 2200)), 3, depth=2200,
    ),
    "ragged": Program(partial(_ragged, 6), _ragged_exact, ((M, K), (GROUPS, K, N)), 6),
    **{f"in TF32, {subscripts}": Program(
        partial(_in_tf32, subscripts), partial(np.einsum, subscripts),
        tuple(tuple(EXTENTS[x] for x in letters) for letters in subscripts[:-4].split(",")), 0)
       for subscripts in ("mk,kn->mn", "mk,nk->mn", "km,kn->mn", "km,nk->mn")},
    "in TF32, an epilogue": Program(
        _layer_in_tf32, lambda a, b, bias: np.maximum(a @ b + bias, 0), (*AB, (N,)), 0
    ),
    "in TF32, groups": Program(
        partial(_ragged, 0), _ragged_exact, ((M, K), (GROUPS, K, N)), 0
    ),
}  # fmt: skip


def long_cases() -> list[tuple[GemmSpec, GemmProblem]]:
    """Returns a large kernel of each layout and number of terms, and a long sum for it."""
    found = []
    for terms, tile_n in ((3, 192), (6, 128), (9, 128)):
        for a_major in ("k", "m"):
            for b_major in ("n", "k"):
                spec = GemmSpec(
                    "float32", "float32", "float32", a_major, b_major, 128, tile_n, 32, cluster_m=2,
                    num_stages=3, epi_tile_n=16 if terms > 3 else 32, epi_stages=2,
                    bf16_terms=terms,
                )  # fmt: skip
                problem = GemmProblem.dense(
                    512, 384, LONG_K, a_major=a_major, b_major=b_major, dtype="float32"
                )
                found.append((spec, problem))
                reads = replace(
                    spec, a_dtype="bfloat16", b_dtype="bfloat16", tile_n=192, tile_k=64,
                    num_stages=4, epi_tile_n=32,
                )  # fmt: skip
                found.append((reads, problem))
    return found


def parts_along(x: np.ndarray, axis: int, terms: int) -> np.ndarray:
    """Returns the bfloat16 parts of float32, stored as `gemm.bf16_parts` describes."""
    padding = [(0, -extent % RUN_K if i == axis else 0) for i, extent in enumerate(x.shape)]
    rest = np.pad(x, padding)
    outer, inner = rest.shape[:axis], rest.shape[axis + 1 :]
    rest, parts = rest.reshape(*outer, -1, 1, RUN_K, *inner), []
    for _ in range(num_parts(terms)):
        parts.append(rest.astype(jnp.bfloat16))
        with np.errstate(invalid="ignore"):  # of infinities
            rest = rest - parts[-1].astype(np.float32)
    return np.concatenate(parts, axis + 1).reshape(*outer, -1, *inner)


def of_parts(stored: np.ndarray, axis: int, k: int, terms: int) -> np.ndarray:
    """Returns the float32 numbers, `k` along an axis, whose parts lie so."""
    outer, inner = stored.shape[:axis], stored.shape[axis + 1 :]
    runs = stored.astype(np.float32).reshape(*outer, -1, num_parts(terms), RUN_K, *inner)
    return runs.sum(axis + 1).reshape(*outer, -1, *inner).take(range(k), axis)


def specs() -> list[KernelSpec]:
    """Returns the kernels of `PROGRAMS` and of `long_cases`."""
    programs = (spec for program in PROGRAMS.values() for spec in program.specs())
    return list(dict.fromkeys((*programs, *(spec for spec, _ in long_cases()))))
