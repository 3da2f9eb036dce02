"""Products of a jaxpr, and what made their operands, as lowering will find it in the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

from ..gemm.dtypes import converts
from ..lowering.forms import reads_in_order
from ..lowering.origins import ELEMENTWISE, Origin, Step, Widened, source_of
from ..lowering.register import EXPANDED
from ..lowering.request import Request
from ..primitives.define import PRODUCTS, apart_of, request_of
from ..primitives.dots import hopper_dots_p, one_by_one
from ..primitives.experimental import HopperPrimitive
from ..primitives.rows import pick_rows_p, sum_rows_p
from ..primitives.widen import hopper_widen_p


@dataclass(frozen=True)
class TracedProduct:
    """A product, and what surrounds it."""

    program: Program  # that it is part of
    equation: Any  # there; one of `PRODUCTS`
    following: tuple[str, ...] = ()  # names of the operations that follow it

    @cached_property
    def request(self) -> Request:
        """Of the operands as they are."""
        return request_of(self.equation)

    def origins(self) -> tuple[Origin, ...]:
        """Returns what the operands are made of, as in `decide`."""
        request = self.request
        shapes = (request.lhs_shape, *request.rhs_shapes)
        world, ordered = JaxprValues(), reads_in_order(request)
        return tuple(
            source_of(Value(self.program, atom, shape), world, ordered=ordered).origin
            for atom, shape in zip(self.equation.invars, shapes, strict=False)
        )

    def apart(self) -> TracedProduct | None:
        """Returns the product without its epilogue that lowering asks for where none runs it whole.

        One of two that are alike, for gate and up. None where XLA then computes all.
        """
        if (function := apart_of(self.equation)) is None:
            return None
        program = self.program.replaced(self.equation, function)
        equation = next(e for e in program.jaxpr.eqns if e.primitive in PRODUCTS)
        assert self.request.function
        return TracedProduct(program, equation, operations_of(self.request.function.jaxpr.eqns))


def by_recipe(program: Program, equation: Any) -> Program | None:
    """Returns what a product by a recipe, or a ring of them, is made of; None for others."""
    params, primitive = equation.params, equation.primitive
    if isinstance(primitive, HopperPrimitive) and "axis_name" in params:
        return program.replaced(equation, partial(primitive.reference, **params))
    if primitive not in EXPANDED or not params["product"].options.recipe:
        return None
    return program.replaced(equation, partial(EXPANDED[primitive], **params))


def as_by_xla(program: Program, equation: Any) -> Program:
    """Returns what a product that no kernel runs is lowered as: those of one array one by one."""
    primitive = equation.primitive
    reference = one_by_one if primitive is hopper_dots_p else primitive.reference
    inside = program.replaced(equation, partial(reference, **equation.params))
    return program.lower_as(inside)


# Operations that say where elements lie, which rows are live and what the dtype is, not what is
# computed.
SILENT = (
    "broadcast_in_dim", "convert_element_type", "copy", "live_rows", "reshape", "reshard",
    "rows_of_groups", "squeeze", "transpose",
)  # fmt: skip


def operations_of(equations: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names of what equations compute, each once, in order."""
    names: list[str] = []
    for equation in equations:
        inner = list(jaxprs_in_params(equation.params))
        for jaxpr in inner:
            names += operations_of(getattr(jaxpr, "jaxpr", jaxpr).eqns)
        if not inner and equation.primitive.name not in SILENT:
            names.append(equation.primitive.name)
    return tuple(dict.fromkeys(names))


# Equations that lowering emits nothing for.
IDENTITIES = frozenset({"copy", "name", "pvary"})

CALLS = frozenset({"custom_jvp_call", "jit"})  # of a function, by its own arguments

# The programs within a program that are lowered in place. Others become functions, whose
# arguments hide what made them: `jit`, `scan`, `cond`, `checkpoint` and `custom_jvp_call` are such.
# The order of axes alone is looked for through `CALLS`.
IN_PLACE = ("accelerated", "custom_vjp_call")


@dataclass(frozen=True)
class Value:
    """A variable of a program, or a reshape of it that a product makes."""

    program: Program
    atom: Any  # the variable
    shape: tuple[Any, ...]  # of the value


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
        self._in_place: dict[int, Program] = {}  # what is lowered for equations, by their identity

    def inner(self, equation: Any, jaxpr: Any) -> Program:
        """Returns a program within one of its equations."""
        in_place = equation.primitive.name in IN_PLACE
        return self.lower_as(Program(jaxpr, self, equation)) if in_place else Program(jaxpr)

    def replaced(self, equation: Any, function: Callable[..., Any]) -> Program:
        """Returns the program of a function of the operands that stands for an equation."""
        avals = [atom.aval for atom in equation.invars]
        with equation.ctx.manager:  # of its mesh
            mesh = jax.sharding.get_abstract_mesh()
            axes = [(axis, mesh.shape[axis]) for axis in mesh.manual_axes]
            return Program(jax.make_jaxpr(function, axis_env=axes)(*avals), self, equation)

    def lower_as(self, inside: Program) -> Program:
        """Says of a program that it is lowered for its equation; returns it."""
        return self._in_place.setdefault(id(inside.equation), inside)

    def made(self, atom: Any) -> tuple[Program, Any]:
        """Returns the equation that made a variable, with its program; None for an argument."""
        program: Program = self
        while not isinstance(atom, Literal):
            if atom in program._made:
                equation, index = program._made[atom]
                if equation.primitive.name in IN_PLACE:
                    program.inner(equation, next(jaxprs_in_params(equation.params)))
                if inside := program._in_place.get(id(equation)):
                    program, atom = inside, inside.jaxpr.outvars[index]
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
        if equation is None or not equation.invars:
            return None
        primitive, params = equation.primitive, equation.params
        source = _value(program, equation.invars[0])
        if primitive is hopper_widen_p:
            dtype = "int4" if params["packed"] else equation.invars[0].aval.dtype.name
            return Step("widen", source, widened=Widened(dtype, params["axis"], params["group"]))
        if primitive is lax.convert_element_type_p:
            narrow, wide = (x.aval.dtype.name for x in (equation.invars[0], equation.outvars[0]))
            widened = Widened(narrow)
            return Step("widen", source, widened=widened) if converts(wide, narrow) else None
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

    def element_sources(self, value: Value) -> list[Value]:
        if value.shape != value.atom.aval.shape:
            return []
        program, equation = value.program.made(value.atom)
        if equation is None:
            return []
        if equation.primitive.name in CALLS:
            inner = Program(next(jaxprs_in_params(equation.params)), program, equation)
            results = (_value(inner, x) for x in inner.jaxpr.outvars)
            return [x for x in results if x.atom.aval == value.atom.aval][:1]
        if equation.primitive.name not in ELEMENTWISE:
            return []
        atoms = equation.invars
        if equation.primitive is lax.select_n_p:  # the case of "true" first, as in MLIR
            atoms = atoms[:0:-1]
        alike = (_value(program, x) for x in atoms if x.aval.shape == value.shape)
        made = ((x, x.program.made(x.atom)[1]) for x in alike)
        return [x for x, by in made if by is None or by.primitive is not lax.broadcast_in_dim_p]

    def shape(self, value: Value) -> tuple[Any, ...]:
        return value.shape


def _value(program: Program, atom: Any) -> Value:
    return Value(program, atom, atom.aval.shape)
