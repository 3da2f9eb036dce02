"""Ragged products in a program that XLA partitions over devices.

In the custom call an axis that is two in one has a letter for each: periods ("p") and their rows or
groups, planes ("c"; gate and up) and their columns. So devices can have a part of either. On a
device they are one again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from ..gemm.groups import GroupedAxis, Groups
from ..gemm.subscripts import Subscripts
from ..launch.ffi_target import launcher_violation
from ..lowering.call import Call
from ..lowering.devices import platforms_of
from ..lowering.match import product_between
from ..sharding.choose_shards import Factors
from ..sharding.custom_call import emit, precision_names, precision_of
from ..sharding.shard import ShardContext
from .ragged_shards import PERIODS, RaggedShare, ragged_labels

NAME = "hopper_ragged_dot"
PLANES = "c"
OUTER = PERIODS + PLANES  # letters of axes that are outer ones of the next


def emit_ragged(
    ctx: mlir.LoweringRuleContext,
    call: Call,
    *,
    precision: Any,
    preferred_element_type: Any,
    implementation: str | None,
) -> list[Any] | None:
    """Emits a ragged product, or returns None.

    What no kernel could run of any share, or what cannot be launched at all, is left to XLA.
    """
    insist = implementation == "hopper"
    call = call.readable(ctx, kernel_only=insist)
    if platforms_of(ctx) == ("cuda",):
        found = call.route(ctx, kernel_only=insist)
        if not found.supported or launcher_violation():
            return None
    if (names := precision_names(precision)) is None:
        return None
    product, axis, preferred = call.product, call.product.groups, preferred_element_type
    assert axis
    words = {
        "subscripts": str(product.subscripts),
        "spans": astuple(axis.rule),
        "precision": names,
        "preferred_element_type": None if preferred is None else np.dtype(preferred).name,
        "implementation": implementation,
        "max_sms": product.max_sms,
    }
    periods = axis.rule.periods(axis.num_sizes)
    labels = ragged_labels(product.subscripts, periods, shared=not axis.rule.step)
    labels, values, planes = _with_planes(labels, call.values)
    (aval,) = ctx.avals_out
    if any(letter in labels.out for letter in OUTER):
        aval = ShapedArray(_apart(aval.shape, labels.out, periods, planes), aval.dtype)
    factors = [
        _reshaped(x, _apart(x.type.shape, names, periods, planes))
        if len(x.type.shape) < len(names)
        else x
        for x, names in zip(values, labels.factors, strict=True)
    ]
    emitted = emit(ctx, NAME, [*factors, call.sizes], labels, words, avals_out=[aval])
    return emitted and [_reshaped(emitted[0], ctx.avals_out[0].shape)]


def _with_planes(labels: Factors, values: Sequence[Any]) -> tuple[Factors, Sequence[Any], int]:
    """Returns labels and operands with planes as an axis of its own, and how many these are.

    They lie so in an operand which is a reshape of one whose last two axes are planes and columns.
    """
    beneath = [_beneath_merge(x) for x in values]
    last = {names[-1] for names, x in zip(labels.factors, beneath, strict=True) if x is not None}
    planes = {x.type.shape[-2] for x in beneath if x is not None}
    if len(last) != 1 or len(planes) != 1:
        return labels, values, 1
    (letter,), (count,) = last, planes
    having = [letter in names for names in labels.factors]
    if having != [x is not None for x in beneath]:
        return labels, values, 1
    lhs, rhs, out = (
        names.replace(letter, PLANES + letter) for names in (*labels.factors, labels.out)
    )
    values = [x if x is not None else y for x, y in zip(beneath, values, strict=True)]
    return replace(labels, factors=(lhs, rhs), out=out, results=(out,)), values, count


def _beneath_merge(value: Any) -> Any:
    """Returns the array whose last two axes a reshape makes one, if `value` is such a reshape."""
    if getattr(value.owner, "name", None) != "stablehlo.reshape":
        return None
    array = value.owner.operands[0]
    shape = list(array.type.shape)
    if len(shape) != len(value.type.shape) + 1 or shape[:-2] != list(value.type.shape)[:-1]:
        return None
    return array


def _apart(shape: Sequence[int], names: str, periods: int, planes: int) -> list[int]:
    """Returns the shape with an axis for each letter."""
    counts, left, found = {PERIODS: periods, PLANES: planes}, list(shape), []
    for name in names:
        if name in counts:
            found.append(counts[name])
            left[0] //= counts[name]
        else:
            found.append(left.pop(0))
    return found


def _reshaped(value: Any, shape: Sequence[int]) -> Any:
    if tuple(value.type.shape) == tuple(shape):
        return value
    kind = ir.RankedTensorType.get(shape, value.type.element_type)
    return stablehlo.ReshapeOp(kind, value).result


def product_at(
    value: Any, operands: Sequence[Any], words: dict[str, Any]
) -> tuple[Call, dict[str, Any]] | None:
    """Returns the bare product that `emit_ragged` emitted; see `sharding.product_at`.

    None where an axis has two letters.
    """
    lhs, rhs, sizes = operands
    subscripts = Subscripts.parse(words["subscripts"])
    product = product_between(subscripts, lhs, rhs, value)
    if product is None or len(lhs.type.shape) > len(subscripts.lhs):
        return None
    product = replace(
        product,
        groups=GroupedAxis.of(subscripts, Groups(*words["spans"]), sizes.type.shape[0]),
        max_sms=words.get("max_sms"),
    )
    precision = precision_of(words["precision"])
    options = {"precision": precision, "implementation": words["implementation"]}
    return Call(product, (lhs, rhs), sizes=sizes), options


# On a device.


def ragged_of_shards(
    product: Callable[..., jax.Array],
    local: ShardContext,
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    subscripts: str,
    spans: Sequence[int],
    precision: list[str],
    preferred_element_type: str | None,
    max_sms: int | None = None,
    **params: Any,
) -> list[jax.Array]:
    """The program of a share.

    Args:
      product: binds `hopper_ragged_dot`.
      sizes: of the whole product.
      **params: those that `emit_ragged` hands in.
    """
    share, labels = RaggedShare.of(Groups(*spans), local.part), local.letters
    extents = labels.extents((lhs.shape, rhs.shape))
    periods = share.rule.periods(sizes.shape[0])
    length = extents["m"] * share.rows.count * periods
    lhs, rhs = (_together(x, names) for x, names in zip((lhs, rhs), labels.factors, strict=True))
    preferred = preferred_element_type and np.dtype(jnp.dtype(preferred_element_type))
    found = product(
        lhs, rhs, share.local_sizes(sizes, length), subscripts=Subscripts.parse(subscripts),
        groups=share.local_rule(),
        precision=precision_of(precision), preferred_element_type=preferred,
        max_sms=max_sms, **params,
    )  # fmt: skip
    periods //= share.periods.count
    shape = _apart(found.shape, labels.out, periods, extents.get(PLANES, 1))
    return [local.sum(found.reshape(shape))]


def _together(x: jax.Array, names: str) -> jax.Array:
    """Returns the array with what lies behind one another in one axis."""
    shape, outer = [], 1
    for name, extent in zip(names, x.shape, strict=True):
        outer *= extent
        if name not in OUTER:
            shape.append(outer)
            outer = 1
    return x.reshape(shape)
