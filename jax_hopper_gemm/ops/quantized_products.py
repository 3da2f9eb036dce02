"""Products of two quantized arrays.

Scales that do not change along the contracted axis are multiplied by what the kernel has summed,
others while it sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..fusion.jaxprs import traced
from ..gemm.dtypes import QUANTIZED
from ..gemm.product import Options
from ..primitives.auto_axes import in_auto_axes, is_explicit
from ..primitives.scaled_dot import hopper_scaled_dot
from . import checks
from .batch_invariance import in_contexts
from .dense_run import JaxProduct, run
from .quantized import BLOCK, BLOCKS, Quantized, blocks_of, spread
from .steps import SCALES, Steps


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale"), meta_fields=("blocks", "batch", "free"),
)  # fmt: skip
@dataclass(frozen=True)
class Operand:
    """A quantized operand of a product, its axes in the order batch, free, contracted."""

    values: jax.Array
    scale: jax.Array
    blocks: tuple[int, ...]
    batch: int  # how many axes of each kind; one is contracted
    free: int

    @property
    def constant(self) -> bool:
        """Whether no scale changes along the contracted axis."""
        return self.blocks[-1] == 0

    def flat(self) -> tuple[jax.Array, jax.Array]:
        """Returns matrices (B, rows, K) or (rows, K), and their block scales."""
        batch, values, blocks = self.batch, self.values, self.blocks
        for_rows = self.free != 1 or blocks[batch] == 0  # one for each row
        scale = spread(self.scale, blocks[: -1 if for_rows else batch], values.shape)
        if for_rows:
            wide = (*scale.shape[:batch], *values.shape[batch:-1], scale.shape[-1])
            scale = jnp.broadcast_to(scale, wide)
        along_k = -(-values.shape[-1] // BLOCK)
        rows = prod(scale.shape[batch:-1])
        scale = jnp.broadcast_to(scale, (*values.shape[:batch], *scale.shape[batch:-1], along_k))
        lead = (prod(values.shape[:batch]),) if batch else ()
        matrices = (*lead, prod(values.shape[batch:-1]), values.shape[-1])
        return values.reshape(matrices), scale.reshape(*lead, rows, along_k)


def run_quantized(
    operands: tuple[tuple[str, Any], ...],
    dimension_numbers: Any,
    steps: Steps,
    following: tuple[Any, ...],
    options: Options,
    out_sharding: Any,
) -> Any:
    """Returns a product of quantized arrays and what follows it.

    Args:
      operands: two, each one's name, for messages, and itself.
      dimension_numbers: as in `dot_general`; one axis is contracted.
      steps: what follows; `following` are its operands, checked.
      options: `preferred_element_type` None is float32.
      out_sharding: of the product, for Explicit mesh axes.
    """
    op = steps.op
    check_quantized(op, operands)
    (lhs_k, rhs_k), (lhs_batch, rhs_batch) = dimension_numbers
    if len(lhs_k) != 1:
        raise NotImplementedError(
            f"{op}: {len(lhs_k)} axes of quantized arrays are contracted, expected one: reshape "
            "them"
        )
    axes = (lhs_k, lhs_batch), (rhs_k, rhs_batch)
    lhs, rhs = (_arranged(op, *x, *own) for x, own in zip(operands, axes, strict=True))
    preferred = options.preferred_element_type
    if lhs.constant and rhs.constant:
        scales = (_broadcast(lhs, rhs.free, 0), _broadcast(rhs, 0, lhs.free))
        scaled = replace(steps, named=(*SCALES, *steps.named))
        numbers = ("dimension_numbers", dimension_numbers), ("out_sharding", out_sharding)
        values = tuple(x.values for _, x in operands)
        options = replace(options, preferred_element_type=preferred or jnp.float32)
        product = JaxProduct(lax.dot_general, numbers)
        return run(product, values, scaled, (*scales, *following), options)
    dtype, whole, several = steps.dtypes(preferred, jnp.float32)
    by_jax = partial(
        lax.dot_general, dimension_numbers=dimension_numbers, precision=options.precision,
        preferred_element_type=dtype, out_sharding=out_sharding,
    )  # fmt: skip
    closed = traced(by_jax, *(jax.typeof(x.values) for _, x in operands))
    (dot,), (like,) = closed.jaxpr.eqns, closed.out_avals
    precision = dot.params["precision"]
    options = in_contexts(replace(options, preferred_element_type=dtype, precision=precision))
    multiply = partial(_product, options=options, shape=like.shape)
    if is_explicit(lhs.values, rhs.values):  # axes are merged
        multiply = partial(in_auto_axes, multiply, like.sharding)
    return steps.after(multiply(lhs, rhs), following, whole, several)


def scales_of_groups(op: str, lhs: Quantized, rhs: Quantized) -> tuple[dict[str, Any], Any]:
    """Returns the scales of a ragged product of rows (M, K) and weights (G, K, N).

    Those of `SCALES` where none changes along K, as they broadcast against the result, with an axis
    of groups before it; else none, and those of blocks, as `scaled_dot` takes them of rows and of
    weights (G, N, K).
    """
    operands = ("lhs", lhs), ("rhs", rhs)
    check_quantized(op, operands)
    left, right = _arranged(op, *operands[0], (1,), ()), _arranged(op, *operands[1], (1,), (0,))
    if left.constant and right.constant:
        rows, columns = (spread(x.scale, x.blocks[:-1], x.values.shape) for x in (left, right))
        columns = lax.transpose(columns, (0, 2, 1))
        pair = zip(SCALES, (rows, columns), strict=True)
        return {name: x.reshape(()) if x.size == 1 else x for name, x in pair}, None
    if left.blocks[0] == BLOCK:  # groups begin at any row
        scale = spread(left.scale, (BLOCK,), left.values.shape)
        left = replace(left, scale=scale, blocks=(1, *left.blocks[1:]))
    return {}, (left.flat()[1], right.flat()[1])


def constant_scale(op: str, name: str, x: Quantized, axis: int) -> jax.Array | None:
    """Returns the scales of an array that are one along an axis; None where they change there."""
    blocks = blocks_of(op, name, x)
    return None if blocks[axis] else spread(x.scale, blocks, x.shape)


def check_quantized(op: str, operands: Sequence[tuple[str, Any]]) -> None:
    """Checks that the operands of a product are quantized as kernels multiply them."""
    for name, x in operands:
        if not isinstance(x, Quantized):
            raise TypeError(
                f"{op}: {name} is {checks.describe(x)} beside a quantized array: quantize it, too, "
                "or convert it to bfloat16 or float16"
            )
        if x.zero is not None:
            raise NotImplementedError(
                f"{op}: {name} has zero points beside a quantized array; kernels multiply "
                "symmetric ones: quantize it without, or pass the other one in 16 bits"
            )
        if x.packed or x.values.dtype.name not in QUANTIZED:
            raise TypeError(
                f"{op}: {name} is of {'int4' if x.packed else x.values.dtype.name} beside a "
                "quantized array: pass the other one in 16 bits"
            )


def _product(lhs: Operand, rhs: Operand, *, options: Options, shape: Sequence[int]) -> jax.Array:
    """Returns a product with block scales."""
    (l_values, l_scale), (r_values, r_scale) = lhs.flat(), rhs.flat()
    return hopper_scaled_dot(l_values, r_values, l_scale, r_scale, options).reshape(shape)


def _arranged(
    op: str, name: str, x: Quantized, contracted: Sequence[int], batch: Sequence[int]
) -> Operand:
    blocks, scale = list(blocks_of(op, name, x)), jnp.asarray(x.scale, jnp.float32)
    for axis, block in enumerate(blocks):
        if axis in contracted and block not in (0, BLOCK) and x.shape[axis] > 1:
            raise NotImplementedError(
                f"{op}: {name} has a scale for each {'element' if block == 1 else block} of the "
                f"contracted axis; beside a quantized array kernels take one for each {BLOCK}: "
                "pass the other in 16 bits"
            )
        if block not in BLOCKS or block == BLOCK:
            continue
        scale, blocks[axis] = spread(scale, (*(0,) * axis, block), x.shape), 1
    free = [axis for axis in range(x.ndim) if axis not in (*contracted, *batch)]
    order = (*batch, *free, *contracted)
    return Operand(
        lax.transpose(x.values, order), lax.transpose(scale, order),
        tuple(blocks[axis] for axis in order), len(batch), len(free),
    )  # fmt: skip


def _broadcast(x: Operand, behind: int, before: int) -> jax.Array:
    """Returns scales that are constant along K as they broadcast against the result.

    Args:
      behind, before: how many free axes of the other operand follow or precede.
    """
    scale = lax.squeeze(x.scale, (x.scale.ndim - 1,))
    scale = spread(scale, x.blocks[:-1], x.values.shape)
    if scale.size == 1:
        return scale.reshape(())
    batch, own = scale.shape[: x.batch], scale.shape[x.batch :]
    return scale.reshape(*batch, *(1,) * before, *own, *(1,) * behind)
