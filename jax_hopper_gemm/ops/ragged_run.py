"""Ragged products as they run: on the primitives of this library, or on JAX's own product.

`run_product` and `run_with_epilogue` take checked arguments through the same steps. Arrays with
Explicit mesh axes are taken into Auto axes first. A product that no form covers is left to JAX. Of
any other, JAX's own product says which precision and dtype the arguments mean, and the axes are
brought into the order of a form (see `ragged_axes`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, typeof
from jax.sharding import PartitionSpec

from ..fusion.jaxprs import varying_together
from ..fusion.memo import memoised
from ..gemm.groups import VARLEN_M_KN, VARLEN_M_NK
from ..gemm.product import Options, Product
from ..gemm.subscripts import Subscripts
from ..primitives.auto_axes import in_auto_axes, is_explicit, kept_sharding
from ..primitives.define import accumulator_dtype
from ..primitives.fused_dot import fused_dot
from ..primitives.group_sizes import as_int32, sizes_and_groups, sizes_in_rows
from ..primitives.ragged_dot import hopper_ragged_dot
from ..primitives.rows import pick_rows
from .dense import dot_general
from .dense_run import INLINE
from .ragged_axes import RaggedAxes, partitions, sharding_of_product, shardings_of_results
from .settled import Settled, settled
from .steps import Gate, Steps, result_dtypes, traced, with_range

# Taken here, so that it stays JAX's own where `intercept_ragged_dot` puts ours in its place.
lax_ragged_dot_general = lax.ragged_dot_general

BASIC = lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])  # of `lax.ragged_dot`
VARLEN_M_GATE_UP = Subscripts.parse("mk,gkcn->mn")


class RaggedArrays(NamedTuple):
    """What a ragged product reads."""

    lhs: Any  # (M, K), or (S, K) of which `rows` picks; with other numbers than `BASIC` any array
    # The right operand; or weights (G, K, N) of gate and up, or both in one (G, K, 2, N).
    rights: tuple[Any, ...]
    sizes: Any  # integers
    offset: Any = None  # number of the first group, where `rights` has those of some; or None
    rows: Any = None  # (M,) indices of rows of `lhs`, or None
    blocks: Any = None  # scales of blocks of `lhs` and of `rights`, by `scales_of_groups`, or None

    def axes(self, numbers: lax.RaggedDotDimensionNumbers) -> RaggedAxes:
        rhs_ndim = 3 if numbers is BASIC else np.ndim(self.rights[0])
        return RaggedAxes.of(numbers, np.ndim(self.lhs), rhs_ndim)

    def sharding_of_product(self, op: str, numbers: lax.RaggedDotDimensionNumbers) -> Any:
        """Returns the sharding that a product keeps of its operands' Explicit mesh axes."""
        lhs, rhs = partitions(self.lhs), partitions(self.rights[0])
        if numbers is BASIC:  # without an axis of gate and up
            rhs = (*rhs[:2], rhs[-1])
        return sharding_of_product(op, self.axes(numbers), lhs, rhs, self.rows)

    def gathered(self, x: Any) -> Any:
        """Returns the rows, of the left operand or of its scales, that are multiplied."""
        if self.rows is None or x.shape[:1] != self.lhs.shape[:1]:  # or one scale for all
            return x
        rows = as_int32(self.rows, least=-1)
        sharding = PartitionSpec(*kept_sharding(rows, rows.shape), None)
        return in_auto_axes(pick_rows, sharding, x, rows)

    @property
    def length(self) -> int:
        """The number of rows that are multiplied."""
        return (self.lhs if self.rows is None else self.rows).shape[0]

    def canonical(self, options: Options) -> Options:
        """Returns options of the product by `BASIC`, with the dtype that it has."""
        if isinstance(options.preferred_element_type, tuple):
            options = replace(options, preferred_element_type=None)
        count, k, *_, n = self.rights[0].shape
        lhs: Any = typeof(self.lhs)
        lhs = lhs.update(shape=(self.length, *lhs.shape[1:]))
        weights = jax.ShapeDtypeStruct((count, k, n), self.rights[0].dtype)
        options = _canonical(lhs, weights, typeof(self.sizes), BASIC, options)
        dtype = options.preferred_element_type or jnp.result_type(lhs, weights)
        return replace(options, preferred_element_type=dtype)

    def wide_products(self, options: Options) -> tuple[Any, ...]:
        """Returns the products as a function of them sees them."""
        dtype, right = self.canonical(options).preferred_element_type, self.rights[0]
        product = self._like((self.length, right.shape[-1]), accumulator_dtype(dtype))
        return (product,) * (2 if right.ndim == 4 else len(self.rights))

    def seen_from_rows(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns a function's operands as it sees them: of entries for groups each row's own."""
        return tuple(
            self._like((self.length, x.shape[2]), x.dtype) if jnp.ndim(x) == 3 else x
            for x in operands
        )

    def _like(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an abstract value that varies over mesh axes as the arrays do."""
        lhs: Any = typeof(self.lhs)
        return lhs.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)


# A product, and where the ragged axis is contracted a multiple of it added to a matrix.


def run_product(
    arrays: RaggedArrays,
    operands: tuple[Any, ...],
    steps: Steps,
    numbers: lax.RaggedDotDimensionNumbers,
    options: Options,
    out_sharding: Any,
) -> jax.Array:
    """Returns a ragged product; of one that contracts the ragged axis `alpha * product + beta * c`.

    Args:
      arrays: with one right operand; neither offset nor rows beside `operands`.
      operands: those of alpha, c and beta that `steps.named` names, in this order.
    """
    (rhs,), lhs, sizes = arrays.rights, arrays.lhs, arrays.sizes
    if arrays.axes(numbers).kind == "batch":
        return dot_general(
            lhs, rhs, numbers.dot_dimension_numbers, cotangent_dtype=options.cotangent_dtype,
            implementation=options.implementation, out_sharding=out_sharding,
            recipe=options.recipe and options.recipe.recipe, **options.of_dot(),
        )  # fmt: skip
    if is_explicit(lhs, rhs, sizes, *operands):
        if out_sharding is None:
            out_sharding = arrays.sharding_of_product(steps.op, numbers)
        named = {"steps": steps, "numbers": numbers, "options": options, "out_sharding": None}
        return in_auto_axes(partial(run_product, **named), out_sharding, arrays, operands)
    if reason := left_to_lax(lhs, rhs, sizes, out_sharding, numbers):
        _refuse_ours(steps.op, reason, arrays, options)
        return _run_by_lax(arrays, operands, steps, numbers, options, out_sharding)
    return _traced_product(arrays, operands, steps, numbers, options)


@partial(jax.jit, static_argnums=(2, 3, 4, 5), inline=INLINE)
def _run_by_lax(
    arrays: RaggedArrays,
    operands: tuple[Any, ...],
    steps: Steps,
    numbers: lax.RaggedDotDimensionNumbers,
    options: Options,
    out_sharding: Any,
) -> jax.Array:
    theirs = partial(
        lax_ragged_dot_general, arrays.lhs, arrays.rights[0], arrays.sizes, numbers,
        out_sharding=out_sharding, **options.of_dot(),
    )  # fmt: skip
    if steps.plain:
        return theirs()
    dtype = jax.eval_shape(theirs).dtype
    product = theirs(preferred_element_type=accumulator_dtype(dtype))
    dtypes = result_dtypes(steps, options.preferred_element_type)
    return steps.after(product, operands, dtype, dtypes)


@partial(jax.jit, static_argnums=(2, 3, 4), inline=INLINE)
def _traced_product(
    arrays: RaggedArrays,
    operands: tuple[Any, ...],
    steps: Steps,
    numbers: lax.RaggedDotDimensionNumbers,
    options: Options,
) -> jax.Array:
    lhs, (rhs,), sizes = arrays.gathered(arrays.lhs), arrays.rights, arrays.sizes
    dtypes = result_dtypes(steps, options.preferred_element_type)
    axes = RaggedAxes.of(numbers, lhs.ndim, rhs.ndim)
    options = _canonical(typeof(lhs), typeof(rhs), typeof(sizes), numbers, options)
    place = steps.named.index("c") if "c" in steps.named else len(operands)

    def product(left: Any, right: Any, own_sizes: Any, *c: Any, inner: int) -> jax.Array:
        length = left.shape[0]
        own_sizes = sizes_in_rows(own_sizes, length, inner)
        count = right.shape[0] if axes.kind == "varlen_m" else own_sizes.shape[0]
        own_sizes, groups = sizes_and_groups(own_sizes, arrays.offset, count, length)
        whole = Product(axes.subscripts, options, groups=groups)
        if steps.plain:
            return hopper_ragged_dot(left, right, own_sizes, whole)
        dtype = options.preferred_element_type or jnp.result_type(left, right)
        shape = (count, left.shape[1], right.shape[1])
        like = jax.ShapeDtypeStruct(shape, accumulator_dtype(dtype))
        own = (*operands[:place], *c, *operands[place + 1 :])
        follow = traced(steps, (like,), own, dtype, dtypes)
        results = fused_dot(
            follow.function, (left, right), follow.operands,
            whole.with_options(preferred_element_type=dtype), out_dtypes=follow.dtypes,
            in_place=follow.in_place(steps.named, like), sizes=own_sizes,
        )  # fmt: skip
        return follow.structured(results)

    return axes.mapped(product, lhs, rhs, sizes, *operands[place : place + 1])


# Rows times their group's weights, and a function of that.


def run_with_epilogue(
    arrays: RaggedArrays,
    operands: tuple[Any, ...],
    function: Steps | Gate,
    options: Options,
    out_sharding: Any = None,
) -> Any:
    """Returns a function of ragged products of rows, by the numbers `BASIC`.

    Args:
      operands: the function's; those of rank 3 have an entry for each group.
      options: with a dtype of the product, or a tuple of the results' dtypes.
    """
    leaves, structure = jax.tree.flatten((arrays, operands))
    arrays, operands = jax.tree.unflatten(structure, varying_together(*leaves))
    lhs, rights, sizes, _, rows, _ = arrays
    if is_explicit(lhs, *rights, sizes, rows, *operands):
        with_epilogue = partial(run_with_epilogue, function=function, options=options)
        if out_sharding is None:
            out_sharding = arrays.sharding_of_product(function.op, BASIC)
        if getattr(function, "epilogue", None) is not None:
            shape = (lhs if rows is None else rows).shape[0], rights[0].shape[-1]
            both = arrays, operands
            out_sharding = shardings_of_results(with_epilogue, both, out_sharding, shape)
        return in_auto_axes(with_epilogue, out_sharding, arrays, operands)
    if out_sharding is not None:
        reason = left_to_lax(lhs, rights[0], sizes, out_sharding, BASIC)
        raise ValueError(f"{function.op}: {reason}")
    options = with_range(options, function, lhs)
    products = partial(arrays.wide_products, options)
    own, seen = settled(function, products, arrays.seen_from_rows(operands), lhs, options)
    consts = seen[len(operands) :]
    if any(x.ndim == 3 for x in consts):  # they would be by groups
        own, consts = function, ()
    dtypes = result_dtypes(function, options.preferred_element_type)
    return _traced_with_epilogue(arrays, (*operands, *consts), own, options, dtypes)


@partial(jax.jit, static_argnums=(2, 3, 4), inline=INLINE)
def _traced_with_epilogue(
    arrays: RaggedArrays,
    operands: tuple[Any, ...],
    function: Steps | Gate | Settled,
    options: Options,
    dtypes: tuple[Any, ...] | None,
) -> Any:
    lhs, rights, blocks = arrays.gathered(arrays.lhs), arrays.rights, arrays.blocks
    count, _, *planes, _ = rights[0].shape
    options = arrays.canonical(options)
    dtype, length = options.preferred_element_type, lhs.shape[0]
    products = arrays.wide_products(options)
    steps = traced(function, products, arrays.seen_from_rows(operands), dtype, dtypes)
    sizes, groups = sizes_and_groups(as_int32(arrays.sizes), arrays.offset, count, length)
    subscripts = VARLEN_M_GATE_UP if planes else VARLEN_M_KN
    if blocks:  # K comes last
        blocks = arrays.gathered(blocks[0]), blocks[1]
        rights, subscripts = tuple(jnp.swapaxes(x, 1, 2) for x in rights), VARLEN_M_NK
    results = fused_dot(
        steps.function, (lhs, *rights), (*operands, *steps.operands[len(operands) :]),
        Product(subscripts, options, groups=groups), out_dtypes=steps.dtypes, sizes=sizes,
        blocks=blocks,
    )  # fmt: skip
    return steps.structured(results)


# What JAX's own product runs and decides.


def left_to_lax(
    lhs: Any, rhs: Any, sizes: Any, out_sharding: Any, numbers: lax.RaggedDotDimensionNumbers
) -> str | None:
    """Returns why JAX's own product is the answer whatever the GPU; None where it is not."""
    if out_sharding is not None and not is_explicit(lhs, rhs, sizes):
        return "out_sharding came, and its arrays have no Explicit mesh axes"
    axes = RaggedAxes.of(numbers, np.ndim(lhs), np.ndim(rhs))
    if axes.kind == "varlen_k" and axes.outer:
        return "it contracts axes outside of the ragged one"
    return None


def _refuse_ours(op: str, reason: str, arrays: RaggedArrays, options: Options) -> None:
    """Raises if the user asks for what JAX's own product, which is the answer, does not have."""
    if options.insists:
        raise NotImplementedError(f"{options.insists}: no kernel runs {op}: {reason}")
    ours = {
        "group_offset": arrays.offset, "row_indices": arrays.rows,
        "cotangent_dtype": options.cotangent_dtype, "recipe": options.recipe,
    }  # fmt: skip
    for name, argument in ours.items():
        if argument is not None:
            raise NotImplementedError(
                f"{op}: {name} came, and XLA, which has none, would run this: {reason}"
            )


@memoised
def _canonical(
    lhs: Any, rhs: Any, sizes: Any, numbers: lax.RaggedDotDimensionNumbers, options: Options
) -> Options:
    """Returns options with precision and dtype as JAX puts them into its product of these types."""
    if numbers.rhs_group_dimensions:  # fewer than there are sizes, with an offset
        count = rhs.shape[numbers.rhs_group_dimensions[0]]
        sizes = jax.ShapeDtypeStruct((*sizes.shape[:-1], count), sizes.dtype)
    function = partial(
        lax_ragged_dot_general, ragged_dot_dimension_numbers=numbers, **options.of_dot()
    )
    equations = jax.make_jaxpr(function)(lhs, rhs, sizes).jaxpr.eqns
    (params,) = (e.params for e in equations if e.primitive.name == "ragged_dot_general")
    return replace(options, **{x: params[x] for x in ("precision", "preferred_element_type")})
