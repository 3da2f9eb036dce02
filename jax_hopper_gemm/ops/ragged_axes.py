"""The axes of a `jax.lax.RaggedDotDimensionNumbers`, brought into the order of one of our forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import jax
from jax import lax

from ..gemm.groups import VARLEN_K, VARLEN_M_KN, VARLEN_M_NK
from ..gemm.subscripts import Subscripts

Kind = Literal["varlen_m", "varlen_k", "batch"]


@dataclass(frozen=True)
class RaggedAxes:
    """What each axis of the two operands is to a ragged product.

    Attributes:
      kind: "varlen_m" where the ragged axis is a free one of the left operand, "varlen_k" where it
        is contracted, "batch" where it is a batch axis.
      form: the form that the product comes down to; None for "batch".
      batch: pairs of axes, left and right.
      outer: axes of the left operand outside of the ragged one, of its kind.
      ragged: the ragged axis; in varlen_k its partner on the right, too.
      inner: like `outer`, the axes inside of it; in varlen_k pairs.
      lhs_others, rhs_others: the other axes: contracted or columns, in the order of the form;
        two tuples for weights.
      group: the axis of groups of the right operand, if it has one.
    """

    kind: Kind
    form: Subscripts | None
    batch: tuple[tuple[int, int], ...]
    outer: tuple[int, ...]
    ragged: tuple[int, ...]
    inner: tuple[Any, ...]
    lhs_others: tuple[int, ...]
    rhs_others: tuple[tuple[int, ...], ...]
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
            return cls("batch", None, batch, (), (ragged,), (), (), ())
        if ragged in lhs_contracted:
            place = lhs_contracted.index(ragged)
            outer, inner = lhs_contracted[:place], contracted[place + 1 :]
            return cls(
                "varlen_k", VARLEN_K, batch, tuple(outer), contracted[place], tuple(inner),
                lhs_free, (rhs_free,),
            )  # fmt: skip
        place = lhs_free.index(ragged)
        contracted.sort()  # as they lie on the left
        k = tuple(right for _, right in contracted)
        before = (*rhs_batch, *groups)
        in_memory = [(*before, *matrix) for matrix in ((*k, *rhs_free), (*rhs_free, *k))]
        ascending = tuple(range(rhs_ndim))
        transposed = in_memory[1] == ascending != in_memory[0]
        transposed = transposed or (in_memory[0] != ascending and rhs_ndim - 1 in k)
        return cls(
            "varlen_m",
            VARLEN_M_NK if transposed else VARLEN_M_KN,
            batch, lhs_free[:place], (ragged,), lhs_free[place + 1 :],
            tuple(left for left, _ in contracted),
            (rhs_free, k) if transposed else (k, rhs_free),
            groups[0],
        )  # fmt: skip

    @property
    def subscripts(self) -> Subscripts:
        assert self.form is not None, "a ragged batch axis has no form"
        return self.form

    def mapped(
        self,
        product: Callable[..., jax.Array],
        lhs: Any,
        rhs: Any,
        sizes: Any,
        *matrices: Any,
    ) -> jax.Array:
        """Returns the result, from products without outer and batch axes.

        Args:
          product: of (T, K), weights in the order of the form or (T, N), (G,) sizes, `matrices` of
            shape (G, K, N), and `inner`, the number of rows for each of the ragged axis; returns
            (T, N) or (G, K, N).
          lhs, rhs, sizes: as the user gave them.
          *matrices: in varlen_k without outer axes, arrays of the result's shape.
        """
        rows = self.kind == "varlen_m"
        left_batch, right_batch = ([pair[side] for pair in self.batch] for side in (0, 1))
        left_rows, right_rows = (
            ((*self.ragged, *self.inner), ())
            if rows
            else tuple(zip(self.ragged, *self.inner, strict=True))
        )
        lead = [left_batch] * bool(self.batch) + [list(self.outer)] * bool(self.outer)
        left = _arranged(lhs, [*lead, left_rows, self.lhs_others])
        right = _arranged(
            rhs,
            [right_batch] * bool(self.batch) + [[self.group] if rows else right_rows]
            + list(self.rhs_others),
        )  # fmt: skip
        own_sizes = sizes.ndim > 1  # for every outer and batch index
        if own_sizes:
            sizes = sizes.reshape(*(prod(lhs.shape[axis] for axis in axes) for axes in lead), -1)
        inner = prod(lhs.shape[axis] for axis in left_rows[1:])
        function, mapped_sizes = partial(product, inner=inner), 0 if own_sizes else None
        if self.outer:
            function = jax.vmap(function, (0, None, mapped_sizes))
        if self.batch:
            axes = (0, 0, mapped_sizes, *(1 for _ in matrices))
            function = jax.vmap(function, axes, 0 if rows else 1)
        matrix = (*left.shape[:-2], left.shape[-1], right.shape[-1])
        own = [_reshaped(x, (x.shape[0], *matrix)) for x in matrices]
        out = function(left, right, sizes, *own)

        shape = self.of_result(lhs.shape, rhs.shape)
        return _reshaped(out, shape if rows else [out.shape[0], *shape])

    def of_result(self, lhs: Sequence[Any], rhs: Sequence[Any]) -> list[Any]:
        """Returns from what is known of each axis of the operands what is of the result's.

        Without that of groups, which a contraction has in front.
        """
        rows = (*self.ragged, *self.inner) if self.kind == "varlen_m" else self.lhs_others
        left = [*(pair[0] for pair in self.batch), *self.outer, *rows]
        columns = self.rhs_others[0 if self.form == VARLEN_M_NK else -1]
        return [lhs[axis] for axis in left] + [rhs[axis] for axis in columns]

    def of_sum(self, lhs: Sequence[Any], rhs: Sequence[Any]) -> list[Any]:
        """Returns what is known of the operands' contracted axes, and of that of groups."""
        if self.kind == "varlen_k":
            left, right = zip(self.ragged, *self.inner, strict=True)
        else:
            k = self.rhs_others[1 if self.form == VARLEN_M_NK else 0]
            assert self.group is not None
            left, right = self.lhs_others, (*k, self.group)
        return [lhs[axis] for axis in left] + [rhs[axis] for axis in right]


def _others(ndim: int, *taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(ndim) if not any(axis in axes for axes in taken))


def _arranged(array: Any, groups: Sequence[Sequence[Any]]) -> Any:
    """Returns the array with an axis for each group of its axes, in this order."""
    order = tuple(axis for group in groups for axis in group)
    shape = [prod(array.shape[axis] for axis in group) for group in groups]
    if order != tuple(range(array.ndim)):
        array = lax.transpose(array, order)
    return _reshaped(array, shape)


def _reshaped(array: Any, shape: Sequence[Any]) -> Any:
    """Returns the array itself where it has the shape: nothing hides where it comes from."""
    return array if array.shape == tuple(shape) else array.reshape(shape)
