"""Extents of the models of `model_programs.py`, their parameters' shapes, and random ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
PATCH = 16  # pixels along each side of a patch of ViT
BUCKETS, FARTHEST = 32, 128  # of T5's relative positions


@dataclass(frozen=True)
class Size:
    """Extents of a model.

    Attributes:
      length: tokens of a sequence; of ViT patches and one token of the class.
      vocabulary: tokens that are told apart; of ViT classes.
      kv_heads: pairs of keys and values; 0: as many as heads.
      head_dim: features of a head; 0: those of the model over heads.
      experts, active: of a mixture, and how many a token visits.
      gated: whether T5's MLPs are gated.
    """

    layers: int
    batch: int
    length: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int = 0
    head_dim: int = 0
    experts: int = 0
    active: int = 0
    gated: bool = False

    @property
    def features(self) -> int:
        """Of a head."""
        return self.head_dim or self.width // self.heads


def linear(inputs: int, outputs: int, bias: bool = False) -> Tree:
    return {"w": (inputs, outputs)} | ({"b": (outputs,)} if bias else {})


def norm(width: int, bias: bool = False) -> Tree:
    return {"scale": (width,)} | ({"b": (width,)} if bias else {})


def attention(size: Size, bias: bool = False, normed: bool = False) -> Tree:
    d, q = size.width, size.heads * size.features
    kv = (size.kv_heads or size.heads) * size.features
    norms = {f"{name}_norm": norm(size.features) for name in "qk"} if normed else {}
    return norms | {
        "q": linear(d, q, bias), "k": linear(d, kv, bias), "v": linear(d, kv, bias),
        "out": linear(q, d, bias),
    }  # fmt: skip


def mlp(size: Size, bias: bool = False, gated: bool = False) -> Tree:
    d, f = size.width, size.hidden
    gate = {"gate": linear(d, f)} if gated else {}
    return gate | {"up": linear(d, f, bias), "down": linear(f, d, bias)}


def experts(size: Size) -> Tree:
    e, d, f = size.experts, size.width, size.hidden
    return {"router": linear(d, e), "gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}


def layers(size: Size, bias: bool = False, **parts: Tree) -> list[Tree]:
    norms = {f"{name}_norm": norm(size.width, bias) for name in parts}
    return [parts | norms for _ in range(size.layers)]


def decoder(size: Size, block: Tree, tied: bool = False, normed: bool = False) -> Tree:
    head = {} if tied else {"head": linear(size.width, size.vocabulary)}
    return head | {
        "embed": linear(size.vocabulary, size.width),
        "layers": layers(size, attention=attention(size, normed=normed), mlp=block),
        "norm": norm(size.width),
    }


def with_biases(size: Size, **embeddings: Tree) -> Tree:
    blocks = layers(size, True, attention=attention(size, True), mlp=mlp(size, True))
    positions = {"positions": linear(size.length, size.width)}
    return embeddings | positions | {"layers": blocks, "norm": norm(size.width, True)}


def vit(size: Size) -> Tree:
    return with_biases(
        size, embed=linear(3 * PATCH**2, size.width, True), of_class=linear(1, size.width),
        head=linear(size.width, size.vocabulary, True),
    )  # fmt: skip


def t5(size: Size) -> Tree:
    def stack(**parts: Tree) -> Tree:
        blocks = layers(size, attention=attention(size), mlp=mlp(size, gated=size.gated), **parts)
        bias = linear(BUCKETS, size.heads)
        return {"layers": blocks, "norm": norm(size.width), "bias": bias}

    return {
        "embed": linear(size.vocabulary, size.width), "encoder": stack(),
        "decoder": stack(cross=attention(size)), "head": linear(size.width, size.vocabulary),
    }  # fmt: skip


def stacked(p: Tree) -> Tree:
    """Returns parameters, those of layers with a leading axis for all of them."""
    if isinstance(p, list):
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *p)
    return {name: stacked(x) for name, x in p.items()} if isinstance(p, dict) else p


def random_tree(shapes: Tree, key: jax.Array, dtype: Any) -> Tree:
    """Returns normal numbers: matrices keep the size of what they multiply, scales are about 1."""

    def draw(path: Any, shape: tuple[int, ...]) -> jax.Array:
        number = sum(map(ord, jax.tree_util.keystr(path)))
        values = jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)
        scale = min(shape[-2:]) ** -0.5 if len(shape) > 1 else 0.1
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return (values * scale + mean).astype(dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))
