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
from ..gemm.product import Options, Product
from ..gemm.subscripts import Subscripts
from ..primitives.auto_axes import in_auto_axes
from ..primitives.by_recipe import Operand, Operands, multiplied
from ..primitives.scaled_dot import beside_result
from . import checks
from .contexts import in_contexts
from .dense_run import JaxProduct, run
from .quantized import BLOCK, BLOCKS, Quantized, blocks_of, spread
from .steps import SCALES, Steps


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale"), meta_fields=("letters", "blocks", "batch"),
)  # fmt: skip
@dataclass(frozen=True)
class _Arranged:
    """A quantized operand of a product, its axes in the order batch, free, contracted."""

    values: jax.Array
    scale: jax.Array
    letters: str  # of the axes
    blocks: tuple[int, ...]
    batch: int  # how many axes; one is contracted

    @property
    def constant(self) -> bool:
        """Whether no scale changes along the contracted axis."""
        return self.blocks[-1] == 0

    def beside_result(self, out: str) -> jax.Array:
        """Returns scales that are constant along K as they broadcast against the result."""
        scale = spread(self.scale, self.blocks[:-1], self.values.shape)
        return beside_result(scale, self.letters, out)

    def of_blocks(self) -> Operand:
        """Returns the operand with scales of blocks as `scaled_dot` takes them."""
        batch, shape, blocks = self.batch, self.values.shape, self.blocks
        for_rows = len(shape) != batch + 2 or blocks[batch] == 0  # one for each row
        scale = spread(self.scale, blocks[: -1 if for_rows else batch], shape)
        if for_rows:
            wide = (*scale.shape[:batch], *shape[batch:-1], scale.shape[-1])
            scale = jnp.broadcast_to(scale, wide)
        along_k = -(-shape[-1] // BLOCK)
        scale = jnp.broadcast_to(scale, (*shape[:batch], *scale.shape[batch:-1], along_k))
        lead = (prod(shape[:batch]),) if batch else ()
        scale = scale.reshape(*lead, prod(scale.shape[batch:-1]), along_k)
        return Operand(self.values, self.letters, scale)


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
    subscripts = Subscripts.of_dot_general(dimension_numbers, *(x.ndim for _, x in operands))
    if (count := len(subscripts.contracted)) != 1:
        raise NotImplementedError(
            f"{op}: {count} axes of quantized arrays are contracted, expected one: reshape them"
        )
    batch, k, letters = subscripts.batch, subscripts.contracted, (subscripts.lhs, subscripts.rhs)
    lhs, rhs = (_arranged(op, *x, own, batch, k) for x, own in zip(operands, letters, strict=True))
    preferred, values = options.preferred_element_type, tuple(x.values for _, x in operands)
    numbers = ("dimension_numbers", dimension_numbers), ("out_sharding", out_sharding)
    dot = JaxProduct(lax.dot_general, numbers)
    if lhs.constant and rhs.constant:
        scales = (x.beside_result(subscripts.out) for x in (lhs, rhs))
        scaled = replace(steps, named=(*SCALES, *steps.named))
        options = replace(options, preferred_element_type=preferred or jnp.float32)
        return run(dot, values, scaled, (*scales, *following), options)
    dtype, whole, several = steps.dtypes(preferred, jnp.float32)
    options = replace(options, preferred_element_type=dtype)
    closed = traced(dot.with_options(options), *values)
    (equation,), (like,) = closed.jaxpr.eqns, closed.out_avals
    options = in_contexts(replace(options, precision=equation.params["precision"]))
    product = Product(Subscripts(lhs.letters, rhs.letters, subscripts.out), options)

    def multiply(lhs: _Arranged, rhs: _Arranged) -> jax.Array:
        found = Operands(lhs.of_blocks(), (rhs.of_blocks(),), product, blocks=True)
        return multiplied(found, dtype)

    result = in_auto_axes(multiply, like.sharding, lhs, rhs)  # axes are merged
    return steps.after(result, following, whole, several)


def scales_of_groups(op: str, lhs: Quantized, rhs: Quantized) -> tuple[dict[str, Any], Any]:
    """Returns the scales of a ragged product of rows (M, K) and weights (G, K, N).

    Those of `SCALES` where none changes along K, as they broadcast against the result, with an axis
    of groups before it; else none, and those of blocks, as `scaled_dot` takes them of rows and of
    weights (G, N, K).
    """
    check_quantized(op, (("lhs", lhs), ("rhs", rhs)))
    left = _arranged(op, "lhs", lhs, "mk", "", "k")
    right = _arranged(op, "rhs", rhs, "gkn", "g", "k")
    if left.constant and right.constant:
        pair = left.beside_result("mn"), right.beside_result("gmn")
        return dict(zip(SCALES, pair, strict=True)), None
    if left.blocks[0] == BLOCK:  # groups begin at any row
        scale = spread(left.scale, (BLOCK,), left.values.shape)
        left = replace(left, scale=scale, blocks=(1, *left.blocks[1:]))
    return {}, (left.of_blocks().scale, right.of_blocks().scale)


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
                f"quantized array, expected {', '.join(QUANTIZED)}: quantize it to one of them, or "
                "pass the other one as an array of 16-bit floats"
            )


def _arranged(
    op: str, name: str, x: Quantized, letters: str, batch: str, contracted: str
) -> _Arranged:
    blocks, scale = list(blocks_of(op, name, x)), jnp.asarray(x.scale, jnp.float32)
    for axis, block in enumerate(blocks):
        if letters[axis] in contracted and block not in (0, BLOCK) and x.shape[axis] > 1:
            raise NotImplementedError(
                f"{op}: {name} has a scale for each {'element' if block == 1 else block} of the "
                f"contracted axis; beside a quantized array kernels take one for each {BLOCK}: "
                "pass the other in 16 bits"
            )
        if block not in BLOCKS or block == BLOCK:
            continue
        scale, blocks[axis] = spread(scale, (*(0,) * axis, block), x.shape), 1
    own_batch = [a for a in batch if a in letters]
    ordered = (*own_batch, *(a for a in letters if a not in batch + contracted), *contracted)
    order = tuple(map(letters.index, ordered))
    return _Arranged(
        lax.transpose(x.values, order), lax.transpose(scale, order), "".join(ordered),
        tuple(blocks[axis] for axis in order), len(own_batch),
    )  # fmt: skip
