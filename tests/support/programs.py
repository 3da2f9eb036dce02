"""Programs of several products, as users write them: what a GPU run of the fused ones checks.

Each is a `Program`: a function of bfloat16 arrays, how many kernels of ours it needs, and what it
computes in plain jnp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hopper_gemm import accelerate
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.ops import einsum, gated_linear_unit, matmul
from jax_hopper_gemm.testing.lowered import specs_of

TOKENS, WIDTH, HIDDEN, EXPERTS = 512, 256, 1024, 128


@dataclass(frozen=True)
class Program:
    """A function and what is known of it.

    Attributes:
      ours, plain: the function with our products, and in jnp.
      shapes: of its arguments, all bfloat16 but for those of `float32`.
      launches: kernels of ours that it takes.
      float32: numbers of the arguments that are float32.
      donated: numbers of the arguments whose memory it may take.
    """

    ours: Callable
    plain: Callable
    shapes: tuple[tuple[int, ...], ...]
    launches: int
    float32: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Returns normal random numbers, those of matrices scaled to keep results near 1."""
        rng = np.random.default_rng(seed)
        found = []
        for i, shape in enumerate(self.shapes):
            scale = shape[0] ** -0.5 if len(shape) > 1 and shape[0] != TOKENS else 1.0
            dtype = np.float32 if i in self.float32 else jnp.bfloat16
            found.append((scale * rng.standard_normal(shape)).astype(dtype))
        return found

    def specs(self) -> list[GemmSpec]:
        return specs_of(self.ours, *self.arguments())


def _training(mlp: Callable) -> Callable:
    def step(cotangent: jax.Array, *arguments: jax.Array) -> Any:
        y, pull = jax.vjp(mlp, *arguments)
        return y, pull(cotangent)

    return step


def _hopper(function: Callable, *args: Any, **options: Any) -> Any:
    return function(*args, implementation="hopper", **options)


def _gelu_mlp(x, up, up_bias, down, down_bias):
    hidden = _hopper(matmul, x, up, bias=up_bias, activation="gelu")
    return _hopper(matmul, hidden, down, bias=down_bias)


def _plain_gelu_mlp(x, up, up_bias, down, down_bias):
    return jax.nn.gelu(x @ up + up_bias) @ down + down_bias


def _swiglu(x, weights, down):
    return _hopper(matmul, _hopper(gated_linear_unit, x, weights), down)


def _plain_swiglu(x, weights, down):
    return (jax.nn.silu(x @ weights[:, 0]) * (x @ weights[:, 1])) @ down


def _swiglu_pair(x, gate, up, down):
    return _hopper(matmul, _hopper(gated_linear_unit, x, (gate, up)), down)


def _plain_swiglu_pair(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _last_layer(x, weights):
    """Logits in float32; their cotangents enter the gradients' kernels in bfloat16."""
    options = {"preferred_element_type": jnp.float32, "cotangent_dtype": jnp.bfloat16}
    return _hopper(matmul, x, weights, **options)


def _plain_last_layer(x, weights):
    return jnp.matmul(x, weights, preferred_element_type=jnp.float32)


def _with_float32(step: Callable) -> Callable:
    return lambda cotangent, *arguments: step(cotangent.astype(jnp.float32), *arguments)


SHARED_KEYS = "btkgd,bskd->bkgts"  # attention whose groups of g heads share keys


def _layers(x, weights):
    return jax.lax.fori_loop(0, 4, lambda i, x: _hopper(matmul, x, weights[i]), x)


def _plain_layers(x, weights):
    return jax.lax.fori_loop(0, 4, lambda i, x: x @ weights[i], x)


def _kept(x, weights, product):
    """Layers that keep what the next one reads, as for gradients."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = product(x, w)
        return y, y

    return jax.lax.scan(layer, x, weights)


def _last_first(x, weights, product):
    """The same from the last layer to the first, each cut out and stored where its number says."""

    def layer(i: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, kept = state
        start = (len(weights) - 1 - i, 0, 0)
        part = jax.lax.dynamic_slice(weights, start, (1, *weights.shape[1:]))
        y = product(x, part.reshape(weights.shape[1:]))
        return y, jax.lax.dynamic_update_slice(kept, y[None], start)

    kept = jnp.zeros((len(weights), *x.shape), x.dtype)
    return jax.lax.fori_loop(0, len(weights), layer, (x, kept))


def _updated(weights, inputs, cotangents):
    """A step of gradient descent in each layer; `weights` may lie where the results do."""

    def layer(_: None, own: Any) -> tuple[None, jax.Array]:
        w, x, cotangent = own
        return None, w - 0.25 * (x.T @ cotangent)

    return jax.lax.scan(layer, None, (weights, inputs, cotangents))[1]


def _accumulated(total, inputs, cotangents):
    """The gradient of some batches, one after the other."""

    def batch(total: jax.Array, own: Any) -> tuple[jax.Array, None]:
        x, cotangent = own
        return total + jnp.matmul(x.T, cotangent, preferred_element_type=jnp.float32), None

    return jax.lax.scan(batch, total, (inputs, cotangents))[0]


def _gelu_layer(x, w):
    return _hopper(matmul, x, w, activation="gelu")


def _plain_gelu_layer(x, w):
    return jax.nn.gelu(x @ w)


def _route(y):
    weights = jax.nn.softmax(y)
    return (weights, *jax.lax.top_k(weights, 8))


def _statistics(y):
    return y, jnp.sum(y, 0), jnp.sum(y, 1), jnp.max(jnp.abs(y)), jax.nn.logsumexp(y, -1)


X, OUT, STACK = (TOKENS, WIDTH), (TOKENS, WIDTH), (4, WIDTH, WIDTH)
PROGRAMS = {
    "layers in a stack": Program(_layers, _plain_layers, (X, STACK), 1),
    "layers that are kept": Program(
        lambda x, w: _kept(x, w, _gelu_layer), lambda x, w: _kept(x, w, _plain_gelu_layer),
        (X, STACK), 1,
    ),
    "layers that are kept, training": Program(
        _training(lambda x, w: _kept(x, w, _gelu_layer)[0]),
        _training(lambda x, w: _kept(x, w, _plain_gelu_layer)[0]), (OUT, X, STACK), 3,
    ),
    "layers, the last one first": Program(
        lambda x, w: _last_first(x, w, _gelu_layer),
        lambda x, w: _last_first(x, w, _plain_gelu_layer), (X, STACK), 1,
    ),
    "layers, updated": Program(
        accelerate(_updated, implementation="hopper"), _updated, (STACK, *[(4, *X)] * 2), 1,
    ),
    "batches, accumulated": Program(
        accelerate(_accumulated, implementation="hopper"), _accumulated,
        ((WIDTH, WIDTH), *[(4, *X)] * 2), 1, float32=(0,), donated=(0,),
    ),
    "gelu MLP, training": Program(
        _training(_gelu_mlp), _training(_plain_gelu_mlp),
        (OUT, X, (WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH), (WIDTH,)), 6,
    ),
    "swiglu, training": Program(
        _training(_swiglu), _training(_plain_swiglu),
        (OUT, X, (WIDTH, 2, HIDDEN), (HIDDEN, WIDTH)), 6,
    ),
    "swiglu of a pair, training": Program(
        _training(_swiglu_pair), _training(_plain_swiglu_pair),
        (OUT, X, (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)), 8,
    ),
    "last layer, training": Program(
        _with_float32(_training(_last_layer)), _with_float32(_training(_plain_last_layer)),
        ((TOKENS, HIDDEN), X, (WIDTH, HIDDEN)), 3,
    ),
    "shared keys, training": Program(
        _training(lambda q, k: _hopper(einsum, SHARED_KEYS, q, k)),
        _training(lambda q, k: jnp.einsum(SHARED_KEYS, q, k)),
        ((2, 2, 4, 256, 128), (2, 256, 2, 4, 64), (2, 128, 2, 64)), 3,
    ),
    "accumulation": Program(
        lambda c, a, b: _hopper(matmul, a, b, c=c),
        lambda c, a, b: c + jnp.matmul(a, b, preferred_element_type=jnp.float32),
        ((TOKENS, HIDDEN), X, (WIDTH, HIDDEN)), 1, float32=(0,), donated=(0,),
    ),
    "router": Program(
        lambda x, w: _hopper(matmul, x, w, epilogue=_route),
        lambda x, w: _route(x @ w),
        (X, (WIDTH, EXPERTS)), 1,
    ),
    "statistics": Program(
        lambda x, w: _hopper(matmul, x, w, epilogue=_statistics),
        lambda x, w: _statistics(x @ w),
        (X, (WIDTH, HIDDEN)), 1,
    ),
}  # fmt: skip
