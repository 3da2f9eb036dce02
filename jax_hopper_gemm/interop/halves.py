"""Gates whose weights are the two halves of one array, which kernels read.

A program cuts the array, or the product by it, as in `gate, up = jnp.split(x @ weights, 2, -1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax import lax
from jax.extend.core import Var

from ..dispatch import Device
from ..fusion.jaxprs import CALLS, renamed, spliced, traced_once
from ..fusion.residuals import variables
from ..gemm.groups import is_varlen_k
from ..lowering.route import route
from ..primitives.define import request_of
from .kinds import PRODUCTS, kind_of


def of_one_array(launch: Any, makers: dict[Any, Any], device: Device) -> Any:
    """Returns a launch; of a gate of both halves of one array, in order, one that reads the array.

    XLA would copy the halves for a kernel.

    Args:
      launch: a `hopper_fused` equation.
      makers: by variable, the equation that makes it.
    """
    product, params = launch.params["product"], launch.params
    if params["num_b"] != 2 or product.options.recipe:
        return launch
    lhs, *halves = launch.invars[:3]
    first, second = (_half(x, makers) for x in halves)
    if first is None or second != (*first[:2], 1) or first[2]:
        return launch
    array, axis, _ = first
    of, letters = product.subscripts, product.subscripts.rhs
    letters = letters[:axis] + next(of.fresh_letters()) + letters[axis:]
    product = replace(product, subscripts=replace(of, rhs=letters))
    params, invars = {**params, "product": product, "num_b": 1}, [lhs, array, *launch.invars[3:]]
    whole = launch.replace(params=params, invars=invars)
    found = route(request_of(whole), device, kernel_only=True)
    return whole if found.path == "hopper" and not found.uncovered else launch


def _half(x: Any, makers: dict[Any, Any]) -> tuple[Any, int, int] | None:
    """Returns the array that a variable is a half of, along which axis of extent 2, and which.

    None where it is none.
    """
    squeeze: Any = makers.get(x)
    if squeeze is None or squeeze.primitive is not lax.squeeze_p:
        return None
    cut = makers.get(squeeze.invars[0])
    if cut is None or cut.primitive is not lax.slice_p:
        return None
    axis = _cut_axis(cut)
    if axis is None or tuple(squeeze.params["dimensions"]) != (axis,):
        return None
    return cut.invars[0], axis, cut.params["start_indices"][axis]


def with_halves(
    equations: Sequence[Any], results: Sequence[Any], may_be_a_gate: Callable[[Any], bool]
) -> tuple[list[Any], list[Any], dict[tuple[int, ...], Any]]:
    """Returns the equations and results with two products for each that the program cuts in two.

    Then, by the numbers of the two, the equation of the one that they stand for. Elementwise
    equations may come between a product and its cut, as those of a bias.

    Args:
      may_be_a_gate: of a product that is cut so; where it says no, the product stays whole.
    """
    axes = _axes_of_cuts(equations, results)
    cut = {x.outvars[0] for x in equations if _may_be_halved(x, axes) and may_be_a_gate(x)}
    if not cut:
        return list(equations), list(results), {}
    halving = _Halving(axes)
    wholes: dict[tuple[int, ...], Any] = {}
    for equation in map(halving.renamed, equations):
        if not cut.isdisjoint(equation.outvars):
            wholes[halving.add_products(equation)] = equation
        elif halving.halves.keys().isdisjoint(variables(equation.invars)):
            halving.equations.append(equation)
        elif equation.outvars[0] in axes:
            halving.add_elementwise(equation)
        else:
            halving.add_cut(equation)
    return halving.equations, renamed(results, halving.names), wholes


def _axes_of_cuts(equations: Sequence[Any], results: Sequence[Any]) -> dict[Any, int]:
    """Returns along which axis all that reads a variable cuts it, or what is made of it, in two."""
    axes: dict[Any, int | None] = dict.fromkeys(variables(results))  # None: read in another way
    for equation in reversed(equations):
        axis, shape = _cut_axis(equation), None
        if axis is None and len(equation.outvars) == 1:
            (out,) = equation.outvars
            if axes.get(out) is not None and _is_elementwise(equation):
                axis, shape = axes[out], out.aval.shape
        for x in variables(equation.invars):
            read = axis if shape in (None, x.aval.shape) else None
            if axes.setdefault(x, read) != read:
                axes[x] = None
    return {x: axis for x, axis in axes.items() if axis is not None}


def _cut_axis(equation: Any) -> int | None:
    """Returns along which axis an equation cuts its input into halves, or takes one of them."""
    name, params = equation.primitive.name, equation.params
    if name not in ("slice", "split"):
        return None
    shape, kept = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    axes = [axis for axis, extent in enumerate(shape) if extent != kept[axis]]
    if len(axes) != 1 or shape[axes[0]] != 2 * kept[axes[0]]:
        return None
    (axis,) = axes
    if name == "split":
        return axis if len(equation.outvars) == 2 else None
    whole = not params["strides"] or set(params["strides"]) == {1}
    return axis if whole and params["start_indices"][axis] in (0, kept[axis]) else None


def _is_elementwise(equation: Any) -> bool:
    """Whether an equation has halves that are the same of the halves of its inputs."""
    ndims = {x.aval.ndim for x in equation.invars}
    alike = ndims <= {0, equation.outvars[0].aval.ndim}
    return alike and equation.primitive.name not in CALLS and kind_of(equation) == "elementwise"


def _may_be_halved(equation: Any, axes: dict[Any, int]) -> bool:
    """Whether what is cut in two are columns of a product by weights."""
    if equation.primitive not in PRODUCTS or equation.outvars[0] not in axes:
        return False
    product, (out,) = equation.params["product"], equation.outvars
    letter = product.subscripts.out[axes[out]]
    return (
        letter in product.subscripts.rhs_free
        and not (product.options.recipe or product.batch)
        and not (product.groups and is_varlen_k(product.subscripts))
        and product.out_sharding is None
        and not out.aval.sharding.mesh.explicit_axes
    )


class _Halving:
    """Equations of halves in the place of others."""

    def __init__(self, axes: dict[Any, int]):
        self._axes = axes
        self.names: dict[Any, Any] = {}
        self._broadcasts: dict[Any, Any] = {}  # equations, by what they make
        self._parts: dict[Any, tuple[Any, Any]] = {}  # of others, by variable and axis
        self.equations: list[Any] = []  # the new ones
        # By variable that they do not compute, the two that they compute in its place.
        self.halves: dict[Any, tuple[Any, Any]] = {}

    def renamed(self, equation: Any) -> Any:
        if equation.primitive is lax.broadcast_in_dim_p:
            self._broadcasts[equation.outvars[0]] = equation
        inputs = renamed(equation.invars, self.names)
        return equation if inputs == equation.invars else equation.replace(invars=inputs)

    def add_products(self, equation: Any) -> tuple[int, int]:
        """Adds two products by halves of the weights; returns the numbers of their equations."""
        product, (out,) = equation.params["product"], equation.outvars
        axis, subscripts = self._axes[out], product.subscripts
        letter, pair = subscripts.out[axis], out.aval.shape[axis] == 2
        if pair:  # the halves have no such axis
            product = replace(product, subscripts=subscripts.without(letter))
        before = len(self.equations)
        self.halves[out] = self._add(
            equation, equation.invars, _products, primitive=equation.primitive,
            cut=subscripts.rhs.index(letter), added=axis if pair else None,
            **{**equation.params, "product": product},
        )  # fmt: skip
        new = enumerate(self.equations[before:], before)
        first, second = (number for number, x in new if x.primitive is equation.primitive)
        return first, second

    def add_elementwise(self, equation: Any) -> None:
        (out,) = equation.outvars
        pairs = [self._halves_of(x, equation) for x in equation.invars]
        extents = list(out.aval.shape)
        extents[self._axes[out]] //= 2
        first, second = (Var(out.aval.update(shape=tuple(extents))) for _ in range(2))
        self.halves[out] = first, second
        for inputs, half in zip(zip(*pairs, strict=True), self.halves[out], strict=True):
            self.equations.append(equation.replace(invars=[*inputs], outvars=[half]))

    def add_cut(self, equation: Any) -> None:
        """Lets what an equation cuts out of a variable be a half of it."""
        (x,), outs = equation.invars, equation.outvars
        if equation.primitive is lax.slice_p and any(equation.params["start_indices"]):
            self.names[outs[0]] = self.halves[x][1]
        else:
            self.names.update(zip(outs, self.halves[x], strict=False))

    def _halves_of(self, x: Any, equation: Any) -> tuple[Any, Any]:
        """Returns the halves of an input of an elementwise equation."""
        axis = self._axes[equation.outvars[0]]
        if x.aval.ndim == 0 or x.aval.shape[axis] == 1:
            return x, x
        if x in self.halves:
            return self.halves[x]
        if (x, axis) not in self._parts:
            if broadcast := self._broadcasts.get(x):
                params = {"axes": broadcast.params["broadcast_dimensions"], "shape": x.aval.shape}
                parts = self._add(equation, broadcast.invars, _broadcasts, cut=axis, **params)
            else:
                parts = self._add(equation, [x], _slices, cut=axis)
            self._parts[x, axis] = parts
        return self._parts[x, axis]

    def _add(
        self, equation: Any, inputs: Sequence[Any], function: Any, **params: Any
    ) -> tuple[Any, Any]:
        """Adds equations of a function, in the place of another's; returns its two results."""
        with equation.ctx.manager:  # of its mesh
            closed = traced_once(function, *(x.aval for x in inputs), **params)
        first, second = map(Var, closed.out_avals)
        new = equation.replace(invars=[*inputs], outvars=[first, second])
        self.equations += spliced(new, closed)
        return first, second


def _products(
    lhs: Any, rhs: Any, *sizes: Any, primitive: Any, cut: int, added: int | None, **params: Any
) -> list[Any]:
    """Two products by the halves of weights along an axis; the results may have one of extent 1."""
    extents = list(rhs.shape)
    if added is None:
        extents[cut : cut + 1] = 2, extents[cut] // 2
    planes = lax.reshape(rhs, extents)
    halves = [lax.index_in_dim(planes, i, cut, keepdims=False) for i in range(2)]
    products = [primitive.bind(lhs, half, *sizes, **params) for half in halves]
    return products if added is None else [lax.expand_dims(x, (added,)) for x in products]


def _slices(x: Any, *, cut: int) -> Sequence[Any]:
    return lax.split(x, [x.shape[cut] // 2] * 2, cut)


def _broadcasts(x: Any, *, cut: int, axes: Sequence[int], shape: Sequence[int]) -> list[Any]:
    extents = [extent // 2 if axis == cut else extent for axis, extent in enumerate(shape)]
    is_cut = cut in axes and x.shape[axes.index(cut)] > 1
    halves = _slices(x, cut=axes.index(cut)) if is_cut else [x, x]
    return [lax.broadcast_in_dim(half, extents, axes) for half in halves]
