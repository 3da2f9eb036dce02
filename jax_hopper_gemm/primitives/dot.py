"""The JAX primitive `hopper_dot`: a product of two arrays.

`hopper_dot` multiplies two arrays by subscripts such as "bmk,bkn->bmn". It is
`jax.lax.dot_general` with the order of the result's axes left free: so the product, both of its
gradients and its `vmap` are again `hopper_dot`s, with the letters arranged anew and no array
transposed. It is bilinear: JAX derives forward and reverse mode of every order from two rules.

Only lowering for CUDA decides between a kernel and XLA. Elsewhere, and where XLA is the answer,
the product lowers to `jax.lax.dot_general`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters import mlir

from .. import sharding
from ..gemm.product import Options, Product
from ..gemm.subscripts import DotGeneral, Subscripts
from ..lowering.call import Call, call_between, mark_options
from ..lowering.devices import padded_partitions, with_partitions
from ..lowering.emit import lower_call
from ..lowering.register import Lowering, lower_fun_once
from ..lowering.request import Request
from .auto_axes import stated_sharding
from .call_words import options_of_words, options_to_words
from .complex_products import by_parts
from .define import Rules, define_primitive, promoted
from .remat import dot_general_of

NAME = "hopper_dot"


def hopper_dot(lhs: jax.Array, rhs: jax.Array, product: Product) -> jax.Array:
    """Returns the product of two arrays; its precision and dtype are canonical already."""
    return hopper_dot_p.bind(lhs, rhs, product=product)


def _abstract_eval(lhs: Any, rhs: Any, *, product: Product) -> Any:
    """Shape, dtype, sharding and varying axes are those of `lax.dot_general`."""
    dot, params = dot_general_of(product)
    out, _ = lax.dot_general_p.abstract_eval(*_ordered(dot, lhs, rhs), **params)
    return lax.transpose_p.abstract_eval(out, permutation=dot.permutation)[0]


def reference_dot(lhs: jax.Array, rhs: jax.Array, *, product: Product) -> jax.Array:
    dot, params = dot_general_of(product)
    left, right = _ordered(dot, lhs, rhs)
    if widens(left, right, params) and _is_folded(left.ndim, right.ndim, dot.dimension_numbers):
        return _folded_dot_p.bind(lhs, rhs, product=product)
    return _xla_dot(lhs, rhs, product=product)


def _xla_dot(lhs: jax.Array, rhs: jax.Array, *, product: Product) -> jax.Array:
    dot, params = dot_general_of(product)
    left, right = _ordered(dot, lhs, rhs)
    out = by_parts(lax.dot_general_p.bind, params["precision"])(left, right, **params)
    return lax.transpose(as_multiplied(out, left, right, params), dot.permutation)


def _ordered(dot: DotGeneral, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    return (rhs, lhs) if dot.swap_ab else (lhs, rhs)


# Products of bfloat16 into float32 that XLA:CPU would fail to run, as "Unsupported element type for
# DotThunk": it widens operands unless a library runs their product, which wants K last on the left.
# It asks before it folds a transpose into the product: one of the left operand, which comes wider
# here, or one of the result, which changes the operands' places, and which a barrier keeps apart.


def widens(lhs: jax.Array, rhs: jax.Array, options: dict[str, Any]) -> bool:
    wide = options["preferred_element_type"] == jnp.float32
    return wide and lhs.dtype == rhs.dtype == jnp.bfloat16


def as_multiplied(out: jax.Array, lhs: jax.Array, rhs: jax.Array, options: dict) -> jax.Array:
    """Returns a product as a result of its own, whatever reads it; `options` of `dot_general`."""
    return _apart_p.bind(out) if widens(lhs, rhs, options) else out


_apart_p = define_primitive(
    "apart",
    lambda x: x,
    rules=Rules(
        linear_in=(0,),
        transpose=lambda cotangent, _: [_apart_p.bind(cotangent)],
        batch=lambda _, operands, axes: (_apart_p.bind(*operands), *axes),
    ),
)
mlir.register_lowering(_apart_p, lower_fun_once(lax.optimization_barrier), platform="cpu")


def _is_folded(lhs_ndim: int, rhs_ndim: int, dimension_numbers: Any) -> bool:
    """Whether the left operand is one of matrices (K, M), and the right one is of none: then XLA
    transposes the left one, and folds that."""
    (lhs_contracted, _), (lhs_batch, rhs_batch) = dimension_numbers
    count = len(lhs_batch)
    leading = tuple(range(count))
    k_first = (lhs_batch, lhs_contracted, lhs_ndim) == (leading, (count,), count + 2)
    return k_first and (rhs_batch != leading or rhs_ndim > count + 2)


def _widened_dot(lhs: jax.Array, rhs: jax.Array, *, product: Product) -> jax.Array:
    return _xla_dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32), product=product)


def _batch(
    multiply: Any, axis_data: Any, operands: Any, axes: Any, *, product: Product
) -> tuple[Any, int]:
    """Adds a letter: a batch index where both operands have it, else a free one."""
    return multiply(*operands, product=batched(product, axis_data, axes)), 0


_folded_dot_p = define_primitive(
    "folded_dot",
    _xla_dot,
    rules=Rules(linear_in=(0, 1), transpose="reference", batch=partial(_batch, reference_dot)),
)
mlir.register_lowering(_folded_dot_p, lower_fun_once(_widened_dot), platform="cpu")


# Derivatives and vmap: the letters change places.


def _transpose(kept: int, cotangent: Any, lhs: Any, rhs: Any, *, product: Product) -> Any:
    """Returns the gradient of an operand: another product, of the cotangent and the one `kept`."""
    primal, other = (lhs.aval, rhs) if kept else (rhs.aval, lhs)
    sharding, subscripts = stated_sharding(primal), product.subscripts
    subscripts = subscripts.transpose_lhs() if kept else subscripts.transpose_rhs()
    cotangent, options = entering(primal, cotangent, other, product.options, kept)
    gradient = replace(product, subscripts=subscripts, options=options, out_sharding=sharding)
    return as_cotangent(primal, hopper_dot_p.bind(cotangent, other, product=gradient))


def entering(
    primal: Any, cotangent: Any, other: Any, options: Options, kept: int = 0
) -> tuple[Any, Options]:
    """Returns a cotangent as it is multiplied by `other`, and the options of this product.

    With a `cotangent_dtype` that is rounded to it, unless it is complex, and the product has the
    dtype of `primal`, whose gradient it is, or a wider one of the factors. With a recipe it is
    rounded to the dtype of `other`, which is the operand `kept`.
    """
    dtype = options.cotangent_dtype
    if options.recipe:
        options = replace(options, recipe=options.recipe.of_gradient(kept))
        dtype = other.dtype
    if dtype is None or not jnp.issubdtype(cotangent.dtype, jnp.floating):
        return cotangent, options
    result = promoted(dtype, other.dtype, primal.dtype)
    options = replace(options, preferred_element_type=result)
    return lax.convert_element_type(cotangent, dtype), options


def as_cotangent(primal: Any, gradient: Any) -> Any:
    """Returns a gradient in the dtype of the array that it belongs to."""
    complex_types = [np.issubdtype(x.dtype, np.complexfloating) for x in (primal, gradient)]
    if complex_types == [False, True]:
        gradient = lax.real(gradient)
    return lax.convert_element_type(gradient, primal.dtype)


def batched(product: Product, axis_data: Any, axes: Any) -> Product:
    """Returns the product whose operands have mapped axes; the result's is its first.

    `axes` holds each operand's, or None where it has none.
    """
    sharding, subscripts = product.out_sharding, product.subscripts
    if sharding is not None:
        partitions = padded_partitions(sharding, len(subscripts.out))
        sharding = with_partitions(sharding, (axis_data.explicit_mesh_axis, *partitions))
    subscripts = subscripts.batched(*axes)
    mapped = product.mapped + subscripts.out[0] if product.options.recipe else ""
    return replace(product, subscripts=subscripts, out_sharding=sharding, mapped=mapped)


# Lowering.

_lower_to_xla = lower_fun_once(reference_dot)


def _request_of(avals: Sequence[Any], out_avals: Sequence[Any], *, product: Product) -> Request:
    return Request.of(product, *avals, *out_avals)


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, *, product: Product) -> Any:
    call = Call(_request_of(ctx.avals_in, ctx.avals_out, product=product), (lhs, rhs))
    launched = lower_call(ctx, call)
    return launched or mark_options(call, _lower_to_xla(ctx, lhs, rhs, product=product))


def _lower_partitioned(
    ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, *, product: Product
) -> Any:
    """Leaves to XLA what no kernel could run of any shard, or what cannot be launched at all."""
    call = Call(_request_of(ctx.avals_in, ctx.avals_out, product=product), (lhs, rhs))
    call, words = call.readable(ctx), options_to_words(product.options)
    if words is None or call.left_to_xla(ctx):
        return None
    subscripts = call.request.subscripts
    params = {"subscripts": str(subscripts)} | words
    return sharding.emit(ctx, NAME, call.values, sharding.Factors.of(subscripts), params)


def _call_at(value: Any, operands: Sequence[Any], words: dict[str, Any]) -> Call | None:
    """Returns the bare product that `_lower_partitioned` emitted; see `sharding.product_at`."""
    subscripts = Subscripts.parse(words["subscripts"])
    return call_between(subscripts, options_of_words(words), operands, value)


def _product_of_shards(
    context: sharding.ShardContext, lhs: jax.Array, rhs: jax.Array, *, subscripts: str, **words: Any
) -> list[jax.Array]:
    product = Product(Subscripts.parse(subscripts), options_of_words(words))
    return [context.sum(hopper_dot_p.bind(lhs, rhs, product=product))]


hopper_dot_p = define_primitive(
    NAME,
    reference_dot,
    abstract=_abstract_eval,
    rules=Rules(
        linear_in=(0, 1),
        transpose=(partial(_transpose, 1), partial(_transpose, 0)),
        batch=lambda *args, **params: _batch(hopper_dot_p.bind, *args, **params),
    ),  # fmt: skip
    lowering=Lowering(_lower_for_cuda, _lower_partitioned),
    request_of=_request_of,
)
sharding.register(NAME, _product_of_shards, _call_at)
