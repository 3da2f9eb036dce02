"""Grouped products that benchmarks time: shapes, random inputs, and each library's functions."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import group_sizes
import jax
import jax.numpy as jnp

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing import timing

SCALE = 2.0**-6  # of the weights: products are of the order of 1
ROWS_OF_DECODING = 64  # rows a group, at most, where the weights' bytes are the bar
WHAT = ("forward", "data", "weight")  # the product, gradients of tokens and of weights


@dataclass(frozen=True)
class Shape:
    """(T, K) tokens times (E, K, N) weights; the ratio to dense that is wanted of each."""

    experts: int
    tokens: int
    k: int
    n: int
    wanted: float | None = None

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.k * self.n

    @property
    def decodes(self) -> bool:
        return self.tokens <= ROWS_OF_DECODING * self.experts


SHAPES = {
    "mixtral": Shape(8, 16384, 4096, 14336, 0.95),
    "qwen3": Shape(128, 65536, 2048, 1536, 0.86),
    "deepseek": Shape(32, 32768, 7168, 4096, 0.93),
    "decode": Shape(64, 256, 2048, 1536),
}
SIZES = {name: group_sizes.KINDS[name] for name in ("uneven", "even", "zipf", "half_empty")}

# Functions of (x (T, K), w (E, K, N), w0 (K, N), g (T, N), sizes (E,)).
Function = Callable[..., jax.Array]


def by_ragged_dot(ragged_dot: Callable) -> dict[str, Function]:
    """Returns what to time of a differentiable function (lhs, rhs, group_sizes)."""

    def data(x, w, w0, g, sizes):
        return jax.vjp(lambda x: ragged_dot(x, w, sizes), x)[1](g)[0]

    def weight(x, w, w0, g, sizes):
        return jax.vjp(lambda w: ragged_dot(x, w, sizes), w)[1](g)[0]

    return {
        "forward": lambda x, w, w0, g, sizes: ragged_dot(x, w, sizes),
        "data": data,
        "weight": weight,
    }


def ours() -> dict[str, Function]:
    return by_ragged_dot(functools.partial(jhg.ragged_dot, implementation="hopper"))


DENSE: dict[str, Function] = {
    "forward": lambda x, w, w0, g, sizes: x @ w0,
    "data": lambda x, w, w0, g, sizes: g @ w0.T,
    "weight": lambda x, w, w0, g, sizes: x.T @ g,
}


def pallas(shape: Shape, what: str) -> Iterator[tuple[str, Function]]:
    """Yields JAX's own Hopper kernels in configurations that suit them, with names."""
    folder = "jax.experimental.pallas.ops.gpu"
    if what == "weight":
        kernel = importlib.import_module(f"{folder}.transposed_ragged_dot_mgpu")
        for m, n, k, steps in ((128, 128, 64, 4), (128, 128, 64, 5), (128, 128, 128, 2),
                               (64, 128, 64, 5), (128, 64, 64, 5)):  # fmt: skip
            fixed: dict[str, Any] = {
                "block_m": m, "block_n": n, "block_k": k, "max_concurrent_steps": steps,
                "grid_block_n": 8,
            }  # fmt: skip
            call = functools.partial(kernel.transposed_ragged_dot, **fixed)
            yield (
                f"{m}x{n}x{k}x{steps}",
                lambda x, w, w0, g, sizes, call=call: call(x, g, group_sizes=sizes),
            )
        return
    kernel = importlib.import_module(f"{folder}.ragged_dot_mgpu")
    columns = shape.n if what == "forward" else shape.k
    for m, n, steps, across in (
        (128, 128, 4, 8), (128, 128, 5, 16), (128, 128, 6, 4), (128, 192, 4, 8), (128, 192, 5, 4),
        (64, 128, 6, 8), (64, 192, 5, 8), (64, 256, 4, 4), (192, 128, 4, 8),
    ):  # fmt: skip
        if columns % (n * across):
            continue
        fixed = {
            "block_m": m, "block_n": n, "block_k": 64, "max_concurrent_steps": steps,
            "grid_block_n": across, "transpose_rhs": what == "data",
        }  # fmt: skip
        call = functools.partial(kernel.ragged_dot, **fixed)
        if what == "forward":

            def function(x, w, w0, g, sizes, call=call):
                return call(x, w, group_sizes=sizes)

        else:

            def function(x, w, w0, g, sizes, call=call):
                return call(g, w, group_sizes=sizes)

        yield f"{m}x{n}x64x{steps}, {across} across", function


def random_inputs(shape: Shape) -> list[tuple[jax.Array, ...]]:
    """Returns enough sets of (x, w, w0, g) to keep them out of L2."""
    s = shape
    shapes = ((s.tokens, s.k), (s.experts, s.k, s.n), (s.k, s.n), (s.tokens, s.n))
    sets = timing.sets_to_rotate(sum(map(math.prod, shapes)) * 2)

    @jax.jit
    def draw(seed: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), 4)
        scales = (1.0, SCALE, SCALE, 1.0)
        return tuple(
            jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)
            for key, shape, scale in zip(keys, shapes, scales, strict=True)
        )

    return [jax.block_until_ready(draw(jnp.uint32(seed))) for seed in range(sets)]


def abstract(shape: Shape) -> list[jax.ShapeDtypeStruct]:
    s = shape
    shapes = ((s.tokens, s.k), (s.experts, s.k, s.n), (s.k, s.n), (s.tokens, s.n))
    floats = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in shapes]
    return [*floats, jax.ShapeDtypeStruct((s.experts,), jnp.int32)]
