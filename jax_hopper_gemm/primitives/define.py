"""Definition of a primitive in one call, and the registry of those that are products.

    double_p = define_primitive("double", lambda x: 2 * x, rules=Rules(linear_in=(0,)))

Primitives that are products have one static parameter `product`, a `gemm.product.Product`, and say
in `request_of` what they ask for. Reports know them by `PRODUCTS`; `jax.checkpoint`'s policies take
them for dots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, xla
from jax.interpreters import partial_eval as pe

from .. import sharding
from ..fusion.jaxprs import is_inexact, jvp_by, traced_once, transpose_by
from ..lowering.register import Lowering, register_lowering
from ..lowering.request import Request
from .experimental import HopperPrimitive
from .remat import remat_rule

Rule = Callable[..., Any]

# Equations, profiles and messages of XLA then name the user's lines in place of this package's.
source_info_util.register_exclusion(str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class Rules:
    """Rules of JAX's transformations; None: the primitive has none."""

    # Operands in each of which it is linear: a tangent takes the operand's place. Stands for `jvp`.
    linear_in: tuple[int, ...] = ()
    # `(primals, tangents, **params)`; "reference": tangents of the function that it stands for,
    # beside its own results.
    jvp: Rule | Literal["reference"] | None = None
    # `(cotangent, *operands, **params)`, of one result never a zero; of a bilinear primitive one by
    # each operand, as in `ad.defbilinear`; "reference": the function's.
    transpose: Rule | tuple[Rule, Rule] | Literal["reference"] | None = None
    batch: Rule | None = None  # `(axis_data, operands, axes, **params)`, where an operand is mapped
    # `(used, equation)`, where some results are: which operands are needed, and the parameters.
    dce: Rule | None = None


RequestOf = Callable[..., Request]  # (avals, out_avals, **params)
Apart = Callable[[dict[str, Any]], Rule | None]  # (params)


PRODUCTS: dict[Primitive, Apart | None] = {}


def define_primitive(
    name: str,
    reference: Rule,
    *,
    abstract: Rule | None = None,
    multiple_results: bool = False,
    rules: Rules | None = None,
    lowering: Lowering | None = None,
    request_of: RequestOf | None = None,
    apart: Apart | None = None,
) -> Primitive:
    """Returns a new primitive.

    Args:
      reference: the JAX function of operands and parameters that it stands for. With
        `multiple_results` it gives a list.
      abstract: gives abstract results from abstract operands; None: traces `reference`.
      lowering: where it is lowered to something else than `reference`; None: nowhere.
      request_of: of a product, which has a parameter `product`: what it asks for, from abstract
        operands, abstract results and its parameters.
      apart: of a product: gives from the parameters the JAX function of the operands that is
        lowered where no kernel is launched, if it has products of its own; else None.
    """
    rules = rules or Rules()
    primitive = HopperPrimitive(name, reference, rules.linear_in, request_of)
    primitive.multiple_results = multiple_results
    abstract = abstract or partial(_abstract_eval, reference, multiple_results)
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract)
    _register_rules(primitive, reference, rules)
    register_lowering(primitive, abstract, reference, lowering or Lowering(), sharding.applies)
    if request_of:
        PRODUCTS[primitive] = apart
        pe.partial_eval_jaxpr_custom_rules[primitive] = remat_rule
    return primitive


def _abstract_eval(reference: Rule, multiple_results: bool, *avals: Any, **params: Any) -> Any:
    outputs = traced_once(reference, *avals, **params).out_avals
    return list(outputs) if multiple_results else outputs[0]


def _register_rules(primitive: Primitive, reference: Rule, rules: Rules) -> None:
    if isinstance(rules.transpose, tuple):
        ad.defbilinear(primitive, *rules.transpose)
    elif rules.transpose == "reference":
        ad.primitive_transposes[primitive] = partial(transpose_by, reference)
    elif rules.transpose and primitive.multiple_results:
        ad.primitive_transposes[primitive] = rules.transpose
    elif rules.transpose:
        ad.primitive_transposes[primitive] = partial(_transposed, rules.transpose)
    if rules.linear_in:
        ad.primitive_jvps[primitive] = partial(_linear_jvp, primitive, rules.linear_in)
    elif rules.jvp == "reference":
        ad.primitive_jvps[primitive] = partial(_jvp_by_reference, primitive, reference)
    elif rules.jvp:
        ad.primitive_jvps[primitive] = rules.jvp
    if rules.batch:
        batching.fancy_primitive_batchers[primitive] = partial(_batched, primitive, rules.batch)
    if rules.dce:
        pe.dce_rules[primitive] = partial(_without_unused, rules.dce)


def _linear_jvp(
    primitive: Primitive, linear_in: Sequence[int], primals: Any, tangents: Any, **params: Any
) -> tuple[Any, Any]:
    result = primitive.bind(*primals, **params)
    total = ad.Zero(jax.typeof(result).to_tangent_aval())
    for i in linear_in if is_inexact(result) else ():
        if type(tangents[i]) is not ad.Zero:
            operands = *primals[:i], tangents[i], *primals[i + 1 :]
            total = ad.add_tangents(total, primitive.bind(*operands, **params))
    return result, total


def _jvp_by_reference(
    primitive: Primitive, reference: Rule, primals: Any, tangents: Any, **params: Any
) -> tuple[Any, Any]:
    _, moved = jvp_by(lambda *x: jax.tree.leaves(reference(*x, **params)), primals, tangents)
    result = primitive.bind(*primals, **params)
    return result, moved if primitive.multiple_results else moved[0]


def _transposed(rule: Rule, cotangent: Any, *operands: Any, **params: Any) -> Any:
    """Returns what the rule gives; JAX also asks where no cotangent comes in."""
    if type(cotangent) is not ad.Zero:
        return rule(cotangent, *operands, **params)
    return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]


def _without_unused(rule: Rule, used: list[bool], *args: Any) -> tuple[list[bool], Any]:
    """Drops results that nothing reads and operands that only they need."""
    equation = args[-1]  # before it, JAX 0.12 passes what matters for mutable references
    if not any(used):
        return [False] * len(equation.invars), None
    needed, params = rule(used, equation)
    return needed, equation.replace(
        invars=[x for x, need in zip(equation.invars, needed, strict=True) if need],
        outvars=[x for x, use in zip(equation.outvars, used, strict=True) if use],
        params=params,
    )


def _batched(
    primitive: Primitive, rule: Rule, axis_data: Any, operands: Any, axes: Any, **params: Any
) -> tuple[Any, Any]:
    """Returns what the rule gives; JAX also asks where nothing is mapped."""
    if any(axis is not None for axis in axes):
        return rule(axis_data, operands, axes, **params)
    results = primitive.bind(*operands, **params)
    return results, [None] * len(results) if primitive.multiple_results else None


def mapped_first(size: int, x: Any, axis: int | None) -> Any:
    """Returns an operand of a rule of `vmap` whose first axis is the mapped one, of this size."""
    if axis is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)


# Products.


def request_of(equation: Any) -> Request:
    avals, out_avals = ([x.aval for x in atoms] for atoms in (equation.invars, equation.outvars))
    return equation.primitive.request_of(avals, out_avals, **equation.params)


def apart_of(equation: Any) -> Rule | None:
    """Returns what lowering runs of an equation of `PRODUCTS` if a kernel cannot; see `apart`."""
    apart = PRODUCTS[equation.primitive]
    return apart and apart(equation.params)


def accumulator_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype in which elements of `dtype` are added up, and an epilogue sees a sum."""
    dtype = jnp.dtype(dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4
    return jnp.dtype("float32") if narrow else dtype


def promoted(*dtypes: Any) -> np.dtype:
    """Returns JAX's promoted dtype, whatever promotion of arrays the user allows.

    It is float32 of floats that JAX does not promote, such as those of 8 bits beside others.
    """
    with jax.numpy_dtype_promotion("standard"):
        try:
            return np.dtype(reduce(jnp.promote_types, dtypes))
        except ValueError:
            return np.dtype(np.float32)
