"""Programs of a function: its derivatives, maps, loops; what `transformations` has names for.

Each function here takes a function of floats and integers, and what is known of it, and returns a
function of the same operands; those that `by_floats` adapts take one of floats alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support.transformed_functions import Function

Program = Callable[..., Any]


def weighted(y: jax.Array, power: int = 1) -> jax.Array:
    """Returns a scalar of an array, of another weight for each element's neighbours."""
    weights = (np.arange(y.size) % 3 - 1).astype(np.float32).reshape(y.shape)
    y = y.astype(jnp.float32)
    return jnp.sum(y * (weights + y if power == 2 else weights))


def loss(f: Program, power: int = 1) -> Program:
    return lambda *args: weighted(f(*args), power)


def directions(args: Any) -> tuple[Any, ...]:
    """Returns a tangent for each operand: integers have none to speak of."""
    return tuple(
        jnp.flip(x, -1) if jnp.issubdtype(x.dtype, jnp.floating)
        else np.zeros(x.shape, jax.dtypes.float0)
        for x in args
    )  # fmt: skip


def copies(args: Any, mapped: Any) -> list[jax.Array]:
    """Returns the operands, those that are mapped twice: as they are and reversed."""
    return [
        jnp.stack((x, jnp.flip(x))) if each else x for x, each in zip(args, mapped, strict=True)
    ]


def axes(mapped: Any) -> tuple[int | None, ...]:
    return tuple(0 if each else None for each in mapped)


# Derivatives.


def by_floats(transform: Callable[[Program], Program]) -> Callable[[Program, Function], Program]:
    """Returns the transformation of a function of the floats alone, the integers being given."""

    def program(f: Program, function: Function) -> Program:
        count = len(function.floats)

        def run(*args: jax.Array) -> Any:
            of_floats = lambda *floats: f(*floats, *args[count:])  # noqa: E731
            return transform(of_floats)(*args[:count])

        return run

    return program


def gradient_by_all(f: Program) -> Callable[..., Any]:
    """Returns its gradient by all of its operands."""
    return lambda *x: jax.grad(f, tuple(range(len(x))))(*x)


def vjp(f: Program, function: Function) -> Program:
    def run(*args: jax.Array) -> Any:
        y, pull = jax.vjp(f, *args)
        gradients = pull(jnp.flip(y))
        of_integers = [x.dtype for x in gradients[len(function.floats) :]]
        assert all(dtype == jax.dtypes.float0 for dtype in of_integers), of_integers
        return y, gradients[: len(function.floats)]

    return run


def linearize(f: Program) -> Program:
    def run(*x: jax.Array) -> Any:
        y, linear = jax.linearize(f, *x)
        return y, linear(*directions(x))

    return run


def vjp_of_jvp(f: Program) -> Program:
    def run(*x: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, t: jax.jvp(f, x, t), x, directions(x))
        return y, pull(jax.tree.map(jnp.flip, y))

    return run


def jvp_of_vjp(f: Program) -> Program:
    def pulled(x: Any, cotangent: jax.Array) -> Any:
        return jax.vjp(f, *x)[1](cotangent)

    def run(*x: jax.Array) -> Any:
        cotangent = jnp.flip(f(*x))
        return jax.jvp(pulled, (x, cotangent), (directions(x), jnp.flip(cotangent, 0)))

    return run


def hessian(f: Program) -> Program:
    return lambda *x: jax.hessian(loss(f, 2), (0, 1))(*x)


def grad_of_grad(f: Program) -> Program:
    def length(*x: jax.Array) -> jax.Array:
        return sum(map(weighted, gradient_by_all(loss(f))(*x)), jnp.float32(0))

    return jax.grad(length, (0, 1))


def jacrev_of_jacfwd(f: Program) -> Program:
    """Of four sums of its elements, by rows that are added to the first and the second operand."""

    def run(x: jax.Array, other: jax.Array, *rest: jax.Array) -> Any:
        def sums(row: jax.Array, other_row: jax.Array) -> jax.Array:
            y = f(x + row, other + other_row, *rest)
            return y.astype(jnp.float32).reshape(-1, 4).sum(0)

        rows = (jnp.zeros(a.shape[-1], a.dtype) for a in (x, other))
        return jax.jacrev(jax.jacfwd(sums), 1)(*rows)

    return run


def custom_vjp(f: Program) -> Program:
    @jax.custom_vjp
    def own(*x: jax.Array) -> jax.Array:
        return f(*x)

    own.defvjp(lambda *x: jax.vjp(f, *x), lambda pull, cotangent: pull(2 * cotangent))
    return lambda *x: (own(*x), gradient_by_all(loss(own))(*x))


# Maps.


def vmap(f: Program, function: Function) -> Program:
    mapped = function.mapped
    return lambda *args: jax.vmap(f, axes(mapped))(*copies(args, mapped))


def vmap_of_all(f: Program, function: Function) -> Program:
    """Integers are mapped, too, and the result's new axis is its last."""
    mapped = [True] * len(function.mapped)
    return lambda *args: jax.vmap(f, 0, -1)(*copies(args, mapped))


def vmap_of_grad(f: Program, function: Function) -> Program:
    gradient = jax.grad(loss(f), function.floats)
    mapped = function.mapped
    return lambda *args: jax.vmap(gradient, axes(mapped))(*copies(args, mapped))


def grad_of_vmap(f: Program, function: Function) -> Program:
    mapped = function.mapped
    gradient = jax.grad(loss(jax.vmap(f, axes(mapped))), function.floats)
    return lambda *args: gradient(*copies(args, mapped))


# Rematerialisation and control flow.


def checkpoint(**options: Any) -> Callable[[Program, Function], Program]:
    def named(f: Program) -> Program:
        body = lambda *x: weighted(checkpoint_name(f(*x), "product"), 2)  # noqa: E731
        return gradient_by_all(jax.checkpoint(body, **options))

    return by_floats(named)


def scan(f: Program, function: Function) -> Program:
    """Maps what `vmap` does, one after the other; carries the other operands, which change."""

    def looped(*args: jax.Array) -> jax.Array:
        pairs = list(zip(args, function.mapped, strict=True))

        def step(carried: Any, mapped: Any) -> Any:
            ours, others = iter(mapped), iter(carried)
            y = f(*(next(ours) if each else next(others) for each in function.mapped))
            return [jnp.flip(x, -1) for x in carried], y

        carried = [x for x, each in pairs if not each]
        return lax.scan(step, carried, [x for x, each in pairs if each])[1]

    gradient = jax.value_and_grad(loss(looped), function.floats)
    return lambda *args: gradient(*copies(args, function.mapped))


def added(f: Program, args: Any, i: Any, y: jax.Array) -> jax.Array:
    return y + f(i.astype(args[0].dtype) * args[0], *args[1:])


def zeros(f: Program, args: Any) -> jax.Array:
    out = jax.eval_shape(f, *args)
    return jnp.zeros(out.shape, out.dtype)


def while_loop(f: Program, function: Function) -> Program:
    """It ends when the data say so; JAX gives it forward mode alone."""

    def looped(*args: jax.Array) -> jax.Array:
        def more(state: Any) -> jax.Array:
            i, y = state
            return (i < 3) & (jnp.sum(y) < 1e6)

        body = lambda state: (state[0] + 1, added(f, args, *state))  # noqa: E731
        return lax.while_loop(more, body, (jnp.int32(1), zeros(f, args)))[1]

    return lambda *args: jax.jvp(looped, args, directions(args))


def fori_loop(f: Program, function: Function) -> Program:
    def looped(*args: jax.Array) -> jax.Array:
        return lax.fori_loop(1, 3, partial(added, f, args), zeros(f, args))

    return jax.value_and_grad(loss(looped), function.floats)


def cond(f: Program, function: Function) -> Program:
    def chosen(*args: jax.Array) -> jax.Array:
        other = lambda *args: f(-args[0], *args[1:])  # noqa: E731
        return weighted(lax.cond(jnp.sum(args[0]) > 1e6, f, other, *args))

    return jax.value_and_grad(chosen, function.floats)


def itself(f: Program, function: Function) -> Program:
    return f


def donation(f: Program, function: Function) -> Program:
    return lambda y, *args: y + f(*args)
