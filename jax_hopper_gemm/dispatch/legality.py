"""Which problems our kernels can run, and which kernel can run which problem.

Each function returns every reason against, as text for the user; an empty list is a yes. What a
kernel may be at all is `spec.violations`.
"""

from __future__ import annotations

from ..epilogue import Operand, graph_violations
from ..plan import TMA_ALIGNMENT, ceil_div
from ..problem import ITEMSIZE, GemmProblem, MatrixLayout
from ..spec import GemmSpec
from ..walk import MAX_TILES
from .device import Device

AB_DTYPES = ("bfloat16", "float16")
D_DTYPES = ("bfloat16", "float16", "float32")
MAX_EXTENT = 2**31 - 1  # TMA coordinates are int32
MAX_STRIDE_BYTES = 2**40  # a tensor map's strides stay below
MAX_TENSOR_MAPS = 16  # of one launch
MAX_TILE_N = 256


def device_violations(device: Device) -> list[str]:
    """Returns why our kernels cannot run on `device`."""
    if device.compute_capability == (9, 0):
        return []
    major, minor = device.compute_capability
    return [
        f"the GPU has compute capability {major}.{minor}; the kernels are for 9.0 (H100, H200): "
        "use XLA there"
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
    if found:  # what follows does arithmetic on the fields above
        return found
    found += _layout_violations("A", p.a, {"m": p.m, "k": p.k}, p.l, p.ab_dtype)
    found += _layout_violations("B", p.b, {"k": p.k, "n": p.n}, p.l, p.ab_dtype)
    found += _result_violations(p)
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


def _result_violations(problem: GemmProblem) -> list[str]:
    """Returns why TMA cannot store the matrices of the results."""
    p, found = problem, []
    extents = {"m": p.m, "n": p.n}
    planes = MatrixLayout("n", 2 * p.n, 2 * p.m * p.n)
    for dtype, paired in dict.fromkeys((r.dtype, r.planes > 1) for r in p.graph.matrices):
        found += _layout_violations("D", planes if paired else p.d, extents, p.l, dtype)
    if p.graph.matrices and p.graph.matrices[0].dtype != p.d_dtype:
        found.append(f"D is {p.d_dtype}, the epilogue's first result {p.graph.matrices[0].dtype}")
    if all(result.planes > 1 for result in p.graph.matrices):  # where D lies does not matter
        return found
    if p.m > 1 and p.d.leading_stride < p.n:
        found.append(f"D's rows of {p.n} elements are {p.d.leading_stride} apart and overlap")
    if p.l > 1 and p.d.batch_stride == 0:
        found.append(f"D has batch stride 0, so its {p.l} matrices would overwrite each other")
    return found


def _epilogue_operand_violations(
    name: str, operand: Operand, layout: MatrixLayout, problem: GemmProblem
) -> list[str]:
    """Returns why a kernel cannot read an operand of the epilogue."""
    p, itemsize = problem, ITEMSIZE[operand.dtype]
    major = {"matrix": "n", "row": "n", "column": "m"}.get(operand.kind, layout.major)
    if layout.major != major:
        return [f"{name}, a {operand.kind}, has major {layout.major!r}, not {major!r}: copy it"]
    if operand.kind == "matrix":
        return _layout_violations(name, layout, {"m": p.m, "n": p.n}, p.l, operand.dtype)
    found = []
    if operand.kind == "row" and p.n * itemsize % TMA_ALIGNMENT:
        step = TMA_ALIGNMENT // itemsize
        found.append(
            f"{name} is a row of N={p.n} {operand.dtype}, {p.n * itemsize} bytes, not a multiple "
            f"of {TMA_ALIGNMENT}: pad N from {p.n} to {ceil_div(p.n, step) * step}"
        )
    stride = layout.batch_stride
    if p.l == 1 or stride == 0:
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
    clusters = (
        ceil_div(p.m, spec.tile_m * spec.cluster_m) * ceil_div(p.n, spec.d_tile_n * spec.cluster_n)
    ) * p.l
    if clusters >= MAX_TILES:
        found.append(f"{clusters} clusters of tiles, not under {MAX_TILES}: split the product")
    return found
