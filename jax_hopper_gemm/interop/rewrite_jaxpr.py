"""Rewriting of jaxprs: JAX's products, in a program and its inner programs, become ours.

A product and its replacement have the same operands and the same result. So one equation replaces
another, and everything around it stays: variables, parameters of loops and calls, names, source
lines. Then `fuse_jaxpr` lets products take along equations around them, if it is asked to.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax import lax
from jax.api_util import debug_info
from jax.core import Tracer
from jax.extend import linear_util as lu
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import PartitionSpec

from ..fusion.jaxprs import CALLS, in_place_of
from ..gemm.dtypes import HALVES, multiply, results_of
from ..gemm.product import Options
from ..gemm.recipes import ByRecipe
from ..lowering.canonical import canonical
from ..ops.checks.wording import less
from ..ops.contexts import current_max_sms, is_batch_invariant
from ..ops.dense import Implementation
from ..ops.ragged import ragged_dot_general
from ..ops.ragged_run import left_to_lax
from ..ops.recipes import Recipe
from ..ops.substitute import as_hopper_dot, hopper_equations
from ..primitives.accelerated import (
    paused_collector,
    run_accelerated,
    with_equations_of_accelerated,
)
from ..primitives.define import request_of
from .converted import RAGGED, is_jaxs, with_converted_operands
from .fuse_jaxpr import fused
from .kinds import nbytes
from .scatters import without_scatters
from .weights import Marks, Weights

# Primitives whose jaxprs are ordinary programs. The jaxpr of any other primitive may be a kernel,
# or a pattern that a compiler matches by its operations.
ENTERED = {
    *CALLS, "cond", "custom_linear_solve", "custom_vjp_call", "custom_vmap_call", "eval_jaxpr",
    "remat2", "remat_opt", "scan", "shard_map", "while", "xla_metadata_call",
}  # fmt: skip

# Why a product is left to XLA that kernels could run.
ROWS_APART = "its rows or its K lie in several places, and XLA stores its result as it likes"

# The replacement of each program, so that shared programs stay shared, and JAX finds those that it
# has compiled. None stands for a program without products: a value must not keep its key alive.
_rewritten: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


class Rewriting(NamedTuple):
    """How a program is rewritten."""

    implementation: Implementation = None  # of the products
    fuse: bool = True  # whether they take along the equations around them
    recipe: Recipe | None = None  # of those that have no batch axes
    weights: Marks = ()  # which arguments of the program may be weights, to a recipe

    def within(self, found: Weights, equation: Any, parameter: str) -> Rewriting:
        """Returns how an inner program is rewritten, a parameter of an equation."""
        marks = found.into(equation, parameter) if self.recipe else ()
        return self._replace(weights=marks if any(marks) else ())


def with_our_products(program: Any, rewriting: Rewriting) -> Any:
    """Returns a jaxpr, open or closed, with our products; the jaxpr itself if it has none."""
    by_options = _rewritten.setdefault(program, {})
    options = rewriting, current_max_sms(), is_batch_invariant()
    if options not in by_options:
        replacement = rewritten(program, rewriting)
        by_options[options] = None if replacement is program else replacement
    replacement = by_options[options]
    return program if replacement is None else replacement


def run_with_our_products(
    function: Callable[..., Any], args: Any, kwargs: Any, rewriting: Rewriting
) -> Any:
    """Returns `function(*args, **kwargs)`, computed with our products.

    Arrays go through the program; other arguments and results are passed on unchanged.
    """
    traces = any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
    with paused_collector() if traces else nullcontext():
        program, arrays, result = traced_call(function, args, kwargs)
        if rewriting.recipe:
            rewriting = rewriting._replace(weights=(True,) * len(arrays))
        # Not cached: nothing else holds this program, and it may contain tracers.
        outputs = run_accelerated(rewritten(program, rewriting), arrays)
    return result(outputs)


def traced_call(
    function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the closed jaxpr of a call, its inputs, and a function from outputs to the result.

    `args` and `kwargs` are trees of arrays, `jax.ShapeDtypeStruct`s and anything else, which is
    passed to the function unchanged.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    results: list[Any] = []

    def of(*arrays: Any) -> list[Any]:
        inputs = iter(arrays)
        filled = [next(inputs) if _is_array(x) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(tree, filled)
        outputs, out_tree = jax.tree.flatten(function(*args, **kwargs))
        is_output = [isinstance(x, jax.Array | Tracer) for x in outputs]  # tokens are no arrays
        kept = [None if y else x for x, y in zip(outputs, is_output, strict=True)]
        results[:] = [out_tree, kept, is_output]
        return [x for x, y in zip(outputs, is_output, strict=True) if y]

    arrays = [x for x in leaves if _is_array(x)]
    about: Any = debug_info("accelerate", function, args, kwargs)  # for JAX's errors
    names = tuple(name for name, x in zip(about.arg_names, leaves, strict=True) if _is_array(x))
    vars(of)["__fun_debug_info__"] = about._replace(arg_names=names)
    program = jax.make_jaxpr(of)(*arrays)

    def result(outputs: Sequence[Any]) -> Any:
        out_tree, kept, is_output = results
        remaining = iter(outputs)
        filled = [next(remaining) if y else x for x, y in zip(kept, is_output, strict=True)]
        return jax.tree.unflatten(out_tree, filled)

    return program, arrays, result


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def reason_left(
    equation: Any, transposes: Sequence[Any] = (), implementation: Implementation = None
) -> str | None:
    """Returns the reason to leave a product to JAX, or None if it becomes ours.

    The `transposes` follow it, and become part of it.
    """
    lhs, rhs = (atom.aval for atom in equation.invars[:2])
    if not multiply(lhs.dtype.name, rhs.dtype.name):
        names = " by ".join(dict.fromkeys((lhs.dtype.name, rhs.dtype.name)))
        return f"no kernel multiplies {names}"
    result = equation.outvars[0].aval.dtype.name
    if lhs.dtype.itemsize == 1 and result not in results_of(lhs.dtype.name):
        return f"no kernel multiplies {lhs.dtype.name} into {result}"
    if not (lhs.ndim and rhs.ndim):
        return "it multiplies by a number"  # as the gradient of `jnp.vdot` does
    if equation.primitive.name != RAGGED:
        return None if implementation else _rows_apart(equation, transposes)
    params = equation.params
    if params["group_offset"] is not None:
        return "it has a group_offset, which jax.lax does not implement"
    sizes, numbers = equation.invars[2].aval, params["ragged_dot_dimension_numbers"]
    with equation.ctx.manager:  # of its mesh
        return left_to_lax(lhs, rhs, sizes, _out_sharding(equation), numbers)


def _rows_apart(equation: Any, transposes: Sequence[Any]) -> str | None:
    """Returns why XLA should run a product whose rows, or K, lie in several places, or None.

    As of heads that share keys. XLA merges them, and stores what is computed from the result in the
    order that all its products read best. A kernel's result has one order: measured on an H200,
    XLA then computed the derivative of a softmax twice, in two orders, 9 % of a training step.
    A result that is smaller than an operand may have it: the larger array is not moved for it,
    which saved 5 %. So may one without batch axes, as by weights (heads, width, size), which XLA
    would transpose: measured on an H100, kernels take 0.36 to 1.01 of its time.
    """
    if any(less(nbytes(equation.outvars[0]), nbytes(x)) for x in equation.invars[:2]):
        return None
    request = request_of(as_hopper_dot(equation, Options(), transposes))
    if request.symbolic:
        return None
    gemm, subscripts = canonical(request), request.subscripts
    if gemm is None:
        apart = len(subscripts.contracted) > 1
    else:
        batch = prod(request.extents[x] for x in subscripts.batch)
        apart = bool(subscripts.batch) and gemm.problem.l != batch
    return ROWS_APART if apart else None


def _out_sharding(equation: Any) -> Any:
    """Returns the sharding that a ragged product asks for.

    JAX's own derivatives state one where no mesh axis is Explicit, too; it names none.
    """
    sharding = equation.params["out_sharding"]
    if sharding is None or sharding.mesh.explicit_axes:
        return sharding
    empty = PartitionSpec(*[None] * len(sharding.spec.partitions))
    return None if sharding.spec == empty else sharding


def rewritten(program: Any, rewriting: Rewriting) -> Any:
    """Returns the result of `with_our_products`, without caching it."""
    inner = getattr(program, "jaxpr", program)
    if inner is not program:  # a closed jaxpr, in versions of JAX that have both
        new_inner = rewritten(inner, rewriting)
        return program if new_inner is inner else program.replace(jaxpr=new_inner)

    reasons: dict[Any, str | None] = {}  # of products that are alike

    def chosen(equation: Any, transposes: Sequence[Any] = ()) -> bool:
        if equation.primitive is not lax.dot_general_p:
            return reason_left(equation, transposes, rewriting.implementation) is None
        avals = (x.aval for x in (*equation.invars, *equation.outvars))
        permutations = (x.params["permutation"] for x in transposes)
        alike = (*equation.params.items(), *avals, *permutations)
        if alike not in reasons:
            reasons[alike] = reason_left(equation, transposes, rewriting.implementation)
        return reasons[alike] is None

    made = (x.aval for equation in inner.eqns for x in equation.outvars)
    symbolic = any(type(n) is not int for x in made for n in getattr(x, "shape", ()))
    fuse = rewriting.fuse and not symbolic  # products of such extents no kernel runs
    original, inner = inner, with_converted_operands(with_equations_of_accelerated(inner))
    if fuse:
        inner = inner.replace(eqns=without_scatters(inner.eqns))
    weights = Weights(inner, rewriting.weights)
    recipe_of = partial(_recipe_of, recipe=rewriting.recipe, weights=weights)
    new: list[Any] = []
    for equation in hopper_equations(inner, Options(rewriting.implementation), chosen, recipe_of):
        if equation.primitive.name == RAGGED and chosen(equation):
            new += _ragged(equation, rewriting)
        elif equation.primitive.name in ENTERED:
            new.append(_entered(equation, rewriting, weights))
        else:
            new.append(equation)
    outvars = inner.outvars
    if fuse:
        new, outvars = fused(new, outvars)
    same = len(new) == len(original.eqns) and all(map(operator.is_, new, original.eqns))
    return program if same else inner.replace(eqns=new, outvars=outvars)


def _recipe_of(equation: Any, recipe: Recipe | None, weights: Weights) -> ByRecipe | None:
    """Returns by which recipe, and of which operands, a product is; None: by none.

    Products with batch axes, as of attention, have no weights, and stay as they are, as in
    DeepSeek-V3.
    """
    _, (batch, _) = equation.params["dimension_numbers"]
    if recipe is None or batch or not _of_halves(equation):
        return None
    left, right = weights.marks(equation.invars)
    if right:
        return ByRecipe(recipe)
    return ByRecipe(recipe, ("weights" if left else "activation", "activation"))


def _of_halves(equation: Any) -> bool:
    """Whether a product multiplies arrays of 16-bit floats."""
    return all(x.aval.dtype.name in HALVES for x in equation.invars[:2])


def _ragged(equation: Any, rewriting: Rewriting) -> list[Any]:
    """Returns the equations of our product that replace a ragged one of JAX."""
    names = "ragged_dot_dimension_numbers", "precision", "preferred_element_type"
    return in_place_of(
        equation, ragged_dot_general, **{name: equation.params[name] for name in names},
        out_sharding=_out_sharding(equation),
        recipe=rewriting.recipe if _of_halves(equation) else None,
        implementation=rewriting.implementation,
    )  # fmt: skip


def _entered(equation: Any, rewriting: Rewriting, weights: Weights) -> Any:
    """Returns an equation with our products in its inner programs."""
    before, params = equation.params, dict[str, Any]()

    def rewrite() -> None:
        for key, x in before.items():
            params[key] = _in_value(x, rewriting.within(weights, equation, key))

    # As JAX calls what `shard_map` maps: elsewhere its rules forget over which axes a value varies.
    if before.get("check_vma"):
        where = {"mesh": before["mesh"], "axis_names": before["newly_manual_axes"]}
        mapped = jax.shard_map(rewrite, in_specs=(), out_specs=None, **where)
        with equation.ctx.manager:
            jax.make_jaxpr(mapped)()
    else:
        rewrite()
    rewriting = rewriting._replace(weights=())
    same = all(params[key] is x for key, x in before.items())
    if same and not (_RULES.keys() & params.keys() and _multiplies(params)):
        return equation
    for name, change in _RULES.items():
        if name in params:
            params[name] = _changed(params[name], partial(change, rewriting))
    return equation.replace(params=params)


def _multiplies(params: dict[str, Any]) -> bool:
    """Returns whether the programs in an equation's parameters have any product of JAX's.

    It counts products that stay while their derivatives do not, such as those of quantized arrays.
    """
    return any(
        is_jaxs(e) or _multiplies(e.params)
        for jaxpr in jaxprs_in_params(params)
        for e in jaxpr.eqns
    )


def _changed(function: Any, change: Callable[..., Any]) -> Any:
    """Returns a function as `change` calls it, in the wrapper of JAX that rules are in."""
    if not isinstance(function, lu.WrappedFun):
        return partial(change, function)
    return lu.wrap_init(partial(change, function.call_wrapped), debug_info=function.debug_info)


def _traced(rewriting: Rewriting, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that returns a jaxpr and further values."""
    program, *extras = function(*args)
    return (with_our_products(program, rewriting), *extras)


# Parameters that JAX traces to programs later, for a derivative or a part of the results.
_RULES = {
    "jvp_jaxpr_fun": _traced,
    "fwd_jaxpr_thunk": _traced,
    "fun_jaxpr_thunk": _traced,
    "bwd": lambda rewriting, function, *args: run_with_our_products(function, args, {}, rewriting),
}


def _in_value(value: Any, rewriting: Rewriting) -> Any:
    """Returns an equation's parameter with our products in its programs."""
    if isinstance(value, Jaxpr) or isinstance(getattr(value, "jaxpr", None), Jaxpr):
        return with_our_products(value, rewriting)
    if not isinstance(value, tuple):
        return value
    parts = [_in_value(x, rewriting) for x in value]
    if all(x is y for x, y in zip(parts, value, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
