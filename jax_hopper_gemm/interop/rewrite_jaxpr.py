"""Replaces the products in a program of JAX, and in the programs within it, by ours.

A product of JAX and the one of ours in its place have the same operands and the same result, so an
equation is exchanged for another and everything around it stays as it is: variables, the
parameters of loops and calls, names, source lines.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax import lax
from jax.extend import linear_util as lu
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params

from ..fusion.jaxprs import traced
from ..gemm.dtypes import OPERANDS
from ..ops.dense import Implementation
from ..ops.ragged import ragged_dot_general
from ..ops.ragged_run import left_to_lax
from ..ops.sm_limit import current_max_sms
from ..ops.substitute import hopper_equations
from .checkpoint_policy import checkpoint_policy

RAGGED = "ragged_dot_general"

# Primitives whose jaxprs are programs like any other. The jaxpr of another one may be a kernel,
# or what a compiler looks for by its operations.
ENTERED = frozenset(
    {
        "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_linear_solve",
        "custom_vjp_call", "custom_vmap_call", "eval_jaxpr", "jit", "pjit", "remat", "remat2",
        "remat_opt", "scan", "shard_map", "while", "xla_metadata_call",
    }
)  # fmt: skip

# What each program became, so that a program which is shared stays shared, and one that JAX has
# compiled is found again. A program without products is its own answer, kept as None: a value
# must not keep its key alive.
Asked: TypeAlias = tuple[Implementation, int | None]  # with the limit of SMs
_rewritten: WeakKeyDictionary[Any, dict[Asked, Any]] = WeakKeyDictionary()


def with_our_products(program: Any, implementation: Implementation) -> Any:
    """Returns a jaxpr, open or closed, with its products ours; itself where it has none."""
    known = _rewritten.setdefault(program, {})
    asked = implementation, current_max_sms()
    if asked not in known:
        found = rewritten(program, implementation)
        known[asked] = None if found is program else found
    found = known[asked]
    return program if found is None else found


def run_with_our_products(
    function: Callable[..., Any], args: Any, kwargs: Any, implementation: Implementation
) -> Any:
    """Returns `function(*args, **kwargs)`, computed with our products.

    Arrays go through the program; every other argument, and every other result, is handed on.
    """
    program, arrays, result = traced_call(function, args, kwargs)
    # Not remembered: nothing else has this program, and it may hold tracers.
    return result(jaxpr_as_fun(rewritten(program, implementation))(*arrays))


def traced_call(
    function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the closed jaxpr of a call, its inputs, and what makes the result of its outputs.

    Args:
      args, kwargs: trees of arrays, `jax.ShapeDtypeStruct`s and anything else, which the function
        is given as it is.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    results: list[Any] = []

    def of(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        filled = [next(given) if _is_array(x) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(tree, filled)
        found, out_tree = jax.tree.flatten(function(*args, **kwargs))
        kept = [None if isinstance(x, jax.Array) else x for x in found]
        is_output = [isinstance(x, jax.Array) for x in found]
        results[:] = [out_tree, kept, is_output]
        return [x for x in found if isinstance(x, jax.Array)]

    arrays = [x for x in leaves if _is_array(x)]
    program = jax.make_jaxpr(of)(*arrays)

    def result(outputs: Sequence[Any]) -> Any:
        out_tree, kept, is_output = results
        found = iter(outputs)
        filled = [next(found) if y else x for x, y in zip(kept, is_output, strict=True)]
        return jax.tree.unflatten(out_tree, filled)

    return program, arrays, result


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def reason_left(equation: Any) -> str | None:
    """Returns why a product of JAX stays as it is; None where it becomes one of ours."""
    lhs, rhs = (atom.aval for atom in equation.invars[:2])
    if not (lhs.dtype == rhs.dtype and lhs.dtype.name in OPERANDS):
        names = " by ".join(dict.fromkeys((lhs.dtype.name, rhs.dtype.name)))
        return f"no kernel multiplies {names}"
    if equation.primitive.name != RAGGED:
        return None
    params = equation.params
    if params["group_offset"] is not None:
        return "it has a group_offset, which jax.lax does not implement"
    sizes, numbers = equation.invars[2].aval, params["ragged_dot_dimension_numbers"]
    return left_to_lax(lhs, rhs, sizes, params["out_sharding"], numbers)


def rewritten(program: Any, implementation: Implementation) -> Any:
    """Returns what `with_our_products` does, without remembering it."""
    inner = getattr(program, "jaxpr", program)
    if inner is not program:  # closed, where JAX tells these apart
        found = rewritten(inner, implementation)
        return program if found is inner else program.replace(jaxpr=found)

    def chosen(equation: Any) -> bool:
        return reason_left(equation) is None

    new: list[Any] = []
    for equation in hopper_equations(inner, implementation, chosen):
        if equation.primitive.name == RAGGED and chosen(equation):
            new += _ragged(equation, implementation)
        elif equation.primitive.name in ENTERED:
            new.append(_entered(equation, implementation))
        else:
            new.append(equation)
    same = len(new) == len(inner.eqns) and all(map(operator.is_, new, inner.eqns))
    return program if same else inner.replace(eqns=new)


def _ragged(equation: Any, implementation: Implementation) -> list[Any]:
    """Returns the equations of our product in place of a ragged one of JAX."""
    params = equation.params

    def product(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        return ragged_dot_general(
            lhs, rhs, sizes, params["ragged_dot_dimension_numbers"], params["precision"],
            params["preferred_element_type"], out_sharding=params["out_sharding"],
            implementation=implementation,
        )  # fmt: skip

    with equation.ctx.manager:
        closed = traced(product, *(atom.aval for atom in equation.invars))
    jaxpr = closed.jaxpr
    assert not jaxpr.constvars
    names = dict(zip(jaxpr.invars, equation.invars, strict=True))
    names |= dict(zip(jaxpr.outvars, equation.outvars, strict=True))

    def named(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    return [
        step.replace(
            invars=[named(x) for x in step.invars],
            outvars=[named(x) for x in step.outvars],
            source_info=equation.source_info,
        )
        for step in jaxpr.eqns
    ]


def _entered(equation: Any, implementation: Implementation) -> Any:
    """Returns an equation with the products ours in the programs that it holds."""
    params = {key: _in_value(x, implementation) for key, x in equation.params.items()}
    same = all(params[key] is x for key, x in equation.params.items())
    if same and not (_RULES.keys() & params.keys() and _multiplies(params)):
        return equation
    if params.get("policy") is not None:
        params["policy"] = checkpoint_policy(params["policy"])

    for name, change in _RULES.items():
        if name in params:
            params[name] = change(params[name], implementation)
    return equation.replace(params=params)


def _multiplies(params: dict[str, Any]) -> bool:
    """Returns whether the programs in the parameters of an equation have any product of JAX's.

    It may be one that stays as it is and whose derivatives do not, as of quantized arrays.
    """
    return any(
        e.primitive is lax.dot_general_p or e.primitive.name == RAGGED or _multiplies(e.params)
        for jaxpr in jaxprs_in_params(params)
        for e in jaxpr.eqns
    )


def _traced_rule(rule: Any, implementation: Implementation) -> Any:
    """Returns a rule of a function's derivative that gives a jaxpr and what belongs to it."""

    def changed(*zeros: Any) -> Any:
        program, *rest = rule.call_wrapped(*zeros)
        return (with_our_products(program, implementation), *rest)

    return lu.wrap_init(changed, debug_info=rule.debug_info)


def _traced_function(function: Any, implementation: Implementation) -> Any:
    def changed() -> Any:
        program, consts = function()
        return with_our_products(program, implementation), consts

    return changed


def _backward_rule(rule: Any, implementation: Implementation) -> Any:
    def changed(*args: Any) -> Any:
        return run_with_our_products(rule.call_wrapped, args, {}, implementation)

    return lu.wrap_init(changed, debug_info=rule.debug_info)


# Parameters that become programs later, when JAX needs a derivative or a part of the results.
_RULES = {
    "jvp_jaxpr_fun": _traced_rule,
    "fwd_jaxpr_thunk": _traced_rule,
    "fun_jaxpr_thunk": _traced_function,
    "bwd": _backward_rule,
}


def _in_value(value: Any, implementation: Implementation) -> Any:
    """Returns a parameter of an equation with the products ours in its programs."""
    if isinstance(value, Jaxpr) or isinstance(getattr(value, "jaxpr", None), Jaxpr):
        return with_our_products(value, implementation)
    if not isinstance(value, tuple):
        return value
    found = [_in_value(x, implementation) for x in value]
    if all(x is y for x, y in zip(found, value, strict=True)):
        return value
    return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
