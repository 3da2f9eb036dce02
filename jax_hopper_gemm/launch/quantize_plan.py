"""The launch of a kernel that quantizes."""

from __future__ import annotations

from ..gemm.grid import ceil_div
from ..gemm.kernel_params import param_list
from ..gemm.quantization import THREADS, TILE, QuantizeSpec
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
    values: dict[str, Param] = {"rows": Int32(rows), "columns": Int32(columns)}
    if spec.picked:
        values["source_rows"] = Int32(source_rows)
    pointers = [param.name for param in param_list(spec) if param.kind == "pointer"]
    values |= {name: Pointer(i) for i, name in enumerate(pointers)}
    return LaunchPlan(
        grid=(ceil_div(columns, TILE), ceil_div(rows, TILE), batch),
        cluster=(1, 1, 1),
        threads=THREADS,
        smem_bytes=spec.smem_bytes,
        params=in_kernel_order(spec, values),
        first_workspace=len(pointers),
    )
