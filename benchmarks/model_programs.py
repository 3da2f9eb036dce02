"""Models as their users write them in plain `jax.numpy`: forward passes and training steps.

Seven families share a few building blocks. None of them knows of this library: `models.py` wraps
their steps by `accelerate` and times them beside the same steps without it.

    Llama      SwiGLU, RMSNorm, rotary positions, grouped-query attention
    Gemma      GeGLU, one pair of keys and values or as many as heads, tied embeddings
    GPT-2      biases, LayerNorm, gelu, tied embeddings
    T5         encoder and decoder, relative positions; relu (1.0) or gated gelu (1.1)
    ViT        patches embedded by a product, LayerNorm, gelu, classification
    Mixtral    Llama with 8 experts, `jax.lax.ragged_dot` over tokens sorted by expert
    Qwen3-MoE  the same with 128 experts, norms of queries and keys

Large language models keep bfloat16 parameters and take steps of SGD; GPT-2, T5 and ViT keep
float32 parameters, which are cast to bfloat16 for the forward pass, and take steps of Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import model_parameters as shapes
from model_parameters import BUCKETS, FARTHEST, PATCH, Size, Tree, random_tree, stacked

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8  # of Adam


# Building blocks: functions of parameters and arrays (batch, length, width).


def linear(p: Tree, x: jax.Array) -> jax.Array:
    y = x @ p["w"]
    return y + p["b"] if "b" in p else y


def rms_norm(p: Tree, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * p["scale"]).astype(x.dtype)


def layer_norm(p: Tree, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (wide * p["scale"] + p["b"]).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of (batch, length, heads, features)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


Attend = Callable[..., jax.Array]  # of q, k and v (batch, length, heads, features)


def attention(
    size: Size, p: Tree, x: jax.Array, attend: Attend, memory: jax.Array | None = None
) -> jax.Array:
    """Attention of x to `memory`, or to itself."""
    memory = x if memory is None else memory
    sources = {"q": x, "k": memory, "v": memory}
    q, k, v = (
        linear(p[name], source).reshape(*source.shape[:2], -1, size.features)
        for name, source in sources.items()
    )
    if "q_norm" in p:
        q, k = rms_norm(p["q_norm"], q), rms_norm(p["k_norm"], k)
    return linear(p["out"], attend(q, k, v).reshape(*x.shape[:2], -1))


def rotary_attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)


def written_out(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Attention in products of matrices, of heads that stand before positions."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    logits = (q @ k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        logits = jnp.where(jnp.tri(q.shape[-2], dtype=bool), logits, -jnp.inf)
    shares = jax.nn.softmax(logits.astype(jnp.float32)).astype(q.dtype)
    return (shares @ v).swapaxes(1, 2)


def mlp(p: Tree, x: jax.Array, activation: Callable[..., jax.Array]) -> jax.Array:
    return linear(p["down"], activation(linear(p["up"], x)))


def gated_mlp(p: Tree, x: jax.Array, activation: Callable[..., jax.Array]) -> jax.Array:
    return linear(p["down"], activation(linear(p["gate"], x)) * linear(p["up"], x))


def experts(size: Size, p: Tree, x: jax.Array) -> jax.Array:
    """A mixture of gated MLPs: rows sorted by expert, three grouped products, rows put back."""
    tokens = x.reshape(-1, size.width)
    logits = linear(p["router"], tokens).astype(jnp.float32)
    best, chosen = jax.lax.top_k(logits, size.active)
    shares = jax.nn.softmax(best).astype(x.dtype)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=size.experts)
    rows = tokens[order // size.active]
    gate = jax.lax.ragged_dot(rows, p["gate"], sizes)
    hidden = jax.nn.silu(gate) * jax.lax.ragged_dot(rows, p["up"], sizes)
    rows = jax.lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)]
    return jnp.einsum(
        "tkd,tk->td", rows.reshape(-1, *shares.shape[1:], size.width), shares
    ).reshape(x.shape)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    right = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


def relative_buckets(length: int, both_ways: bool) -> jax.Array:
    """Returns T5's bucket of each query's distance from each key, (length, length)."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)  # how far back the key lies
    buckets = BUCKETS // 2 if both_ways else BUCKETS
    offset = jnp.where(distance < 0, buckets, 0) if both_ways else 0
    distance = jnp.abs(distance) if both_ways else jnp.maximum(distance, 0)
    near = buckets // 2
    share = jnp.log(jnp.maximum(distance, 1) / near) / math.log(FARTHEST / near)
    far = jnp.minimum(near + (share * (buckets - near)).astype(jnp.int32), buckets - 1)
    return offset + jnp.where(distance < near, distance, far)


# Families: functions of parameters and a batch's inputs to logits.


def through(layers: Tree, x: jax.Array, layer: Callable[[Tree, jax.Array], jax.Array]) -> jax.Array:
    """Returns what layers make of an array: those of a list, or of stacks, by a scan."""
    if isinstance(layers, list):
        for p in layers:
            x = layer(p, x)
        return x
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, layers)[0]


def decoder(size: Size, p: Tree, x: jax.Array, block: Callable[..., jax.Array]) -> jax.Array:
    """The layers that Llama, Gemma and mixtures of experts share."""

    def layer(p: Tree, x: jax.Array) -> jax.Array:
        inner = rms_norm(p["attention_norm"], x)
        x = x + attention(size, p["attention"], inner, rotary_attend)
        return x + block(p["mlp"], rms_norm(p["mlp_norm"], x))

    return rms_norm(p["norm"], through(p["layers"], x, layer))


def llama(size: Size, p: Tree, tokens: jax.Array) -> jax.Array:
    x = p["embed"]["w"][tokens]
    return linear(p["head"], decoder(size, p, x, partial(gated_mlp, activation=jax.nn.silu)))


def gemma(size: Size, p: Tree, tokens: jax.Array) -> jax.Array:
    x = p["embed"]["w"][tokens] * jnp.asarray(size.width**0.5, p["embed"]["w"].dtype)
    x = decoder(size, p, x, partial(gated_mlp, activation=jax.nn.gelu))
    return x @ p["embed"]["w"].T


def mixture(size: Size, p: Tree, tokens: jax.Array) -> jax.Array:
    """Mixtral and Qwen3-MoE."""
    return linear(p["head"], decoder(size, p, p["embed"]["w"][tokens], partial(experts, size)))


def with_biases(size: Size, p: Tree, x: jax.Array, causal: bool) -> jax.Array:
    """The layers that GPT-2 and ViT share."""

    def layer(p: Tree, x: jax.Array) -> jax.Array:
        inner = layer_norm(p["attention_norm"], x)
        x = x + attention(size, p["attention"], inner, partial(written_out, causal=causal))
        return x + mlp(p["mlp"], layer_norm(p["mlp_norm"], x), jax.nn.gelu)

    return layer_norm(p["norm"], through(p["layers"], x, layer))


def gpt2(size: Size, p: Tree, tokens: jax.Array) -> jax.Array:
    x = p["embed"]["w"][tokens] + p["positions"]["w"]
    return with_biases(size, p, x, causal=True) @ p["embed"]["w"].T


def vit(size: Size, p: Tree, images: jax.Array) -> jax.Array:
    """Args: images: (batch, height, width, 3)."""
    side = images.shape[1] // PATCH
    patches = images.reshape(-1, side, PATCH, side, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    x = linear(
        p["embed"], patches.reshape(-1, side * side, 3 * PATCH**2).astype(p["embed"]["w"].dtype)
    )
    of_class = jnp.broadcast_to(p["of_class"]["w"], (len(x), 1, size.width))
    x = jnp.concatenate([of_class, x], axis=1) + p["positions"]["w"]
    return linear(p["head"], with_biases(size, p, x, causal=False)[:, 0])


def t5(size: Size, p: Tree, source: jax.Array, target: jax.Array) -> jax.Array:
    block = (
        partial(gated_mlp, activation=jax.nn.gelu)
        if size.gated
        else partial(mlp, activation=jax.nn.relu)
    )

    def stack(p: Tree, x: jax.Array, memory: jax.Array | None) -> jax.Array:
        causal, attend = memory is not None, partial(jax.nn.dot_product_attention, scale=1.0)
        bias = p["bias"]["w"][relative_buckets(size.length, not causal)]
        here = partial(attend, bias=bias.transpose(2, 0, 1)[None], is_causal=causal)

        def layer(p: Tree, x: jax.Array) -> jax.Array:
            inner = rms_norm(p["attention_norm"], x)
            x = x + attention(size, p["attention"], inner, here)
            if memory is not None:
                inner = rms_norm(p["cross_norm"], x)
                x = x + attention(size, p["cross"], inner, attend, memory)
            return x + block(p["mlp"], rms_norm(p["mlp_norm"], x))

        return rms_norm(p["norm"], through(p["layers"], x, layer))

    memory = stack(p["encoder"], p["embed"]["w"][source], None)
    return linear(p["head"], stack(p["decoder"], p["embed"]["w"][target], memory))


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
      logits: of a size, parameters and inputs.
      shapes: of the parameters of a size.
      sizes: by name, "small" and "large".
      inputs: how many arrays `logits` reads besides parameters.
      adam: whether it is trained by Adam, with float32 parameters.
    """

    logits: Callable[..., jax.Array]
    shapes: Callable[[Size], Tree]
    sizes: dict[str, Size]
    inputs: int = 1
    adam: bool = False

    @property
    def kind(self) -> str:
        return "MoE" if self.logits is mixture else "dense"


# A small one and a large one of each: Llama 3.2 1B and 3 8B, Gemma 2B and 7B, GPT-2 and its XL, T5
# base and 1.1 XL, ViT-B/16 and L/16, half a Mixtral and 8x7B, half a Qwen3-30B-A3B and the whole.
# Layers are fewer, and so are the tokens of Llama's vocabulary; GPT-2's is padded as nanoGPT's.
FAMILIES = {
    "llama": Family(
        llama, lambda size: shapes.decoder(size, shapes.mlp(size, gated=True)),
        {
            "small": Size(4, 4, 2048, 2048, 8192, 32, 32000, kv_heads=8),
            "large": Size(3, 4, 2048, 4096, 14336, 32, 32000, kv_heads=8),
        },
    ),
    "gemma": Family(
        gemma, lambda size: shapes.decoder(size, shapes.mlp(size, gated=True), tied=True),
        {
            "small": Size(4, 4, 1024, 2048, 16384, 8, 256128, kv_heads=1, head_dim=256),
            "large": Size(3, 4, 1024, 3072, 24576, 16, 256128, head_dim=256),
        },
    ),
    "gpt2": Family(
        gpt2,
        lambda size: shapes.with_biases(size, embed=shapes.linear(size.vocabulary, size.width)),
        {
            "small": Size(6, 16, 1024, 768, 3072, 12, 50304),
            "large": Size(4, 8, 1024, 1600, 6400, 25, 50304),
        },
        adam=True,
    ),
    "t5": Family(
        t5, shapes.t5,
        {
            "small": Size(3, 16, 512, 768, 3072, 12, 32128),
            "large": Size(2, 16, 512, 2048, 5120, 32, 32128, gated=True),
        },
        inputs=2, adam=True,
    ),
    "vit": Family(
        vit, shapes.vit,
        {
            "small": Size(6, 128, 197, 768, 3072, 12, 1000),
            "large": Size(4, 128, 197, 1024, 4096, 16, 1000),
        },
        adam=True,
    ),
    "mixtral": Family(
        mixture, lambda size: shapes.decoder(size, shapes.experts(size)),
        {
            "small": Size(2, 4, 2048, 2048, 7168, 16, 32000, 4, experts=8, active=2),
            "large": Size(2, 4, 2048, 4096, 14336, 32, 32000, 8, experts=8, active=2),
        },
    ),
    "qwen3": Family(
        mixture, lambda size: shapes.decoder(size, shapes.experts(size), normed=True),
        {
            "small": Size(2, 2, 2048, 1024, 384, 16, 32000, 4, 128, experts=64, active=8),
            "large": Size(2, 4, 2048, 2048, 768, 32, 32000, 4, 128, experts=128, active=8),
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A family in one size: functions to be jitted, and their arguments.

    Attributes:
      scanned: whether each parameter of the layers is one array, which a scan goes through.
      dtype: of activations, and of parameters that SGD trains.
      rate: of learning.
    """

    family: str
    size: Size
    scanned: bool = False
    dtype: Any = jnp.bfloat16
    rate: float = 1e-4

    def forward(self, parameters: Tree, batch: tuple) -> jax.Array:
        """Returns the logits; a batch is inputs and labels."""
        parameters = jax.tree.map(lambda w: w.astype(self.dtype), parameters)
        return FAMILIES[self.family].logits(self.size, parameters, *batch[:-1])

    def loss(self, parameters: Tree, batch: tuple) -> jax.Array:
        return cross_entropy(self.forward(parameters, batch), batch[-1])

    def step(self, state: Tree, batch: tuple) -> tuple[Tree, jax.Array]:
        """Returns the state after a step, and the loss before it."""
        loss, gradients = jax.value_and_grad(self.loss)(state["parameters"], batch)
        return (self._adam if "mean" in state else self._sgd)(state, gradients), loss

    def _sgd(self, state: Tree, gradients: Tree) -> Tree:
        update = jax.tree.map(lambda w, g: w - self.rate * g, state["parameters"], gradients)
        return {"parameters": update}

    def _adam(self, state: Tree, gradients: Tree) -> Tree:
        count = state["count"] + 1
        mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["mean"], gradients)
        square = jax.tree.map(
            lambda v, g: BETA2 * v + (1 - BETA2) * g**2, state["square"], gradients
        )
        of_mean, of_square = 1 - BETA1**count, 1 - BETA2**count

        def update(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return w - self.rate * (m / of_mean) / (jnp.sqrt(v / of_square) + EPSILON)

        parameters = jax.tree.map(update, state["parameters"], mean, square)
        return {"parameters": parameters, "mean": mean, "square": square, "count": count}

    def state(self, seed: int = 0) -> Tree:
        """Returns random parameters, and moments of Adam; under `jax.eval_shape` their shapes."""
        family = FAMILIES[self.family]
        shapes = family.shapes(self.size)
        dtype = jnp.float32 if family.adam else self.dtype

        def drawn(seed: int) -> Tree:
            tree = random_tree(shapes, jax.random.key(seed, impl="rbg"), dtype)
            return stacked(tree) if self.scanned else tree

        parameters = drawn(seed)
        if not family.adam:
            return {"parameters": parameters}
        mean, square = drawn(seed + 1), drawn(seed + 2)
        square = jax.tree.map(jnp.square, square)
        return {"parameters": parameters, "mean": mean, "square": square, "count": jnp.float32(9)}

    def batch(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """Returns random inputs and labels: tokens; or normal images, and a class of each."""
        size, keys = self.size, jax.random.split(jax.random.key(seed + 3, impl="rbg"), 3)
        if self.family == "vit":
            side = PATCH * math.isqrt(size.length - 1)
            images = jax.random.normal(keys[0], (size.batch, side, side, 3))
            return images, jax.random.randint(keys[1], (size.batch,), 0, size.vocabulary)
        shape = size.batch, size.length
        number = FAMILIES[self.family].inputs + 1
        return tuple(jax.random.randint(key, shape, 0, size.vocabulary) for key in keys[:number])
