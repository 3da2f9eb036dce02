"""Axes of ragged products: their roles, and shardings of results where mesh axes are Explicit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec

from ..gemm.groups import VARLEN_K, VARLEN_M_KN, VARLEN_M_NK
from ..gemm.subscripts import Subscripts
from ..lowering.devices import padded_partitions

Kind = Literal["varlen_m", "varlen_k", "batch"]


@dataclass(frozen=True)
class RaggedAxes:
    """The role of each axis of the two operands in a ragged product.

    It is "varlen_m" where the ragged axis is a free one of the left operand, "varlen_k" where that
    is contracted, "batch" where it is a batch axis. The other axes are contracted or columns.
    """

    kind: Kind
    form: Subscripts | None  # that the product comes down to; None for "batch"
    batch: tuple[tuple[int, int], ...]  # pairs of axes, left and right
    outer: tuple[int, ...]  # axes of the left operand outside of the ragged one, of its kind
    ragged: tuple[int, ...]  # the ragged axis; in varlen_k its partner on the right, too
    inner: tuple[Any, ...]  # like `outer`, the axes inside of it; in varlen_k pairs
    lhs_others: tuple[int, ...]
    rhs_others: tuple[tuple[int, ...], ...]  # in the order of the form, two tuples for weights
    group: int | None = None  # the axis of groups of the right operand, if it has one

    @classmethod
    def of(cls, numbers: lax.RaggedDotDimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> RaggedAxes:
        """Returns the axes; `numbers` are valid ones."""
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
        (ragged,) = numbers.lhs_ragged_dimensions
        batch = tuple(zip(lhs_batch, rhs_batch, strict=True))
        contracted = list(zip(lhs_contracted, rhs_contracted, strict=True))
        groups = tuple(numbers.rhs_group_dimensions)
        lhs_free = _other_axes(lhs_ndim, lhs_contracted, lhs_batch)
        rhs_free = _other_axes(rhs_ndim, rhs_contracted, rhs_batch, groups)
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
        self, product: Callable[..., jax.Array], lhs: Any, rhs: Any, sizes: Any, *matrices: Any
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
            mapped = [prod(lhs.shape[axis] for axis in axes) for axes in lead]
            sizes = sizes.reshape(*mapped, sizes.shape[-1])
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
        """Maps a property of each axis of the operands to the axes of the result.

        Without that of groups, which a contraction has in front.
        """
        rows = (*self.outer, *self.ragged, *self.inner)
        kept = rows if self.kind == "varlen_m" else self.lhs_others
        left = [*(pair[0] for pair in self.batch), *kept]
        columns = self.rhs_others[0 if self.form == VARLEN_M_NK else -1]
        return [lhs[axis] for axis in left] + [rhs[axis] for axis in columns]

    def of_sum(self, lhs: Sequence[Any], rhs: Sequence[Any]) -> list[Any]:
        """Maps a property of the operands' axes to the contracted axes and that of groups."""
        if self.kind == "varlen_k":
            left, right = zip(self.ragged, *self.inner, strict=True)
        else:
            k = self.rhs_others[1 if self.form == VARLEN_M_NK else 0]
            assert self.group is not None
            left, right = self.lhs_others, (*k, self.group)
        return [lhs[axis] for axis in left] + [rhs[axis] for axis in right]


def _other_axes(ndim: int, *taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(ndim) if not any(axis in axes for axes in taken))


def _arranged(array: Any, groups: Sequence[Sequence[Any]]) -> Any:
    """Returns the array with an axis for each group of its axes, in this order."""
    order = tuple(axis for group in groups for axis in group)
    shape = [prod(array.shape[axis] for axis in group) for group in groups]
    if order != tuple(range(array.ndim)):
        array = lax.transpose(array, order)
    return _reshaped(array, shape)


def _reshaped(array: Any, shape: Sequence[Any]) -> Any:
    """Reshapes an array, or returns it unchanged, so that lowering can see its producer."""
    return array if array.shape == tuple(shape) else array.reshape(shape)


def partitions(array: Any) -> tuple[Any, ...]:
    """Returns the mesh axes, or None, of each axis of an array or abstract value."""
    aval = array if isinstance(array, ShapedArray) else jax.typeof(array)
    return tuple(padded_partitions(aval.sharding, aval.ndim))


def sharding_of_product(
    op: str, axes: RaggedAxes, lhs: Sequence[Any], rhs: Sequence[Any], rows: Any
) -> PartitionSpec:
    """Returns the sharding of a product, which keeps that of its operands' rows and columns.

    Args:
      lhs, rhs: the mesh axes, or None, of each axis of the operands.
      rows: indices of rows of the left operand, or None.

    Raises:
      ValueError: the operands leave it open.
    """
    way_out = "Name the sharding of the result by out_sharding."
    over = _named(axes.of_sum(lhs, rhs))
    if over:
        raise ValueError(
            f"{op}: contracted axes, or the groups of weights, are sharded over the mesh axes "
            f"{sorted(set(over))}: it is open how the sum over these devices is to lie. {way_out}"
        )
    if rows is not None:
        lhs = (*partitions(rows)[:1], *lhs[1:])
    kept = axes.of_result(lhs, rhs)
    if len(used := _named(kept)) > len(set(used)):
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        raise ValueError(
            f"{op}: several axes of the result would be sharded over the mesh axes {twice}, as the "
            f"operands' are. {way_out}"
        )
    return PartitionSpec(*([None] if axes.kind == "varlen_k" else []), *kept)


def shardings_of_results(
    function: Callable[..., Any], arrays: Any, product: Any, shape: tuple[int, int]
) -> Any:
    """Returns the shardings of the results of `function(*arrays)`.

    Results of the product's shape have `product`, others with as many rows that of the rows.
    """
    (rows, *_) = (*getattr(product, "spec", product), None)

    def of(result: Any) -> Any:
        if result.shape == shape:
            return product
        if result.shape[:1] == shape[:1]:
            return PartitionSpec(rows, *[None] * (result.ndim - 1))
        return PartitionSpec()

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), arrays)
        return jax.tree.map(of, jax.eval_shape(function, *shapes))


def _named(axes: Sequence[Any]) -> list[str]:
    """Returns all mesh axes of a partition spec's entries."""
    entries = (x if isinstance(x, tuple) else (x,) for x in axes if x is not None)
    return [axis for entry in entries for axis in entry]
