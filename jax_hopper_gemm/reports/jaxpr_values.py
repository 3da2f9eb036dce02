"""Values of a jaxpr: what made them, as lowering will find it in the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.core import Literal

from ..lowering.origins import Origin, Step, source_of
from ..lowering.route import Request
from ..primitives.rows import pick_rows_p, sum_rows_p

# Equations that lowering emits nothing for.
IDENTITIES = frozenset({"copy", "name", "pvary"})

# The one program within a program that is lowered in place. Others become functions, whose
# arguments hide what made them: `jit`, `scan`, `cond`, `checkpoint` and `custom_jvp_call` are such.
IN_PLACE = "custom_vjp_call"


@dataclass(frozen=True)
class Value:
    """A variable of a program, or a reshape of it that a product makes.

    Attributes:
      program: the program.
      atom: the variable.
      shape: that of the value.
    """

    program: Program
    atom: Any
    shape: tuple[Any, ...]


class Program:
    """A jaxpr, and where it stands in another one.

    Attributes:
      jaxpr: an open one.
      outer, equation: the program that holds it in place, and there the equation; None: none does.
    """

    def __init__(self, jaxpr: Any, outer: Program | None = None, equation: Any = None) -> None:
        self.jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        self.outer, self.equation = outer, equation
        self._made = {x: (e, i) for e in self.jaxpr.eqns for i, x in enumerate(e.outvars)}

    def inner(self, equation: Any, jaxpr: Any) -> Program:
        """Returns a program within one of its equations."""
        in_place = equation.primitive.name == IN_PLACE
        return Program(jaxpr, self, equation) if in_place else Program(jaxpr)

    def made(self, atom: Any) -> tuple[Program, Any]:
        """Returns the equation that made a variable, with its program; None for an argument."""
        program: Program = self
        while not isinstance(atom, Literal):
            if atom in program._made:
                equation, index = program._made[atom]
                if equation.primitive.name == IN_PLACE:
                    program = program.inner(equation, equation.params["call_jaxpr"])
                    atom = program.jaxpr.outvars[index]
                elif equation.primitive.name in IDENTITIES:
                    atom = equation.invars[0]
                else:
                    return program, equation
            elif program.outer and atom in program.jaxpr.invars:
                atom = program.equation.invars[program.jaxpr.invars.index(atom)]
                program = program.outer
            else:
                break
        return program, None


class JaxprValues:
    """The `World` of a program that is traced, not lowered."""

    def step(self, value: Value) -> Step | None:
        if value.shape != value.atom.aval.shape:
            return Step("reshape", _value(value.program, value.atom))
        program, equation = value.program.made(value.atom)
        if equation is None:
            return None
        primitive, params = equation.primitive, equation.params
        source = _value(program, equation.invars[0])
        if primitive is lax.transpose_p:
            return Step("transpose", source, tuple(params["permutation"]))
        if primitive in (lax.reshape_p, lax.squeeze_p):
            return Step("reshape", source)
        if primitive is lax.dynamic_slice_p:
            index, known = equation.invars[1], all(isinstance(n, int) for n in source.shape)
            return Step("slice", source) if known and index.aval.dtype == "int32" else None
        one_source = primitive is sum_rows_p and equation.invars[1].aval.shape[1] == 1
        if primitive is pick_rows_p or (one_source and len(source.shape) == 2):
            return Step("rows", source)
        return None

    def shape(self, value: Value) -> tuple[Any, ...]:
        return value.shape


def _value(program: Program, atom: Any) -> Value:
    return Value(program, atom, atom.aval.shape)


def origins_of(program: Program, equation: Any, request: Request) -> tuple[Origin, ...]:
    """Returns what the operands of a product are made of, as in `decide`.

    Args:
      program: that the equation is part of.
      equation: of one of `define.PRODUCTS`.
      request: what it asks for.
    """
    shapes = (request.lhs_shape, *[request.rhs_shape] * request.num_b)
    return tuple(
        source_of(Value(program, atom, shape), JaxprValues()).origin
        for atom, shape in zip(equation.invars, shapes, strict=False)
    )
