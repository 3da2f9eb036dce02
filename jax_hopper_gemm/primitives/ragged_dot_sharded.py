"""Ragged products in a program that XLA partitions over devices.

A device has a part of the rows, of the groups, or of both. Runs end where its rows do, and what
belongs to groups of other devices becomes rows of no group: 0 in a result of rows, so that the sum
over devices is the product, and left out of a contraction.

In the custom call an axis that is two in one has a letter for each: periods ("p"), which come of
`jax.vmap` and have as many rows each, and their rows or groups; planes ("c"; gate and up) and their
columns. So devices can have a part of either. On a device they are one again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from ..gemm.groups import GROUP, Groups
from ..gemm.product import Product
from ..gemm.subscripts import Subscripts
from ..lowering.call import Call, call_between
from ..sharding.choose_shards import Factors
from ..sharding.custom_call import emit
from ..sharding.shard import ShardContext
from .call_words import options_of_words, options_to_words
from .group_sizes import run_ends

PERIODS, SIZES, ENTRIES = "p", "s", "h"  # h: groups of which each device reads all entries


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts of an axis. Its index may be one that only the device knows."""

    index: Any = 0
    count: int = 1

    def of(self, array: jax.Array) -> jax.Array:
        """Returns the part of an array along its first axis."""
        if self.count == 1:
            return array
        length = array.shape[0] // self.count
        return lax.dynamic_slice_in_dim(array, self.index * length, length)


@dataclass(frozen=True)
class RaggedShard:
    """The parts of a ragged product that a device has."""

    rule: Groups  # of the whole product
    periods: Part = Part()  # of the periods, if there are several
    rows: Part = Part()  # of the rows of each period
    groups: Part = Part()  # of the groups of each period

    @staticmethod
    def of(rule: Groups, part: Callable[[str], tuple[Any, int]]) -> RaggedShard:
        """Returns a device's shard; `part` gives for a letter its part's index and their count."""
        return RaggedShard(rule, *(Part(*part(letter)) for letter in (PERIODS, "m", GROUP)))

    def own_rule(self) -> Groups:
        """Returns which of the runs that `own_sizes` cuts belong to which group."""
        if self.groups.count == 1:
            return self.rule
        count = self.rule.count // self.groups.count
        return Groups(count + 2, count, first=1, step=count if self.rule.step else 0)

    def own_sizes(self, sizes: jax.Array, length: int) -> jax.Array:
        """Returns the sizes that cut the device's rows into runs of `own_rule`.

        `sizes` are those of the whole product, (S,) int32, and `length` its rows.
        """
        if self.periods.count == self.rows.count == self.groups.count == 1:
            return sizes
        periods = self.rule.periods(sizes.shape[0])
        ends = jnp.append(run_ends(sizes, length), np.int32(length))
        starts = jnp.arange(periods, dtype=np.int32) * (length // periods)
        bounds = jnp.column_stack([starts, ends.reshape(periods, self.rule.period)])
        length, bounds = length // periods, self.periods.of(bounds)
        if self.groups.count > 1:
            count = self.rule.count // self.groups.count
            before = self.rule.first + self.groups.index * count
            own = lax.dynamic_slice_in_dim(bounds, before, count + 1, axis=1)
            ends = jnp.column_stack([own, bounds[:, -1:]])
        else:
            ends = bounds[:, 1:]
        rows = length // self.rows.count
        ends = jnp.clip(ends - bounds[:, :1] - self.rows.index * rows, 0, rows)
        ends += rows * jnp.arange(bounds.shape[0], dtype=np.int32)[:, None]
        return jnp.diff(ends.reshape(-1), prepend=np.int32(0))[:-1]


NAME = "hopper_ragged_dot"
PLANES = "c"
OUTER = PERIODS + PLANES  # letters of axes that are outer ones of the next


def emit_ragged(ctx: mlir.LoweringRuleContext, call: Call) -> list[Any] | None:
    """Emits a ragged product; None: it is left to XLA."""
    call, options = call.readable(ctx), options_to_words(call.request.options)
    if options is None or call.left_to_xla(ctx):
        return None
    request, axis = call.request, call.request.groups
    assert axis
    of, periods = request.subscripts, axis.rule.periods(axis.num_sizes)
    words = {"subscripts": str(of), "spans": astuple(axis.rule)} | options
    # Of several periods rows, and matrices that are not shared, have one more axis in front.
    lhs, rhs, out = (
        PERIODS + x if periods > 1 and (axis.rule.step or GROUP not in x) else x
        for x in (of.lhs, of.rhs, of.out)
    )
    letters = Factors((lhs, rhs), out, (out,), others=(SIZES,), whole=SIZES, picked=GROUP)
    letters, values, planes = _with_planes(letters, call.values)
    (aval,) = ctx.avals_out
    if any(letter in letters.out for letter in OUTER):
        aval = ShapedArray(_apart(aval.shape, letters.out, periods, planes), aval.dtype)
    factors = [
        _reshaped(x, _apart(x.type.shape, names, periods, planes))
        if len(x.type.shape) < len(names)
        else x
        for x, names in zip(values, letters.factors, strict=True)
    ]
    emitted = emit(ctx, NAME, [*factors, call.sizes], letters, words, avals_out=[aval])
    return emitted and [_reshaped(emitted[0], ctx.avals_out[0].shape)]


def _with_planes(letters: Factors, values: Sequence[Any]) -> tuple[Factors, Sequence[Any], int]:
    """Returns letters and operands with planes as an axis of its own, and how many these are.

    They lie so in an operand which is a reshape of one whose last two axes are planes and columns.
    """
    beneath = [_beneath_merge(x) for x in values]
    last = {names[-1] for names, x in zip(letters.factors, beneath, strict=True) if x is not None}
    planes = {x.type.shape[-2] for x in beneath if x is not None}
    if len(last) != 1 or len(planes) != 1:
        return letters, values, 1
    (letter,), (count,) = last, planes
    having = [letter in names for names in letters.factors]
    if having != [x is not None for x in beneath]:
        return letters, values, 1
    lhs, rhs, out = (
        names.replace(letter, PLANES + letter) for names in (*letters.factors, letters.out)
    )
    values = [x if x is not None else y for x, y in zip(beneath, values, strict=True)]
    return replace(letters, factors=(lhs, rhs), out=out, results=(out,)), values, count


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


def call_at(value: Any, operands: Sequence[Any], words: dict[str, Any]) -> Call | None:
    """Returns the bare product that `emit_ragged` emitted; see `sharding.product_at`.

    None where an axis has two letters.
    """
    subscripts, rule = Subscripts.parse(words["subscripts"]), Groups(*words["spans"])
    if len(operands[0].type.shape) > len(subscripts.lhs):
        return None
    return call_between(subscripts, options_of_words(words), operands, value, rule=rule)


# On a device.


def ragged_of_shards(
    bind: Callable[..., jax.Array],
    context: ShardContext,
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    subscripts: str,
    spans: Sequence[int],
    **words: Any,
) -> list[jax.Array]:
    """The program of a shard, by the words of `emit_ragged`; `sizes` are of the whole product."""
    shard, letters = RaggedShard.of(Groups(*spans), context.part), context.letters
    extents = letters.extents((lhs.shape, rhs.shape))
    periods = shard.rule.periods(sizes.shape[0])
    length = extents["m"] * shard.rows.count * periods
    lhs, rhs = (_together(x, names) for x, names in zip((lhs, rhs), letters.factors, strict=True))
    product = Product(
        Subscripts.parse(subscripts), options_of_words(words), groups=shard.own_rule()
    )
    result = bind(lhs, rhs, shard.own_sizes(sizes, length), product=product)
    periods //= shard.periods.count
    shape = _apart(result.shape, letters.out, periods, extents.get(PLANES, 1))
    return [context.sum(result.reshape(shape))]


def _together(x: jax.Array, names: str) -> jax.Array:
    """Returns the array with what lies behind one another in one axis."""
    shape, outer = [], 1
    for name, extent in zip(names, x.shape, strict=True):
        outer *= extent
        if name not in OUTER:
            shape.append(outer)
            outer = 1
    return x.reshape(shape)
