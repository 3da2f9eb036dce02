"""Random calls of products, for tests of what is said of a call and what it becomes.

The draws mix what decides how a product runs: layouts, dtypes, extents that kernels cannot read,
batches, what operands are made of (transposes, picked rows, arrays of a stack), epilogues, gated
products, ragged products in all their forms.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support import float32

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.bf16_parts import PRESETS
from jax_hopper_gemm.primitives.rows import pick_rows, sum_rows

Function = Callable[..., Any]
DTYPES = ["bfloat16"] * 5 + ["float16", "float32"]
EPILOGUES = [
    lambda y: jnp.cumsum(y, 0), lambda y: (y, jnp.sum(y, -1)), lambda y: jnp.exp(y) + 1,
]  # fmt: skip
KINDS = [
    "array", "array", "array", "transpose", "transpose", "transpose", "stack", "stack", "named",
    "jitted", "custom", "stacked transpose", "transposed stack", "slice", "twice", "cast",
]  # fmt: skip
ROWS = ["array", "row_indices", "picked", "summed", "summed pairs", "transpose"]
ACTIVATIONS = [None, None, "gelu", "silu", "relu"]


@dataclass
class Call:
    """A function of arrays that has one product of this library.

    Attributes:
      parts: what was drawn, for messages.
      arguments: the arrays, `jax.ShapeDtypeStruct`s.
      function: of these.
      implementation: of the product.
    """

    parts: list[str] = field(default_factory=list)
    arguments: list[jax.ShapeDtypeStruct] = field(default_factory=list)
    function: Function = lambda: None
    implementation: str | None = None

    def __str__(self) -> str:
        arrays = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.arguments)
        return f"{'; '.join(self.parts)} of {arrays}, implementation={self.implementation!r}"


class Draw:
    """One call that is being drawn."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.call = rng, Call(implementation=rng.choice([None, None, "hopper"]))
        self.chosen: dict[str, Any] = {"implementation": self.call.implementation}
        self.dtype = rng.choice(DTYPES)

    def argument(self, shape: tuple[int, ...], dtype: Any = None) -> Function:
        """Adds an argument, and returns the function that takes it out of all."""
        number = len(self.call.arguments)
        struct = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype or self.dtype))
        self.call.arguments.append(struct)
        return lambda *args: args[number]

    def note(self, text: str) -> None:
        self.call.parts.append(text)

    def extent(self) -> int:
        return self.rng.choice([128, 256, 384, 512, 768, 1024, 96, 8, 264, 100, 65])

    def operand(self, shape: tuple[int, ...]) -> Function:
        """Returns a function that makes an operand of this shape from arguments somehow."""
        kind = self.rng.choice(KINDS)
        self.note(kind)
        return self.made(kind, shape)

    def made(self, kind: str, shape: tuple[int, ...]) -> Function:
        swapped = (*shape[:-2], shape[-1], shape[-2])
        count = self.rng.choice([1, 2, 5])
        if kind == "array":
            return self.argument(shape)
        if kind in ("transpose", "named", "jitted", "custom", "cast"):
            x = self.argument(swapped, "float32" if kind == "cast" else None)
            transposed: dict[str, Function] = {
                "transpose": lambda x: jnp.swapaxes(x, -1, -2),
                "named": lambda x: checkpoint_name(jnp.swapaxes(x, -1, -2), "x"),
                "jitted": jax.jit(lambda x: jnp.swapaxes(x, -1, -2)),
                "custom": _custom(lambda x: jnp.swapaxes(x, -1, -2)),
                "cast": lambda x: jnp.swapaxes(x, -1, -2).astype(self.dtype),
            }
            return lambda *args: transposed[kind](x(*args))
        if kind == "twice":
            x = self.argument(shape)
            return lambda *args: jnp.swapaxes(jnp.swapaxes(x(*args), -1, -2), -1, -2)
        index = self.argument((), self.rng.choice(["int32"] * 4 + ["uint8"]))
        if kind == "stack":
            x = self.argument((count, *shape))
            return lambda *args: lax.dynamic_index_in_dim(x(*args), index(*args), keepdims=False)
        if kind == "stacked transpose":
            x = self.argument((count, *swapped))
            return lambda *args: jnp.swapaxes(x(*args)[index(*args)], -1, -2)
        if kind == "transposed stack":
            x = self.argument((count, *swapped))
            return lambda *args: jnp.swapaxes(x(*args), -1, -2)[index(*args)]
        assert kind == "slice"
        x = self.argument((*shape[:-2], shape[-2] * 2, shape[-1]))
        return lambda *args: lax.dynamic_slice(x(*args), (index(*args),) * len(shape), shape)

    def options(self, n: int, rows: tuple[int, ...], *, ragged: int = 0) -> Function:
        """Returns a function that makes the keyword arguments of an epilogue."""
        named: dict[str, Function] = {}
        fixed: dict[str, Any] = {}
        if self.rng.random() < 0.4:
            named["bias"] = self.argument((ragged, n) if ragged else (n,))
        if activation := self.rng.choice(ACTIVATIONS):
            fixed["activation"] = activation
        if not ragged and self.rng.random() < 0.3:
            named["residual"] = self.argument((*rows, n))
        if self.rng.random() < 0.2:
            fixed["preferred_element_type"] = self.rng.choice([jnp.float32, jnp.bfloat16])
        if not named.keys() | fixed.keys() and self.rng.random() < 0.3:
            fixed["epilogue"] = self.rng.choice(
                [
                    lambda y: jnp.cumsum(y, 0),
                    lambda y: (y, jnp.sum(y, -1)),
                    lambda y: jnp.exp(y) + 1,
                ]
            )
        if self.dtype == "float32" and self.rng.random() < 0.7:
            fixed["precision"] = self.rng.choice([float32.preset(terms) for terms in PRESETS])
        self.note(" ".join((*named, *fixed)) or "no epilogue")
        return lambda *args: fixed | {name: get(*args) for name, get in named.items()}


def _custom(function: Function) -> Function:
    own = jax.custom_vjp(function)
    own.defvjp(lambda x: (function(x), None), lambda _, ct: (jnp.swapaxes(ct, -1, -2),))
    return own


def dense(draw: Draw) -> Function:
    rng = draw.rng
    m, n, k = (draw.extent() for _ in range(3))
    batch = (rng.choice([1, 3]),) if rng.random() < 0.3 else ()
    lhs = draw.operand((*batch, m, k))
    rhs = draw.operand((*batch, k, n) if rng.random() < 0.5 else (k, n))
    options = draw.options(n, (*batch, m))
    if rng.random() < 0.15:
        draw.note("two dtypes")
        draw.dtype = "float32"
    draw.note("matmul")
    limit = rng.choice([None] * 5 + [64])
    if limit is None:
        return lambda *args: jhg.matmul(lhs(*args), rhs(*args), **options(*args), **draw.chosen)

    def limited(*args: Any) -> Any:
        with jhg.max_sms(limit):
            return jhg.matmul(lhs(*args), rhs(*args), **options(*args), **draw.chosen)

    return limited


def summed(draw: Draw) -> Function:
    """A product by subscripts."""
    rng = draw.rng
    letters = dict(zip("abmnk", (3, 2, draw.extent(), draw.extent(), draw.extent()), strict=True))
    subscripts = rng.choice(
        ["mk,kn->mn", "km,kn->mn", "mk,nk->nm", "amk,kn->amn", "amk,akn->anm", "akm,ank->amn",
         "abmk,kn->abmn", "amk,bkn->abmn", "mak,kan->mn", "amk,ank->nam"]
    )  # fmt: skip
    draw.note(subscripts)
    left, right = subscripts.split("->")[0].split(",")
    lhs, rhs = (draw.operand(tuple(letters[x] for x in names)) for names in (left, right))
    return lambda *args: jhg.einsum(subscripts, lhs(*args), rhs(*args), **draw.chosen)


def mapped(draw: Draw) -> Function:
    """`jax.vmap` of a product, mapped along any axes."""
    rng = draw.rng
    m, n, k, size = draw.extent(), draw.extent(), draw.extent(), 3
    axes = rng.choice([(0, None), (None, 0), (0, 0), (1, None), (2, 0), (0, 2)])

    def shape(matrix: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
        return matrix if axis is None else (*matrix[:axis], size, *matrix[axis:])

    lhs, rhs = draw.operand(shape((m, k), axes[0])), draw.operand(shape((k, n), axes[1]))
    activation = rng.choice(ACTIVATIONS)
    draw.note(f"vmap {axes} {activation}")
    product = jax.vmap(lambda a, b: jhg.matmul(a, b, activation=activation, **draw.chosen), axes)
    return lambda *args: product(lhs(*args), rhs(*args))


def gated(draw: Draw) -> Function:
    rng = draw.rng
    m, n, k = (draw.extent() for _ in range(3))
    x, kind = draw.operand((m, k)), rng.choice(["stacked", "pair", "transposed pair", "mixed"])
    draw.note(f"gated {kind}")
    if kind == "stacked":
        weights = draw.argument((k, 2, n))
        return lambda *args: jhg.gated_linear_unit(x(*args), weights(*args), **draw.chosen)
    transposed = {"pair": (0, 0), "transposed pair": (1, 1), "mixed": (0, 1)}[kind]
    gate, up = (draw.argument((n, k) if each else (k, n)) for each in transposed)

    def function(*args: Any) -> Any:
        pair = [
            w(*args).T if each else w(*args) for w, each in zip((gate, up), transposed, strict=True)
        ]
        return jhg.gated_linear_unit(x(*args), tuple(pair), **draw.chosen)

    return function


def _rows(draw: Draw, length: int, k: int) -> tuple[Function, dict[str, Function]]:
    """Returns what makes the rows of a ragged product, and its argument `row_indices`, if any."""
    source = draw.rng.choice([1000, 128, length])
    kind = draw.rng.choice(
        ["array", "row_indices", "picked", "summed", "summed pairs", "transpose"]
    )
    draw.note(kind)
    if kind == "array":
        return draw.argument((length, k)), {}
    if kind == "transpose":
        x = draw.argument((k, length))
        return lambda *args: x(*args).T, {}
    x = draw.argument((source, k))
    if kind == "row_indices":
        return x, {"row_indices": draw.argument((length,), "int32")}
    if kind == "picked":
        rows = draw.argument((length,), "int32")
        return lambda *args: pick_rows(x(*args), rows(*args)), {}
    count = 1 if kind == "summed" else 2
    sources = draw.argument((length, count), "int32")
    users = draw.argument((source, 2), "int32")
    return lambda *args: sum_rows(x(*args), sources(*args), users(*args)), {}


def ragged(draw: Draw) -> Function:
    rng = draw.rng
    length, k, n, groups = rng.choice([512, 4096, 100]), draw.extent(), draw.extent(), 8
    x, indices = _rows(draw, length, k)
    sizes = draw.argument((groups,), "int32")
    kind = rng.choice(["weights", "weights", "transposed", "stack", "gated"])
    draw.note(f"ragged {kind}")
    options = draw.options(n, (length,), ragged=groups) if kind != "gated" else lambda *args: {}
    shapes = {"transposed": (groups, n, k), "gated": (groups, k, 2, n), "stack": (3, groups, k, n)}
    w = draw.argument(shapes.get(kind, (groups, k, n)))
    index = draw.argument((), "int32") if kind == "stack" else lambda *args: None

    def function(*args: Any) -> Any:
        weights, named = w(*args), {name: get(*args) for name, get in indices.items()} | draw.chosen
        if kind == "gated":
            return jhg.gated_linear_unit(x(*args), weights, group_sizes=sizes(*args), **named)
        if kind == "transposed":
            weights = jnp.swapaxes(weights, 1, 2)
        if kind == "stack":
            weights = weights[index(*args)]
        return jhg.ragged_dot(x(*args), weights, sizes(*args), **named, **options(*args))

    return function


def contraction(draw: Draw) -> Function:
    """A ragged product that contracts the rows of each group."""
    length, k, n = draw.rng.choice([512, 4096]), draw.extent(), draw.extent()
    (x, _), (y, _) = _only_arrays(draw, length, k), _only_arrays(draw, length, n)
    sizes = draw.argument((8,), "int32")
    numbers = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    draw.note("contraction")
    return lambda *args: jhg.ragged_dot_general(
        x(*args), y(*args), sizes(*args), numbers, **draw.chosen
    )


def _only_arrays(draw: Draw, length: int, k: int) -> tuple[Function, dict[str, Function]]:
    while True:
        state = len(draw.call.arguments), len(draw.call.parts)
        rows, indices = _rows(draw, length, k)
        if not indices:
            return rows, indices
        del draw.call.arguments[state[0] :], draw.call.parts[state[1] :]


def mapped_ragged(draw: Draw) -> Function:
    rng = draw.rng
    length, k, n, groups, size = 512, draw.extent(), draw.extent(), 4, 3
    own = rng.random() < 0.5
    x, sizes = draw.argument((size, length, k)), draw.argument((size, groups), "int32")
    w = draw.argument((size, groups, k, n) if own else (groups, k, n))
    rows = draw.argument((size, 256), "int32") if rng.random() < 0.4 else None
    activation = rng.choice(ACTIVATIONS)
    draw.note(f"vmap ragged, own weights {own}, picked {rows is not None}, {activation}")

    def product(x: Any, w: Any, sizes: Any, rows: Any) -> Any:
        return jhg.ragged_dot(x, w, sizes, row_indices=rows, activation=activation, **draw.chosen)

    axes = (0, 0 if own else None, 0, None if rows is None else 0)
    get = rows or (lambda *args: None)
    run = jax.vmap(product, axes)
    return lambda *args: run(x(*args), w(*args), sizes(*args), get(*args))


FAMILIES = (dense, dense, dense, summed, mapped, gated, ragged, ragged, contraction, mapped_ragged)


def random_calls(count: int, seed: int) -> list[Call]:
    """Returns so many calls, the same for the same seed."""
    rng = random.Random(seed)
    calls = []
    for i in range(count):
        draw = Draw(rng)
        draw.call.function = FAMILIES[i % len(FAMILIES)](draw)
        calls.append(draw.call)
    assert np.unique([str(call) for call in calls]).size > 0.9 * count
    return calls
