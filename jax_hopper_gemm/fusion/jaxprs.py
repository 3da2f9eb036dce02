"""Transformations of jaxprs: the functions that fused primitives carry."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.api_util import debug_info
from jax.core import AbstractValue
from jax.extend import core
from jax.extend.core import DropVar, Literal, Var, jaxpr_as_fun, jaxprs_in_params
from jax.extend.linear_util import wrap_init
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from .memo import memoised, structure

ClosedJaxpr: TypeAlias = Any  # that of `jax.extend.core`, which JAX 0.12 does not type

# Calls that mean no more than their jaxpr, and the parameter that holds it.
INLINED = {"jit": "jaxpr", "closed_call": "call_jaxpr"}  # JAX 0.12 has the former alone
CALLS = INLINED | {"custom_jvp_call": "call_jaxpr"}


def varying_together(*arrays: Any) -> list[jax.Array]:
    """Returns the arrays, each varying over every mesh axis that one of them varies over."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    missing = [frozenset().union(*varying) - own for own in varying]
    return [
        lax.pcast(x, tuple(axes), to="varying") if axes else x
        for x, axes in zip(arrays, missing, strict=True)
    ]


def traced(function: Callable[..., Any], *avals: Any, lower: bool = False) -> ClosedJaxpr:
    """Returns the jaxpr of a function of arrays or abstract values.

    As `jax.make_jaxpr`, which takes 0.2 ms for a `jax.jit` of each function. With `lower` it has
    none of the equations that JAX replaces before it lowers a program, as those of `searchsorted`.
    """
    types = [x if isinstance(x, AbstractValue) else jax.typeof(x) for x in avals]
    about = debug_info("traced", function, avals, {})
    flat = wrap_init(lambda *args: jax.tree.leaves(function(*args)), debug_info=about)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(flat, types, lower=lower)
    return core.ClosedJaxpr(jaxpr, consts)  # pyright: ignore[reportPrivateImportUsage]


def renamed(atoms: Iterable[Any], names: dict[Any, Any]) -> list[Any]:
    """Returns atoms; in the place of variables that have another name that one."""
    return [x if isinstance(x, Literal) else names.get(x, x) for x in atoms]


def spliced(equation: Any, closed: ClosedJaxpr, source: bool = True) -> list[Any]:
    """Returns the equations of a jaxpr without constants, to stand in the place of an equation.

    Their inner variables are new: one jaxpr may stand in many places. With `source` they are said
    to come from the line that the equation comes from.
    """
    jaxpr = closed.jaxpr
    assert not jaxpr.constvars
    names = dict(zip(jaxpr.invars, equation.invars, strict=True))
    names |= {x: Var(x.aval) for step in jaxpr.eqns for x in step.outvars}
    pairs = zip(jaxpr.outvars, equation.outvars, strict=True)
    names |= {x: out for x, out in pairs if not isinstance(out, DropVar)}

    def source_of(step: Any) -> Any:
        outer, own = equation.source_info, step.source_info
        return outer if source else own.replace(name_stack=outer.name_stack + own.name_stack)

    return [
        step.replace(
            invars=renamed(step.invars, names),
            outvars=renamed(step.outvars, names),
            source_info=source_of(step),
        )
        for step in jaxpr.eqns
    ]


def without_lines(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a function whose equations have no lines of source, to be lowered in many places."""
    equations = [
        x.replace(source_info=type(x.source_info)(None, x.source_info.name_stack))
        for x in closed.jaxpr.eqns
    ]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=equations))


@memoised
def lowered(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a function that computes the same, `traced` with `lower`."""
    return traced(jaxpr_as_fun(closed), *closed.in_avals, lower=True)


@memoised
def traced_once(function: Callable[..., Any], *avals: Any, **params: Any) -> ClosedJaxpr:
    """Returns the jaxpr of a function of arrays and parameters: one for equal arguments."""
    return traced(partial(function, **params), *avals)


def in_place_of(equation: Any, function: Callable[..., Any], **params: Any) -> list[Any]:
    """Returns the equations of a function of an equation's operands, to stand in its place."""
    with equation.ctx.manager:  # of its mesh
        closed = traced_once(function, *(x.aval for x in equation.invars), **params)
    return spliced(equation, closed)


def abstract(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the abstract values of a function's outputs, in their structure.

    As `jax.eval_shape`, whose structs lose, inside `jax.shard_map` over some mesh axes, the mesh.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)


@memoised
def pruned(
    closed: ClosedJaxpr, outputs: Sequence[bool], kept: Sequence[bool] | None = None
) -> tuple[ClosedJaxpr, list[bool]]:
    """Returns the part that computes some outputs, and for each input whether it has it.

    That is the function itself if it computes nothing else. Inputs that are `kept` stay though
    nothing reads them; None: none stays.
    """
    kept = list(kept or [False] * len(closed.in_avals))
    jaxpr, used = pe.dce_jaxpr(closed.jaxpr, list(outputs), kept)
    before = closed.jaxpr.eqns
    same = len(jaxpr.eqns) == len(before) and all(map(operator.is_, jaxpr.eqns, before))
    whole = same and all(outputs) and all(used)
    return closed if whole else closed.replace(jaxpr=jaxpr), used


def mapped(
    closed: ClosedJaxpr, axes: Sequence[int | None], axis_data: Any, args: Sequence[Any]
) -> ClosedJaxpr:
    """Returns the jaxpr of `jax.vmap` of a function; outputs are mapped along their first axis.

    Args:
      axis_data: the size of the mapped axis, and its name, over which the function may reduce.
      args: arrays or abstract values of the mapped function, of whose `axes` not all are None.
    """
    named: Any = {"axis_size": axis_data.size, "axis_name": axis_data.name}
    function = jax.vmap(jaxpr_as_fun(closed), tuple(axes), 0, **named)
    return traced(function, *args)


@memoised
def transposed(
    closed: ClosedJaxpr, residuals: int, cotangents_of: Sequence[int], wanted: Sequence[int]
) -> tuple[ClosedJaxpr, list[bool]]:
    """Returns the transpose of a function that is linear in the inputs after its `residuals`.

    Its inputs are the residuals that it needs, which comes second, then cotangents of some outputs;
    its outputs cotangents of the `wanted` inputs, counted from the first linear one.
    """
    avals: Any = closed.in_avals
    places = [residuals + i for i in wanted]

    def transpose(*args: Any) -> Any:
        zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in avals[residuals:]]
        function = outputs_of(closed, cotangents_of)
        of = at(places, function, [*args[:residuals], *zeros])
        return jax.linear_transpose(of, *(avals[i] for i in places))(list(args[residuals:]))

    whole = traced(transpose, *avals[:residuals], *(closed.out_avals[i] for i in cotangents_of))
    whole = _inlined(whole)
    kept = [False] * residuals + [True] * len(cotangents_of)
    transpose_jaxpr, used = pruned(whole, [True] * len(wanted), kept)
    return transpose_jaxpr, used[:residuals]


def outputs_of(closed: ClosedJaxpr, numbers: Sequence[int]) -> Callable[..., list[Any]]:
    """Returns the function that gives these outputs alone."""

    def function(*args: Any) -> list[Any]:
        outputs = jaxpr_as_fun(closed)(*args)
        return [outputs[i] for i in numbers]

    return function


@memoised
def as_differentiated(closed: ClosedJaxpr, wrt: Sequence[int]) -> ClosedJaxpr:
    """Returns the function whose results a derivative by the inputs `wrt` goes on with.

    That is the function itself, but where the rule of a `jax.custom_jvp` or `jax.custom_vjp`
    computes the result in another way, whose derivatives may be others.
    """
    if not _has_rules(closed.jaxpr):
        return closed

    def results(*args: Any) -> list[Any]:
        moving = [args[i] for i in wrt]
        return jax.jvp(at(wrt, jaxpr_as_fun(closed), args), moving, moving)[0]

    after = _inlined(traced(results, *closed.in_avals))
    after, _ = pruned(after, [True] * len(closed.out_avals), [True] * len(closed.in_avals))
    written = structure(after)
    return closed if written is not None and written == structure(_inlined(closed)) else after


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    return traced(lambda *args: evaluated(closed, args), *closed.in_avals)


def _has_rules(jaxpr: Any) -> bool:
    """Whether some equation has a derivative of the user's."""
    return any(
        equation.primitive.name.startswith("custom_")
        or any(map(_has_rules, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


@memoised
def with_accumulator(closed: ClosedJaxpr, index: int, dtype: Any) -> ClosedJaxpr:
    """Returns the function with an input replaced by a product's accumulator, which comes first.

    If the function begins by widening that input to `dtype`, nothing is rounded.
    """
    aval: Any = closed.in_avals[index]

    def function(accumulator: jax.Array, *others: jax.Array) -> list[Any]:
        inputs, rounded = list(others), accumulator.astype(aval.dtype)
        inputs.insert(index, rounded)
        return evaluated(closed, inputs, {id(rounded): (rounded, accumulator)})

    others = [a for i, a in enumerate(closed.in_avals) if i != index]
    whole = traced(function, aval.update(dtype=np.dtype(dtype)), *others)
    return pruned(whole, [True] * len(whole.out_avals), [True] * len(whole.in_avals))[0]


def evaluated(
    closed: ClosedJaxpr, args: Sequence[Any], origins: dict[int, tuple[Any, Any]] | None = None
) -> list[Any]:
    """Returns the outputs of a function, with conversions that undo each other left out.

    `origins` has pairs of an array and the one that it is a conversion of, by `id` of the former;
    it grows.
    """
    jaxpr, origins = closed.jaxpr, {} if origins is None else origins
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*closed.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [read(atom) for atom in equation.invars]
        origin = None
        if convert := name == "convert_element_type":
            _, origin = origins.get(id(inputs[0]), (None, None))
        if origin is not None and jax.typeof(origin) == equation.outvars[0].aval:
            outputs = [origin]
        elif name in INLINED:
            outputs = evaluated(equation.params[INLINED[name]], inputs, origins)
        else:
            with equation.ctx.manager:
                params = equation.primitive.get_bind_params(equation.params)
                outputs = equation.primitive.bind(*inputs, **params)
            if not equation.primitive.multiple_results:
                outputs = [outputs]
            if convert and _widens(inputs[0], outputs[0].dtype):
                origins[id(outputs[0])] = (outputs[0], inputs[0])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _widens(array: Any, new: Any) -> bool:
    """Whether a conversion to `new`, of a float to another one, loses nothing."""
    old = jax.typeof(array).dtype
    if old == new or not all(jnp.issubdtype(x, jnp.floating) for x in (old, new)):
        return False
    few, many = jnp.finfo(old), jnp.finfo(new)
    fits = few.minexp >= many.minexp and few.maxexp <= many.maxexp
    return bool(fits and few.nmant <= many.nmant)


def at(places: Sequence[int], function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Returns `function` of the inputs at these places alone, the others as they are."""

    def of(*moving: Any) -> list[Any]:
        arguments = list(inputs)
        for i, x in zip(places, moving, strict=True):
            arguments[i] = x
        return list(function(*arguments))

    return of


def transpose_by(function: Callable[..., Any], cotangents: Any, *args: Any, **params: Any) -> Any:
    """A transpose rule: that of a JAX function which is linear in the undefined arguments."""
    linear = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    of = at(linear, partial(function, **params), args)
    transpose = jax.linear_transpose(of, *(args[i].aval for i in linear))
    results = transpose([ad.instantiate_zeros(ct) for ct in cotangents])
    by_index = dict(zip(linear, results, strict=True))
    return [by_index.get(i) for i in range(len(args))]


def jvp_by(function: Callable[..., Any], primals: Any, tangents: Any, **params: Any) -> Any:
    """A derivative rule: that of a JAX function."""
    moving = [i for i, x in enumerate(tangents) if type(x) is not ad.Zero]
    of = at(moving, partial(function, **params), primals)
    return jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])


def is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
