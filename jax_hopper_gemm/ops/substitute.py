"""Substitution of our product for the `dot_general` in a JAX function's trace.

`jnp.matmul` and `jnp.einsum` define the meaning of their arguments: promotion, broadcasting, weak
types, sharding, precision. Replacing the product in their trace keeps all of these rules, in every
version of JAX, without writing them down again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any

import jax
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Literal

from ..fusion.memo import memoised
from ..gemm.product import Options, Product
from ..gemm.recipes import ByRecipe
from ..gemm.subscripts import Subscripts
from ..lowering.devices import padded_partitions, permuted_sharding, with_partitions
from ..primitives.dot import hopper_dot_p
from .contexts import in_contexts


def with_hopper_dot(
    function: Callable[..., jax.Array], options: Options, *arrays: Any
) -> jax.Array:
    """Returns `function(*arrays)` on our products; a transpose after one becomes part of it.

    Of the `options`, precision and dtype are those that the function gives each product.
    """
    closed = jax.make_jaxpr(function)(*arrays)
    jaxpr = closed.jaxpr.replace(eqns=hopper_equations(closed.jaxpr, options))
    (result,) = eval_jaxpr(jaxpr, closed.consts, *arrays)
    return result


def hopper_equations(
    jaxpr: Any,
    options: Options,
    chosen: Callable[[Any, Sequence[Any]], bool] = lambda equation, transposes: True,
    recipe_of: Callable[[Any], ByRecipe | None] | None = None,
) -> list[Any]:
    """Returns the equations of a jaxpr with each `dot_general` replaced by a `hopper_dot`.

    It is where `chosen` says so of a product and its transposes. Those that alone use it become
    part of it, unless a batch axis then comes last: no kernel writes such a result. The recipe is
    that of the options, or what `recipe_of` says of each product.
    """
    transposes = _transposes_of_products(jaxpr, chosen)
    absorbed = {id(transpose) for steps in transposes.values() for transpose in steps}

    def options_of(equation: Any) -> Options:
        return replace(options, recipe=recipe_of(equation)) if recipe_of else options

    return [
        as_hopper_dot(equation, options_of(equation), transposes[equation.outvars[0]])
        if equation.primitive is lax.dot_general_p and equation.outvars[0] in transposes
        else equation
        for equation in jaxpr.eqns
        if id(equation) not in absorbed
    ]


def as_hopper_dot(equation: Any, options: Options, transposes: Sequence[Any] = ()) -> Any:
    """Returns a `dot_general`, and the transposes after it, as a `hopper_dot`.

    It takes implementation, dtype of cotangents and recipe from the `options`.
    """
    permutations = tuple(transpose.params["permutation"] for transpose in transposes)
    ranks = tuple(atom.aval.ndim for atom in equation.invars)
    params = tuple(equation.params.items())
    product = _hopper_product(params, ranks, permutations, in_contexts(options))
    outvars = [equation, *transposes][-1].outvars
    return equation.replace(primitive=hopper_dot_p, params={"product": product}, outvars=outvars)


@memoised
def _hopper_product(params: Any, ranks: Any, permutations: Any, options: Options) -> Product:
    """Returns the product of a `dot_general` with these parameters, and of transposes after it."""
    named = dict(params)
    subscripts = Subscripts.of_dot_general(named["dimension_numbers"], *ranks)
    of_dot = {name: named[name] for name in ("precision", "preferred_element_type")}
    options = replace(options, save_preactivation=True, **of_dot)
    return reduce(_permuted, permutations, Product(subscripts, options, named["out_sharding"]))


def _permuted(product: Product, permutation: tuple[int, ...]) -> Product:
    """Returns a product with a transpose after it."""
    sharding = permuted_sharding(product.out_sharding, permutation)
    subscripts = product.subscripts.permuted(permutation)
    return replace(product, subscripts=subscripts, out_sharding=sharding)


def final_product(
    function: Callable[..., jax.Array], options: Options, lhs: Any, rhs: Any
) -> tuple[Any, Any, Product] | None:
    """Returns two operands and their product, the whole result of `function(lhs, rhs)`, or None.

    Axes of extent 1 that the function adds to the result are added to the left operand. Of the
    `options`, the precision is that which the function gives the product.
    """
    closed = jax.make_jaxpr(function)(lhs, rhs)
    tail = _tail(closed.jaxpr)
    if tail is None:
        return None
    dot, *steps = tail
    before = [x for x in closed.jaxpr.eqns if not any(x is other for other in tail)]
    operands = closed.jaxpr.replace(eqns=before, outvars=dot.invars)
    lhs, rhs = eval_jaxpr(operands, closed.consts, lhs, rhs)
    params = dot.params
    subscripts = Subscripts.of_dot_general(params["dimension_numbers"], lhs.ndim, rhs.ndim)
    options = replace(options, precision=params["precision"])
    product = Product(subscripts, options, params["out_sharding"])
    for step in steps:
        if step.primitive is lax.transpose_p:
            product = _permuted(product, step.params["permutation"])
        else:
            ndim, kept = len(step.params["shape"]), step.params["broadcast_dimensions"]
            product = _with_unit_axes(product, ndim, kept)
            lhs = lax.expand_dims(lhs, range(ndim - len(kept)))
    return lhs, rhs, product


def _transposes_of_products(
    jaxpr: Any, chosen: Callable[[Any, Sequence[Any]], bool]
) -> dict[Any, list[Any]]:
    """Returns, by the variable of a product, the transposes that alone use it, one the other."""
    uses = _uses(jaxpr)
    transposes = {
        x: equation
        for equation in jaxpr.eqns
        if equation.primitive is lax.transpose_p
        for x in equation.invars
        if not isinstance(x, Literal) and uses[x] == 1
    }
    chains: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        if equation.primitive is lax.dot_general_p:
            (variable,) = equation.outvars
            steps, order = [], range(variable.aval.ndim)
            while (transpose := transposes.get(variable)) is not None:
                order = [order[axis] for axis in transpose.params["permutation"]]
                if _ends_with_batch(equation, order):
                    break
                steps.append(transpose)
                (variable,) = transpose.outvars
            if chosen(equation, steps):
                chains[equation.outvars[0]] = steps
    return chains


def _ends_with_batch(product: Any, order: Sequence[int]) -> bool:
    """Whether a batch axis of a product comes last in an order of its axes, but for unit axes."""
    _, (batch, _) = product.params["dimension_numbers"]
    shape = product.outvars[0].aval.shape
    return [axis < len(batch) for axis in order if shape[axis] != 1][-1:] == [True]


def _uses(jaxpr: Any) -> Counter[Any]:
    atoms: Iterable[Any] = chain(*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars)
    return Counter(atom for atom in atoms if not isinstance(atom, Literal))


def _tail(jaxpr: Any) -> list[Any] | None:
    """Returns the equations from the product to the result, if they only rearrange its axes."""
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    uses = _uses(jaxpr)
    tail: list[Any] = []
    (variable,) = jaxpr.outvars
    while (equation := makers.get(variable)) is not None and uses[variable] == 1:
        tail.insert(0, equation)
        if equation.primitive is lax.dot_general_p:
            return tail
        if equation.primitive is not lax.transpose_p and not _adds_unit_axes(equation):
            return None
        variable = equation.invars[0]
    return None


def _adds_unit_axes(equation: Any) -> bool:
    if equation.primitive is not lax.broadcast_in_dim_p or len(equation.invars) != 1:
        return False
    shape, kept = equation.params["shape"], equation.params["broadcast_dimensions"]
    same = all(
        shape[axis] is extent or shape[axis] == extent
        for axis, extent in zip(kept, equation.invars[0].aval.shape, strict=True)
    )
    return same and all(shape[axis] == 1 for axis in range(len(shape)) if axis not in kept)


def _with_unit_axes(product: Product, ndim: int, kept: tuple[int, ...]) -> Product:
    """Returns the product whose result has `ndim` axes, all but the `kept` of extent 1.

    The others are the left operand's first.
    """
    subscripts, fresh = product.subscripts, product.subscripts.fresh_letters()
    added = {axis: next(fresh) for axis in range(ndim) if axis not in kept}
    letters = added | dict(zip(kept, subscripts.out, strict=True))
    sharding = product.out_sharding
    if sharding is not None:
        partitions = dict(zip(kept, padded_partitions(sharding, len(kept)), strict=True))
        sharding = with_partitions(sharding, tuple(map(partitions.get, range(ndim))))
    out = "".join(letters[axis] for axis in range(ndim))
    subscripts = Subscripts("".join(added.values()) + subscripts.lhs, subscripts.rhs, out)
    return replace(product, subscripts=subscripts, out_sharding=sharding)
