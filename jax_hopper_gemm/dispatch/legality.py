"""Which problems our kernels can run, and which kernel can run which problem.

Each function returns every reason against, as text for the user; an empty list is a yes. What a
kernel may be at all is `spec.violations`.
"""

from __future__ import annotations

from typing import Literal

from ..gemm.epilogue_graph import Operand, graph_violations
from ..gemm.grid import WRAP_BYTES, ceil_div, launched_clusters
from ..gemm.group_search import MAX_LENGTH
from ..gemm.group_search import MAX_TILES as MAX_GROUPED_TILES
from ..gemm.problem import ITEMSIZE, GemmProblem, GroupedAxis, MatrixLayout, VarlenAxis
from ..gemm.raster import MAX_TILES
from ..gemm.spec import TMA_ALIGNMENT, GemmSpec
from .device import Device

AB_DTYPES = ("bfloat16", "float16")
D_DTYPES = ("bfloat16", "float16", "float32")
MAX_EXTENT = 2**31 - 1  # TMA coordinates are int32
MAX_STRIDE_BYTES = 2**40  # a tensor map's strides stay below
MAX_TENSOR_MAPS = 16  # of one launch
MAX_TILE_N = 256
# Operands that a kernel can gather by an array of indices, for each grouped axis.
GATHERABLE: dict[VarlenAxis | None, tuple[Literal["a", "b"], ...]] = {"m": ("a",), "k": ("a", "b")}


def device_violations(device: Device) -> list[str]:
    """Returns why our kernels cannot run on `device`."""
    if device.compute_capability == (9, 0):
        return []
    major, minor = device.compute_capability
    return [
        f"the GPU has compute capability {major}.{minor}; the kernels are for 9.0 (H100, H200): "
        "use XLA there"
    ]


def limit_violations(problem: GemmProblem, spec: GemmSpec, device: Device) -> list[str]:
    """Returns why `spec`'s kernel does not keep to a limit of SMs."""
    if not device.limited:
        return []
    blocks = spec.cluster_size * launched_clusters(problem, spec, device.num_sms)
    if blocks <= device.num_sms:
        return []
    return [
        f"no kernel for it keeps to {device.num_sms} SMs: the last one tried launches {blocks} "
        "thread blocks"
    ]


def problem_violations(problem: GemmProblem) -> list[str]:
    """Returns why no kernel of ours can run `problem`."""
    p, found = problem, []
    if p.ab_dtype not in AB_DTYPES:
        found.append(f"A and B are {p.ab_dtype}: cast them to bfloat16 or float16")
    if p.d_dtype not in D_DTYPES:
        found.append(f"D is {p.d_dtype}: ask for bfloat16, float16 or float32")
    extents = {"M": p.m, "N": p.n, "K": p.k, "L": p.l}
    for name, extent in extents.items():
        if extent < 1:
            found.append(f"{name} is {extent}: an empty product needs no kernel")
        elif extent > MAX_EXTENT:
            found.append(f"{name} is {extent}, over {MAX_EXTENT}: split the product")
    for operand, layout, majors in (("A", p.a, "mk"), ("B", p.b, "nk"), ("D", p.d, "n")):
        if layout.major not in majors:
            expected = " or ".join(repr(major) for major in majors)
            found.append(f"{operand} has major {layout.major!r}, not {expected}")
    found += [f"epilogue: {reason}" for reason in graph_violations(p.graph)]
    if not found and len(p.operands) != len(p.graph.operands):
        found.append(
            f"the epilogue has {len(p.graph.operands)} operands, {len(p.operands)} are described"
        )
    if p.groups:
        found += _group_violations(p, p.groups)
    if p.indexed:
        found += _stack_violations(p)
    if found:  # what follows does arithmetic on the fields above
        return found
    extents_a, extents_b = {"m": p.m, "k": p.k}, {"k": p.k, "n": p.n}
    if p.groups and p.groups.gathered:
        gathered = extents_a if p.groups.gathered == "a" else extents_b
        gathered[p.groups.axis] = p.groups.source_rows
    found += _layout_violations("A", p.a, extents_a, p.matrices("a"), p.ab_dtype)
    found += _layout_violations("B", p.b, extents_b, p.matrices("b"), p.ab_dtype)
    found += _result_violations(p)
    if p.groups and not found:
        found += _boundary_violations(p, p.groups)
    for i, (operand, layout) in enumerate(zip(p.graph.operands, p.operands, strict=True)):
        found += _epilogue_operand_violations(f"epilogue operand {i}", operand, layout, p)
    found += _gate_violations(p)
    columns = MAX_TILE_N // p.graph.accumulators
    if p.graph.needs_whole_rows and p.n > columns:
        found.append(
            f"N is {p.n}, but the epilogue needs whole rows, which fit a tile up to {columns} "
            "columns: leave it to XLA"
        )
    selected = max((result.k for result in p.graph.results), default=0)
    if selected > p.n:
        found.append(f"the epilogue selects {selected} of rows of {p.n}: ask for {p.n} at most")
    maps = 2 + p.gated + len(p.graph.matrices) + len(p.graph.loaded)
    if maps > MAX_TENSOR_MAPS:
        found.append(
            f"the epilogue needs {maps} tensor maps, over {MAX_TENSOR_MAPS}: split it in two"
        )
    return found


def _stack_violations(problem: GemmProblem) -> list[str]:
    """Returns why no kernel can find an operand in a stack of matrices."""
    p, found = problem, []
    if p.indexed not in ("a", "b"):
        return [f"one matrix of a stack is {p.indexed!r}, not 'a' or 'b'"]
    if p.l != 1 or p.groups:
        found.append(
            f"{p.indexed.upper()} is one matrix of a stack, and the product has "
            f"{'groups' if p.groups else f'{p.l} matrices'}: copy it out of the stack"
        )
    if not 1 <= p.stack <= MAX_EXTENT:
        found.append(f"the stack has {p.stack} matrices, not 1 to {MAX_EXTENT}: split it")
    return found


def _group_violations(problem: GemmProblem, groups: GroupedAxis) -> list[str]:
    """Returns why no kernel can find the groups of a problem whose extents are legal."""
    p, g, found = problem, groups, []
    if g.axis not in ("m", "k"):
        return [f"groups cut the axis {g.axis!r}, not 'm' or 'k'"]
    length = p.m if g.axis == "m" else p.k
    if length > MAX_LENGTH:
        axis = g.axis.upper()
        found.append(f"{axis}, which is cut into groups, is {length}, over {MAX_LENGTH}: split it")
    if not 1 <= g.num_sizes <= MAX_LENGTH:
        found.append(f"{g.num_sizes} sizes of groups, not 1 to {MAX_LENGTH}: split the product")
    rule = g.rule
    if rule.count < 1 or rule.first < 0 or rule.first + rule.count > rule.period:
        found.append(
            f"groups are {rule.count} runs of every {rule.period}, the first of them number "
            f"{rule.first}: there are no such runs"
        )
    if rule.step not in (0, rule.count):
        found.append(f"from a period to the next are {rule.step} matrices, not 0 or {rule.count}")
    if g.gathered and g.gathered not in GATHERABLE[g.axis]:
        found.append(
            f"no kernel gathers {g.gathered.upper()} by indices where groups cut {g.axis.upper()}: "
            "gather it beforehand"
        )
    elif g.gathered == "b" and p.gated:
        found.append("no kernel gathers two B's: gather them beforehand")
    elif g.gathered and not 1 <= g.source_rows <= MAX_EXTENT:
        found.append(f"indices pick among {g.source_rows} rows, not 1 to {MAX_EXTENT}")
    if found:  # what follows does arithmetic on the fields above
        return found
    if g.axis == "m":
        if p.a.major != "k":
            found.append("rows of A are cut into groups, so A must be stored (M, K): copy it")
        if g.matrices > p.l:
            found.append(f"groups need {g.matrices} matrices of B, there are {p.l}")
        cut = sorted({r.kind for r in p.graph.results} & {"column_sum", "max"})
        found += [f"a {kind} of rows that are cut into groups: leave it to XLA" for kind in cut]
        return found
    if (p.a.major, p.b.major) != ("m", "n"):
        found.append(
            "K is cut into groups, so A must be stored (K, M) and B (K, N): copy what is stored "
            "otherwise"
        )
    if (g.total, g.matrices) != (p.l, p.l):
        found.append(
            f"D has {p.l} matrices, but {g.total} groups write {g.matrices}: each must be written "
            "once"
        )
    return found


def _boundary_violations(problem: GemmProblem, groups: GroupedAxis) -> list[str]:
    """Returns why a tensor map over rows of a grouped axis cannot end where a group does.

    Of rows that are gathered there is none; their distance is an int32.
    """
    p = problem
    layouts = {"a": ("A", p.a), "b": ("B", p.b)}
    if groups.gathered:
        name, layout = layouts.pop(groups.gathered)
        if layout.leading_stride > MAX_EXTENT:
            apart = f"{layout.leading_stride} elements apart, over {MAX_EXTENT}"
            return [f"{name}'s rows, picked by indices, are {apart}: copy it"]
    if groups.axis == "k":
        lines = {
            f"{name} is stored (K, {'M' if name == 'A' else 'N'}) {p.ab_dtype} and its": (
                layout.leading_stride * ITEMSIZE[p.ab_dtype]
            )
            for name, layout in layouts.values()
        }
    else:
        lines = {
            f"D is stored (M, N) {r.dtype} and its": ITEMSIZE[r.dtype]
            * (2 * p.n if r.planes > 1 else p.d.leading_stride)
            for r in p.graph.matrices
        }
    return [
        f"{what} rows, cut into groups, are {nbytes} bytes apart, not a multiple of "
        f"{TMA_ALIGNMENT} over 0 and under 2**34: copy it"
        for what, nbytes in lines.items()
        if nbytes % TMA_ALIGNMENT or not 0 < nbytes < WRAP_BYTES
    ]


def _result_violations(problem: GemmProblem) -> list[str]:
    """Returns why TMA cannot store the matrices of the results."""
    p, found = problem, []
    batches = 1 if p.groups and p.groups.axis == "m" else p.l
    extents = {"m": p.m, "n": p.n}
    planes = MatrixLayout("n", 2 * p.n, 2 * p.m * p.n)
    for dtype, paired in dict.fromkeys((r.dtype, r.planes > 1) for r in p.graph.matrices):
        found += _layout_violations("D", planes if paired else p.d, extents, batches, dtype)
    if p.graph.matrices and p.graph.matrices[0].dtype != p.d_dtype:
        found.append(f"D is {p.d_dtype}, the epilogue's first result {p.graph.matrices[0].dtype}")
    if all(result.planes > 1 for result in p.graph.matrices):  # where D lies does not matter
        return found
    if p.m > 1 and p.d.leading_stride < p.n:
        found.append(f"D's rows of {p.n} elements are {p.d.leading_stride} apart and overlap")
    if batches > 1 and p.d.batch_stride == 0:
        found.append(f"D has batch stride 0, so its {batches} matrices would overwrite each other")
    return found


def _epilogue_operand_violations(
    name: str, operand: Operand, layout: MatrixLayout, problem: GemmProblem
) -> list[str]:
    """Returns why a kernel cannot read an operand of the epilogue."""
    p, itemsize = problem, ITEMSIZE[operand.dtype]
    major = {"matrix": "n", "row": "n", "column": "m"}.get(operand.kind, layout.major)
    if layout.major != major:
        return [f"{name}, a {operand.kind}, has major {layout.major!r}, not {major!r}: copy it"]
    batches = p.l
    if p.groups and p.groups.axis == "m" and operand.kind in ("matrix", "column"):
        batches = 1
    if operand.kind == "matrix":
        return _layout_violations(name, layout, {"m": p.m, "n": p.n}, batches, operand.dtype)
    found = []
    if operand.kind == "row" and p.n * itemsize % TMA_ALIGNMENT:
        step = TMA_ALIGNMENT // itemsize
        found.append(
            f"{name} is a row of N={p.n} {operand.dtype}, {p.n * itemsize} bytes, not a multiple "
            f"of {TMA_ALIGNMENT}: pad N from {p.n} to {ceil_div(p.n, step) * step}"
        )
    stride = layout.batch_stride
    if batches == 1 or stride == 0:
        return found
    if stride < 0 or stride > MAX_EXTENT:
        found.append(f"{name} has batch stride {stride}, not 0 to {MAX_EXTENT}: copy it")
    elif operand.kind != "scalar" and stride * itemsize % TMA_ALIGNMENT:
        found.append(
            f"{name} is a {operand.kind} of {operand.dtype} for each matrix, "
            f"{stride * itemsize} bytes apart, not a multiple of {TMA_ALIGNMENT}: choose a stride "
            f"that is a multiple of {TMA_ALIGNMENT // itemsize} elements"
        )
    return found


def _gate_violations(problem: GemmProblem) -> list[str]:
    """Returns why the second right operand cannot be where the problem says."""
    if problem.up_offset is None:
        return []
    if not problem.gated:
        return [f"up_offset is {problem.up_offset}, but the product has one right operand"]
    nbytes = problem.up_offset * ITEMSIZE[problem.ab_dtype]
    if nbytes < 0 or nbytes % TMA_ALIGNMENT:
        return [
            f"up lies {nbytes} bytes behind gate, not at a multiple of {TMA_ALIGNMENT}: pass two "
            "arrays"
        ]
    return []


def _layout_violations(
    operand: str, layout: MatrixLayout, extents: dict[str, int], batches: int, dtype: str
) -> list[str]:
    """Returns why TMA cannot address an operand.

    Lines and strides are positive multiples of 16 bytes. Of a line that is not, TMA would store
    up to the next multiple: on an H200 that wrote past D's last column.
    """
    (other,) = extents.keys() - {layout.major}
    contiguous = layout.major
    stored = f"{operand} is stored ({other.upper()}, {contiguous.upper()}) {dtype}"
    step = TMA_ALIGNMENT // ITEMSIZE[dtype]
    extent = extents[contiguous]
    if extent % step:
        line = f"its lines of {contiguous.upper()}={extent} are {extent * ITEMSIZE[dtype]} bytes"
        way_out = f"pad {contiguous.upper()} from {extent} to {ceil_div(extent, step) * step}"
        return [f"{stored} and {line}, not a multiple of {TMA_ALIGNMENT}: {way_out}"]
    way_out = f"choose a stride that is a multiple of {step} elements"
    strides = []
    if extents[other] > 1:
        strides.append((f"its lines along {contiguous.upper()}", layout.leading_stride, 1))
    if batches > 1:
        strides.append(("its matrices", layout.batch_stride, 0))
    for what, stride, least in strides:
        nbytes = stride * ITEMSIZE[dtype]
        if stride < least:
            return [f"{stored} and {what} are {nbytes} bytes apart: make a compact copy"]
        if nbytes % TMA_ALIGNMENT:
            reason = f"{stored} and {what} are {nbytes} bytes apart, not a multiple of"
            return [f"{reason} {TMA_ALIGNMENT}: {way_out}"]
        if nbytes >= MAX_STRIDE_BYTES:
            return [f"{stored} and {what} are {nbytes} bytes apart, not under 2**40: split it"]
    return []


def pairing_violations(problem: GemmProblem, spec: GemmSpec) -> list[str]:
    """Returns why the kernel of `spec` cannot run `problem`; each is taken to be legal alone."""
    p, found = problem, []
    asked = {"ab_dtype": p.ab_dtype, "d_dtype": p.d_dtype}
    asked |= {"a_major": p.a.major, "b_major": p.b.major}
    for field, value in asked.items():
        compiled = getattr(spec, field)
        if compiled != value:
            found.append(f"the kernel has {field} {compiled!r}, the problem {value!r}")
    if spec.epilogue != p.epilogue:
        found.append(f"the kernel's epilogue is {spec.graph.label}, the problem's {p.graph.label}")
    elif p.graph.needs_whole_rows and p.n > spec.d_tile_n:
        found.append(f"rows of {p.n} columns do not fit the kernel's tile of {spec.d_tile_n}")
    axis, gathered = (p.groups.axis, p.groups.gathered) if p.groups else (None, None)
    if spec.grouped != axis:
        found.append(f"the kernel has groups along {spec.grouped}, the problem along {axis}")
    if spec.gathered != gathered:
        found.append(f"the kernel gathers {spec.gathered}, the problem {gathered}")
    if spec.indexed != p.indexed:
        found.append(f"the kernel indexes {spec.indexed}, the problem {p.indexed}")
    clusters_m = ceil_div(p.m, spec.tile_m * spec.raster_m)
    clusters_n = ceil_div(p.n, spec.d_tile_n * spec.raster_n)
    if p.groups and axis == "m":  # at most; a group's last tile may be all but empty
        clusters = (clusters_m + p.groups.num_sizes) * clusters_n
    else:
        clusters = clusters_m * clusters_n * p.l
    limit = MAX_GROUPED_TILES if p.groups else MAX_TILES
    if clusters >= limit:
        found.append(f"{clusters} clusters of tiles, not under {limit}: split the product")
    return found
