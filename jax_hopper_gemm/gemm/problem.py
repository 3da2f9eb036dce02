"""What is asked of a GEMM: extents, dtypes and where the operands lie in memory.

A `GemmProblem` is plain integers and strings. It says nothing of tiles or devices (that is
`spec.GemmSpec`) nor of addresses (those exist only while the program runs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Literal

from . import simt
from .bf16_parts import stored_k
from .dtypes import DTYPES
from .epilogue_graph import EpilogueGraph, Result
from .groups import GroupedAxis, Groups, VarlenAxis

if TYPE_CHECKING:
    from .spec import GemmSpec

Major = Literal["k", "m", "n"]
SECTOR_BYTES = 32  # of memory, that is read or written at once
TMA_ALIGNMENT = 16  # bytes: addresses and strides that a tensor map takes are multiples


@dataclass(frozen=True)
class MatrixLayout:
    """Where the elements of a batch of matrices lie; all strides in elements."""

    major: Major  # the index whose neighbours are adjacent in memory (stride 1)
    leading_stride: int  # between neighbours along the matrix's other index
    batch_stride: int = 0  # between matrices of the batch; 0 when all share one matrix
    outer_strides: tuple[int, ...] = ()  # of a nested batch, along its `GemmProblem.outer` axes
    # Elements of a line of the array of which this is a copy with whole lines; 0 if it is none.
    copied_line: int = 0

    @property
    def transposed(self) -> MatrixLayout:
        """The layout of the transposed matrices, which lie where these do."""
        names: dict[Major, Major] = {"m": "n", "n": "m", "k": "k"}
        return replace(self, major=names[self.major])

    def with_k(self, k: int, other: int) -> MatrixLayout:
        """The layout of an array without gaps once it has `other` elements along K, not `k`."""
        along_k = self.major == "k"
        inside = k if along_k else k * self.leading_stride  # elements that K spans

        def scaled(stride: int) -> int:
            return stride // k * other if stride >= inside else stride

        return replace(
            self,
            leading_stride=scaled(self.leading_stride) if along_k else self.leading_stride,
            batch_stride=scaled(self.batch_stride),
            outer_strides=tuple(map(scaled, self.outer_strides)),
        )


@dataclass(frozen=True)
class BlockScales:
    """float32 scales of an operand: one for each 128 of K of a block of rows of A, columns of B.

    They are stored (L, blocks along K, blocks), the last axis contiguous.
    """

    block: int  # rows or columns that share a scale: 1 or 128
    k_stride: int  # elements from a block of K to the next
    batch_stride: int = 0


@dataclass(frozen=True)
class Panel:
    """Columns of a product that are those of one right operand, with results of their own."""

    n: int
    b: MatrixLayout
    d: MatrixLayout
    operands: tuple[MatrixLayout, ...] = ()  # of the epilogue


@dataclass(frozen=True)
class GemmProblem:
    """D[l, m, n] = sum over k of A[l, m, k] * B[l, k, n], accumulated in float32, int8 in int32.

    In a grouped product A and D (axis "m") or A and B (axis "k") are one matrix each, in place of
    l; in the sum, l is the group of a row (axis "m") or of k.

    With an epilogue D is what that makes of the sum. A gated product has two B's of one layout,
    gate and up, and so two sums for each element of D.

    D's transpose is a product, too, whose D lies along M (`transposed`). Lowering describes D along
    N; some kernels compute its transpose, and what takes a problem and a kernel takes the problem
    either way round (`as_stored`).
    """

    m: int
    n: int
    k: int
    l: int  # noqa: E741  number of products: the field's letter for the batch
    a_dtype: str  # NumPy's names: "bfloat16"
    b_dtype: str
    d_dtype: str  # that of the first matrix of the results
    a: MatrixLayout  # major "k" (stored (M, K)) or "m" (stored (K, M))
    b: MatrixLayout  # major "n" (stored (K, N)) or "k" (stored (N, K))
    d: MatrixLayout  # major "n" (stored (M, N)), or "m" (stored (N, M))
    epilogue: EpilogueGraph | None = None  # None: D is the sum as `d_dtype`
    # Those of the epilogue, in order. Of a matrix (major as D's) all counts; of a row (major "n")
    # and a column (major "m"), contiguous, and of a scalar only the batch stride.
    operands: tuple[MatrixLayout, ...] = ()
    up_offset: int | None = None  # of two B's in one array, elements from gate to up
    groups: GroupedAxis | None = None
    # An operand (of "b" both B's) that is one matrix of a stack. An int32 says which; one outside
    # of the stack stands for the nearest. `l` is 1, the operand's batch stride that of the stack.
    indexed: Literal["a", "b"] | None = None
    stack: int = 1  # matrices of that stack
    promoted: bool = False  # as in `GemmSpec`
    a_scales: BlockScales | None = None  # both operands have some, or none
    b_scales: BlockScales | None = None
    # Elements of K of a column of B that share a scale, see `GemmSpec`; 0: there are none. They are
    # stored (L, blocks along K, N), compact.
    k_group: int = 0
    # Extents of the outer axes of a nested batch, outermost first: where the batch has several axes
    # that do not lie evenly one inside the other. `l` counts all, the innermost axis fastest.
    outer: tuple[int, ...] = ()
    bf16_terms: int = 0  # as in `GemmSpec`
    simt: bool = False  # whether FMA units are to add up the products, in IEEE float32
    # Where B and D are several arrays side by side, one product of A for each: `n` counts the
    # columns of all, `b`, `d` and `operands` are the first one's. Else there are none.
    panels: tuple[Panel, ...] = ()

    @classmethod
    def dense(
        cls, m: int, n: int, k: int, l: int = 1, *,  # noqa: E741
        a_major: Major = "k", b_major: Major = "n", dtype: str = "bfloat16",
        d_dtype: str | None = None,
    ) -> GemmProblem:  # fmt: skip
        """Returns the problem for compact operands: A and B batched like D, no padding.

        `dtype` is that of A and B, and of D unless that has another.
        """
        return cls(
            m, n, k, l, dtype, dtype, d_dtype or dtype,
            a=MatrixLayout(a_major, k if a_major == "k" else m, m * k),
            b=MatrixLayout(b_major, n if b_major == "n" else k, k * n),
            d=MatrixLayout("n", n, m * n),
        )  # fmt: skip

    @classmethod
    def grouped(
        cls, axis: VarlenAxis, m: int, n: int, k: int, groups: int, *,
        b_major: Major = "n", dtype: str = "bfloat16", d_dtype: str | None = None,
    ) -> GemmProblem:  # fmt: skip
        """Returns the problem of a size and a matrix for each group, for compact operands.

        The grouped axis is `m` or `k` long. A is stored (M, K) where M is that axis, else (K, M).
        `dtype` as in `dense`.
        """
        a_major: Major = "k" if axis == "m" else "m"
        dense = cls.dense(
            m, n, k, groups, a_major=a_major, b_major=b_major, dtype=dtype, d_dtype=d_dtype
        )
        return replace(dense, groups=GroupedAxis(axis, groups, Groups.plain(groups)))

    @classmethod
    def side_by_side(cls, products: Sequence[GemmProblem]) -> GemmProblem:
        """Returns the problem of products of one A, which differ in N and arrays alone."""
        panels = tuple(Panel(x.n, x.b, x.d, x.operands) for x in products)
        return replace(products[0], n=sum(x.n for x in panels), panels=panels)

    @property
    def graph(self) -> EpilogueGraph:
        """The epilogue; where there is none, the graph that says so."""
        return self.epilogue or plain_graph(self.d_dtype)

    @cached_property
    def transposed(self) -> GemmProblem:
        """The same product as that of its transposes, B^T A^T = D^T; no array moves."""
        assert self.has_like_sides, self
        p = self
        others: dict[str | None, Literal["a", "b"]] = {"a": "b", "b": "a"}
        return replace(
            p, m=p.n, n=p.m, a_dtype=p.b_dtype, b_dtype=p.a_dtype,
            a=p.b.transposed, b=p.a.transposed, d=p.d.transposed,
            epilogue=p.epilogue and p.epilogue.transposed,
            operands=tuple(layout.transposed for layout in p.operands),
            indexed=others.get(p.indexed),
        )  # fmt: skip

    @cached_property
    def has_like_sides(self) -> bool:
        """Whether A and B may exchange roles: not with groups, scales, reductions, several B's."""
        p, graph = self, self.graph
        others = p.groups or p.a_scales or p.k_group
        return not (others or p.gated or p.panels or graph.needs_extents)

    def as_stored(self, d_major: Major) -> GemmProblem:
        """Returns the problem, or its transpose if D then lies along `d_major`."""
        return self if self.d.major == d_major or not self.has_like_sides else self.transposed

    @property
    def reads_parts(self) -> bool:
        """As in `GemmSpec`."""
        return self.bf16_terms > 0 and self.a_dtype != "float32"

    @property
    def stored_k(self) -> int:
        """Elements along K that A and B have in memory: more where they are parts."""
        return stored_k(self.k, self.bf16_terms) if self.reads_parts else self.k

    @cached_property
    def in_parts(self) -> GemmProblem:
        """The product of float32 arrays, without gaps, once they are cut into bfloat16 parts."""
        p, stored = self, stored_k(self.k, self.bf16_terms)
        up_offset = p.up_offset
        if up_offset is not None:
            up_offset = replace(p.b, batch_stride=up_offset).with_k(p.k, stored).batch_stride
        return replace(
            p, a_dtype="bfloat16", b_dtype="bfloat16", a=p.a.with_k(p.k, stored),
            b=p.b.with_k(p.k, stored), up_offset=up_offset,
        )  # fmt: skip

    def as_read_by(self, spec: GemmSpec) -> GemmProblem:
        """Returns the problem of the arrays that a kernel reads: `in_parts` if it reads these."""
        return self.in_parts if spec.reads_parts and not self.reads_parts else self

    def as_run_by(self, spec: GemmSpec) -> GemmProblem:
        """Returns the problem as a kernel has it: `as_stored` and `as_read_by`."""
        return self.as_stored(spec.d_major).as_read_by(spec)

    @property
    def gated(self) -> bool:
        """Whether there are two B's."""
        return self.graph.accumulators == 2

    @cached_property
    def loose_d(self) -> bool:
        """As in `GemmSpec`: whether lines of D are no multiples of 16 bytes, or so far apart."""
        if self.groups or self.simt:
            return False
        lines, length = (self.m, self.n) if self.d.major == "n" else (self.n, self.m)
        apart = [stride for extent, stride in self.batch_axes(self.d) if extent > 1]
        apart += [length, *([self.d.leading_stride] if lines > 1 else [])]
        dtypes = {r.dtype for r in self.graph.matrices} & DTYPES.keys()  # others are refused
        return any(x * DTYPES[dtype].itemsize % TMA_ALIGNMENT for x in apart for dtype in dtypes)

    @cached_property
    def splits_sectors(self) -> bool:
        """Whether lines of D begin and end within sectors of memory, in multiples of 16 bytes."""
        if self.loose_d or self.simt:
            return False
        dtypes = {r.dtype for r in self.graph.matrices} & DTYPES.keys()
        return any(self.d.leading_stride * DTYPES[x].itemsize % SECTOR_BYTES for x in dtypes)

    @property
    def rounds_operands(self) -> bool:
        """Whether the tensor cores read fewer digits than operands have: float32 in TF32."""
        return DTYPES[self.a_dtype].rounding_map > 0 and not (self.bf16_terms or self.simt)

    @property
    def simt_width(self) -> int:
        """As in `GemmSpec`: vectors where all lines of M and N are multiples of their 16 bytes."""
        if not self.simt:
            return 0
        placed = [(self.n, self.d)]
        placed += [(self.m, self.a)] if self.a.major == "m" else []
        placed += [(self.n, self.b)] if self.b.major == "n" else []
        distances = [
            x
            for extent, layout in placed
            for x in (extent, layout.leading_stride, layout.batch_stride if self.l > 1 else 0)
        ]
        return 1 if any(x % simt.VECTOR for x in distances) else simt.VECTOR

    @property
    def groups_k(self) -> bool:
        """Whether K is cut into groups: A and B are one matrix each."""
        return self.groups is not None and self.groups.axis == "k"

    def matrices(self, operand: Literal["a", "b"]) -> int:
        """Returns how many matrices of A, or of one B, there are to address."""
        if self.indexed == operand:
            return self.stack
        alone = self.groups is not None and (operand == "a" or self.groups_k)
        return 1 if alone else self.l

    def batch_axes(self, layout: MatrixLayout) -> list[tuple[int, int]]:
        """Returns extent and stride of each axis of the batch in an array, the innermost first."""
        axes = [*zip(self.outer, layout.outer_strides, strict=True)]
        return [(self.l // prod(self.outer), layout.batch_stride), *reversed(axes)]

    def distinct(self, layout: MatrixLayout) -> int:
        """Returns how many matrices an array has in memory, which others of the batch share."""
        return prod(extent for extent, stride in self.batch_axes(layout) if stride)

    @property
    def as_panels(self) -> tuple[Panel, ...]:
        """The panels; without several the product is one."""
        return self.panels or (Panel(self.n, self.b, self.d, self.operands),)

    @property
    def apart(self) -> list[GemmProblem]:
        """The products of each panel."""
        if not self.panels:
            return [self]
        return [
            replace(self, n=x.n, b=x.b, d=x.d, operands=x.operands, panels=()) for x in self.panels
        ]

    @property
    def flops(self) -> int:
        """Of a grouped product: if all of the axis belongs to groups."""
        products = 1 if self.groups else self.l
        return 2 * products * self.m * self.n * self.k * self.graph.accumulators

    @cached_property
    def bytes(self) -> int:
        """Fewest bytes that device memory must move: inputs once, matrices of results once."""
        axis = self.groups.axis if self.groups else None
        batches_a = 1 if axis else self.distinct(self.a)
        batches_b = 1 if axis == "k" else self.distinct(self.b)
        b_matrices = batches_b * self.graph.accumulators
        inputs = DTYPES[self.a_dtype].nbytes(batches_a * self.m * self.stored_k)
        inputs += DTYPES[self.b_dtype].nbytes(b_matrices * self.stored_k * self.n)
        elements = (1 if axis == "m" else self.l) * self.m * self.n
        return inputs + elements * self.element_bytes

    @cached_property
    def element_bytes(self) -> int:
        """Bytes that an element of D moves: those of the results' and the operands' matrices."""
        stored = sum(DTYPES[result.dtype].itemsize for result in self.graph.matrices)
        loaded = sum(DTYPES[o.dtype].itemsize for o in self.graph.operands if o.kind == "matrix")
        return stored + loaded


@lru_cache
def plain_graph(d_dtype: str) -> EpilogueGraph:
    """Returns the graph that stores the accumulator."""
    return EpilogueGraph(results=(Result("matrix", 0, d_dtype),))
