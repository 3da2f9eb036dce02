"""Plain JAX programs that `accelerate` fuses, large enough that the cost model gains by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.interop import accelerate
from jax_hopper_gemm.testing.lowered import specs_of

TOKENS, WIDTH, HIDDEN, EXPERTS = 2048, 1024, 4096, 8
RATE = 2.0**-4

Weights = dict[str, Any]


@dataclass(frozen=True)
class FusedProgram:
    """A step of training: gradients of a mean square, and an update of the weights.

    Attributes:
      forward: of weights and (tokens, width) rows.
      shapes: of the weights.
      operations: some that kernels of the accelerated step compute.
    """

    forward: Callable[[Weights, Any], Any]
    shapes: dict[str, tuple[int, ...]]
    operations: frozenset[str]

    def step(self, weights: Weights, x: Any) -> tuple[Any, Weights]:
        def loss(weights: Weights) -> Any:
            return jnp.mean(self.forward(weights, x).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return value, jax.tree.map(lambda w, g: w - RATE * g.astype(w.dtype), weights, gradients)

    def arguments(self, dtype: Any = jnp.bfloat16) -> tuple[Weights, Any]:
        """Returns weights and rows, numbers of bfloat16 whatever the dtype."""
        random = np.random.default_rng(0)

        def normal(at: Any) -> Any:
            scale = at.shape[-2] ** -0.5 if len(at.shape) > 1 else 0.1
            return jnp.asarray(random.standard_normal(at.shape) * scale, jnp.bfloat16).astype(dtype)

        weights, x = jax.tree.map(normal, self.abstract(dtype))
        return weights, x * WIDTH**0.5

    def abstract(self, dtype: Any = jnp.bfloat16) -> tuple[Weights, Any]:
        """Returns the shapes and dtypes of `arguments`."""
        weights = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in self.shapes.items()}
        return weights, jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype)

    def specs(self, dtype: Any = jnp.bfloat16) -> list[GemmSpec]:
        return specs_of(accelerate(self.step), *self.abstract(dtype))


def gated(w: Weights, x: Any) -> Any:
    return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def cut(w: Weights, x: Any) -> Any:
    gate, up = jnp.split(x @ w["both"] + w["bias"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ w["down"]


def with_biases(w: Weights, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ w["up"] + w["up_bias"])
    return jax.nn.relu(hidden @ w["down"] + w["down_bias"]) + x


def normed(w: Weights, x: Any) -> Any:
    for _ in range(2):
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
        y = (wide * scale).astype(x.dtype) * w["norm"]
        x = x + jnp.tanh(y @ w["up"]) @ w["down"]
    return x


def masked(w: Weights, x: Any) -> Any:
    kept = lax.broadcasted_iota(jnp.int32, (TOKENS, HIDDEN), 0) % 3 > 0
    hidden = jnp.where(kept, jnp.square(jax.nn.relu(x @ w["up"])) * 1.5, 0)
    return hidden @ w["down"] - hidden @ w["other"]


def expert(w: Weights, x: Any) -> Any:
    parts = jnp.array([300, 0, 500, 100, 7, 641, 200, 100])  # of 2048 rows; 200 are of no group
    sizes, order = parts * TOKENS // 2048, jnp.arange(TOKENS) * 5 % TOKENS
    rows = x[order]
    if "both" in w:
        gate, up = jnp.split(lax.ragged_dot(rows, w["both"], sizes), 2, axis=-1)
    else:
        gate, up = (lax.ragged_dot(rows, w[name], sizes) for name in ("gate", "up"))
    return lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], sizes)[jnp.argsort(order)]


def attending(w: Weights, x: Any) -> Any:
    """Attention of two sequences: 8 heads, of which 4 share a key and a value."""
    projected = (x @ w[name] + w[f"{name}_bias"] for name in "qkv")
    q, k, v = (y.reshape(2, len(x) // 2, -1, WIDTH // 8) for y in projected)
    heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return x + heads.reshape(x.shape) @ w["out"]


DTYPES = (jnp.bfloat16, jnp.float32)
UP, BOTH, DOWN = (WIDTH, HIDDEN), (WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH)
FUSED_PROGRAMS = {
    "gated": FusedProgram(
        gated, {"gate": UP, "up": UP, "down": DOWN}, frozenset({"logistic", "add", "sub"})
    ),
    "cut": FusedProgram(
        cut, {"both": BOTH, "bias": (2 * HIDDEN,), "down": DOWN},
        frozenset({"logistic", "add", "sub"}),
    ),
    "biases": FusedProgram(
        with_biases, {"up": UP, "up_bias": (HIDDEN,), "down": DOWN, "down_bias": (WIDTH,)},
        frozenset({"tanh", "gt", "add"}),
    ),
    "norms": FusedProgram(
        normed, {"norm": (WIDTH,), "up": UP, "down": DOWN}, frozenset({"tanh", "add"})
    ),
    "masks": FusedProgram(
        masked, {"up": UP, "down": DOWN, "other": DOWN}, frozenset({"select"})
    ),
    "attention": FusedProgram(
        attending,
        {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH // 4), "v": (WIDTH, WIDTH // 4),
         "q_bias": (WIDTH,), "k_bias": (WIDTH // 4,), "v_bias": (WIDTH // 4,),
         "out": (WIDTH, WIDTH)},
        frozenset({"add"}),
    ),
    "experts": FusedProgram(
        expert, {name: (EXPERTS, *shape) for name, shape in
                 (("gate", UP), ("up", UP), ("down", DOWN))}, frozenset({"logistic"}),
    ),
    "cut experts": FusedProgram(
        expert, {"both": (EXPERTS, *BOTH), "down": (EXPERTS, *DOWN)}, frozenset({"logistic"})
    ),
}  # fmt: skip


def fused_specs() -> list[GemmSpec]:
    """Returns the kernels of the programs in all dtypes."""
    return [
        x for dtype in DTYPES for program in FUSED_PROGRAMS.values() for x in program.specs(dtype)
    ]
