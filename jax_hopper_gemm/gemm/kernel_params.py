"""The kernel's parameters: names, kinds and order, as a function of the `GemmSpec`.

This is the one list of them. `kernels/compile.py` makes the arguments to compile with from it,
`cubin/manifest.py` the sizes that the machine code must show, and `launch/plan.py` puts its values
in this order. The kernel itself takes a `KernelArgs`, whose fields flatten to the same list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from . import simt
from .cutting import CutSpec
from .epilogue_graph import Operand, Result
from .group_search import GroupRaster
from .k_split import KSplit
from .offsets import ZeroRows
from .quantization import QuantizeSpec
from .raster import Raster
from .spec import TMA_ALIGNMENT, GemmSpec

KernelSpec = GemmSpec | QuantizeSpec | CutSpec
PASSES: dict[str, type[QuantizeSpec | CutSpec]] = {x.KIND: x for x in (QuantizeSpec, CutSpec)}

ParamKind = Literal["tensor_map", "pointer", "int32"]
PARAM_BYTES: dict[ParamKind, int] = {"tensor_map": 128, "pointer": 8, "int32": 4}
SPAN_MODES = "et"  # the end of a span and the total: the last modes of a span map, see `plan`
BATCH_MODES = "lij"  # the axes of a nested batch, the innermost first; of others the first alone


@dataclass(frozen=True)
class KernelParam:
    """One parameter of the kernel: a tensor map by value, an address in device memory, a number."""

    name: str  # unique in the kernel
    kind: ParamKind
    dtype: str = "int32"  # of the elements of a tensor map or behind a pointer
    modes: str = ""  # of a tensor map, in the order of CuTe, one letter each
    contiguous: str = ""  # which of the modes is
    alignment: int | None = None  # bytes a pointer is a multiple of; None: those of an element

    @property
    def nbytes(self) -> int:
        return PARAM_BYTES[self.kind]


class Gather(NamedTuple):
    """Rows of one operand that an array of indices picks."""

    indices: Any  # pointer to int32, one for each element of the grouped axis
    rows: Any  # of the array that they pick from
    width: Any  # elements of such a row
    stride: Any  # elements between neighbouring rows


class StackIndex(NamedTuple):
    """Which matrix of a stack an operand is: an int32 in device memory, and how many there are."""

    index: Any
    matrices: Any


class Scales(NamedTuple):
    """Block scales of one operand, (L, blocks along K, blocks), the last axis contiguous."""

    scales: Any  # pointer to float32
    last: Any  # index of the last block
    k_stride: Any  # elements from a block of K to the next
    batch_stride: Any  # elements from a matrix's to the next one's


class Nest(NamedTuple):
    """Extents of a nested batch's axes but the outermost."""

    inner: Any
    middle: Any


class Extents(NamedTuple):
    """Extents of D, for epilogues that must know them."""

    m: Any
    n: Any


class ZeroFill(NamedTuple):
    """D, and its matrices as rows, for the warp that writes those of empty groups."""

    d: Any
    rows: ZeroRows


class SplitK(NamedTuple):
    """What clusters that share the k-tiles of a tile know and exchange."""

    tape: Any  # `KSplit`
    partials: Any  # pointer to float32, a slot of a cluster's accumulators for each range
    flags: Any  # pointer to 8 bytes for each warp that writes to such a slot


class KernelArgs(NamedTuple):
    """One thing for each parameter: a `KernelParam`, or the argument. None: there is none."""

    # Tensor maps of A, of B or each panel's, of a gated product's up; of the scales of these along
    # K. Of a gathered operand a pointer.
    tma_ab: Any
    # A tensor map for each matrix, or `Strided` where threads store it; of other results a pointer.
    # Where there are panels, a tuple of those of each.
    results: Any
    # A tensor map each; of a scalar a pointer and the elements to the next matrix's. Of panels as
    # of results.
    operands: Any
    group_sizes: Any  # pointer to the int32 sizes of groups
    gather: Any  # `Gather`, where rows are gathered
    stack_index: Any  # `StackIndex`, where an operand is one matrix of a stack
    scales: Any  # `Scales` of A and of B, where blocks have some
    nest: Any  # `Nest`, where the batch has several axes
    raster: Any  # the order of tiles: `Raster`, or `GroupRaster` where there are groups
    k_tiles: Any  # of a tile, unless K is grouped
    stage_bytes: Any  # that TMA brings, where boxes end with their matrices
    extents: Any  # `Extents`, if the epilogue must know them
    zero_fill: Any  # `ZeroFill`, where a warp does that
    split_k: Any  # `SplitK`, where K is split
    tile_counter: Any  # pointer to the 16 bytes of the dynamic scheduler's counter
    panel_starts: Any  # where there are panels, tiles of columns before each but the first


class Strided(NamedTuple):
    """A batch of matrices, addressed by its strides in elements."""

    pointer: Any
    stride: Any  # between neighbours along the matrix's index that is not contiguous
    batch_stride: Any


class SimtExtents(NamedTuple):
    """Extents of a product."""

    m: Any
    n: Any
    k: Any


class SimtArgs(NamedTuple):
    """The same of a kernel for FMA units."""

    a: Any  # `Strided`, as d, or a tensor map: see `simt.by_tma`
    b: Any
    d: Any
    raster: Any
    k_tiles: Any
    extents: Any  # `SimtExtents`


class QuantizeArgs(NamedTuple):
    """The same of a kernel that quantizes a matrix of `rows` by `columns`; see `quantization`."""

    x: Any  # pointers, but for the extents
    picks: Any  # indices of rows of x, int32
    values: Any
    scales: Any  # (B, C / 128, R), of lines
    transposed_values: Any
    transposed_scales: Any  # (B, R / 128, C), of lines
    tile_scales: Any  # (B, R / 128, C / 128)
    rows: Any
    columns: Any
    source_rows: Any  # of x, where rows are picked


class CutArgs(NamedTuple):
    """The same of a kernel that cuts a matrix of `rows` by `columns` into parts; see `cutting`."""

    x: Any
    parts: Any
    rows: Any
    columns: Any


def spec_from_json(text: str) -> KernelSpec:
    """Returns the spec whose `to_json` the text is."""
    named = json.loads(text)
    one_pass = PASSES.get(named.get("kind", "")) if isinstance(named, dict) else None
    return one_pass.from_dict(named) if one_pass else GemmSpec.from_json(text)


def kernel_params(spec: KernelSpec) -> KernelArgs | SimtArgs | QuantizeArgs | CutArgs:
    """Returns the parameters of `spec`'s kernel."""
    if isinstance(spec, QuantizeSpec):
        return _quantize_params(spec)
    if isinstance(spec, CutSpec):
        x = _pointer("x", "float32", TMA_ALIGNMENT if spec.aligned else None)
        parts = _pointer("parts", "bfloat16", TMA_ALIGNMENT)
        return CutArgs(x, parts, *map(_number, CutArgs._fields[2:]))
    if spec.simt_width:
        return _simt_params(spec)
    graph = spec.graph
    gather = zero_fill = stack_index = split_k = None
    if spec.gathered:
        gather = Gather(_pointer("gather_indices"), *_numbers("gather", Gather._fields[1:]))
    if spec.indexed:
        stack_index = StackIndex(_pointer("stack_index"), _number("stack_matrices"))
    if spec.zero_fill_warp:
        rows = ZeroRows(*_numbers("zero", ZeroRows._fields))
        zero_fill = ZeroFill(_pointer("zero_d"), rows)
    if spec.split_k:
        tape = KSplit(*_numbers("tape", KSplit._fields))
        split_k = SplitK(
            tape, _pointer("partials", "float32", TMA_ALIGNMENT), _pointer("flags", alignment=8)
        )
    raster = GroupRaster if spec.grouped else Raster
    rights = right_names(spec.panels) + ["up"] * (graph.accumulators - 1)
    return KernelArgs(
        tma_ab=tuple(_operand_ab(spec, n) for n in ("a", *rights))
        + tuple(_scales_of_b(spec, n) for n in ("b", "up")[: graph.accumulators] if spec.k_group),
        results=_of_panels(spec, graph.results, _result),
        # None and not (): of an empty tuple CuTeDSL warns.
        operands=_of_panels(spec, graph.operands, _operand) or None,
        group_sizes=_pointer("group_sizes") if spec.grouped else None,
        gather=gather,
        stack_index=stack_index,
        scales=tuple(map(_scales, "ab")) if spec.a_block else None,
        nest=Nest(*_numbers("nest", Nest._fields)) if spec.nested else None,
        raster=raster(*_numbers("raster", raster._fields)),
        k_tiles=_number("k_tiles"),
        stage_bytes=_number("stage_bytes") if spec.short_boxes else None,
        extents=Extents(_number("m"), _number("n")) if spec.needs_extents else None,
        zero_fill=zero_fill,
        split_k=split_k,
        tile_counter=_pointer("tile_counter", alignment=16) if spec.dynamic else None,
        panel_starts=tuple(map(_number, start_names(spec.panels))) or None,
    )


def right_names(panels: int) -> list[str]:
    """Returns the names of right operands side by side."""
    return ["b", *(f"b{i}" for i in range(1, panels))]


def start_names(panels: int) -> list[str]:
    """Returns the names of what all panels but the first begin with."""
    return [f"panel_start{i}" for i in range(1, panels)]


def _simt_params(spec: GemmSpec) -> SimtArgs:
    return SimtArgs(
        _operand_ab(spec, "a") if simt.by_tma(spec, False) else _strided("a", spec.a_dtype),
        _operand_ab(spec, "b") if simt.by_tma(spec, True) else _strided("b", spec.b_dtype),
        _strided("d", spec.d_dtype),
        raster=Raster(*_numbers("raster", Raster._fields)),
        k_tiles=_number("k_tiles"),
        extents=SimtExtents(*map(_number, SimtExtents._fields)),
    )


def _quantize_params(spec: QuantizeSpec) -> QuantizeArgs:
    def pointer(name: str, dtype: str, there: bool, alignment: int | None = None) -> Any:
        return _pointer(name, dtype, alignment) if there else None

    return QuantizeArgs(
        _pointer("x", spec.dtype, TMA_ALIGNMENT),
        pointer("picks", "int32", spec.picked),
        pointer("values", spec.to, spec.straight > 0, TMA_ALIGNMENT),
        pointer("scales", "float32", spec.straight == 1),
        pointer("transposed_values", spec.to, spec.transposed > 0, TMA_ALIGNMENT),
        pointer("transposed_scales", "float32", spec.transposed == 1),
        pointer("tile_scales", "float32", spec.whole_tiles),
        _number("rows"),
        _number("columns"),
        _number("source_rows") if spec.picked else None,
    )


def result_names(spec: QuantizeSpec) -> tuple[str, ...]:
    """Returns the names in `QuantizeArgs` of what the kernel writes."""
    params = _quantize_params(spec)
    names = "values", "scales", "transposed_values", "transposed_scales", "tile_scales"
    return tuple(name for name in names if getattr(params, name) is not None)


def param_list(spec: KernelSpec) -> tuple[KernelParam, ...]:
    """Returns the parameters of `spec`'s kernel in order."""
    params: list[KernelParam] = []
    map_args(params.append, kernel_params(spec))
    return tuple(params)


def map_args(function: Callable[[Any], Any], args: Any) -> Any:
    """Returns `args`, a `KernelArgs` or a part of one, with `function` of each thing in it."""
    if args is None:
        return None
    if not isinstance(args, tuple):
        return function(args)
    mapped = [map_args(function, arg) for arg in args]
    return type(args)(*mapped) if hasattr(args, "_fields") else tuple(mapped)


def _operand_ab(spec: GemmSpec, name: str) -> KernelParam:
    operand, row, dtype, major = "b", "n", spec.b_dtype, spec.b_major
    if name == "a":
        operand, row, dtype, major = "a", "m", spec.a_dtype, spec.a_major
    if spec.gathered == operand:
        return _pointer(name, dtype, TMA_ALIGNMENT)
    return KernelParam(name, "tensor_map", dtype, row + "k" + _last(spec, "k"), major)


def _scales_of_b(spec: GemmSpec, name: str) -> KernelParam:
    return KernelParam(f"{name}_group_scales", "tensor_map", "float32", "ng" + _batch(spec), "n")


def _of_panels(spec: GemmSpec, arrays: Sequence[Any], param: Callable[..., Any]) -> tuple[Any, ...]:
    """Returns what `param` makes of each array of the epilogue, and of its number.

    Where there are panels, a tuple of those of each; numbers count the first one's arrays first.
    """
    if spec.panels == 1:
        return tuple(param(spec, i, array) for i, array in enumerate(arrays))
    panels = range(spec.panels)
    return tuple(
        tuple(param(spec, i + len(arrays) * panel, array) for panel in panels)
        for i, array in enumerate(arrays)
    )


def _result(spec: GemmSpec, i: int, result: Result) -> KernelParam | Strided:
    if result.kind == "matrix" and spec.loose_d:
        return _strided(f"d{i}", result.dtype)
    if result.kind == "matrix":
        modes = "mn" + _last(spec, "m")
        return KernelParam(f"d{i}", "tensor_map", result.dtype, modes, spec.d_major)
    return _pointer(f"d{i}", "int32" if result.kind == "top_k_indices" else "float32")


def _operand(
    spec: GemmSpec, i: int, operand: Operand
) -> KernelParam | tuple[KernelParam, KernelParam]:
    if operand.kind == "scalar":
        return _pointer(f"c{i}", "float32"), _number(f"c{i}_batch_stride")
    modes = {"matrix": "mn", "row": "n", "column": "m"}[operand.kind] + _batch(spec)
    contiguous = {"matrix": spec.d_major, "row": "n", "column": "m"}[operand.kind]
    return KernelParam(f"c{i}", "tensor_map", operand.dtype, modes, contiguous)


def _strided(name: str, dtype: str) -> Strided:
    return Strided(_pointer(name, dtype), *_numbers(name, Strided._fields[1:]))


def _scales(operand: str) -> Scales:
    name = f"{operand}_scales"
    return Scales(_pointer(name, "float32"), *_numbers(name, Scales._fields[1:]))


def _last(spec: GemmSpec, axis: str) -> str:
    """Returns the modes after a matrix's two: those of a span map where this axis is grouped."""
    return SPAN_MODES if spec.grouped == axis else _batch(spec)


def _batch(spec: GemmSpec) -> str:
    return BATCH_MODES if spec.nested else BATCH_MODES[0]


def _pointer(name: str, dtype: str = "int32", alignment: int | None = None) -> KernelParam:
    return KernelParam(name, "pointer", dtype, alignment=alignment)


def _number(name: str) -> KernelParam:
    return KernelParam(name, "int32")


def _numbers(prefix: str, names: tuple[str, ...]) -> list[KernelParam]:
    return [_number(f"{prefix}_{name}") for name in names]
