"""Legality of layouts: why TMA, or a kernel without it, cannot address the arrays of a problem.

Lines and strides of what TMA copies are positive multiples of 16 bytes. Of a line that is not, it
would store up to the next multiple: on an H200 that wrote past D's last column. So threads store
rows of D that are no such multiples (`GemmSpec.loose_d`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..gemm.dtypes import DTYPES
from ..gemm.epilogue_graph import Operand
from ..gemm.grid import WRAP_BYTES, ceil_div
from ..gemm.groups import GroupedAxis
from ..gemm.problem import GemmProblem, MatrixLayout
from ..gemm.spec import TMA_ALIGNMENT

# Coordinates are int32. Tiles may reach past the end of an axis, and not past 2**31: there a
# coordinate would be negative, and so not past the end.
MAX_EXTENT = 2**31 - 2**15
MAX_INT32 = 2**31 - 1
MAX_STRIDE_BYTES = 2**40  # a tensor map's strides stay below


def layout_violations(problem: GemmProblem) -> list[str]:
    """Returns why the arrays of a problem, which is legal otherwise, cannot be read or written."""
    p = problem
    if p.simt:
        return [*_stride_violations(p)]
    extents_a, extents_b = {"m": p.m, "k": p.stored_k}, {"k": p.stored_k, "n": p.n}
    if p.groups and p.groups.gathered:
        gathered = extents_a if p.groups.gathered == "a" else extents_b
        gathered[p.groups.axis] = p.groups.source_rows
    of_a, of_b = batch_strides(p, p.a, p.matrices("a")), batch_strides(p, p.b, p.matrices("b"))
    gaps = not p.groups and p.up_offset is None
    reasons = _matrix_violations("A", p.a, extents_a, of_a, p.a_dtype, gaps=gaps)
    for panel in p.as_panels:
        extents = extents_b | {"n": panel.n}
        reasons += _matrix_violations("B", panel.b, extents, of_b, p.b_dtype, gaps=gaps)
    reasons += _result_violations(p)
    if p.groups and not reasons:
        reasons += _group_violations(p, p.groups)
    for each in p.apart:
        for i, (operand, layout) in enumerate(zip(p.graph.operands, each.operands, strict=True)):
            reasons += _operand_violations(f"epilogue operand {i}", operand, layout, each)
    reasons += _gate_violations(p)
    return reasons


def _stride_violations(problem: GemmProblem) -> Iterator[str]:
    """Yields why a kernel that needs no tensor maps cannot address an array: strides are int32."""
    p = problem
    for name, layout in {"A": p.a, "B": p.b, "D": p.d}.items():
        yield from _beyond_int32(name, layout, [layout.batch_stride] if p.l > 1 else [])
    if p.m > 1 and p.d.leading_stride < p.n or p.l > 1 and p.d.batch_stride < 1:
        yield "elements of D overlap: make a compact copy"


def _group_violations(problem: GemmProblem, groups: GroupedAxis) -> list[str]:
    """Returns why a tensor map over rows of a grouped axis cannot end where a group does.

    Of rows that are gathered there is none; their distance in bytes is an int32.
    """
    p = problem
    operands = {"a": ("A", "M", p.a, p.a_dtype), "b": ("B", "N", p.b, p.b_dtype)}
    if groups.gathered:
        name, _, layout, dtype = operands.pop(groups.gathered)
        row_bytes = layout.leading_stride * DTYPES[dtype].itemsize
        if row_bytes > MAX_INT32:
            apart = f"{row_bytes} bytes apart, over {MAX_INT32}"
            return [f"{name}'s rows, picked by indices, are {apart}: copy it"]
    if groups.axis == "k":
        lines = [
            (f"{name} is stored (K, {other})", layout.leading_stride, dtype)
            for name, other, layout, dtype in operands.values()
            if layout.major != "k"
        ]
    else:
        lines = [
            ("D is stored (M, N)", 2 * p.n if r.planes > 1 else p.d.leading_stride, r.dtype)
            for r in p.graph.matrices
        ]
    distances = (
        (f"{stored} {dtype}", stride * DTYPES[dtype].itemsize) for stored, stride, dtype in lines
    )
    return [
        f"{stored} and its rows, cut into groups, are {nbytes} bytes apart, not a multiple of "
        f"{TMA_ALIGNMENT} over 0 and under 2**34: copy it"
        for stored, nbytes in dict.fromkeys(distances)
        if nbytes % TMA_ALIGNMENT or not 0 < nbytes < WRAP_BYTES
    ]


def _result_violations(problem: GemmProblem) -> list[str]:
    p, reasons = problem, []
    batches = 1 if p.groups and p.groups.axis == "m" else p.l
    planes = MatrixLayout("n", 2 * p.n, 2 * p.m * p.n)
    written = dict.fromkeys((r.dtype, r.planes > 1) for r in p.graph.matrices)
    for panel, (dtype, paired) in product(p.as_panels, written):
        layout, extents = planes if paired else panel.d, {"m": p.m, "n": panel.n}
        strides = batch_strides(p, layout, batches)
        if p.loose_d:
            reasons += _beyond_int32("D", layout, strides)
        else:
            reasons += _matrix_violations("D", layout, extents, strides, dtype)
    if all(result.planes > 1 for result in p.graph.matrices):  # where D lies does not matter
        return reasons
    for panel in p.as_panels:
        lines, length = (p.m, panel.n) if p.d.major == "n" else (panel.n, p.m)
        if lines > 1 and (apart := panel.d.leading_stride) < length:
            reasons.append(f"D's lines of {length} elements are {apart} apart and overlap")
    if 0 in batch_strides(p, p.d, batches):
        reasons.append(
            f"D has batch stride 0, so its {batches} matrices would overwrite each other"
        )
    return reasons


def _beyond_int32(name: str, layout: MatrixLayout, batch: list[int]) -> Iterator[str]:
    """Yields why threads cannot address an array without TMA: strides are int32."""
    for stride in (layout.leading_stride, *batch):
        if not 0 <= stride <= MAX_INT32:
            yield f"{name} has a stride of {stride} elements, not 0 to {MAX_INT32}: split it"


def _operand_violations(
    name: str, operand: Operand, layout: MatrixLayout, problem: GemmProblem
) -> list[str]:
    p, itemsize = problem, DTYPES[operand.dtype].itemsize
    major = {"matrix": p.d.major, "row": "n", "column": "m"}.get(operand.kind, layout.major)
    if layout.major != major:
        return [f"{name}, a {operand.kind}, has major {layout.major!r}, not {major!r}: copy it"]
    batches = p.l
    if p.groups and p.groups.axis == "m" and operand.kind in ("matrix", "column"):
        batches = 1
    if operand.kind == "matrix":
        strides = batch_strides(p, layout, batches)
        return _matrix_violations(name, layout, {"m": p.m, "n": p.n}, strides, operand.dtype)
    reasons = []
    if operand.kind == "row" and not p.loose_d and p.n * itemsize % TMA_ALIGNMENT:
        step = TMA_ALIGNMENT // itemsize
        reasons.append(
            f"{name} is a row of N={p.n} {operand.dtype}, {p.n * itemsize} bytes, not a multiple "
            f"of {TMA_ALIGNMENT}: pad N from {p.n} to {ceil_div(p.n, step) * step}"
        )
    if operand.kind == "scalar" and not _is_even(p, layout):
        return [f"{name} is a scalar for each matrix, and they do not lie evenly: copy it"]
    for stride in batch_strides(p, layout, batches):
        if stride < 0 or stride > MAX_INT32:
            reasons.append(f"{name} has batch stride {stride}, not 0 to {MAX_INT32}: copy it")
        elif operand.kind == "scalar":
            if (last := (batches - 1) * layout.batch_stride) > MAX_INT32:
                reasons.append(
                    f"{name} is a scalar for each matrix, the last of them {last} elements behind "
                    f"the first, over {MAX_INT32}: copy it"
                )
        elif stride * itemsize % TMA_ALIGNMENT:
            reasons.append(
                f"{name} is a {operand.kind} of {operand.dtype} for each matrix, "
                f"{stride * itemsize} bytes apart, not a multiple of {TMA_ALIGNMENT}: choose a "
                f"stride that is a multiple of {TMA_ALIGNMENT // itemsize} elements"
            )
    return reasons


def batch_strides(problem: GemmProblem, layout: MatrixLayout, matrices: int) -> list[int]:
    """Returns an array's strides along the axes of its batch that have more than one entry."""
    axes = problem.batch_axes(layout) if problem.outer else [(matrices, layout.batch_stride)]
    return [stride for extent, stride in axes if extent > 1]


def _is_even(problem: GemmProblem, layout: MatrixLayout) -> bool:
    """Whether a step along an axis of the batch spans all of the next inner one."""
    axes = problem.batch_axes(layout)
    pairs = zip(axes, axes[1:], strict=False)
    return all(outer == extent * inner for (extent, inner), (_, outer) in pairs)


def _gate_violations(problem: GemmProblem) -> Iterator[str]:
    """Yields why the second right operand cannot be where the problem says."""
    p = problem
    if p.up_offset is None:
        return
    if not p.gated:
        yield f"up_offset is {p.up_offset}, but the product has one right operand"
        return
    nbytes = DTYPES[p.b_dtype].nbytes(p.up_offset)
    if nbytes < 0 or nbytes % TMA_ALIGNMENT:
        yield (
            f"up lies {nbytes} bytes behind gate, not at a multiple of {TMA_ALIGNMENT}: pass two "
            "arrays"
        )


def _matrix_violations(
    operand: str,
    layout: MatrixLayout,
    extents: dict[str, int],
    batch: list[int],
    dtype: str,
    *,
    gaps: bool = False,
) -> list[str]:
    """Returns why TMA cannot copy the lines of an array.

    With `gaps` a line may end anywhere, if what lies behind it up to the next multiple of 16 bytes
    is its own: zeros, which lowering puts there.
    """
    (other,) = extents.keys() - {layout.major}
    contiguous, row = layout.major, DTYPES[dtype]
    stored = f"{operand} is stored ({other.upper()}, {contiguous.upper()}) {dtype}"
    step = TMA_ALIGNMENT * row.packed // row.itemsize
    extent = extents[contiguous]
    whole = ceil_div(extent, step) * step
    if extent % step and not (gaps and layout.leading_stride >= whole):
        line = f"its lines of {contiguous.upper()}={extent} are {row.nbytes(extent)} bytes"
        way_out = f"pad {contiguous.upper()} from {extent} to {whole}"
        return [f"{stored} and {line}, not a multiple of {TMA_ALIGNMENT}: {way_out}"]
    strides = []
    if extents[other] > 1:
        strides.append((f"its lines along {contiguous.upper()}", layout.leading_stride, 1))
    strides += [("its matrices", stride, 0) for stride in batch]
    for neighbours, stride, least in strides:
        nbytes = row.nbytes(stride)
        if stride < least:
            wrong = ": make a compact copy"
        elif nbytes % TMA_ALIGNMENT:
            wrong = (
                f", not a multiple of {TMA_ALIGNMENT}: choose a stride that is a multiple of "
                f"{step} elements"
            )
        elif nbytes >= MAX_STRIDE_BYTES:
            wrong = ", not under 2**40: split it"
        else:
            continue
        return [f"{stored} and {neighbours} are {nbytes} bytes apart{wrong}"]
    return []
