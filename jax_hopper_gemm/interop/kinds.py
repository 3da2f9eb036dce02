"""What an equation is to a kernel: a product, elementwise, a layout, a reduction, or another."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any
from typing import Literal as OneOf

from jax import numpy as jnp

from ..fusion.jaxprs import CALLS
from ..fusion.op_table import covered
from ..gemm.dtypes import EPILOGUE, QUANTIZED, RESULTS, name_of, names
from ..primitives.dot import hopper_dot_p
from ..primitives.ragged_dot import hopper_ragged_dot_p

Kind = OneOf["product", "elementwise", "layout", "reduction", "other"]
Along = OneOf["rows", "columns"]  # what a reduction takes together

LAYOUTS = ("broadcast_in_dim", "reshape", "squeeze")  # of what meets a product
# Operations that XLA computes together with what their operands come from.
FUSED_BY_XLA = {
    "argmax", "argmin", "bitcast_convert_type", "broadcast_in_dim", "concatenate",
    "convert_element_type", "dynamic_slice", "gather", "pad", "reduce_and", "reduce_max",
    "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reshape", "rev", "slice", "split",
    "squeeze", "transpose",
}  # fmt: skip
PRODUCTS = (hopper_dot_p, hopper_ragged_dot_p)
HELD = frozenset(map(jnp.dtype, EPILOGUE))  # with which kernels compute
CONVERTED = HELD | frozenset(map(jnp.dtype, QUANTIZED))
SUMS = names("sum")  # integers that products are, and nothing else in a kernel


def kind_of(equation: Any) -> Kind:
    name = equation.primitive.name
    if getattr(equation.ctx, "compute_type", None):  # `compute_on` says where it runs
        return "other"
    if equation.primitive in PRODUCTS:
        return "product" if name_of(equation.outvars[0].aval.dtype) in RESULTS + SUMS else "other"
    if equation.effects or len(equation.outvars) != 1:
        return "other"
    avals = [x.aval for x in (*equation.invars, *equation.outvars)]
    held = CONVERTED if name == "convert_element_type" else HELD
    if any(getattr(x, "dtype", None) not in held for x in avals) or _changes_meshes(avals):
        return "other"
    if name in LAYOUTS or (name == "transpose" and moves_units_alone(equation)):
        return "layout" if len(equation.invars) == 1 else "other"
    if name in ("reduce_sum", "reduce_max"):
        return "reduction" if along_of(equation) else "other"
    return "elementwise" if _is_elementwise(equation) else "other"


def along_of(equation: Any) -> Along | None:
    """Returns what a reduction of matrices takes together, if a kernel may do so."""
    (x,), axes = equation.invars, [*equation.params["axes"]]
    if x.aval.ndim < 2:
        return None
    *rows, columns = range(x.aval.ndim)
    if axes == [columns]:
        return "columns"
    return "rows" if axes == rows and equation.primitive.name == "reduce_sum" else None


def _changes_meshes(avals: Sequence[Any]) -> bool:
    """Whether an equation of these arrays is more than one for each device."""
    meshes = {x.sharding.mesh for x in avals if not x.sharding.mesh.empty}
    if len(meshes) != 1:  # More: it leads from Auto mesh axes into Explicit ones, or back.
        return bool(meshes)
    # It adds up over devices, or leaves that open, where each would round.
    return len({(x.sharding.spec.unreduced, x.sharding.spec.reduced) for x in avals}) > 1


def _is_elementwise(equation: Any) -> bool:
    """Whether each element of the results depends on those of the inputs at the same place."""
    if (parameter := CALLS.get(equation.primitive.name)) is None:
        return covered(equation.primitive.name)
    if not equation.outvars:  # what was left of it when a derivative needed none of its results
        return not equation.effects
    closed, shape = equation.params[parameter], equation.outvars[0].aval.shape
    moved = (e for e in closed.jaxpr.eqns if e.primitive.name in LAYOUTS)
    return (
        _is_open(closed)
        and all(x.aval.shape in ((), shape) for x in equation.invars)
        and all(  # what may become part of a region, or is of scalars
            kind_of(e) in ("elementwise", "layout")
            or (e.primitive.name == "convert_element_type" and not e.invars[0].aval.ndim)
            for e in closed.jaxpr.eqns
        )
        and not any(x.aval.ndim for e in moved for x in e.invars)
    )


def is_inlined(closed: Any) -> bool:
    """Whether a jaxpr has equations alone that a kernel, or XLA, computes with those around it.

    NOTE: such calls may not hide from lowering what an operand is made of, a slice or a transpose:
    `explain` inlines them in functions that are lowered as they are.
    """
    return _is_open(closed) and all(
        equation.primitive.name in (*LAYOUTS, "gather", "iota")
        or (equation.primitive.name == "transpose" and moves_units_alone(equation))
        or _is_elementwise(equation)
        for equation in closed.jaxpr.eqns
    )


def _is_open(closed: Any) -> bool:
    """Whether nothing but the operands enters a jaxpr."""
    return not (getattr(closed, "consts", ()) or closed.jaxpr.constvars)


def meets(x: Any, equation: Any) -> bool:
    """Whether an input of an elementwise equation has an element for each one of the result."""
    out = equation.outvars[0]
    return x.aval.shape == out.aval.shape or _without_units(x) == _without_units(out)


def _without_units(x: Any) -> list[Any]:
    return [extent for extent in x.aval.shape if extent != 1]


def nbytes(variable: Any) -> int:
    return prod(variable.aval.shape) * variable.aval.dtype.itemsize


def moves_units_alone(equation: Any) -> bool:
    """Whether a layout leaves all axes of an extent over 1 as they are, one after the other."""
    (x,), (out,) = equation.invars, equation.outvars
    if equation.primitive.name != "transpose":
        return _without_units(x) == _without_units(out)
    moved = [axis for axis in equation.params["permutation"] if x.aval.shape[axis] != 1]
    return moved == sorted(moved)
