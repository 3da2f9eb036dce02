"""The dense models of `model_programs.py` in Flax nnx: its own layers, as its users call them.

Parameters are float32, activations bfloat16. GPT-2 and ViT have nnx's own attention; the others
add rotary or relative positions, or share keys and values between heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import model_programs as programs
import optax
from flax import nnx
from model_parameters import BUCKETS, PATCH, Size
from model_programs import Attend, Model


class Options:
    """What the layers of a model share: its size, the dtype of activations, random numbers."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs) -> None:
        self.size, self.of = size, {"dtype": dtype, "rngs": rngs}

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> nnx.Linear:
        return nnx.Linear(inputs, outputs, use_bias=bias, **self.of)

    def embed(self, number: int) -> nnx.Embed:
        return nnx.Embed(number, self.size.width, **self.of)

    def rms_norm(self) -> nnx.RMSNorm:
        return nnx.RMSNorm(self.size.width, **self.of)

    def layer_norm(self) -> nnx.LayerNorm:
        return nnx.LayerNorm(self.size.width, **self.of)


class Attention(nnx.Module):
    """Attention without biases, of x to `memory` or to itself."""

    def __init__(self, options: Options, attend: Attend) -> None:
        size, self.attend = options.size, attend
        queries = size.heads * size.features
        shared = (size.kv_heads or size.heads) * size.features
        self.features = size.features
        self.q, self.k, self.v = (
            options.linear(size.width, outputs) for outputs in (queries, shared, shared)
        )
        self.out = options.linear(queries, size.width)

    def __call__(self, x: jax.Array, memory: jax.Array | None = None, **options: Any) -> jax.Array:
        memory = x if memory is None else memory
        q, k, v = (
            project(source).reshape(*source.shape[:2], -1, self.features)
            for project, source in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        return self.out(self.attend(q, k, v, **options).reshape(*x.shape[:2], -1))


class Mlp(nnx.Module):
    def __init__(self, options: Options, activation: Callable[..., Any], bias: bool) -> None:
        size, self.activation = options.size, activation
        self.up = options.linear(size.width, size.hidden, bias)
        self.down = options.linear(size.hidden, size.width, bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(x)))


class GatedMlp(nnx.Module):
    def __init__(self, options: Options, activation: Callable[..., Any]) -> None:
        size, self.activation = options.size, activation
        self.gate, self.up = (options.linear(size.width, size.hidden) for _ in range(2))
        self.down = options.linear(size.hidden, size.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """Of Llama and Gemma."""

    def __init__(self, options: Options, activation: Callable[..., Any]) -> None:
        self.norms = nnx.List([options.rms_norm() for _ in range(2)])
        self.attention = Attention(options, programs.rotary_attend)
        self.mlp = GatedMlp(options, activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Llama(nnx.Module):
    def __init__(self, options: Options) -> None:
        size = options.size
        self.embed, self.norm = options.embed(size.vocabulary), options.rms_norm()
        self.layers = nnx.List([DecoderLayer(options, nnx.silu) for _ in range(size.layers)])
        self.head = options.linear(size.width, size.vocabulary)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Gemma(nnx.Module):
    def __init__(self, options: Options) -> None:
        size = options.size
        self.embed, self.norm = options.embed(size.vocabulary), options.rms_norm()
        self.layers = nnx.List([DecoderLayer(options, nnx.gelu) for _ in range(size.layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


class Block(nnx.Module):
    """A layer of GPT-2 and ViT."""

    def __init__(self, options: Options) -> None:
        size = options.size
        self.norms = nnx.List([options.layer_norm() for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(size.heads, size.width, decode=False, **options.of)
        self.mlp = Mlp(options, nnx.gelu, bias=True)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.mlp(self.norms[1](x))


class Gpt2(nnx.Module):
    def __init__(self, options: Options) -> None:
        size = options.size
        self.embed, self.positions = options.embed(size.vocabulary), options.embed(size.length)
        self.layers = nnx.List([Block(options) for _ in range(size.layers)])
        self.norm = options.layer_norm()

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embed.attend(self.norm(x))


class Vit(nnx.Module):
    def __init__(self, options: Options) -> None:
        size = options.size
        self.patches = nnx.Conv(
            3, size.width, (PATCH, PATCH), strides=(PATCH, PATCH), padding="VALID", **options.of
        )
        self.of_class, self.positions = options.embed(1), options.embed(size.length)
        self.layers = nnx.List([Block(options) for _ in range(size.layers)])
        self.norm = options.layer_norm()
        self.head = options.linear(size.width, size.vocabulary, bias=True)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        x = jnp.concatenate([self.of_class(jnp.zeros((len(x), 1), int)), x], axis=1)
        x = x + self.positions(jnp.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class T5Layer(nnx.Module):
    def __init__(self, options: Options, is_decoder: bool) -> None:
        attend = partial(jax.nn.dot_product_attention, scale=1.0)
        self.norms = nnx.List([options.rms_norm() for _ in range(3 if is_decoder else 2)])
        self.attention = Attention(options, attend)
        self.cross = Attention(options, attend) if is_decoder else None
        gated = options.size.gated
        self.mlp = GatedMlp(options, nnx.gelu) if gated else Mlp(options, nnx.relu, bias=False)

    def __call__(self, x: jax.Array, bias: jax.Array, memory: jax.Array | None) -> jax.Array:
        causal = self.cross is not None
        x = x + self.attention(self.norms[0](x), bias=bias, is_causal=causal)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.mlp(self.norms[-1](x))


class T5Stack(nnx.Module):
    def __init__(self, options: Options, is_decoder: bool) -> None:
        size = options.size
        self.layers = nnx.List([T5Layer(options, is_decoder) for _ in range(size.layers)])
        self.relative = nnx.Embed(BUCKETS, size.heads, **options.of)
        self.norm, self.is_decoder = options.rms_norm(), is_decoder

    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        buckets = programs.relative_buckets(x.shape[1], not self.is_decoder)
        bias = self.relative(buckets).transpose(2, 0, 1)[None]
        for layer in self.layers:
            x = layer(x, bias, memory)
        return self.norm(x)


class T5(nnx.Module):
    def __init__(self, options: Options) -> None:
        size = options.size
        self.embed = options.embed(size.vocabulary)
        self.encoder, self.decoder = T5Stack(options, False), T5Stack(options, True)
        self.head = options.linear(size.width, size.vocabulary)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        return self.head(self.decoder(self.embed(target), self.encoder(self.embed(source))))


MODULES = {"llama": Llama, "gemma": Gemma, "gpt2": Gpt2, "t5": T5, "vit": Vit}


def module(model: Model, seed: int = 0) -> nnx.Module:
    """Returns a model with random parameters; under `nnx.eval_shape` their shapes."""
    return MODULES[model.family](Options(model.size, model.dtype, nnx.Rngs(seed)))


def optimizer(model: Model, module: nnx.Module) -> nnx.Optimizer:
    return nnx.Optimizer(module, optax.sgd(model.rate, momentum=0.9), wrt=nnx.Param)


def forward(module: Any, batch: tuple) -> jax.Array:
    return module(*batch[:-1])


def loss(module: Any, batch: tuple) -> jax.Array:
    return programs.cross_entropy(forward(module, batch), batch[-1])


def step(module: Any, optimizer: Any, batch: tuple) -> jax.Array:
    """Changes the module and the optimizer; returns the loss before it."""
    value, gradients = nnx.value_and_grad(loss)(module, batch)
    optimizer.update(module, gradients)
    return value
