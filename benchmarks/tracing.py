"""Times tracing and lowering of a training step beside the same step in `jax.numpy`.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --layers 4 --rounds 3 --profile fused

A step of a transformer, its layers unrolled: loss and gradients by all weights. Programs take
turns in one process; each round traces new functions with the caches of JAX and of this library
cleared, as the first call of a process does. What a process does once (reading the tables, the
digest of the kernels' sources) comes before the clock starts. Neither a GPU nor XLA's compiler is
needed.

CPU time is this process's alone: on a machine that others load, its ratios are the steadier ones.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jax_hopper_gemm as jhg

Weights = dict[str, Any]


@dataclass(frozen=True)
class Model:
    layers: int
    batch: int = 4
    tokens: int = 1024
    width: int = 1024
    hidden: int = 4096
    heads: int = 8

    def weights(self) -> list[Weights]:
        """Returns the shapes of each layer's weights."""
        d, f = self.width, self.hidden
        shapes = {
            "qkv": (d, 3 * d), "qkv_bias": (3 * d,), "out": (d, d), "out_bias": (d,),
            "up": (d, f), "up_bias": (f,), "down": (f, d), "down_bias": (d,), "gate_up": (d, 2, f),
        }  # fmt: skip
        one = {k: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for k, shape in shapes.items()}
        return [one] * self.layers

    def inputs(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.tokens, self.width), jnp.bfloat16)


def attention(model: Model, einsum: Callable[..., Any], qkv: jax.Array) -> jax.Array:
    """Self-attention of (batch, tokens, 3 * width)."""
    q, k, v = jnp.split(qkv.reshape(*qkv.shape[:2], model.heads, -1), 3, axis=-1)
    scores = einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    shares = jax.nn.softmax(scores * q.shape[-1] ** -0.5).astype(q.dtype)
    return einsum("bhts,bshd->bthd", shares, v).reshape(*qkv.shape[:2], -1)


def normalized(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


# A layer of each kind: of x (batch, tokens, width) and weights w.


def plain(matmul: Any, einsum: Any, model: Model, w: Weights, x: jax.Array) -> jax.Array:
    """Products, and what follows them in jnp."""
    mixed = attention(model, einsum, matmul(normalized(x), w["qkv"]) + w["qkv_bias"])
    x = x + matmul(mixed, w["out"]) + w["out_bias"]
    hidden = jax.nn.gelu(matmul(normalized(x), w["up"]) + w["up_bias"])
    return x + matmul(hidden, w["down"]) + w["down_bias"]


def fused(model: Model, w: Weights, x: jax.Array) -> jax.Array:
    """Bias, activation and residual as epilogues."""
    qkv = jhg.matmul(normalized(x), w["qkv"], bias=w["qkv_bias"])
    mixed = attention(model, jhg.einsum, qkv)
    x = jhg.matmul(mixed, w["out"], bias=w["out_bias"], residual=x)
    hidden = jhg.matmul(normalized(x), w["up"], bias=w["up_bias"], activation="gelu")
    return jhg.matmul(hidden, w["down"], bias=w["down_bias"], residual=x)


def lambdas(model: Model, w: Weights, x: jax.Array) -> jax.Array:
    """As `fused`, by functions that each layer makes anew."""
    matmul = jhg.matmul
    qkv = matmul(
        normalized(x), w["qkv"], epilogue=lambda y, b: y + b, epilogue_operands=(w["qkv_bias"],)
    )
    mixed = attention(model, jhg.einsum, qkv)
    x = matmul(
        mixed, w["out"], epilogue=lambda y, b, x: y + b + x, epilogue_operands=(w["out_bias"], x)
    )
    hidden = matmul(
        normalized(x), w["up"], epilogue=lambda y, b: jax.nn.gelu(y + b),
        epilogue_operands=(w["up_bias"],),
    )  # fmt: skip
    return matmul(
        hidden, w["down"], epilogue=lambda y, b, x: y + b + x,
        epilogue_operands=(w["down_bias"], x),
    )  # fmt: skip


def gated_by_jnp(model: Model, w: Weights, x: jax.Array) -> jax.Array:
    """A gated MLP in jnp."""
    mixed = attention(model, jnp.einsum, jnp.matmul(normalized(x), w["qkv"]) + w["qkv_bias"])
    x = x + jnp.matmul(mixed, w["out"]) + w["out_bias"]
    inner = normalized(x)
    gate, up = (jnp.matmul(inner, w["gate_up"][:, i]) for i in range(2))
    return x + jnp.matmul(jax.nn.silu(gate) * up, w["down"]) + w["down_bias"]


def gated(model: Model, w: Weights, x: jax.Array) -> jax.Array:
    """The same with the gate as an epilogue of both products."""
    qkv = jhg.matmul(normalized(x), w["qkv"], bias=w["qkv_bias"])
    mixed = attention(model, jhg.einsum, qkv)
    x = jhg.matmul(mixed, w["out"], bias=w["out_bias"], residual=x)
    hidden = jhg.gated_linear_unit(normalized(x), w["gate_up"], activation="silu")
    return jhg.matmul(hidden, w["down"], bias=w["down_bias"], residual=x)


LAYERS: dict[str, Callable[..., jax.Array]] = {
    "jnp": partial(plain, jnp.matmul, jnp.einsum),
    "plain": partial(plain, jhg.matmul, jhg.einsum),
    "fused": fused,
    "lambdas": lambdas,
    "gated jnp": gated_by_jnp,
    "gated": gated,
}
BASELINES = {"plain": "jnp", "fused": "jnp", "lambdas": "jnp", "gated": "gated jnp"}


def step_of(model: Model, layer: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns a new function: loss and gradients of `model` with these layers."""

    def loss(weights: Sequence[Weights], x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(model, w, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)


def clear_caches() -> None:
    """Clears the caches of JAX, and with them `fusion.memo`, and the decisions of `dispatch`."""
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{jhg.__name__}.dispatch."):
            for cached in vars(module).values():
                clear = getattr(cached, "cache_clear", None)
                if clear and cached.__name__ not in ("packaged_table", "read_fit"):
                    clear()


def lower(model: Model, layer: Callable[..., jax.Array]) -> Any:
    """Traces and lowers a step for CUDA."""
    step = jax.jit(step_of(model, layer))
    return step.trace(model.weights(), model.inputs()).lower(lowering_platforms=("cuda",))


def timed(model: Model, name: str, warm: bool) -> tuple[float, float]:
    """Returns CPU and wall time in seconds."""
    if not warm:
        clear_caches()
    else:
        jax.clear_caches()
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    lower(model, LAYERS[name])
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--programs", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--warm", action="store_true", help="keep the caches of this library")
    parser.add_argument("--profile", choices=list(LAYERS), help="profile one program instead")
    parser.add_argument("--sort", default="cumulative", help="order of the profile")
    args = parser.parse_args()
    model = Model(args.layers)
    for name in args.programs:  # what a process does once
        lower(Model(1), LAYERS[name])
    if args.profile:
        clear_caches()
        with cProfile.Profile() as profile:
            lower(model, LAYERS[args.profile])
        pstats.Stats(profile).sort_stats(args.sort).print_stats(70)
        return
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in args.programs}
    for _ in range(args.rounds):
        for name in args.programs:
            times[name].append(timed(model, name, args.warm))
    caches = "JAX's caches cleared" if args.warm else "all caches cleared"
    print(f"jax {jax.__version__}, {args.layers} layers, {args.rounds} rounds, {caches}; seconds")
    print("| program | CPU min | CPU median | wall min | ratio CPU min | CPU median | wall min |")
    print("|---|---|---|---|---|---|---|")
    for name, rounds in times.items():
        print(f"| {name} | " + " | ".join(_columns(rounds, times.get(BASELINES.get(name, "")))))


def _columns(rounds: Sequence[Any], baseline: Sequence[Any] | None) -> list[str]:
    def figures(of: Sequence[Any]) -> list[float]:
        cpu, wall = zip(*of, strict=True)
        return [min(cpu), statistics.median(cpu), min(wall)]

    columns = [f"{x:.2f}" for x in figures(rounds)]
    if baseline is None:
        return [*columns, "- | - | - |"]
    ratios = zip(figures(rounds), figures(baseline), strict=True)
    return [*columns, *(f"{x / y:.2f}" for x, y in ratios)]


if __name__ == "__main__":
    main()
