"""What JAX makes of a function: derivatives, maps, loops, ways to run it.

A `Transformation` makes a program of a function, and may run it in a way of its own. The same is
done with our functions and with their twins in jnp, and the results are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..ops import checkpoint_policy
from ..spec import GemmSpec
from . import running
from .lowered import specs_apart, specs_of
from .transformed_functions import FUNCTIONS, Function

Program = Callable[..., Any]


@dataclass(frozen=True)
class Transformation:
    """A program of a function of floats and integers, and how it is run.

    Attributes:
      program: of (the function, what is known of it): a function of the same operands.
      around: of the same: what takes the function's place in our program.
      run: of (program, operands, their `Function`): the results.
      lower: of the same: the program for CUDA, as text; None where there is no single one.
      devices: how many it takes.
      like: name of the transformation of the jnp function that has the same results.
    """

    program: Callable[[Program, Function], Program]
    around: Callable[[Program, Function], Program] = lambda f, function: f
    run: Callable[[Program, list[jax.Array], Function], Any] = running.jitted
    lower: Callable[[Program, list[jax.Array], Function], str] | None = running.lowered
    devices: int = 1
    like: str | None = None

    def of(self, f: Program, function: Function) -> Program:
        return self.program(self.around(f, function), function)

    def to_lower(self, f: Program, function: Function) -> Program:
        """Returns what `lower` takes. It exports for CUDA itself."""
        return (
            self.program(f, function) if self.around is running.exported else self.of(f, function)
        )


def weighted(y: jax.Array, power: int = 1) -> jax.Array:
    """Returns a scalar of an array, of another weight for each element's neighbours."""
    weights = (np.arange(y.size) % 3 - 1).astype(np.float32).reshape(y.shape)
    y = y.astype(jnp.float32)
    return jnp.sum(y * (weights + y if power == 2 else weights))


def loss(f: Program, power: int = 1) -> Program:
    return lambda *args: weighted(f(*args), power)


def directions(args: Any) -> tuple[jax.Array, ...]:
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


def _axes(mapped: Any) -> tuple[int | None, ...]:
    return tuple(0 if each else None for each in mapped)


# Derivatives.


def _by_floats(transform: Callable[[Program], Program]) -> Callable[[Program, Function], Program]:
    """Returns the transformation of a function of the floats alone, the integers being given."""

    def program(f: Program, function: Function) -> Program:
        count = len(function.floats)

        def run(*args: jax.Array) -> Any:
            of_floats = lambda *floats: f(*floats, *args[count:])  # noqa: E731
            return transform(of_floats)(*args[:count])

        return run

    return program


def _all(f: Program) -> Callable[..., Any]:
    """Returns its gradient by all of its operands."""
    return lambda *x: jax.grad(f, tuple(range(len(x))))(*x)


def _vjp(f: Program, function: Function) -> Program:
    def run(*args: jax.Array) -> Any:
        y, pull = jax.vjp(f, *args)
        gradients = pull(jnp.flip(y))
        of_integers = [x.dtype for x in gradients[len(function.floats) :]]
        assert all(dtype == jax.dtypes.float0 for dtype in of_integers), of_integers
        return y, gradients[: len(function.floats)]

    return run


def _linearize(f: Program) -> Program:
    def run(*x: jax.Array) -> Any:
        y, linear = jax.linearize(f, *x)
        return y, linear(*directions(x))

    return run


def _vjp_of_jvp(f: Program) -> Program:
    def run(*x: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, t: jax.jvp(f, x, t), x, directions(x))
        return y, pull(jax.tree.map(jnp.flip, y))

    return run


def _jvp_of_vjp(f: Program) -> Program:
    def pulled(x: Any, cotangent: jax.Array) -> Any:
        return jax.vjp(f, *x)[1](cotangent)

    def run(*x: jax.Array) -> Any:
        cotangent = jnp.flip(f(*x))
        return jax.jvp(pulled, (x, cotangent), (directions(x), jnp.flip(cotangent, 0)))

    return run


def _hessian(f: Program) -> Program:
    return lambda *x: jax.hessian(loss(f, 2), (0, 1))(*x)


def _grad_of_grad(f: Program) -> Program:
    def length(*x: jax.Array) -> jax.Array:
        return sum(map(weighted, _all(loss(f))(*x)), jnp.float32(0))

    return jax.grad(length, (0, 1))


def _jacrev_of_jacfwd(f: Program) -> Program:
    """Of four sums of its elements, by rows that are added to the first and the second operand."""

    def run(x: jax.Array, other: jax.Array, *rest: jax.Array) -> Any:
        def sums(row: jax.Array, other_row: jax.Array) -> jax.Array:
            y = f(x + row, other + other_row, *rest)
            return y.astype(jnp.float32).reshape(-1, 4).sum(0)

        rows = (jnp.zeros(a.shape[-1], a.dtype) for a in (x, other))
        return jax.jacrev(jax.jacfwd(sums), 1)(*rows)

    return run


def _custom_vjp(f: Program) -> Program:
    @jax.custom_vjp
    def own(*x: jax.Array) -> jax.Array:
        return f(*x)

    own.defvjp(lambda *x: jax.vjp(f, *x), lambda pull, cotangent: pull(2 * cotangent))
    return lambda *x: (own(*x), _all(loss(own))(*x))


# Maps.


def _vmap(f: Program, function: Function) -> Program:
    mapped = function.mapped
    return lambda *args: jax.vmap(f, _axes(mapped))(*copies(args, mapped))


def _vmap_of_all(f: Program, function: Function) -> Program:
    """Integers are mapped, too, and the result's new axis is its last."""
    mapped = [True] * len(function.mapped)
    return lambda *args: jax.vmap(f, 0, -1)(*copies(args, mapped))


def _vmap_of_grad(f: Program, function: Function) -> Program:
    gradient = jax.grad(loss(f), function.floats)
    mapped = function.mapped
    return lambda *args: jax.vmap(gradient, _axes(mapped))(*copies(args, mapped))


def _grad_of_vmap(f: Program, function: Function) -> Program:
    mapped = function.mapped
    gradient = jax.grad(loss(jax.vmap(f, _axes(mapped))), function.floats)
    return lambda *args: gradient(*copies(args, mapped))


# Rematerialisation and control flow.


def _checkpoint(**options: Any) -> Callable[[Program, Function], Program]:
    def named(f: Program) -> Program:
        body = lambda *x: weighted(checkpoint_name(f(*x), "product"), 2)  # noqa: E731
        return _all(jax.checkpoint(body, **options))

    return _by_floats(named)


def _scan(f: Program, function: Function) -> Program:
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


def _added(f: Program, args: Any, i: Any, y: jax.Array) -> jax.Array:
    return y + f(i.astype(args[0].dtype) * args[0], *args[1:])


def _zeros(f: Program, args: Any) -> jax.Array:
    out = jax.eval_shape(f, *args)
    return jnp.zeros(out.shape, out.dtype)


def _while_loop(f: Program, function: Function) -> Program:
    """It ends when the data say so; JAX gives it forward mode alone."""

    def looped(*args: jax.Array) -> jax.Array:
        def more(state: Any) -> jax.Array:
            i, y = state
            return (i < 3) & (jnp.sum(y) < 1e6)

        body = lambda state: (state[0] + 1, _added(f, args, *state))  # noqa: E731
        return lax.while_loop(more, body, (jnp.int32(1), _zeros(f, args)))[1]

    return lambda *args: jax.jvp(looped, args, directions(args))


def _fori_loop(f: Program, function: Function) -> Program:
    def looped(*args: jax.Array) -> jax.Array:
        return lax.fori_loop(1, 3, partial(_added, f, args), _zeros(f, args))

    return jax.value_and_grad(loss(looped), function.floats)


def _cond(f: Program, function: Function) -> Program:
    def chosen(*args: jax.Array) -> jax.Array:
        other = lambda *args: f(-args[0], *args[1:])  # noqa: E731
        return weighted(lax.cond(jnp.sum(args[0]) > 1e6, f, other, *args))

    return jax.value_and_grad(chosen, function.floats)


# Ways to run a program.


def _itself(f: Program, function: Function) -> Program:
    return f


def _donation(f: Program, function: Function) -> Program:
    return lambda y, *args: y + f(*args)


dots = jax.checkpoint_policies.dots_saveable
names = jax.checkpoint_policies.save_only_these_names("product")

TRANSFORMATIONS: dict[str, Transformation] = {
    "jit": Transformation(_itself),
    "grad": Transformation(lambda f, function: jax.value_and_grad(loss(f), function.floats)),
    "vjp": Transformation(_vjp),
    "jvp": Transformation(lambda f, _: lambda *args: jax.jvp(f, args, directions(args))),
    "linearize": Transformation(_by_floats(_linearize), like="jvp"),
    "jacfwd": Transformation(_by_floats(jax.jacfwd)),
    "jacrev": Transformation(_by_floats(jax.jacrev), like="jacfwd"),
    "hessian": Transformation(_by_floats(_hessian)),
    "grad of grad": Transformation(_by_floats(_grad_of_grad)),
    "jacrev of jacfwd": Transformation(_by_floats(_jacrev_of_jacfwd)),
    "vjp of jvp": Transformation(_by_floats(_vjp_of_jvp)),
    "jvp of vjp": Transformation(_by_floats(_jvp_of_vjp)),
    "custom_vjp around it": Transformation(_by_floats(_custom_vjp)),
    "vmap": Transformation(_vmap),
    "vmap of every operand": Transformation(_vmap_of_all),
    "vmap of grad": Transformation(_vmap_of_grad),
    "grad of vmap": Transformation(_grad_of_vmap),
    "checkpoint": Transformation(_checkpoint()),
    "checkpoint, saving dots": Transformation(
        _checkpoint(policy=checkpoint_policy(dots)), like="checkpoint"
    ),
    "checkpoint, saving names": Transformation(_checkpoint(policy=names), like="checkpoint"),
    "scan": Transformation(_scan),
    "while_loop": Transformation(_while_loop),
    "fori_loop": Transformation(_fori_loop),
    "cond": Transformation(_cond),
    "donation": Transformation(_donation, run=running.donated, lower=running.lowered_donated),
    "eager": Transformation(_vjp, run=running.eager, lower=None, like="vjp"),
    "disable_jit": Transformation(_vjp, run=running.without_jit, lower=None, like="vjp"),
    "debug_nans": Transformation(_vjp, run=running.debugged, like="vjp"),
    "export": Transformation(_vjp, running.exported, lower=running.lowered_export, like="vjp"),
    "shard_map": Transformation(_vjp, running.mapped, devices=2, like="vjp"),
    "jit with shardings": Transformation(
        _vjp, run=running.partitioned, lower=running.lowered_partitioned, devices=2, like="vjp"
    ),
}

_BATCH = "the axes of its batch do not merge into one, which is all that a kernel reads"
_PARTITIONED = "XLA partitions ragged products itself; under `shard_map` kernels run"
LEFT_TO_XLA: dict[tuple[str, str], str] = {
    **{
        (name, function): _BATCH
        for name, functions in {
            "jacfwd": ["einsum"], "jacrev": ["einsum"], "hessian": ["einsum"],
            "jacrev of jacfwd": ["dot_general", "einsum"], "vmap of grad": ["einsum"],
            "grad of vmap": ["dot_general"],
        }.items()
        for function in functions
    },
    **{
        ("jit with shardings", function): _PARTITIONED
        for function in ("ragged_dot", "ragged_dot, epilogue", "ragged_dot_general")
    },
}  # fmt: skip
"""Why XLA runs some product of a transformation's program for CUDA."""


def on_kernels(name: str, function: str) -> Program:
    """Returns our function, on kernels wherever one runs each product of the transformation."""
    only = None if (name, function) in LEFT_TO_XLA else "hopper"
    return partial(FUNCTIONS[function].ours, implementation=only)


def specs(name: str, function: str) -> list[GemmSpec]:
    """Returns the kernels that a transformation on one device runs."""
    transformation, known = TRANSFORMATIONS[name], FUNCTIONS[function]
    program, args = transformation.program(on_kernels(name, function), known), known.arguments()
    if transformation.run is running.donated:
        args = [running.begun(args, known), *args]
    apart = transformation.run in (running.eager, running.without_jit)
    return (specs_apart if apart else specs_of)(program, *args)


def transformation_specs() -> list[GemmSpec]:
    """Returns the kernels of all transformations on one device."""
    return [
        spec
        for name, transformation in TRANSFORMATIONS.items()
        if transformation.devices == 1
        for function in FUNCTIONS
        for spec in specs(name, function)
    ]


@cache
def expected(name: str, function: str) -> Any:
    """Returns what our function's results are to be, as the CPU computes them in float32."""
    transformation = TRANSFORMATIONS[name]
    if transformation.like:
        return expected(transformation.like, function)
    known = FUNCTIONS[function]
    with jax.default_device(jax.devices("cpu")[0]):
        run = running.donated if transformation.run is running.donated else running.jitted
        return run(transformation.program(known.plain, known), known.arguments("float32"), known)


def assert_equal(results: Any, name: str, function: str) -> None:
    """Checks the results of a transformation: each is the exact one, rounded to its dtype."""

    def check(got: jax.Array, exact: jax.Array) -> None:
        assert got.shape == exact.shape
        rounded = np.asarray(exact).astype(got.dtype)
        np.testing.assert_array_equal(np.float64(got), np.float64(rounded))
        assert np.any(rounded)

    assert jax.tree.structure(results) == jax.tree.structure(expected(name, function))
    jax.tree.map(check, results, expected(name, function))
