"""Products by a recipe, as what they stand for: quantization, and products of 8-bit arrays.

The primitives of products carry a recipe in their options, and so do their gradients, like any
other option. Here each of them is a JAX function of the other primitives, which lowering puts in
its place: scales that do not change along K join what follows the product in its kernel, block
scales go with `hopper_scaled_dot`. What a recipe leaves in 16 bits is a product without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import jaxpr_as_fun

from ..fusion.jaxprs import ClosedJaxpr, abstract, traced
from ..gemm.dtypes import residual_of
from ..gemm.groups import GROUP, VARLEN_K_T, is_varlen_k
from ..gemm.product import Product
from ..gemm.recipes import BlockScaling, Format
from ..gemm.spec import TMA_ALIGNMENT
from ..gemm.subscripts import Subscripts
from ..lowering.register import EXPANDED
from .accumulators import apart
from .auto_axes import in_auto_axes, is_explicit
from .dot import hopper_dot_p
from .fused_dot import fused_dot
from .fused_primitive import hopper_fused_p, reference_fused
from .group_sizes import row_blocks
from .quantize import hopper_quantize, quantized
from .ragged_dot import hopper_ragged_dot_p
from .scaled_dot import BATCHED, SCALED, beside_result, scaled_dot
from .segments import segment_broadcast

WIDE = jnp.dtype("float32")


@dataclass(frozen=True)
class Operand:
    """A quantized operand."""

    values: jax.Array  # of 8 bits
    letters: str  # of their axes
    scale: jax.Array  # float32, with an axis for each of these; of blocks as in `scaled_dot`

    @property
    def extents(self) -> dict[str, int]:
        return dict(zip(self.letters, self.values.shape, strict=True))

    def with_k(self, contracted: str, more: int, blocks: bool) -> Operand:
        """Returns the same with contracted axes as the last one, of so many more zeros."""
        others = "".join(a for a in self.letters if a not in contracted)
        order = [self.letters.index(a) for a in others + contracted]
        values = lax.transpose(self.values, order)
        lead, ends = values.shape[: len(others)], values.shape[len(others) :]
        values = values.reshape(*lead, prod(ends))  # -1 is no extent beside one of 0
        values = jnp.pad(values, [*[(0, 0)] * len(others), (0, more)])
        scale = self.scale
        if not blocks:
            scale = lax.transpose(scale, order)
            scale = scale.reshape(*scale.shape[: len(others)], 1)
        return Operand(values, others + contracted[0], scale)


@dataclass(frozen=True)
class Operands:
    """Those of a product, or of two that have the left one in common, and that product."""

    left: Operand
    rights: tuple[Operand, ...]
    product: Product  # of the values, without the recipe
    blocks: bool  # whether scales change along K
    sizes: tuple[Any, ...] = ()  # what cuts rows into groups, where there are some

    @property
    def all(self) -> tuple[Operand, ...]:
        return (self.left, *self.rights)

    def aligned(self) -> Operands:
        """Returns the same with as much K, of zeros at its end, as lines of a kernel need."""
        contracted = self.product.subscripts.contracted
        missing = -prod(self.left.extents[a] for a in contracted) % TMA_ALIGNMENT
        if not missing or not contracted:
            return self
        left, *rights = (x.with_k(contracted, missing, self.blocks) for x in self.all)
        letters = Subscripts(left.letters, rights[0].letters, self.product.subscripts.out)
        product = replace(self.product, subscripts=letters)
        return replace(self, left=left, rights=tuple(rights), product=product)


def _operands(
    product: Product, lhs: Any, rights: Sequence[Any], others: Sequence[Any] = ()
) -> Operands | None:
    """Returns quantized operands; None where they are multiplied as they are.

    Of a ragged product the first of the `others` are its sizes.
    """
    by, subscripts, groups = product.options.recipe, product.subscripts, product.groups
    assert by is not None
    rows = next((a for a in subscripts.out if (a in subscripts.lhs) != (a in subscripts.rhs)), "")
    formats = by.formats(columns=int(rows in subscripts.lhs))
    if formats is None or (groups and product.batch) or 0 in lhs.shape + rights[0].shape:
        return None
    if not subscripts.contracted:
        return None
    sizes = tuple(others[: product.num_sizes_operands])
    blocks = formats[0].along is not None
    if groups and is_varlen_k(subscripts):
        narrow = getattr(by.recipe, "grouped_weights", False)
        return _in_row_blocks(product, formats, (lhs, *rights), sizes) if narrow else None
    several = GROUP if groups and blocks else subscripts.batch if blocks else product.mapped
    implementation = product.options.implementation
    of = partial(_operand, subscripts=subscripts, several=several, implementation=implementation)
    left = of(lhs, subscripts.lhs, formats[0])
    quantized_rights = tuple(of(x, subscripts.rhs, formats[1]) for x in rights)
    letters = Subscripts(left.letters, quantized_rights[0].letters, subscripts.out)
    whole = replace(_of_values(product), subscripts=letters)
    return Operands(left, quantized_rights, whole, blocks, sizes).aligned()


def _of_values(product: Product) -> Product:
    """Returns the product of 8-bit values that one by a recipe is of."""
    by = product.options.recipe
    whole = product.with_options(recipe=None)
    if by and by.promoted:
        whole = whole.with_options(precision=(lax.Precision.HIGHEST,) * 2)
    return whole


def _in_row_blocks(
    product: Product, formats: tuple[Format, Format], arrays: Sequence[Any], sizes: tuple[Any, ...]
) -> Operands | None:
    """Returns quantized operands of which groups of rows are contracted, as their transposes."""
    by, groups = product.options.recipe, product.groups
    assert by and groups
    if any(x.along is None and x.rows is not None for x in formats):
        return None
    blocks = row_blocks(sizes[0], groups, arrays[0].shape[0])

    def operand(x: Any, letters: str, format: Format) -> Operand:
        if format.along is None:
            pair = quantized(blocks.of(x), format.dtype, [None, None])
            values, scale = map(jnp.transpose, pair)
        else:
            by_lines = partial(hopper_quantize, transposed=True, rows=blocks.rows)
            values, scale = by_lines(
                x, format.dtype, format.rows or 1, by=product.options.implementation
            )
        return Operand(values, letters, scale)

    left = operand(arrays[0], VARLEN_K_T.lhs, formats[0])
    rights = tuple(operand(x, VARLEN_K_T.rhs, formats[1]) for x in arrays[1:])
    whole = replace(_of_values(product), subscripts=VARLEN_K_T)
    return Operands(left, rights, whole, formats[0].along is not None, (blocks.sizes,))


def _operand(
    x: jax.Array, letters: str, format: Format, *, subscripts: Subscripts, several: str,
    implementation: str | None,
) -> Operand:  # fmt: skip
    """Returns a quantized operand; with blocks its axes are those of arrays, free, contracted.

    Along the axes `several` there are as many arrays, each with scales of its own.
    """
    contracted = "".join(a for a in subscripts.contracted if a in letters)
    own = "".join(a for a in several if a in letters and a not in contracted)
    # In the result's order, so that weights of several axes have the same blocks in both passes.
    free = "".join(a for a in subscripts.out if a in letters and a not in own)
    if format.along is None:
        if own:  # rows in the result's order, in which their scales lie
            ordered = "".join(a for a in subscripts.out if a in letters) + contracted
            x, letters = lax.transpose(x, [letters.index(a) for a in ordered]), ordered
        sizes = [None if a in contracted else 1 if a in own else format.rows for a in letters]
        values, scale = quantized(x, format.dtype, sizes)
        return Operand(values, letters, scale)
    parts = [own, free, contracted]
    order = sorted(range(3), key=lambda i: min(map(letters.find, parts[i]), default=-1))
    if order[0] or "".join(parts[i] for i in order) != letters:  # not arrays of two such axes
        x, order = lax.transpose(x, [letters.index(a) for a in "".join(parts)]), [0, 1, 2]
        letters = "".join(parts)
    extents = dict(zip(letters, x.shape, strict=True))
    merged = [prod(extents[a] for a in parts[i]) for i in order]
    x = x.reshape(merged if own else merged[1:])
    values, scale = hopper_quantize(
        x, format.dtype, format.rows or 1, transposed=order[1] == 2, by=implementation
    )
    letters = own + free + contracted
    return Operand(values.reshape([extents[a] for a in letters]), letters, scale)


def _factor(x: Operand, out: str) -> jax.Array:
    """Returns scales that do not change along K, as they broadcast against the result."""
    scale = x.scale
    if scale.size != 1:  # rows or columns merge; or their number is unknown
        scale = jnp.broadcast_to(scale, [n if a in out else 1 for a, n in x.extents.items()])
    return beside_result(scale, x.letters, out)


def _factors(found: Operands) -> list[jax.Array]:
    """Returns those of each operand; where groups have own ones (G, 1, N)."""
    out = found.product.subscripts.out
    if found.product.groups is None:
        return [_factor(x, out) for x in found.all]
    scales = [x.scale.reshape(()) if x.scale.size == 1 else x.scale for x in found.all]
    rows, *columns = scales
    return [rows, *(x.reshape(x.shape[0], 1, -1) if x.ndim else x for x in columns)]


def _scaled(y: Any, lhs_scale: Any, rhs_scale: Any) -> Any:
    return y * lhs_scale * rhs_scale


# The primitives.


def _product(primitive: Any, lhs: Any, rhs: Any, *sizes: Any, product: Product) -> Any:
    plain = product.with_options(recipe=None)
    as_it_is = partial(primitive.bind, lhs, rhs, *sizes, product=plain)
    if primitive is hopper_dot_p and is_explicit(lhs, rhs):  # axes are merged and cut into blocks
        inside = partial(_product, primitive, product=replace(product, out_sharding=None))
        return in_auto_axes(inside, abstract(as_it_is).sharding, lhs, rhs)
    if (found := _operands(product, lhs, (rhs,), sizes)) is None:
        return as_it_is()
    return multiplied(found, abstract(as_it_is).dtype)


def multiplied(found: Operands, dtype: Any) -> jax.Array:
    whole = found.product.with_options(preferred_element_type=jnp.dtype(dtype))
    if not found.blocks:
        values, sizes = [x.values for x in found.all], next(iter(found.sizes), None)
        (y,) = fused_dot(_scaled, values, _factors(found), whole, out_dtypes=(dtype,), sizes=sizes)
        return y
    if whole.groups:
        return _with_blocks(replace(found, product=whole), 0, found.sizes, None, ())[0]
    batch, contracted = len(whole.subscripts.batch), whole.subscripts.contracted
    left, right = found.all
    first = next((a for a in whole.subscripts.out if a not in whole.subscripts.batch), "")
    if first not in left.letters:  # the left one's free axes come first in the result
        left, right = right, left
    extents = left.extents | right.extents
    ends = [x.letters[batch : len(x.letters) - len(contracted)] for x in (left, right)]
    lead, k = left.scale.shape[:-2], prod(extents[a] for a in contracted)
    lhs, rhs = (
        x.values.reshape(*lead, prod(extents[a] for a in end), k)
        for x, end in zip((left, right), ends, strict=True)
    )
    flat = replace(whole, subscripts=BATCHED if batch else SCALED, out_sharding=None)
    (out,) = scaled_dot((lhs, rhs), (left.scale, right.scale), flat)
    letters = left.letters[:batch] + "".join(ends)
    out = out.reshape([extents[a] for a in letters])
    return lax.transpose(out, [letters.index(a) for a in whole.subscripts.out])


def _fused(*args: Any, jaxpr: ClosedJaxpr, product: Product, num_b: int, in_place: Any) -> Any:
    lhs, rights, operands = args[0], args[1 : 1 + num_b], args[1 + num_b :]
    plain, rights = apart(product, rights)
    assert (by := product.options.recipe)
    # Where axes are Explicit no kernel has blocks: their products are cut in Auto axes each.
    apart_by_blocks = isinstance(by.recipe, BlockScaling) and is_explicit(lhs, *rights)
    found = None if apart_by_blocks else _operands(plain, lhs, rights, operands)
    if found is None:
        whole = {"jaxpr": jaxpr, "product": product, "num_b": num_b, "in_place": in_place}
        return reference_fused(*args, **whole, by_xla=False)
    found = replace(found, product=found.product.with_options(preferred_element_type=WIDE))
    operands = *found.sizes, *operands[len(found.sizes) :]
    if not found.blocks:
        return _with_factors(found, operands, jaxpr, in_place)
    if len(found.rights) == 1:
        return _with_blocks(found, 0, operands, jaxpr, in_place)
    # A kernel promotes the sums of one product: the gate is stored.
    dtype = jnp.dtype(residual_of(lhs.dtype.name))
    stored = replace(found, product=found.product.with_options(preferred_element_type=dtype))
    (gate,) = _with_blocks(stored, 0, found.sizes, None, ())

    def function(up: Any, *others: Any) -> list[Any]:
        return jaxpr_as_fun(jaxpr)(others[-1].astype(up.dtype), up, *others[:-1])

    operands = (*operands, gate)
    return _with_blocks(
        found, 1, operands, traced(function, jaxpr.in_avals[1], *operands), in_place
    )


def _with_factors(
    found: Operands, operands: Sequence[Any], jaxpr: ClosedJaxpr, in_place: Any
) -> list[Any]:
    """Returns what a function computes of products whose scales do not change along K."""
    factors, groups, count = _factors(found), found.product.groups, len(found.rights)
    factors = [lax.squeeze(x, (1,)) if x.ndim == 3 and groups else x for x in factors]

    def function(*args: Any) -> list[Any]:
        products, others, scales = args[:count], args[count : -count - 1], args[-count - 1 :]
        if groups:
            length = products[0].shape[0]
            columns = (
                segment_broadcast(x, others[0], groups, length) if x.ndim else x for x in scales[1:]
            )
            scales = scales[0], *columns
        wide = (y * scales[0] * x for y, x in zip(products, scales[1:], strict=True))
        return jaxpr_as_fun(jaxpr)(*wide, *others)

    return hopper_fused_p.bind(
        *(x.values for x in found.all), *operands, *factors,
        jaxpr=traced(function, *jaxpr.in_avals[:count], *operands, *factors),
        product=found.product, num_b=count, in_place=in_place,
    )  # fmt: skip


def _with_blocks(
    found: Operands, number: int, operands: Sequence[Any], jaxpr: Any, in_place: Any
) -> list[Any]:
    """Returns what a function computes of one of the products; None: the product."""
    left, right = found.left, found.rights[number]
    return scaled_dot(
        (left.values, right.values), (left.scale, right.scale), found.product, operands, jaxpr,
        in_place,
    )  # fmt: skip


EXPANDED.update({x: partial(_product, x) for x in (hopper_dot_p, hopper_ragged_dot_p)})
EXPANDED[hopper_fused_p] = _fused
