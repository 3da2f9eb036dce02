"""The JAX primitive `hopper_dot`: a product of two arrays.

`hopper_dot` multiplies two arrays by subscripts such as "bmk,bkn->bmn". It is
`jax.lax.dot_general` with the order of the result's axes left free: so the product, both of its
gradients and its `vmap` are again `hopper_dot`s, with the letters arranged anew and no array
transposed. It is bilinear: JAX derives forward and reverse mode of every order from two rules.

Only lowering for CUDA decides between a kernel and XLA. Elsewhere, and where XLA is the answer,
the product lowers to `jax.lax.dot_general`.
"""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from .. import sharding
from ..gemm.subscripts import DotGeneral, from_subscripts, padded_partitions, split, with_partitions
from ..launch.ffi_target import launcher_violation
from ..lowering.call import Call
from ..lowering.match import product_between
from ..lowering.register import register_lowering
from ..lowering.route import Product
from ..lowering.traced import lower_fun_once

hopper_dot_p = Primitive("hopper_dot")


def hopper_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    subscripts: str,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
    implementation: str | None,
    max_sms: int | None,
) -> jax.Array:
    """Returns the product of two arrays.

    Args:
      lhs, rhs: the operands.
      subscripts: as in `contraction.as_gemm`.
      precision, preferred_element_type: parameters of `lax.dot_general_p`, already canonical.
      out_sharding: likewise, for the axes of the result.
      implementation: None or "hopper".
      max_sms: how many SMs a kernel may use; None: all.
    """
    return hopper_dot_p.bind(
        lhs,
        rhs,
        subscripts=subscripts,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
        max_sms=max_sms,
    )


@hopper_dot_p.def_impl
def _eager(*operands: Any, **params: Any) -> Any:
    return xla.apply_primitive(hopper_dot_p, *operands, **params)


def _dot_general(
    *, implementation: str | None = None, max_sms: int | None = None, **params: Any
) -> DotGeneral:
    del implementation, max_sms  # decide at lowering; the product is the same
    return from_subscripts(**params)


def as_dot_general_params(**params: Any) -> dict[str, Any]:
    """Returns the parameters of the `lax.dot_general_p` that a `hopper_dot_p` stands for."""
    return _dot_general(**params).params


def product_of(lhs: Any, rhs: Any, out: Any, params: dict[str, Any]) -> Product:
    """Returns what a `hopper_dot_p` between these abstract values asks for."""
    return Product(
        params["subscripts"], lhs.shape, lhs.dtype.name, rhs.shape, rhs.dtype.name,
        out.dtype.name, params["precision"], max_sms=params["max_sms"],
    )  # fmt: skip


def _abstract_eval(lhs: Any, rhs: Any, **params: Any) -> Any:
    """Shape, dtype, sharding and varying axes are those of `lax.dot_general`."""
    dot = _dot_general(**params)
    operands = (rhs, lhs) if dot.swap_ab else (lhs, rhs)
    out, _ = lax.dot_general_p.abstract_eval(*operands, **dot.params)
    return lax.transpose_p.abstract_eval(out, permutation=dot.permutation)[0]


hopper_dot_p.def_abstract_eval(_abstract_eval)


def reference_dot(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """The product as XLA computes it."""
    dot = _dot_general(**params)
    operands = (rhs, lhs) if dot.swap_ab else (lhs, rhs)
    return lax.transpose(lax.dot_general_p.bind(*operands, **dot.params), dot.permutation)


# Derivatives and vmap: the letters change places.


def _transpose_lhs(cotangent: Any, lhs: Any, rhs: Any, *, subscripts: str, **params: Any) -> Any:
    lhs_labels, rhs_labels, out_labels = split(subscripts)
    gradient = f"{out_labels},{rhs_labels}->{lhs_labels}"
    return cotangent_of(lhs.aval, cotangent, rhs, subscripts=gradient, **params)


def _transpose_rhs(cotangent: Any, lhs: Any, rhs: Any, *, subscripts: str, **params: Any) -> Any:
    lhs_labels, rhs_labels, out_labels = split(subscripts)
    gradient = f"{out_labels},{lhs_labels}->{rhs_labels}"
    return cotangent_of(rhs.aval, cotangent, lhs, subscripts=gradient, **params)


def cotangent_of(primal: Any, cotangent: Any, other: Any, **params: Any) -> Any:
    params["out_sharding"] = None if primal.sharding.mesh.empty else primal.sharding
    return as_cotangent(primal, hopper_dot_p.bind(cotangent, other, **params))


def as_cotangent(primal: Any, gradient: Any) -> Any:
    """Returns a gradient in the dtype of the array that it belongs to."""
    complex_types = [np.issubdtype(x.dtype, np.complexfloating) for x in (primal, gradient)]
    if complex_types == [False, True]:
        gradient = lax.real(gradient)
    return lax.convert_element_type(gradient, primal.dtype)


ad.defbilinear(hopper_dot_p, _transpose_lhs, _transpose_rhs)


def _batch(
    axis_data: Any, operands: Any, axes: Any, *, subscripts: str, out_sharding: Any, **params: Any
) -> tuple[Any, int | None]:
    """Adds a letter: a batch index where both operands have it, else a free one."""
    mapped = any(axis is not None for axis in axes)  # JAX also asks when nothing is
    if mapped:
        subscripts, out_sharding = with_batch(axis_data, subscripts, axes, out_sharding)
    product = hopper_dot_p.bind(
        *operands, subscripts=subscripts, out_sharding=out_sharding, **params
    )
    return product, 0 if mapped else None


def with_batch(axis_data: Any, subscripts: str, axes: Any, out_sharding: Any) -> tuple[str, Any]:
    """Returns subscripts and sharding of a product whose operands have mapped axes.

    The result's is its first. `axes` holds each operand's, or None where it has none.
    """
    lhs, rhs, out = split(subscripts)
    new = next(x for x in string.ascii_letters if x not in subscripts)
    lhs, rhs = (
        labels if axis is None else labels[:axis] + new + labels[axis:]
        for labels, axis in zip((lhs, rhs), axes, strict=True)
    )
    if out_sharding is not None:
        partitions = padded_partitions(out_sharding, len(out))
        partitions = (axis_data.explicit_mesh_axis, *partitions)
        out_sharding = with_partitions(out_sharding, partitions)
    return f"{lhs},{rhs}->{new}{out}", out_sharding


batching.fancy_primitive_batchers[hopper_dot_p] = _batch


_lower_to_xla = lower_fun_once(reference_dot, multiple_results=False)


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, **params: Any) -> Any:
    (lhs_aval, rhs_aval), (out_aval,) = ctx.avals_in, ctx.avals_out
    call = Call(product_of(lhs_aval, rhs_aval, out_aval, params), (lhs, rhs))
    launched = call.lower(ctx, params["implementation"])
    return launched or call.marked(_lower_to_xla(ctx, lhs, rhs, **params))


def _lower_partitioned(
    ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, *, out_sharding: Any, **params: Any
) -> Any:
    """Leaves to XLA what no kernel could run of any share, or what cannot be launched at all."""
    if not sharding.applies(ctx):
        return None
    (lhs_aval, rhs_aval), (out_aval,) = ctx.avals_in, ctx.avals_out
    insist = params["implementation"] == "hopper"
    call = Call(product_of(lhs_aval, rhs_aval, out_aval, params), (lhs, rhs))
    call = call.readable(ctx, kernel_only=insist)
    if sharding.platforms_of(ctx) == ("cuda",):
        found = call.route(ctx, kernel_only=insist)
        if not found.supported or launcher_violation():
            return None
    if (names := sharding.precision_names(params["precision"])) is None:
        return None
    preferred = params["preferred_element_type"]
    words = {
        "subscripts": call.product.subscripts,
        "precision": names,
        "preferred_element_type": None if preferred is None else np.dtype(preferred).name,
        "implementation": params["implementation"],
        "max_sms": params["max_sms"],
    }
    labels = sharding.Factors.of(call.product.subscripts)
    return sharding.emit(ctx, hopper_dot_p.name, call.values, labels, words)


def partitioned_product_at(value: Any) -> tuple[Call, dict[str, Any]] | None:
    """Returns the bare product that an MLIR value is the result of, in a partitioned program.

    As `lowering.product_at`; with it come its precision and implementation.
    """
    if (found := sharding.call_at(value, hopper_dot_p.name)) is None:
        return None
    (lhs, rhs), words = found
    if (product := product_between(words["subscripts"], lhs, rhs, value)) is None:
        return None
    precision = sharding.precision_of(words["precision"])
    options = {"precision": precision, "implementation": words["implementation"]}
    return Call(replace(product, max_sms=words.get("max_sms")), (lhs, rhs)), options


def _product_of_shards(
    local: sharding.ShardContext,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    precision: list[str],
    preferred_element_type: str | None,
    max_sms: int | None = None,
    **params: Any,
) -> list[jax.Array]:
    preferred = preferred_element_type and np.dtype(jnp.dtype(preferred_element_type))
    product = hopper_dot_p.bind(
        lhs, rhs, precision=sharding.precision_of(precision), preferred_element_type=preferred,
        out_sharding=None, max_sms=max_sms, **params,
    )  # fmt: skip
    return [local.sum(product)]


register_lowering(
    hopper_dot_p, _abstract_eval, reference_dot, _lower_for_cuda,
    lambda params: params["implementation"], _lower_partitioned,
)  # fmt: skip
sharding.register(hopper_dot_p.name, _product_of_shards)
