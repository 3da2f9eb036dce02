"""The launches of kernels that pass once over a matrix."""

from __future__ import annotations

from ..gemm.cutting import COLUMNS, ROWS, CutSpec
from ..gemm.grid import ceil_div
from ..gemm.kernel_params import param_list
from ..gemm.quantization import TILE, QuantizeSpec
from .plan import Int32, LaunchPlan, Param, Pointer, in_kernel_order


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
    return _plan(spec, (ceil_div(columns, TILE), ceil_div(rows, TILE), batch), numbers)


def make_cut_plan(spec: CutSpec, batch: int, rows: int, columns: int) -> LaunchPlan:
    """Returns the launch on (batch, rows, columns); its buffers are the matrix and its parts."""
    tiles = batch * ceil_div(rows, ROWS) * ceil_div(columns, COLUMNS)
    return _plan(spec, (tiles, 1, 1), {"rows": rows, "columns": columns})


def _plan(
    spec: QuantizeSpec | CutSpec, grid: tuple[int, int, int], numbers: dict[str, int]
) -> LaunchPlan:
    pointers = [param.name for param in param_list(spec) if param.kind == "pointer"]
    values: dict[str, Param] = {name: Int32(number) for name, number in numbers.items()}
    values |= {name: Pointer(i) for i, name in enumerate(pointers)}
    return LaunchPlan(
        grid=grid,
        cluster=(1, 1, 1),
        threads=spec.threads,
        smem_bytes=spec.smem_bytes,
        params=in_kernel_order(spec, values),
    )
