"""Ragged products (grouped GEMM): `ragged_dot` and `ragged_dot_general`, as in `jax.lax`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..gemm.groups import VARLEN_M_NK
from ..gemm.product import Implementation, Options
from . import checks
from .activations import Activation, activation_function
from .contexts import in_contexts, takes_batch_invariant
from .quantized import Quantized, as_quantized, is_quantized
from .quantized_products import scales_of_groups
from .ragged_axes import RaggedAxes
from .ragged_run import BASIC, RaggedArrays, run_product, run_with_epilogue
from .recipes import Recipe, as_recipe
from .steps import SCALES, Results, Steps, named_in
from .weights import widened_pair


@takes_batch_invariant
def ragged_dot(
    lhs: ArrayLike | Quantized,
    rhs: ArrayLike | Quantized,
    group_sizes: ArrayLike,
    precision: Any = None,
    preferred_element_type: DTypeLike | Sequence[DTypeLike | None] | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    *,
    cotangent_dtype: DTypeLike | None = None,
    row_indices: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    activation: str | Activation | None = None,
    epilogue: Callable[..., Results] | None = None,
    epilogue_operands: Sequence[ArrayLike] = (),
    save_preactivation: bool = True,
    recipe: Recipe | None = None,
    implementation: Implementation = None,
    batch_invariant: bool | None = None,
) -> Results:
    """Multiplies each run of rows of `lhs` by its own matrix from `rhs`, as `jax.lax.ragged_dot`.

    On a Hopper GPU a product of bfloat16, float16 or 8-bit arrays runs on a kernel that reads the
    sizes from the GPU's memory; everything else runs on XLA. dgrad and wgrad are grouped GEMMs
    too and read `rhs` in place; derivatives of any order and every `vmap` work. Accumulates in
    float32.

    Rows past the last group come back as zeros. A negative size counts as 0, and sizes are cut at
    the last row.

    Weights stored (G, N, K) are not copied by `ragged_dot(lhs, jnp.swapaxes(rhs, 1, 2), ...)`
    inside `jax.jit`, nor by `ragged_dot_general`.

    With `bias`, `activation` or `epilogue` the result is

        y = activation(ragged_dot(lhs, rhs, group_sizes) + bias of the row's group)
        epilogue(y, *epilogue_operands)

    in float32 from the kernel's accumulators, and gradients are fused as well, as in `matmul`.
    Rows of no group are zeros in `y` before the bias, and in every result of shape (M, N).

    With `row_indices` the product is that of `lhs[row_indices]`. Where a kernel runs inside
    `jax.jit`, this array is never written: forward and wgrad kernels gather the rows. The gradient
    of each row of `lhs` is the sum over the rows that pick it, in float32 and rounded once; no sum
    is atomic, and the same input gives the same bits.

    Args:
      lhs: (M, K), rows sorted by group; with `row_indices` (S, K), in any order.
      rhs: (G, K, N), one matrix a group. `Quantized` beside `lhs` of 16 bits, or both are.
      group_sizes: (G,) integers, on the GPU; zeros are fine.
      precision, preferred_element_type, cotangent_dtype, batch_invariant, implementation: as in
        `matmul`. `implementation="xla"` computes what `jax.lax.ragged_dot` does.
      group_offset: the number of the first group in `rhs`, () or (1,), for devices that hold the
        matrices of some groups; `group_sizes` are those of all groups. Rows of other groups come
        back as zeros, so that a `jax.lax.psum` over the devices completes the product.
      out_sharding: sharding of the product, for Explicit mesh axes. None: that of the rows and
        columns of the operands. Other results of `epilogue` are sharded by rows alone.
      row_indices: (M,) integers, for each row of the product the row of `lhs` that it multiplies.
        A negative or too large index stands for a row of zeros.
      bias: (G, N), a row for each matrix of `rhs`.
      activation: as in `matmul`.
      epilogue: a JAX function of `y`, (M, N), and of `epilogue_operands`, as in `matmul`.
      epilogue_operands: arrays that broadcast to (M, N); or, of rank 3, (G, 1, N) or (G, 1, 1), an
        entry for each matrix of `rhs`, which the function receives as (M, N) or (M, 1), with each
        row's entry. A gradient by group is a float32 sum of cotangents in the dtype of `lhs`.
      save_preactivation: as in `matmul`.
      recipe: as in `matmul`; `rhs` is the weights. Their gradient, which contracts the rows, runs
        in 16 bits unless the recipe has `grouped_weights=True`.

    Returns:
      (M, N), dtype `preferred_element_type`, else the promoted dtype of the operands; or what
      `epilogue` returns, as in `matmul`.

    Raises:
      ValueError: ranks or extents do not fit (a TypeError as well, as in JAX), sizes in NumPy
        are negative, or Explicit mesh axes leave the sharding of the result open.
      TypeError: an operand is not an array, or sizes are no integers.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product.
    """
    op = "ragged_dot"
    given = as_quantized(op, "lhs", lhs), as_quantized(op, "rhs", rhs)
    (lhs, rhs), scales = widened_pair(op, (("lhs", given[0]), ("rhs", given[1])), (-1, -2))
    quantized, blocks = is_quantized(lhs, rhs), None
    lhs, rhs = (x.values if isinstance(x, Quantized) else x for x in (lhs, rhs))
    lhs, rhs, group_sizes, group_offset, row_indices, bias = checks.as_arrays(
        op, {"group_offset": group_offset, "row_indices": row_indices, "bias": bias},
        lhs=lhs, rhs=rhs, group_sizes=group_sizes,
    )  # fmt: skip
    groups = checks.GroupArguments(group_sizes, group_offset, row_indices)
    checks.check_ragged_dot(lhs, rhs, groups, implementation, bias, activation)
    preferred_element_type = checks.as_result_dtype(op, preferred_element_type)
    if quantized:
        scales, blocks = scales_of_groups(op, *given)
        preferred_element_type = preferred_element_type or jnp.dtype(jnp.float32)
    plain = not (scales or blocks) and bias is None and activation is None and epilogue is None
    options = Options(
        implementation, precision, preferred_element_type, save_preactivation,
        cotangent_dtype=checks.as_cotangent_dtype(op, cotangent_dtype),
        recipe=as_recipe(op, recipe, given, cotangent_dtype),
    )  # fmt: skip
    operands = checks.check_steps(op, epilogue, epilogue_operands, plain, options)
    arrays = RaggedArrays(lhs, (rhs,), group_sizes, group_offset, row_indices, blocks)
    options = in_contexts(options)
    if plain:
        product: Any = run_product(arrays, (), Steps(op), BASIC, options, out_sharding)
        return product
    checks.check_group_operands(op, operands, rhs)
    # Those that all groups share are rows.
    scales |= {x: lax.squeeze(y, (0,)) for x, y in scales.items() if y.shape[:-2] == (1,)}
    if SCALES[0] in scales:
        scales[SCALES[0]] = arrays.gathered(scales[SCALES[0]])
    if bias is not None:
        scales["bias"] = jnp.expand_dims(bias, 1)
    steps = Steps(op, tuple(scales), activation_function(activation), epilogue)
    operands = *scales.values(), *operands
    return run_with_epilogue(arrays, operands, steps, options, out_sharding)


@takes_batch_invariant
@checks.names_itself
def ragged_dot_general(
    lhs: ArrayLike | Quantized,
    rhs: ArrayLike | Quantized,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    *,
    cotangent_dtype: DTypeLike | None = None,
    alpha: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    c: ArrayLike | None = None,
    recipe: Recipe | None = None,
    implementation: Implementation = None,
    batch_invariant: bool | None = None,
) -> jax.Array:
    """Contracts two arrays, an axis of `lhs` in groups, by the rules of `jax.lax`'s.

    There are three kinds, by the role of the ragged axis of `lhs`:

    - a free axis: rows are multiplied by their group's part of `rhs`, stored (G, K, N) or
      (G, N, K);
    - a contracted axis: the result has a leading axis of groups, and the part of an empty group
      is 0;
    - a batch axis: sizes change nothing, and the product is that of `dot_general`.

    Further axes become rows, columns or matrices of one GEMM; axes in an order that no kernel
    reads are copied. `jax.lax.ragged_dot_general` runs contracted axes outside of a ragged
    contracted one.

    Where the ragged axis is contracted, as in the wgrad of a grouped GEMM, the result is

        alpha * product + beta * c

    in float32 from the kernel's accumulators, so that the product is never rounded or stored. With
    `c` alone it adds to an accumulator; in its memory, if that is donated. The part of an empty
    group is beta * c. Gradients are products and multiples of the cotangent.

    Args:
      lhs, rhs: the operands. `Quantized` as in `ragged_dot`, of rows (M, K) and three axes of
        weights in any order.
      group_sizes: (G,) integers, or with the leading axes that `jax.lax.ragged_dot_general` says.
      ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`.
      group_offset: as in `ragged_dot`, where the ragged axis is a free one.
      precision, cotangent_dtype, out_sharding, implementation: as in `ragged_dot`.
      batch_invariant: as in `matmul`.
      preferred_element_type: dtype of the result; if None that of `c`, else the promoted dtype of
        the operands.
      alpha, beta: numbers or scalar arrays, where the ragged axis is contracted. `beta` is 1 if
        None.
      c: an array of the result's shape, of any dtype.
      recipe: as in `ragged_dot`; a product that contracts its rows runs in 16 bits unless
        the recipe has `grouped_weights=True`.

    Returns:
      The axes of `dot_general`'s result, after one of groups if the ragged axis is contracted.

    Raises:
      ValueError: axes or extents do not fit (a TypeError as well, as in JAX), sizes in NumPy are
        negative, or `alpha`, `beta` or `c` do not fit or came where the ragged axis is
        not contracted.
      TypeError: an operand is not an array, sizes are no integers, or the dimension numbers have
        another type.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product.
    """
    op = "ragged_dot_general"
    terms = {"alpha": alpha, "beta": beta, "c": c}
    given = as_quantized(op, "lhs", lhs), as_quantized(op, "rhs", rhs)
    lhs, rhs = (x.values if isinstance(x, Quantized) else x for x in given)
    lhs, rhs, group_sizes, group_offset, *arrays = checks.as_arrays(
        op, {"group_offset": group_offset} | terms, lhs=lhs, rhs=rhs, group_sizes=group_sizes
    )
    terms = {name: x for name, x in zip(terms, arrays, strict=True) if x is not None}
    checks.as_result_dtype(op, preferred_element_type, several=False)
    whole: list[Any] = [  # packed values are half as many
        jax.ShapeDtypeStruct(x.shape, x.values.dtype) if isinstance(x, Quantized) else array
        for x, array in zip(given, (lhs, rhs), strict=True)
    ]
    numbers = checks.check_ragged_dot_general(
        whole[0], whole[1], ragged_dot_dimension_numbers,
        checks.GroupArguments(group_sizes, group_offset), implementation, terms,
        preferred_element_type,
    )  # fmt: skip
    if is_quantized(*given):
        pair = _in_order_of_ragged_dot(op, *given, numbers)
        return ragged_dot(
            *pair, group_sizes, precision, preferred_element_type, group_offset, out_sharding,
            cotangent_dtype=cotangent_dtype, recipe=recipe, implementation=implementation,
        )  # fmt: skip
    names = named_in(terms, lhs, rhs)
    if names and preferred_element_type is None:
        preferred_element_type = checks.strong_dtype(terms.get("c"))
    arrays = RaggedArrays(lhs, (rhs,), group_sizes, group_offset)
    options = Options(
        implementation, precision, preferred_element_type,
        cotangent_dtype=checks.as_cotangent_dtype(op, cotangent_dtype),
        recipe=as_recipe(op, recipe, (lhs, rhs), cotangent_dtype),
    )  # fmt: skip
    operands, options = tuple(terms[name] for name in names), in_contexts(options)
    return run_product(arrays, operands, Steps(op, names), numbers, options, out_sharding)


def _in_order_of_ragged_dot(
    op: str, lhs: Any, rhs: Any, numbers: lax.RaggedDotDimensionNumbers
) -> tuple[Any, Any]:
    """Returns operands, of which some are quantized, with the axes (M, K) and (G, K, N)."""
    axes = RaggedAxes.of(numbers, lhs.ndim, rhs.ndim)
    order: Any = ()
    if axes.kind == "varlen_m" and (lhs.ndim, rhs.ndim, axes.ragged) == (2, 3, (0,)):
        ((k,), (n,)) = axes.rhs_others[:: -1 if axes.form == VARLEN_M_NK else 1]
        order = axes.group, k, n
    if not order or (order[2] != 2 and getattr(rhs, "packed", False)):
        raise NotImplementedError(
            f"{op}: of quantized arrays rows in groups, (M, K), are multiplied by weights of three "
            f"axes, packed ones in the order (G, K, N); lhs has {lhs.ndim} axes and rhs "
            f"{rhs.ndim}: its dequantize() is an array"
        )
    return lhs, jax.tree.map(lambda x: lax.transpose(x, order), rhs)
