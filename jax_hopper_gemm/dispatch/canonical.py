"""A product of two arrays, written as subscripts, seen as one batch of matrix products.

Arrays are dense and row-major, their axes in any order. A tensor map addresses a matrix whose
elements are adjacent along one index and equally far apart along the other, plus up to three batch
indices, each with a stride of its own (0: matrices that share one). So axes that serve the same
role and lie evenly one inside the other count as one long axis, and the order of the axes is a
matter of strides: nothing is transposed in memory. What does not come down to that form is
`NotAGemm`, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from ..gemm.dtypes import DTYPES
from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.groups import GROUP, VARLEN_K_T, GroupedAxis, gate_up_letter, is_varlen_k
from ..gemm.problem import TMA_ALIGNMENT, GemmProblem, Major, MatrixLayout
from ..gemm.subscripts import Subscripts


class NotAGemm(ValueError):
    """The product is not one strided batch of matrix products; the message says why."""


@dataclass(frozen=True)
class ShapedProduct:
    """A product of two arrays of known extents.

    Its subscripts are "mk,kn->mn", one letter an axis. No letter repeats within an array and each
    stands in at least two of the three; but one of extent 2, in the right operand alone, tells gate
    from up in a product with two right operands ("mk,kcn->mn"). A ragged product has one of the
    forms in `gemm.groups`; the axes of its weights may be in another order.
    """

    subscripts: Subscripts
    lhs_shape: tuple[int, ...]
    lhs_dtype: str
    rhs_shape: tuple[int, ...]
    rhs_dtype: str
    out_dtype: str  # of the result; with an epilogue, of its first one
    # Of a ragged product, how its rows are cut into groups.
    groups: GroupedAxis | None = field(default=None, kw_only=True)

    @property
    def extents(self) -> dict[str, int]:
        extents = self.subscripts.extents(self.lhs_shape, self.rhs_shape)
        return {GROUP: self.groups.matrices} | extents if self.groups else extents

    @property
    def gate_up(self) -> str:
        """The letter that tells gate from up in a right operand that holds both, or ""."""
        return gate_up_letter(self.subscripts) if self.groups else self.subscripts.gate_up

    @property
    def up_offset(self) -> int | None:
        """How far up lies behind gate in a right operand that holds both; None elsewhere."""
        if not (letter := self.gate_up):
            return None
        return prod(self.rhs_shape[self.subscripts.rhs.index(letter) + 1 :])

    def d_dtype(self, epilogue: EpilogueGraph | None) -> str:
        """Returns the dtype of D in a `GemmProblem`."""
        if epilogue is None:
            return self.out_dtype
        return epilogue.matrices[0].dtype if epilogue.matrices else self.lhs_dtype


@dataclass(frozen=True)
class Gemm:
    """A product in canonical form.

    D is row-major, so its last axis is N: when that axis comes from the left operand,
    D = (lhs rhs) is computed as the transpose of rhs^T lhs^T.
    """

    problem: GemmProblem  # extents and layouts
    swap_ab: bool  # whether A is the right operand and B the left one
    padded: tuple[int, ...] = ()  # operands, 0 and 1, of whose lines `with_whole_lines` is a copy


@dataclass(frozen=True)
class Roles:
    """Which axes of the result count the rows and columns of a matrix, and which the matrices."""

    m: str  # letters of the result, in its order
    n: str
    batch: str
    swap_ab: bool  # as in `Gemm`


@dataclass(frozen=True)
class Axis:
    """An index of the product, of one letter or of several merged."""

    letters: str  # those of more than one element, outer first
    extent: int  # number of values
    # Distance of neighbours, in elements, in A, B, D and the epilogue's operands; 0 in an array
    # that the index does not appear in.
    strides: tuple[int, ...]

    def encloses(self, inner: Axis) -> bool:
        """Whether one step of this index spans all of `inner`, in every array."""
        pairs = zip(self.strides, inner.strides, strict=True)
        return all(outer == stride * inner.extent for outer, stride in pairs)

    def along(self, array: int) -> tuple[int, int]:
        """Returns extent and stride in an array."""
        return self.extent, self.strides[array]


MAX_BATCH_AXES = 3  # with a matrix's two the five dimensions of a tensor map
A, B, D = 0, 1, 2  # places in `Axis.strides`; the epilogue's operands follow
UNEVEN = "axes do not lie evenly one inside the other in both operands"
FIRST_OPERAND = 3


@dataclass(frozen=True)
class _Indices:
    """M, N and K, each as one axis, and the axes of the batch."""

    m: Axis
    n: Axis
    k: Axis
    batch: tuple[Axis, ...]  # the outermost of D first; at least one
    swap_ab: bool

    def layouts(self, array: int) -> tuple[tuple[int, int], tuple[int, int], list[tuple[int, int]]]:
        """Returns (extent, stride) of M, of N and of the batch's axes in D or an operand."""
        batch = [axis.along(array) for axis in self.batch]
        return self.m.along(array), self.n.along(array), batch


def roles(product: ShapedProduct, labels: Sequence[str] = ()) -> Roles:
    """Returns the roles of the result's axes; arguments and errors as of `as_gemm`."""
    subscripts = product.subscripts
    if product.groups:
        rows, batch = ("k", GROUP) if is_varlen_k(subscripts) else ("m", "")
        return Roles(m=rows, n="n", batch=batch, swap_ab=False)
    i = _indices(product.subscripts, product.lhs_shape, product.rhs_shape, tuple(labels))
    ordered, out = subscripts.swapped() if i.swap_ab else subscripts, subscripts.out
    batch = "".join(axis.letters for axis in i.batch)
    merged = i.m.letters + i.n.letters + batch
    unit = [letter for letter in out if letter not in merged]  # fits any role: the natural one

    def of(letters: str, natural: str) -> str:
        return "".join(x for x in out if x in letters or (x in unit and x in natural))

    return Roles(
        m=of(i.m.letters, ordered.lhs_free),
        n=of(i.n.letters, ordered.rhs_free),
        batch=of(batch, ordered.batch),
        swap_ab=i.swap_ab,
    )


def as_gemm(
    product: ShapedProduct, epilogue: EpilogueGraph | None = None, labels: Sequence[str] = ()
) -> Gemm:
    """Returns the canonical form of a product.

    Args:
      labels: for each operand of the epilogue, the letters of the result that it varies along, in
        the order of its axes. Those of a ragged product are letters of "gmn" (rows) or "gkn"; "g"
        alone or before "n" is an entry a group.

    Raises:
      NotAGemm: an extent is zero, the axes of a role do not merge, or an operand of the epilogue
        does not lie as a kernel reads it.
    """
    if product.groups:
        return _as_grouped_gemm(product, product.groups, epilogue, labels)
    i = _indices(product.subscripts, product.lhs_shape, product.rhs_shape, tuple(labels))
    graph_operands = epilogue.operands if epilogue else ()
    layouts = tuple(
        operand_layout(operand.kind, *i.layouts(FIRST_OPERAND + j))
        for j, operand in enumerate(graph_operands)
    )
    dtypes = product.lhs_dtype, product.rhs_dtype
    a_dtype, b_dtype = dtypes[::-1] if i.swap_ab else dtypes
    problem = GemmProblem(
        i.m.extent, i.n.extent, i.k.extent, prod(axis.extent for axis in i.batch),
        a_dtype, b_dtype, product.d_dtype(epilogue),
        a=strided_layout("m", i.m.along(A), i.k.along(A), [x.along(A) for x in i.batch]),
        b=strided_layout("n", i.n.along(B), i.k.along(B), [x.along(B) for x in i.batch]),
        d=strided_layout("n", i.n.along(D), i.m.along(D), [x.along(D) for x in i.batch]),
        epilogue=epilogue,
        operands=layouts,
        up_offset=product.up_offset,
        outer=tuple(axis.extent for axis in i.batch[:-1]),
    )  # fmt: skip
    if problem.gated and i.swap_ab:
        raise NotAGemm("the result of a gated product ends with an axis of the left operand")
    compact = MatrixLayout("n", problem.n, problem.m * problem.n)
    if any(result.planes > 1 for result in problem.graph.results) and problem.d != compact:
        raise NotAGemm("gate and up would not lie side by side in a result with axes in this order")
    return Gemm(problem, i.swap_ab)


def with_whole_lines(gemm: Gemm, product: ShapedProduct) -> Gemm:
    """Returns the same product of copies whose lines are padded to multiples of 16 bytes.

    TMA reads no others. XLA pads operands for its own kernels, too. An operand stays as it is where
    its lines are such multiples, or its last axis is not one of the matrix's alone.
    """
    p, padded = gemm.problem, []
    layouts = {}
    for number, shape in enumerate((product.lhs_shape, product.rhs_shape)):
        name = "a" if (number == 0) != gemm.swap_ab else "b"
        layout, dtype = (p.a, p.a_dtype) if name == "a" else (p.b, p.b_dtype)
        line, row = {"m": p.m, "n": p.n, "k": p.k}[layout.major], DTYPES.get(dtype)
        if row is None or row.packed > 1 or shape[-1:] != (line,):
            continue
        whole = line + -row.nbytes(line) % TMA_ALIGNMENT // row.itemsize
        if whole == line:
            continue
        layouts[name] = MatrixLayout(
            layout.major, layout.leading_stride // line * whole,
            layout.batch_stride // line * whole,
            tuple(stride // line * whole for stride in layout.outer_strides), line,
        )  # fmt: skip
        padded.append(number)
    return replace(gemm, problem=replace(p, **layouts), padded=tuple(padded)) if padded else gemm


@lru_cache(maxsize=4096)
def _indices(
    subscripts: Subscripts, lhs: tuple[int, ...], rhs: tuple[int, ...], labels: tuple[str, ...]
) -> _Indices:
    """Returns M, N, K and the batch of a product without groups, its operands of these shapes.

    Axes of M that do not merge are batch axes along which B stands still; likewise for N.
    """
    extents = subscripts.extents(lhs, rhs)
    if 0 in extents.values():
        raise NotAGemm("an extent is 0")
    out = subscripts.out
    kept = [label for label in out if extents[label] > 1]
    swap_ab = bool(kept) and kept[-1] not in subscripts.rhs
    if kept and kept[-1] in subscripts.batch:
        raise NotAGemm("the result's last axis is a batch axis, so no matrix of it is row-major")
    ordered = subscripts.swapped() if swap_ab else subscripts
    a, b = ordered.lhs, ordered.rhs
    strides = [compact_strides(letters, extents) for letters in (a, b, out, *labels)]
    unit = Axis("", 1, (0,) * len(strides))
    axes: dict[tuple[bool, bool], list[Axis]] = {}
    for label in dict.fromkeys(out + subscripts.lhs):
        if extents[label] > 1:
            axis = Axis(label, extents[label], tuple(s.get(label, 0) for s in strides))
            axes.setdefault((label in out, label in a and label in b), []).append(axis)
    free, shared = axes.get((True, False), []), axes.get((True, True), [])
    m, spilled_m = _matrix_axis([axis for axis in free if axis.strides[A]], A, unit)
    n, spilled_n = _matrix_axis([axis for axis in free if axis.strides[B]], D, unit)
    contracted = _merged(axes.get((False, True), []), A)
    if len(contracted) > 1:
        raise NotAGemm(f"the contracted {UNEVEN}")
    spilled = [*spilled_m, *spilled_n]
    batch = _merged([*shared, *spilled], D)
    if len(batch) > MAX_BATCH_AXES:
        raise NotAGemm(_batch_violation(batch, spilled, bool(shared), bool(labels)))
    return _Indices(m, n, (contracted or [unit])[0], tuple(batch or [unit]), swap_ab)


def _batch_violation(batch: list[Axis], spilled: list[Axis], shared: bool, reads: bool) -> str:
    """Returns why a batch has too many axes, of which `spilled` are of one operand alone."""
    others = ", the result and what the epilogue reads" if reads else " and the result"
    if not spilled:
        return f"the batch {UNEVEN}{others}, but as {len(batch)}, over {MAX_BATCH_AXES}"
    letters = ", ".join(repr(x.letters) for x in spilled)
    to_few = f"{'with the batch axes ' if shared else ''}to {MAX_BATCH_AXES} batch axes"
    return (
        f"the axes {letters} of one operand alone do not join with its other axes, nor {to_few}, "
        f"in the operands{others}"
    )


def compact_strides(labels: str, extents: dict[str, int]) -> dict[str, int]:
    return {label: prod(extents[x] for x in labels[i + 1 :]) for i, label in enumerate(labels)}


def _matrix_axis(axes: list[Axis], array: int, unit: Axis) -> tuple[Axis, list[Axis]]:
    """Returns the axis along which `array` is contiguous, else the longest; and those left over."""
    merged = _merged(axes, D)
    if not merged:
        return unit, []
    best = max(merged, key=lambda axis: (axis.strides[array] == 1, axis.extent))
    return best, [axis for axis in merged if axis is not best]


def _merged(axes: list[Axis], array: int) -> list[Axis]:
    """Returns `axes` from outer to inner in `array`, those that enclose their neighbour joined."""
    merged: list[Axis] = []
    for axis in sorted(axes, key=lambda axis: -axis.strides[array]):
        if merged and merged[-1].encloses(axis):
            outer = merged.pop()
            extent = outer.extent * axis.extent
            merged.append(Axis(outer.letters + axis.letters, extent, axis.strides))
        else:
            merged.append(axis)
    return merged


def operand_layout(
    kind: str, m: tuple[int, int], n: tuple[int, int], batch: Sequence[tuple[int, int]]
) -> MatrixLayout:
    """Returns the layout of an epilogue's operand from its (extent, stride) pairs.

    `batch` has one for each axis of the batch, the outermost first.
    """
    (rows, m_stride), (columns, n_stride) = (
        (extent, stride if extent > 1 else 0) for extent, stride in (m, n)
    )
    along_n, along_m = columns > 1 and kind in ("row", "matrix"), rows > 1 and kind == "column"
    if (along_n and n_stride != 1) or (along_m and m_stride != 1):
        raise NotAGemm(
            f"a {kind} that the epilogue reads does not have adjacent elements along the "
            f"{'columns' if along_n else 'rows'} of the result: its axes are in another order"
        )
    if (kind in ("row", "scalar") and m_stride) or (kind in ("column", "scalar") and n_stride):
        raise NotAGemm(f"a {kind} that the epilogue reads varies within a {kind}")
    own = {"matrix": rows * columns, "row": columns, "column": rows, "scalar": 1}[kind]
    strides = _batch_strides(batch, own)
    if kind == "matrix":
        return MatrixLayout("n", m_stride if rows > 1 else columns, *strides)
    return MatrixLayout("m" if kind == "column" else "n", own, *strides)


def _batch_strides(batch: Sequence[tuple[int, int]], own: int) -> tuple[int, tuple[int, ...]]:
    """Returns a layout's `batch_stride` and `outer_strides`; `own` are the elements of a matrix."""
    *outer, (extent, stride) = batch
    return stride if extent > 1 else own, tuple(stride for _, stride in outer)


def strided_layout(
    name: Major, own: tuple[int, int], other: tuple[int, int], batch: Sequence[tuple[int, int]]
) -> MatrixLayout:
    """Returns the layout of one array from its (extent, stride) pairs, `batch` as `operand_layout`.

    `own` is the index that only this operand has, called `name`; for D the contiguous one. Strides
    along an index of extent 1 mean nothing. They are given as in a compact array, so that equal
    problems compare equal.
    """
    (own_extent, own_stride), (other_extent, other_stride) = own, other
    if other_extent > 1 and other_stride == 1:
        major, contiguous, leading = "k", other_extent, (own_extent, own_stride)
    elif own_extent > 1 and own_stride == 1:
        major, contiguous, leading = name, own_extent, (other_extent, other_stride)
    elif own_extent == other_extent == 1:
        major, contiguous, leading = ("k" if name == "m" else name), 1, (1, 1)
    else:
        raise NotAGemm(
            "an operand's last axis is a batch axis: no matrix of it has adjacent elements"
        )
    leading_stride = leading[1] if leading[0] > 1 else contiguous
    return MatrixLayout(major, leading_stride, *_batch_strides(batch, own_extent * other_extent))


def _as_grouped_gemm(
    product: ShapedProduct,
    groups: GroupedAxis,
    epilogue: EpilogueGraph | None,
    labels: Sequence[str],
) -> Gemm:
    """Returns the canonical form of a ragged product; `groups` are the product's."""
    subscripts, extents = product.subscripts, product.extents
    assert groups.axis == ("k" if is_varlen_k(subscripts) else "m"), (subscripts, groups)
    if 0 in extents.values():
        raise NotAGemm("an extent is 0")
    count, length, n, k = (extents[letter] for letter in "gmnk")
    if groups.axis == "k":
        letter_of_rows, rows, contracted = "k", k, length
        a, b, d = MatrixLayout("m", k), MatrixLayout("n", n), MatrixLayout("n", n, k * n)
        if subscripts == VARLEN_K_T:
            a = b = MatrixLayout("k", length)
    else:
        letter_of_rows, rows, contracted = "m", length, k
        stride = compact_strides(subscripts.rhs, extents)
        a, d = MatrixLayout("k", k), MatrixLayout("n", n)
        b = strided_layout("n", (n, stride["n"]), (k, stride["k"]), [(count, stride["g"])])
    layouts = []
    for operand, letters in zip(epilogue.operands if epilogue else (), labels, strict=True):
        stride = compact_strides(letters, extents)
        axes = (rows, letter_of_rows), (n, "n"), (count, "g")
        m, columns, groups_of = ((extent, stride.get(letter, 0)) for extent, letter in axes)
        layouts.append(operand_layout(operand.kind, m, columns, [groups_of]))
        if operand.kind in ("matrix", "column") and groups.axis == "m" and "g" in letters:
            raise NotAGemm(f"a {operand.kind} that the epilogue reads has an entry for each group")
    problem = GemmProblem(
        rows, n, contracted, count, product.lhs_dtype, product.rhs_dtype,
        product.d_dtype(epilogue), a, b, d,
        epilogue=epilogue,
        operands=tuple(layouts),
        up_offset=product.up_offset,
        groups=groups,
    )  # fmt: skip
    return Gemm(problem, swap_ab=False)
