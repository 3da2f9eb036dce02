"""How a kernel is launched: grid, shared memory, tensor maps, scalars; all but the pointers.

A plan is data. `LaunchPlan.encode` turns it into the int64 words that travel in the HLO and
that `ffi/` decodes; the format is described there and carries `PLAN_VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal

from ..gemm import grid, simt
from ..gemm.cutting import COLUMNS, ROWS, CutSpec
from ..gemm.dtypes import DTYPES
from ..gemm.group_search import GroupRaster
from ..gemm.kernel_params import KernelSpec, param_list, right_names, start_names
from ..gemm.problem import GemmProblem, MatrixLayout
from ..gemm.quantization import TILE, QuantizeSpec
from ..gemm.raster import Raster, RasterOrder, make_raster
from ..gemm.smem import column_elements
from ..gemm.spec import GemmSpec
from ..gemm.tma_box import TmaBox
from .params import (
    Int32,
    Param,
    Pointer,
    TensorMap,
    batch_axes,
    outer_dims,
    span_map,
    tensor_map,
)

PLAN_VERSION = 2


@dataclass(frozen=True)
class LaunchPlan:
    """One launch.

    Buffers are numbered: A 0, B 1, up where it has an array of its own, or the right operands of
    other panels, the epilogue's operands; of a grouped product the sizes, and the indices of
    gathered rows; of one that reads a stack the index; block scales of A and of B, or of groups
    along K of each B; then the results, then workspaces. Operands and results of one panel stand
    together.
    """

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    threads: int
    smem_bytes: int
    params: tuple[Param, ...]
    workspaces: tuple[int, ...] = ()  # bytes of scratch memory: extra results of the call

    def encode(self) -> tuple[int, ...]:
        """Returns int64 words: version, grid, cluster, threads, smem, cleared, params.

        `cleared` is a count, then (buffer, bytes) pairs: memory that the launcher sets to zero. It
        is 0 here; programs of version 0.1 have such. `params` is a count, then the parameters in
        the kernel's order, each opened by its kind: 0 tensor map (buffer, offset,
        CUtensorMapDataType, CUtensorMapSwizzle, rank, dims, strides, box), 1 int32, 2 pointer.
        """
        words = chain.from_iterable(param.encode() for param in self.params)
        head = PLAN_VERSION, *self.grid, *self.cluster, self.threads, self.smem_bytes
        return (*head, 0, len(self.params), *words)


def make_plan(
    problem: GemmProblem, spec: GemmSpec, raster_order: RasterOrder, num_sms: int
) -> LaunchPlan:
    """Returns the launch of `spec`'s kernel on `problem`, on a GPU with `num_sms` SMs."""
    if problem.d.major != spec.d_major:  # the kernel computes D's transpose: its A is our B
        plan = make_plan(problem.transposed, spec, raster_order, num_sms)
        return replace(plan, params=tuple(map(_of_other_operand, plan.params)))
    problem = problem.as_run_by(spec)
    raster: Raster | GroupRaster
    if problem.groups:
        raster = grid.group_raster(problem, spec, raster_order)
    else:
        clusters, along_m = grid.cluster_grid(problem, spec), raster_order.along == "m"
        raster = make_raster(*clusters, problem.l, along_m=along_m, swizzle=raster_order.swizzle)
    values = _simt_params(problem, spec) if spec.simt_width else _tma_params(problem, spec)
    values |= _numbers("raster", raster._asdict())
    values["k_tiles"] = Int32(grid.num_k_tiles(problem, spec))
    workspaces: dict[str, int] = {}
    if spec.dynamic:
        workspaces["tile_counter"] = 16
    if spec.split_k:
        tape = grid.k_split(problem, spec, num_sms)
        slots = max(1, tape.ranges) * spec.cluster_size
        values |= _numbers("tape", tape._asdict())
        workspaces["partials"] = 4 * slots * spec.d_tile_m * spec.tile_n
        workspaces["flags"] = 8 * slots * spec.tile_warps
    first = grid.num_inputs(problem) + len(grid.result_shapes(problem, spec))
    values |= {name: Pointer(first + i) for i, name in enumerate(workspaces)}
    launched = grid.launched_clusters(problem, spec, num_sms)
    return LaunchPlan(
        grid=(spec.cluster_m * launched, spec.cluster_n, spec.cluster_k),
        cluster=(spec.cluster_m, spec.cluster_n, spec.cluster_k), threads=spec.threads,
        smem_bytes=spec.smem_bytes, params=in_kernel_order(spec, values),
        workspaces=tuple(workspaces.values()),
    )  # fmt: skip


def _tma_params(problem: GemmProblem, spec: GemmSpec) -> dict[str, Param]:
    values = {
        **_operand_params(problem, spec),
        **_result_params(problem, spec),
        **_epilogue_params(problem, spec),
        **_group_params(problem),
        **_scale_params(problem, spec),
    }
    if spec.short_boxes:
        values["stage_bytes"] = Int32(grid.loaded_bytes(problem, spec))
    if problem.indexed:
        after = grid.num_scales(problem)
        values["stack_index"] = Pointer(grid.num_inputs(problem) - 1 - after)
        values["stack_matrices"] = Int32(problem.stack)
    if spec.nested:
        inner, middle, _ = batch_axes(problem, problem.d, problem.l)
        values |= _numbers("nest", {"inner": inner[0], "middle": middle[0]})
    if spec.needs_extents:
        values |= {"m": Int32(problem.m), "n": Int32(problem.n)}
    for name, tile in zip(start_names(spec.panels), grid.panel_starts(problem, spec), strict=True):
        values[name] = Int32(tile)
    if spec.zero_fill_warp:
        values["zero_d"] = Pointer(grid.num_inputs(problem))
        values |= _numbers("zero", grid.zero_rows(problem)._asdict())
    return values


def _of_other_operand(param: Param) -> Param:
    """Returns a parameter with A's buffer in place of B's, and B's in place of A's."""
    if isinstance(param, Int32) or param.buffer > 1:
        return param
    return replace(param, buffer=1 - param.buffer)


def _simt_params(problem: GemmProblem, spec: GemmSpec) -> dict[str, Param]:
    """Returns tensor maps of A and B, or pointers and strides; those of D, and the extents."""
    p, values = problem, _strided("d", 2, problem.d, problem.l)
    operands = ("a", p.a, spec.tile_m, "m", p.m), ("b", p.b, spec.tile_n, "n", p.n)
    for buffer, (name, layout, tile, axis, extent) in enumerate(operands):
        if not simt.by_tma(spec, of_b=name == "b"):
            values |= _strided(name, buffer, layout, p.l)
            continue
        batch, box = batch_axes(p, layout, p.l), TmaBox(tile, spec.tile_k, swizzle=0)
        extents = {axis: extent, "k": p.k}
        values[name] = tensor_map(buffer, "float32", layout, extents, batch, box)
    return values | {"m": Int32(p.m), "n": Int32(p.n), "k": Int32(p.k)}


def _strided(name: str, buffer: int, layout: MatrixLayout, matrices: int) -> dict[str, Param]:
    """Returns the values of a `kernel_params.Strided`."""
    batch_stride = layout.batch_stride if matrices > 1 else 0
    numbers = {"stride": layout.leading_stride, "batch_stride": batch_stride}
    return {name: Pointer(buffer), **_numbers(name, numbers)}


def in_kernel_order(spec: KernelSpec, values: dict[str, Param]) -> tuple[Param, ...]:
    """Returns the values of `spec`'s parameters, by name, in the kernel's order."""
    params = param_list(spec)
    unmatched = values.keys() ^ {param.name for param in params}
    assert not unmatched, f"{spec.name}: the plan or the kernel alone has {sorted(unmatched)}"
    for param in params:
        kind = values[param.name].kind
        assert kind == param.kind, (
            f"{param.name}: the kernel takes {param.kind}, the plan has {kind}"
        )
    return tuple(values[param.name] for param in params)


def _numbers(prefix: str, numbers: dict[str, int]) -> dict[str, Param]:
    return {f"{prefix}_{name}": Int32(value) for name, value in numbers.items()}


def _group_params(problem: GemmProblem) -> dict[str, Param]:
    groups = problem.groups
    if groups is None:
        return {}
    after = grid.num_scales(problem)
    sizes = grid.num_inputs(problem) - 1 - (groups.gathered is not None) - after
    values: dict[str, Param] = {"group_sizes": Pointer(sizes)}
    if groups.gathered:
        layout = problem.a if groups.gathered == "a" else problem.b
        width = {"k": problem.k, "m": problem.m, "n": problem.n}[layout.major]
        values["gather_indices"] = Pointer(sizes + 1)
        numbers = {"rows": groups.source_rows, "width": width, "stride": layout.leading_stride}
        values |= _numbers("gather", numbers)
    return values


def _scale_params(problem: GemmProblem, spec: GemmSpec) -> dict[str, Param]:
    p, values = problem, {}
    if p.k_group:
        return _group_scale_params(p, spec)
    for i, (name, scales, lines) in enumerate((("a", p.a_scales, p.m), ("b", p.b_scales, p.n))):
        if scales is None:
            return {}
        values[f"{name}_scales"] = Pointer(grid.num_inputs(p) - 2 + i)
        numbers = {
            "last": grid.ceil_div(lines, scales.block) - 1,
            "k_stride": scales.k_stride,
            "batch_stride": scales.batch_stride if p.l > 1 else 0,
        }
        values |= _numbers(f"{name}_scales", numbers)
    return values


def _group_scale_params(problem: GemmProblem, spec: GemmSpec) -> dict[str, Param]:
    """Returns the tensor maps of the scales of groups along K, those of B and of up."""
    p, groups = problem, grid.ceil_div(problem.k, problem.k_group)
    layout = MatrixLayout("n", p.n, p.n * groups if p.b.batch_stride else 0)
    box = TmaBox(spec.d_tile_n, spec.tile_k // spec.k_group, swizzle=0)
    first = grid.num_inputs(p) - grid.num_scales(p)
    batch = batch_axes(p, layout, p.matrices("b"))
    return {
        f"{name}_group_scales": tensor_map(
            first + i, "float32", layout, {"n": p.n, "groups": groups}, batch, box
        )
        for i, name in enumerate(("b", "up")[: p.graph.accumulators])
    }


def _operand_params(problem: GemmProblem, spec: GemmSpec) -> dict[str, Param]:
    """Returns the tensor maps of A, B and up; of a gathered operand a pointer."""
    p, (first, *_) = problem, problem.as_panels
    values: dict[str, Param] = {"a": _operand_map(p, spec, "a", 0, p.a, p.m)}
    names = right_names(len(p.as_panels))
    for i, (name, panel) in enumerate(zip(names, p.as_panels, strict=True)):
        values[name] = _operand_map(p, spec, "b", 1 + i, panel.b, panel.n)
    if p.gated:
        buffer = 2 if p.up_offset is None else 1
        offset = DTYPES[p.b_dtype].nbytes(p.up_offset or 0)
        values["up"] = _operand_map(p, spec, "b", buffer, first.b, first.n, offset)
    if spec.rounds_operands:
        values = {x: replace(of, rounds=True) for x, of in values.items()}  # gathered ones are none
    return values


def _operand_map(
    problem: GemmProblem, spec: GemmSpec, operand: Literal["a", "b"], buffer: int,
    layout: MatrixLayout, extent: int, offset: int = 0,
) -> TensorMap | Pointer:  # fmt: skip
    """Returns the map over `extent` rows of A or columns of B, or the pointer."""
    p = problem
    if spec.gathered == operand:
        return Pointer(buffer)
    of_a = operand == "a"
    axis, dtype, box = ("m", p.a_dtype, spec.a_box) if of_a else ("n", p.b_dtype, spec.b_box)
    if spec.spans_k:
        return span_map(buffer, dtype, layout, extent, p.k, box, offset)
    if layout.major == "k":  # of few rows, those that are loaded
        rows_a, rows_b = grid.loaded_rows(p, spec)
        box = replace(box, other=min(box.other, rows_a if of_a else rows_b))
    extents, batch = {axis: extent, "k": p.stored_k}, batch_axes(p, layout, p.matrices(operand))
    return tensor_map(buffer, dtype, layout, extents, batch, box, offset)


def _result_params(problem: GemmProblem, spec: GemmSpec) -> dict[str, Param]:
    p, buffer = problem, grid.num_inputs(problem) - 1
    values: dict[str, Param] = {}
    for i, (panel, result) in enumerate(product(p.as_panels, p.graph.results)):
        buffer += result.plane == 0
        if result.kind != "matrix":
            values[f"d{i}"] = Pointer(buffer)
            continue
        if spec.loose_d:
            values |= _strided(f"d{i}", buffer, p.d, p.l)
            continue
        layout, planes = panel.d, result.planes
        if planes > 1:
            layout = MatrixLayout("n", planes * p.n, p.m * planes * p.n)
        offset = result.plane * p.n * DTYPES[result.dtype].itemsize
        # NOTE: TMA stores up to the next multiple of 16 bytes, past the end of a row that is not
        # one: threads store such rows (`loose_d`), or `dispatch/legality.py` refuses the product.
        box = spec.epi_box(result.dtype)
        if spec.grouped == "m":
            values[f"d{i}"] = span_map(buffer, result.dtype, layout, p.n, p.m, box, offset)
            continue
        extents = {"m": p.m, "n": panel.n}
        batch = batch_axes(p, layout, p.l)
        values[f"d{i}"] = tensor_map(buffer, result.dtype, layout, extents, batch, box, offset)
    return values


def _epilogue_params(problem: GemmProblem, spec: GemmSpec) -> dict[str, Param]:
    """Returns the operands' tensor maps; a scalar's pointer and elements to the next matrix's."""
    p = problem
    first = 1 + len(p.as_panels) + (p.gated and p.up_offset is None)
    along_rows = 1 if spec.grouped == "m" else p.l  # arrays of an operand that varies along rows
    values: dict[str, Param] = {}
    arrays = (
        (operand, layout, panel.n)
        for panel in p.as_panels
        for operand, layout in zip(p.graph.operands, panel.operands, strict=True)
    )
    for i, (operand, layout, n) in enumerate(arrays):
        name, buffer = f"c{i}", first + i
        if operand.kind == "scalar":
            values[name] = Pointer(buffer)
            values[f"{name}_batch_stride"] = Int32(layout.batch_stride if p.l > 1 else 0)
        elif operand.kind == "matrix":
            extents, tile = {"m": p.m, "n": n}, spec.epi_box(operand.dtype)
            batch = batch_axes(p, layout, along_rows)
            values[name] = tensor_map(buffer, operand.dtype, layout, extents, batch, tile)
        else:
            if operand.kind == "row":
                extent, batches, box = n, p.l, spec.epi_tile_n
            else:
                extent, batches, box = p.m, along_rows, column_elements(spec, operand.dtype)
            dims, strides = outer_dims(batch_axes(p, layout, batches), operand.dtype)
            values[name] = TensorMap(
                buffer, operand.dtype, (extent, *dims), strides, (box, *(1,) * len(dims)), swizzle=0
            )
    return values


# Kernels that pass once over a matrix.


def make_quantize_plan(
    spec: QuantizeSpec, batch: int, rows: int, columns: int, source_rows: int = 0
) -> LaunchPlan:
    """Returns the launch on (batch, rows, columns).

    Its buffers are the matrix, the indices of rows where they are picked, and the results in the
    order of `QuantizeArgs`.

    Args:
      source_rows: of the matrix, where `rows` are picked from it.
    """
    numbers = {"rows": rows, "columns": columns}
    if spec.picked:
        numbers["source_rows"] = source_rows
    return _pass_plan(
        spec, (grid.ceil_div(columns, TILE), grid.ceil_div(rows, TILE), batch), numbers
    )


def make_cut_plan(spec: CutSpec, batch: int, rows: int, columns: int) -> LaunchPlan:
    """Returns the launch on (batch, rows, columns); its buffers are the matrix and its parts."""
    tiles = batch * grid.ceil_div(rows, ROWS) * grid.ceil_div(columns, COLUMNS)
    return _pass_plan(spec, (tiles, 1, 1), {"rows": rows, "columns": columns})


def _pass_plan(
    spec: QuantizeSpec | CutSpec, tiles: tuple[int, int, int], numbers: dict[str, int]
) -> LaunchPlan:
    pointers = [param.name for param in param_list(spec) if param.kind == "pointer"]
    values: dict[str, Param] = {name: Int32(number) for name, number in numbers.items()}
    values |= {name: Pointer(i) for i, name in enumerate(pointers)}
    params = in_kernel_order(spec, values)
    return LaunchPlan(tiles, (1, 1, 1), spec.threads, spec.smem_bytes, params)
