"""The axes of a `jax.lax.RaggedDotDimensionNumbers`, brought into the order of our three forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
from jax import lax

from ..ragged import CONTRACTION, ROWS, ROWS_TRANSPOSED

Kind = Literal["rows", "contraction", "batch"]


@dataclass(frozen=True)
class RaggedAxes:
    """What each axis of the two operands is to a ragged product.

    Attributes:
      kind: "rows" where the ragged axis is a free one of the left operand, "contraction" where it
        is contracted, "batch" where it is a batch axis.
      subscripts: the form that the product comes down to; of "batch" none.
      batch: pairs of axes, left and right.
      outer: axes of the left operand outside of the ragged one, of its kind.
      ragged: the ragged axis; in a contraction its partner on the right, too.
      inner: like `outer`, the axes inside of it; of a contraction pairs.
      lhs_rest, rhs_rest: the other axes: contracted or columns, in the order of `subscripts`;
        two tuples for weights.
      group: the axis of groups of the right operand, if it has one.
    """

    kind: Kind
    subscripts: str
    batch: tuple[tuple[int, int], ...]
    outer: tuple[int, ...]
    ragged: tuple[int, ...]
    inner: tuple[Any, ...]
    lhs_rest: tuple[int, ...]
    rhs_rest: tuple[tuple[int, ...], ...]
    group: int | None = None

    @classmethod
    def of(cls, numbers: lax.RaggedDotDimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> RaggedAxes:
        """Returns the axes; `numbers` are valid ones."""
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
        (ragged,) = numbers.lhs_ragged_dimensions
        batch = tuple(zip(lhs_batch, rhs_batch, strict=True))
        contracted = list(zip(lhs_contracted, rhs_contracted, strict=True))
        groups = tuple(numbers.rhs_group_dimensions)
        lhs_free = _others(lhs_ndim, lhs_contracted, lhs_batch)
        rhs_free = _others(rhs_ndim, rhs_contracted, rhs_batch, groups)
        if ragged in lhs_batch:
            return cls("batch", "", batch, (), (ragged,), (), (), ())
        if ragged in lhs_contracted:
            place = lhs_contracted.index(ragged)
            outer, inner = lhs_contracted[:place], contracted[place + 1 :]
            return cls(
                "contraction", CONTRACTION, batch, tuple(outer), contracted[place], tuple(inner),
                lhs_free, (rhs_free,),
            )  # fmt: skip
        place = lhs_free.index(ragged)
        contracted.sort()  # as they lie on the left
        k = tuple(right for _, right in contracted)
        before = (*rhs_batch, *groups)
        in_memory = [(*before, *rest) for rest in ((*k, *rhs_free), (*rhs_free, *k))]
        ascending = tuple(range(rhs_ndim))
        transposed = in_memory[1] == ascending != in_memory[0]
        transposed = transposed or (in_memory[0] != ascending and rhs_ndim - 1 in k)
        return cls(
            "rows",
            ROWS_TRANSPOSED if transposed else ROWS,
            batch, lhs_free[:place], (ragged,), lhs_free[place + 1 :],
            tuple(left for left, _ in contracted),
            (rhs_free, k) if transposed else (k, rhs_free),
            groups[0],
        )  # fmt: skip

    def mapped(
        self, product: Callable[[Any, Any, Any], jax.Array], lhs: Any, rhs: Any, sizes: Any
    ) -> jax.Array:
        """Returns the result, from products without outer and batch axes.

        Args:
          product: of (T, inner, K or M), (G, K, N) or (G, N, K) or (T, inner, N), and (G,) sizes:
            (T * inner, N) or (G, M, N).
          lhs, rhs, sizes: as the user gave them.
        """
        batch_extents = [lhs.shape[axis] for axis, _ in self.batch]
        outer_extents = [lhs.shape[axis] for axis in self.outer]
        lhs_extents = [lhs.shape[axis] for axis in self.lhs_rest]
        rows = self.kind == "rows"
        inner = [axis if rows else axis[0] for axis in self.inner]
        lead = [left for left, _ in self.batch]
        groups = [lead, list(self.outer), [self.ragged[0]], inner, list(self.lhs_rest)]
        left = _arranged(lhs, groups)
        lead = [right for _, right in self.batch]
        if rows:
            right = _arranged(rhs, [lead, [self.group], *map(list, self.rhs_rest)])
            free = self.rhs_rest[1] if self.subscripts == ROWS else self.rhs_rest[0]
        else:
            inner = [axis for _, axis in self.inner]
            (free,) = self.rhs_rest
            right = _arranged(rhs, [lead, [self.ragged[1]], inner, list(free)])
        rhs_extents = [rhs.shape[axis] for axis in free]
        each = sizes.ndim > 1  # sizes of their own for every outer and batch index
        if each:
            shape = (prod(batch_extents), prod(outer_extents), sizes.shape[-1])
            sizes = sizes.reshape(shape)
        function, out_axis = product, 0 if rows else 1
        if self.outer:
            function = jax.vmap(function, (0, None, 0 if each else None))
        else:
            left = left.reshape(left.shape[0], *left.shape[2:])
            sizes = sizes[:, 0] if each else sizes
        if self.batch:
            function = jax.vmap(function, (0, 0, 0 if each else None), out_axis)
        else:
            left, right = left.reshape(left.shape[1:]), right.reshape(right.shape[1:])
            sizes = sizes[0] if each else sizes
        out = function(left, right, sizes)
        if rows:
            own = [lhs.shape[axis] for axis in (*self.ragged, *self.inner)]
            return out.reshape(*batch_extents, *outer_extents, *own, *rhs_extents)
        return out.reshape(out.shape[0], *batch_extents, *lhs_extents, *rhs_extents)


def _others(ndim: int, *taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(ndim) if not any(axis in axes for axes in taken))


def _arranged(array: Any, groups: Sequence[Sequence[Any]]) -> Any:
    """Returns the array with an axis for each group of its axes, in this order."""
    shape = [prod(array.shape[axis] for axis in group) for group in groups]
    order = tuple(axis for group in groups for axis in group)
    if order != tuple(range(array.ndim)):
        array = lax.transpose(array, order)
    return array.reshape(shape)
