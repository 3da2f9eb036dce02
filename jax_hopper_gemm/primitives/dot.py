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
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters import mlir

from .. import sharding
from ..gemm.subscripts import Subscripts
from ..launch.ffi_target import launcher_violation
from ..lowering.call import Call
from ..lowering.match import product_between
from ..lowering.register import Lowering
from ..lowering.route import Product
from ..lowering.shardings import padded_partitions, permuted_sharding, with_partitions
from .define import ProductRules, Rules, define_primitive

NAME = "hopper_dot"


def hopper_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    subscripts: Subscripts,
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


@dataclass(frozen=True)
class _DotGeneral:
    """The `lax.dot_general_p` that a `hopper_dot_p` stands for, and the transpose after it.

    Attributes:
      swap_ab: whether the right operand comes first.
      params: all parameters of `lax.dot_general_p`.
      permutation: that of the transpose.
    """

    swap_ab: bool
    params: dict[str, Any]
    permutation: tuple[int, ...]

    @staticmethod
    def of(
        *,
        subscripts: Subscripts,
        precision: Any,
        preferred_element_type: Any,
        out_sharding: Any,
        **params: Any,
    ) -> _DotGeneral:
        """Returns the form of a `hopper_dot_p`, of which `params` decide nothing."""
        del params
        # A precision may tell the operands apart: only one that does not lets them change places.
        same = precision is None or (isinstance(precision, tuple) and precision[0] == precision[1])
        dot = subscripts.dot_general(may_swap=same)
        sharding = permuted_sharding(out_sharding, tuple(map(subscripts.out.index, dot.out)))
        dot_params = {
            "dimension_numbers": dot.dimension_numbers,
            "precision": precision,
            "preferred_element_type": preferred_element_type,
            "out_sharding": sharding,
        }
        return _DotGeneral(dot.swap_ab, dot_params, dot.permutation)


def as_dot_general_params(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of the `lax.dot_general_p` that a `hopper_dot_p` stands for."""
    return _DotGeneral.of(**params).params


def product_of(avals: Sequence[Any], out_avals: Sequence[Any], params: dict[str, Any]) -> Product:
    """Returns what a `hopper_dot_p` between these abstract values asks for."""
    (lhs, rhs), (out,) = avals, out_avals
    return Product(
        params["subscripts"], lhs.shape, lhs.dtype.name, rhs.shape, rhs.dtype.name,
        out.dtype.name, params["precision"], max_sms=params["max_sms"],
    )  # fmt: skip


def _abstract_eval(lhs: Any, rhs: Any, **params: Any) -> Any:
    """Shape, dtype, sharding and varying axes are those of `lax.dot_general`."""
    dot = _DotGeneral.of(**params)
    operands = (rhs, lhs) if dot.swap_ab else (lhs, rhs)
    out, _ = lax.dot_general_p.abstract_eval(*operands, **dot.params)
    return lax.transpose_p.abstract_eval(out, permutation=dot.permutation)[0]


def reference_dot(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """The product as XLA computes it."""
    dot = _DotGeneral.of(**params)
    operands = (rhs, lhs) if dot.swap_ab else (lhs, rhs)
    return lax.transpose(lax.dot_general_p.bind(*operands, **dot.params), dot.permutation)


# Derivatives and vmap: the letters change places.


def _transpose_lhs(cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    params["subscripts"] = params["subscripts"].transpose_lhs()
    return cotangent_of(lhs.aval, cotangent, rhs, **params)


def _transpose_rhs(cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    params["subscripts"] = params["subscripts"].transpose_rhs()
    return cotangent_of(rhs.aval, cotangent, lhs, **params)


def cotangent_of(primal: Any, cotangent: Any, other: Any, **params: Any) -> Any:
    params["out_sharding"] = None if primal.sharding.mesh.empty else primal.sharding
    return as_cotangent(primal, hopper_dot_p.bind(cotangent, other, **params))


def as_cotangent(primal: Any, gradient: Any) -> Any:
    """Returns a gradient in the dtype of the array that it belongs to."""
    complex_types = [np.issubdtype(x.dtype, np.complexfloating) for x in (primal, gradient)]
    if complex_types == [False, True]:
        gradient = lax.real(gradient)
    return lax.convert_element_type(gradient, primal.dtype)


def _batch(
    axis_data: Any,
    operands: Any,
    axes: Any,
    *,
    subscripts: Subscripts,
    out_sharding: Any,
    **params: Any,
) -> tuple[Any, int]:
    """Adds a letter: a batch index where both operands have it, else a free one."""
    subscripts, out_sharding = with_batch(axis_data, subscripts, axes, out_sharding)
    product = hopper_dot_p.bind(
        *operands, subscripts=subscripts, out_sharding=out_sharding, **params
    )
    return product, 0


def with_batch(
    axis_data: Any, subscripts: Subscripts, axes: Any, out_sharding: Any
) -> tuple[Subscripts, Any]:
    """Returns subscripts and sharding of a product whose operands have mapped axes.

    The result's is its first. `axes` holds each operand's, or None where it has none.
    """
    if out_sharding is not None:
        partitions = padded_partitions(out_sharding, len(subscripts.out))
        partitions = (axis_data.explicit_mesh_axis, *partitions)
        out_sharding = with_partitions(out_sharding, partitions)
    return subscripts.batched(*axes), out_sharding


_lower_to_xla = mlir.lower_fun(reference_dot, multiple_results=False)


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, **params: Any) -> Any:
    call = Call(product_of(ctx.avals_in, ctx.avals_out, params), (lhs, rhs))
    launched = call.lower(ctx, params["implementation"])
    return launched or call.marked(_lower_to_xla(ctx, lhs, rhs, **params))


def _lower_partitioned(
    ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, *, out_sharding: Any, **params: Any
) -> Any:
    """Leaves to XLA what no kernel could run of any share, or what cannot be launched at all."""
    if not sharding.applies(ctx):
        return None
    insist = params["implementation"] == "hopper"
    call = Call(product_of(ctx.avals_in, ctx.avals_out, params), (lhs, rhs))
    call = call.readable(ctx, kernel_only=insist)
    if sharding.platforms_of(ctx) == ("cuda",):
        found = call.route(ctx, kernel_only=insist)
        if not found.supported or launcher_violation():
            return None
    if (names := sharding.precision_names(params["precision"])) is None:
        return None
    preferred = params["preferred_element_type"]
    words = {
        "subscripts": str(call.product.subscripts),
        "precision": names,
        "preferred_element_type": None if preferred is None else np.dtype(preferred).name,
        "implementation": params["implementation"],
        "max_sms": params["max_sms"],
    }
    labels = sharding.Factors.of(call.product.subscripts)
    return sharding.emit(ctx, NAME, call.values, labels, words)


def _product_at(
    value: Any, operands: Sequence[Any], words: dict[str, Any]
) -> tuple[Call, dict[str, Any]] | None:
    """Returns the bare product that `_lower_partitioned` emitted; see `sharding.product_at`."""
    lhs, rhs = operands
    subscripts = Subscripts.parse(words["subscripts"])
    if (product := product_between(subscripts, lhs, rhs, value)) is None:
        return None
    precision = sharding.precision_of(words["precision"])
    options = {"precision": precision, "implementation": words["implementation"]}
    return Call(replace(product, max_sms=words.get("max_sms")), (lhs, rhs)), options


def _product_of_shards(
    local: sharding.ShardContext,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    subscripts: str,
    precision: list[str],
    preferred_element_type: str | None,
    max_sms: int | None = None,
    **params: Any,
) -> list[jax.Array]:
    preferred = preferred_element_type and np.dtype(jnp.dtype(preferred_element_type))
    product = hopper_dot_p.bind(
        lhs, rhs, subscripts=Subscripts.parse(subscripts),
        precision=sharding.precision_of(precision), preferred_element_type=preferred,
        out_sharding=None, max_sms=max_sms, **params,
    )  # fmt: skip
    return [local.sum(product)]


hopper_dot_p = define_primitive(
    NAME,
    reference_dot,
    abstract=_abstract_eval,
    rules=Rules(linear_in=(0, 1), transpose=(_transpose_lhs, _transpose_rhs), batch=_batch),
    lowering=Lowering(_lower_for_cuda, _lower_partitioned, itemgetter("implementation")),
    product=ProductRules(product_of, as_dot_general_params),
)
sharding.register(NAME, _product_of_shards, _product_at)
