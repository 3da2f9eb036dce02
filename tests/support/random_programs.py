"""Random programs of products and what stands between them, for `accelerate`.

Numbers are small integers, so that most programs are exact in bfloat16: whatever is fused, and in
which order sums are taken, the results are the same bits. A program is clipped where its numbers
would grow.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZE = 8  # of every axis
LIMIT = 3  # numbers that are multiplied lie in -LIMIT to LIMIT

Array = Any


def clipped(x: Array) -> Array:
    return jnp.clip(x, -LIMIT, LIMIT)


UNARY: tuple[Callable[[Array], Array], ...] = (
    jax.nn.relu, jnp.abs, jnp.negative, clipped, lambda x: 2 * x, lambda x: x - 1,
    lambda x: jnp.where(x > 1, x, -x), lambda x: x.astype(jnp.float32).astype(x.dtype),
    jax.nn.relu6, lambda x: jnp.maximum(x, 0.5 * x) * 2, jnp.square, lax.stop_gradient,
    jax.jit(lambda x: jnp.minimum(x, 2)), lambda x: x.T, lambda x: x[::-1],
    lambda x: x.reshape(2, SIZE // 2, SIZE).reshape(x.shape),
    lambda x: x + x.sum(0, keepdims=True).clip(-1, 1),
    lambda x: x - x.max(-1, keepdims=True),
    lambda x: x[(x.sum(1) > 0).astype(jnp.int32)],
    lambda x: x + jnp.take_along_axis(x, jnp.argmax(x, 1, keepdims=True), 1),
    lambda x: clipped(x).astype(jnp.int32).astype(x.dtype),
    lambda x: x + lax.stop_gradient(clipped(x)).astype(jnp.float16).astype(x.dtype),
    lambda x: jnp.where(jnp.arange(SIZE)[:, None] > 2, x, 0), jnp.sign,
    jax.vmap(lambda row: jnp.maximum(row, row[::-1])),
)  # fmt: skip
BINARY: tuple[Callable[[Array, Array], Array], ...] = (
    jnp.add, jnp.subtract, jnp.maximum, lambda x, y: clipped(x) * clipped(y),
    lambda x, y: jnp.where(y > 0, x, y), lambda x, y: jax.nn.relu(x) * clipped(y),
)  # fmt: skip


def halves(x: Array) -> Array:
    return x.reshape(2, SIZE // 2, SIZE)


def updated(x: Array, w: Array) -> Array:
    """Returns weights after a step of descent."""
    gradient = jax.grad(lambda w: (x @ clipped(w)).astype(jnp.float32).sum())(w)
    return w - clipped(gradient) / 2


# Of a matrix and weights.
PRODUCTS: tuple[Callable[[Array, Array], Array], ...] = (
    *[lambda x, w: x @ w] * 4, *[lambda x, w: w.T @ x] * 2, updated,
    lambda x, w: (halves(x) @ w).reshape(x.shape),
    lambda x, w: jax.vmap(lambda x: x @ w)(halves(x)).reshape(x.shape),
    lambda x, w: jnp.einsum("aij,akj->aik", halves(x), jnp.stack([w, -w])).reshape(x.shape),
    lambda x, w: lax.ragged_dot(x, jnp.stack([w, w.T]), jnp.asarray([3, SIZE - 3])),
    lambda x, w: lax.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype),
)  # fmt: skip


class Writer:
    """Writes one program: a function of weights, a list of matrices and rows."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.matrices = self.random.randint(2, 4)

    def arguments(self, dtype: Any) -> list[Array]:
        numbers = np.random.default_rng(self.random.randrange(2**32))
        shapes = [(SIZE, SIZE)] * self.matrices + [(SIZE,)] * 2
        values = (numbers.integers(-1, 2, at) * numbers.integers(0, 2, at) for at in shapes)
        return [jax.device_put(x.astype(dtype)) for x in values]

    def program(self) -> Callable[[list[Array]], Array]:
        """Returns a function of the arguments; its result is one number."""
        steps = [self.step(nested=2) for _ in range(self.random.randint(4, 12))]
        kept = [self.random.random() < 0.3 for _ in steps]

        def run(arguments: list[Array]) -> Array:
            values, total = list(arguments[: self.matrices]), jnp.float32(0)
            for step, keep in zip(steps, kept, strict=True):
                values.append(step(values, arguments))
                if keep:
                    total += values[-1].astype(jnp.float32).sum()
            return total + values[-1].astype(jnp.float32).sum()

        return run

    def step(self, nested: int) -> Callable[[list[Array], list[Array]], Array]:
        """Returns a function of the values so far and the arguments, to a new value."""
        random = self.random
        pick = [random.random() for _ in range(3)]

        def at(values: list[Array], i: int) -> Array:
            recent = 1 - (1 - pick[i]) ** 2  # late values more often
            return values[int(recent * len(values))]

        kind = random.random()
        if kind < 0.35:
            product = random.choice(PRODUCTS)

            def multiply(values: list[Array], arguments: list[Array]) -> Array:
                x, w = clipped(at(values, 0)), arguments[int(pick[1] * self.matrices)]
                return product(x, w)

            return multiply
        if kind < 0.42:
            combine = random.choice(BINARY)

            def gate(values: list[Array], arguments: list[Array]) -> Array:
                x = clipped(at(values, 0))
                return combine(x @ arguments[0], x @ arguments[1])

            return gate
        if kind < 0.58:
            function = random.choice(UNARY)
            return lambda values, arguments: function(at(values, 0))
        if kind < 0.75:
            combine = random.choice(BINARY)
            return lambda values, arguments: combine(at(values, 0), at(values, 1))
        if kind < 0.85:
            row = random.randint(-2, -1)
            return lambda values, arguments: at(values, 0) + arguments[row]
        if not nested:
            return lambda values, arguments: clipped(at(values, 0))
        return self.block(nested, at)

    def block(
        self, nested: int, at: Callable[[list[Array], int], Array]
    ) -> Callable[[list[Array], list[Array]], Array]:
        """Returns a step that is a call, a loop or a branch around others."""
        random = self.random
        inner = [self.step(nested - 1) for _ in range(random.randint(1, 4))]

        def body(arguments: list[Array], x: Array) -> Array:
            values = [*arguments[: self.matrices], x]
            for step in inner:
                values.append(step(values, arguments))
            return clipped(values[-1])

        def scanned(arguments: list[Array], x: Array) -> Array:
            return lax.scan(lambda c, _: (body(arguments, c), None), x, None, 2)[0]

        def branched(arguments: list[Array], x: Array) -> Array:
            return lax.cond(x.sum() > 0, body, lambda a, x: -x, arguments, x)

        def looped(arguments: list[Array], x: Array) -> Array:
            return lax.fori_loop(0, 2, lambda _, c: body(arguments, c), x)

        def ruled(arguments: list[Array], x: Array) -> Array:
            @jax.custom_vjp
            def function(x: Array) -> Array:
                return body(arguments, x)

            function.defvjp(lambda x: (function(x), x), lambda x, g: (clipped(g @ x.T),))
            return function(lax.stop_gradient(x)) + x if random_rule else function(x)

        random_rule = random.random() < 0.5
        wrap = random.choice([jax.jit, jax.checkpoint, None, None, None, None])
        around = wrap(body) if wrap else random.choice([scanned, branched, looped, body])
        return lambda values, arguments: around(arguments, at(values, 2))


def writer_of(seed: int) -> tuple[Callable[[list[Array]], Array], Callable[[Any], list[Array]]]:
    """Returns a program, and a function from a dtype to its arguments."""
    writer = Writer(seed)
    program, numbers = writer.program(), writer.random.getstate()

    def arguments(dtype: Any) -> list[Array]:
        writer.random.setstate(numbers)
        return writer.arguments(dtype)

    return program, arguments
