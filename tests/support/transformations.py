"""What JAX makes of a function: derivatives, maps, loops, ways to run it.

A `Transformation` makes a program of a function, and may run it in a way of its own. The same is
done with our functions and with their twins in jnp, and the results are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from support import running
from support import transformed_programs as programs
from support.covering import covering_subset
from support.lowered import specs_apart
from support.transformed_functions import FUNCTIONS, WITH_EPILOGUE, Function

from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

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


dots = jax.checkpoint_policies.dots_saveable
names = jax.checkpoint_policies.save_only_these_names("product")

TRANSFORMATIONS: dict[str, Transformation] = {
    "jit": Transformation(programs.itself),
    "grad": Transformation(
        lambda f, function: jax.value_and_grad(programs.loss(f), function.floats)
    ),
    "vjp": Transformation(programs.vjp),
    "jvp": Transformation(lambda f, _: lambda *args: jax.jvp(f, args, programs.directions(args))),
    "linearize": Transformation(programs.by_floats(programs.linearize), like="jvp"),
    "jacfwd": Transformation(programs.by_floats(jax.jacfwd)),
    "jacrev": Transformation(programs.by_floats(jax.jacrev), like="jacfwd"),
    "hessian": Transformation(programs.by_floats(programs.hessian)),
    "grad of grad": Transformation(programs.by_floats(programs.grad_of_grad)),
    "jacrev of jacfwd": Transformation(programs.by_floats(programs.jacrev_of_jacfwd)),
    "vjp of jvp": Transformation(programs.by_floats(programs.vjp_of_jvp)),
    "jvp of vjp": Transformation(programs.by_floats(programs.jvp_of_vjp)),
    "custom_vjp around it": Transformation(programs.by_floats(programs.custom_vjp)),
    "vmap": Transformation(programs.vmap),
    "vmap of every operand": Transformation(programs.vmap_of_all),
    "vmap of grad": Transformation(programs.vmap_of_grad),
    "grad of vmap": Transformation(programs.grad_of_vmap),
    "checkpoint": Transformation(programs.checkpoint()),
    "checkpoint, saving dots": Transformation(programs.checkpoint(policy=dots), like="checkpoint"),
    "checkpoint, saving names": Transformation(
        programs.checkpoint(policy=names), like="checkpoint"
    ),
    "scan": Transformation(programs.scan),
    "while_loop": Transformation(programs.while_loop),
    "fori_loop": Transformation(programs.fori_loop),
    "cond": Transformation(programs.cond),
    "donation": Transformation(
        programs.donation, run=running.donated, lower=running.lowered_donated
    ),
    "eager": Transformation(programs.vjp, run=running.eager, lower=None, like="vjp"),
    "disable_jit": Transformation(programs.vjp, run=running.without_jit, lower=None, like="vjp"),
    "debug_nans": Transformation(programs.vjp, run=running.debugged, like="vjp"),
    "export": Transformation(
        programs.vjp, running.exported, lower=running.lowered_export, like="vjp"
    ),
    "shard_map": Transformation(programs.vjp, running.mapped, devices=2, like="vjp"),
    "jit with shardings": Transformation(
        programs.vjp,
        run=running.partitioned,
        lower=running.lowered_partitioned,
        devices=2,
        like="vjp",
    ),
}

KINDS: dict[str, tuple[str, ...]] = {
    "derivative": (
        "grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "hessian", "grad of grad",
        "jacrev of jacfwd", "vjp of jvp", "jvp of vjp", "custom_vjp around it",
    ),
    "map": ("vmap", "vmap of every operand", "vmap of grad", "grad of vmap"),
    "checkpoint": ("checkpoint", "checkpoint, saving dots", "checkpoint, saving names"),
    "control flow": ("scan", "while_loop", "fori_loop", "cond"),
    "way to run": ("jit", "donation", "eager", "disable_jit", "debug_nans", "export"),
    "devices": ("shard_map", "jit with shardings"),
}  # fmt: skip

_CONTRACTED = "contracted axes that are no neighbours in the larger operand: a kernel reads one K"
LEFT_TO_XLA: dict[tuple[str, str], str] = {("jacrev of jacfwd", "einsum"): _CONTRACTED}
"""Why XLA runs some product of a transformation's program for CUDA."""


COMBINATIONS: list[tuple[str, str]] = list(itertools.product(TRANSFORMATIONS, FUNCTIONS))


def _shown_by(combination: tuple[str, str]) -> list[tuple[str, ...]]:
    """Returns what a combination is to show: pairs of transformations and of functions.

    Each transformation is shown on dense and ragged products, plain and with an epilogue; each
    kind of them on every function; and each product that is left to XLA.
    """
    name, function = combination
    rows = "ragged" if FUNCTIONS[function].sizes else "dense"
    epilogue = "epilogue" if function in WITH_EPILOGUE else "plain"
    (kind,) = (kind for kind, names in KINDS.items() if name in names)
    shown = [(name, rows), (name, epilogue), (kind, function)]
    return [*shown, combination] if combination in LEFT_TO_XLA else shown


def covering_combinations() -> list[tuple[str, str]]:
    """Returns the combinations that run with each change, functions taking turns."""
    count = len(FUNCTIONS)
    turns = [COMBINATIONS[count * i + (i + j) % count]
             for i in range(len(TRANSFORMATIONS)) for j in range(count)]  # fmt: skip
    return sorted(covering_subset(turns, _shown_by), key=COMBINATIONS.index)


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
