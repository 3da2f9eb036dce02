"""What is asked of one product: the question that `route` answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..dispatch.canonical import ShapedProduct
from ..fusion.jaxprs import ClosedJaxpr
from ..gemm.dtypes import DTYPES, name_of, short_name
from ..gemm.groups import GroupedAxis, is_varlen_k
from ..gemm.product import Options, Product
from ..gemm.spec import PROMOTION_K, TMA_ALIGNMENT


@dataclass(frozen=True)
class Request(ShapedProduct):
    """What is asked of one product of arrays of known extents."""

    options: Options = Options()
    num_b: int = 1  # 2 for a gate and an up operand in two arrays of one shape
    # The epilogue, over the accumulators and its operands, or None. Of a ragged product of rows it
    # knows groups by the segment primitives. Where `vmap` added axes, its accumulators have the
    # rows in several, those of a contraction the groups.
    function: ClosedJaxpr | None = None
    # Operand of the function that is the groups' sizes, before `vmap` put them behind one another.
    sizes_operand: int | None = None
    indexed: Literal["a", "b"] | None = None  # operand that is one array of a stack
    stack: int = 1  # of so many
    # Rows of the left and of the right operand that share a scale for each 128 of K, (1 or 128);
    # None: there are no scales.
    blocks: tuple[int, int] | None = None
    # Elements along K that share a scale in each column of the right operand, which a kernel
    # converts; 0: there are no such scales.
    k_group: int = 0
    # Where several right operands side by side have a product each, their extents along the
    # outermost of `Subscripts.columns`; `rhs_shape` is that of all. Else there are none.
    panels: tuple[int, ...] = ()
    functions: tuple[ClosedJaxpr, ...] = ()  # the epilogues of these, if they have some

    @classmethod
    def of(
        cls, product: Product, lhs: Any, rhs: Any, out: Any, sizes: Any = None, **further: Any
    ) -> Request:
        """Returns what is asked of a product of abstract values; `out` is its first result's.

        The `sizes` of a ragged one are the first operand of its function, if it has one.
        """
        if product.groups:
            axis = GroupedAxis.of(product.subscripts, product.groups, sizes.shape[0])
            further |= {"groups": axis, "sizes_operand": 0 if further.get("function") else None}
        return cls(
            product.subscripts, lhs.shape, name_of(lhs.dtype), rhs.shape, name_of(rhs.dtype),
            name_of(out.dtype), product.options, **further,
        )  # fmt: skip

    def __hash__(self) -> int:
        """Is asked often: what mostly tells requests of a program apart is enough."""
        return hash((self.lhs_shape, self.rhs_shape, self.out_dtype, self.function))

    @property
    def consts(self) -> list[Any]:
        """The arrays that its functions hold; `memoised` forgets what is asked with some."""
        return [x for f in (self.function, *self.functions) if f for x in f.consts]

    @property
    def gathered(self) -> Literal["a", "b"] | None:
        """The operand whose rows the kernel gathers, if it does."""
        return self.groups.gathered if self.groups else None

    @property
    def accumulators(self) -> int:
        return 2 if self.num_b == 2 or self.gate_up else 1

    @property
    def rhs_shapes(self) -> list[tuple[int, ...]]:
        if not self.panels:
            return [self.rhs_shape] * self.num_b
        axis = self.subscripts.rhs.index(self.subscripts.columns[0])
        return [(*self.rhs_shape[:axis], x, *self.rhs_shape[axis + 1 :]) for x in self.panels]

    @property
    def apart(self) -> list[Request]:
        """The products of each panel; without several this one."""
        if not self.panels:
            return [self]
        each = zip(self.rhs_shapes, self.functions or [None] * len(self.panels), strict=True)
        return [
            replace(self, rhs_shape=shape, function=function, panels=(), functions=())
            for shape, function in each
        ]

    @property
    def slices(self) -> list[tuple[slice, slice]]:
        """Of each product `apart`, which operands and which results of all epilogues are its."""
        return slices_of(self.functions) if self.functions else [(slice(None), slice(None))]

    @property
    def symbolic(self) -> bool:
        """Whether an extent is known only when an exported program runs."""
        return not all(isinstance(x, int) for x in self.lhs_shape + self.rhs_shape)

    def permuted(self, operand: int, axes: Sequence[int]) -> Request:
        """Returns the same product of an operand, 0 or 1, whose axis i is this one's `axes[i]`."""
        field, shape = (("lhs", self.lhs_shape), ("rhs", self.rhs_shape))[operand]
        letters = getattr(self.subscripts, field)
        order: Any = {field: "".join(letters[axis] for axis in axes)}
        moved: Any = {f"{field}_shape": tuple(shape[axis] for axis in axes)}
        return replace(self, subscripts=replace(self.subscripts, **order), **moved)

    def is_scattered(self, operand: int) -> bool:
        """Whether no TMA reads an operand, and XLA copies it for its own product, too.

        Its contracted axes, or others, lie apart, as in (batch, heads, size, tokens) of a product
        over heads and sizes, and rows of the last axis are no multiples of 16 bytes.
        """
        of, left = self.subscripts, operand == 0
        letters, shape = (of.lhs, self.lhs_shape) if left else (of.rhs, self.rhs_shape)
        dtype = self.lhs_dtype if left else self.rhs_dtype
        kinds = of.contracted, [x for x in letters if x not in of.batch + of.contracted]
        found = [[i for i, x in enumerate(letters) if x in kind] for kind in kinds]
        apart = any(axes and axes[-1] - axes[0] >= len(axes) for axes in found)
        return apart and DTYPES[dtype].nbytes(shape[-1]) % TMA_ALIGNMENT != 0

    def __str__(self) -> str:
        lhs = array_text(self.lhs_shape, self.lhs_dtype)
        rhs = " and ".join(array_text(shape, self.rhs_dtype) for shape in self.rhs_shapes)
        text = f"{lhs} x {rhs} by '{self.subscripts}' into {short_name(self.out_dtype)}"
        if self.blocks:
            rows = " and ".join(f"{rows}x{PROMOTION_K}" for rows in self.blocks)
            text += f", scales of blocks of {rows}"
        if self.k_group:
            text += f", scales of {self.k_group} along K"
        if self.groups:
            of = "contracted in" if is_varlen_k(self.subscripts) else "in"
            text += f", rows {of} {self.groups.matrices} groups"
        if self.functions:
            return f"{text} with an epilogue each"
        return f"{text} with an epilogue" if self.function else text


def slices_of(functions: Sequence[ClosedJaxpr]) -> list[tuple[slice, slice]]:
    """Returns which operands and which results of all functions are those of each.

    The first argument of each is a product.
    """
    found, read, written = [], 0, 0
    for function in functions:
        end, after = read + len(function.in_avals) - 1, written + len(function.out_avals)
        found.append((slice(read, end), slice(written, after)))
        read, written = end, after
    return found


def own_in_place(
    in_place: Sequence[int | None], reads: slice, makes: slice
) -> tuple[int | None, ...]:
    """Returns of one function's results the operands whose memory they take, by its own numbers.

    Args:
      in_place: of the results of all functions, by the numbers of all operands.
      reads, makes: which of these are the function's.
    """
    first = reads.start or 0
    return tuple(None if x is None else x - first for x in in_place[makes])


def array_text(shape: Sequence[int], dtype: str) -> str:
    """Returns an array as JAX prints it: "bf16[128,4096]"."""
    return f"{short_name(dtype)}[{','.join(map(str, shape))}]"
