"""spec → cubin, with CuTeDSL and no GPU."""

import os
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute

from ..gemm.group_search import GroupRaster
from ..gemm.raster import Raster
from ..gemm.spec import GemmSpec
from .dtypes import CUTE_DTYPE
from .skeleton import GemmKernel


def parameter_names(spec: GemmSpec) -> tuple[str, ...]:
    """Returns the names of the kernel's parameters in order.

    The name says the kind: tma_ a tensor map, ptr_ a pointer, all others int32.
    """
    graph = spec.graph
    names = [f"{'ptr' if spec.gathered == operand else 'tma'}_{operand}" for operand in "ab"]
    names += [names[1].replace("_b", "_up")] * (graph.accumulators - 1)
    for i, result in enumerate(graph.results):
        kind = "tma" if result.kind == "matrix" else "ptr"
        names.append(f"{kind}_d{i or ''}")
    for i, operand in enumerate(graph.operands):
        if operand.kind == "scalar":
            names += [f"ptr_c{i}", f"batch_stride_c{i}"]
        else:
            names.append(f"tma_c{i}")
    if spec.grouped:
        names.append("ptr_sizes")
        if spec.gathered:
            names += ["ptr_rows", "source", "width", "stride"]
        names += [*GroupRaster._fields]
    else:
        names += [*(["ptr_index", "stack"] if spec.indexed else []), *Raster._fields]
    names.append("k_tiles")
    if graph.needs_extents:
        names += ["m", "n"]
    if spec.zero_fill_warp:
        names += ["ptr_matrices", "rows", "vectors", "row_stride", "matrix_stride"]
    if spec.tile_scheduler == "dynamic":
        names.append("ptr_tile_counter")
    return tuple(names)


def compile_cubin(spec: GemmSpec, workdir: Path) -> bytes:
    """Returns the sm_90a cubin of `spec`'s kernel; `workdir` holds the compiler's files."""
    graph = spec.graph
    m, n, k, l = (cute.sym_int(divisibility=8) for _ in range(4))  # noqa: E741
    spans = tuple(cute.sym_int(divisibility=8) for _ in range(2))  # a span map's last axes

    def tensor(dtype, shape, contiguous):
        order = (contiguous, *(i for i in range(len(shape)) if i != contiguous))
        return cute.runtime.make_fake_compact_tensor(
            CUTE_DTYPE[dtype], shape,
            stride_order=tuple(order.index(i) for i in range(len(shape))), assumed_align=16,
        )  # fmt: skip

    def pointer(dtype):
        return cute.runtime.make_ptr(dtype, 16, cute.AddressSpace.gmem)

    def result(r):
        if r.kind == "matrix":
            return tensor(r.dtype, (m, n, *(spans if spec.grouped == "m" else (l,))), 1)
        return pointer(cutlass.Int32 if r.kind == "top_k_indices" else cutlass.Float32)

    def operand(o):
        if o.kind == "scalar":
            return pointer(cutlass.Float32), cutlass.Int32(1)
        if o.kind == "matrix":
            return tensor(o.dtype, (m, n, l), 1)
        return tensor(o.dtype, (n if o.kind == "row" else m, l), 0)

    last = spans if spec.grouped == "k" else (l,)
    mA = tensor(spec.a_dtype, (m, k, *last), 1 if spec.a_major == "k" else 0)
    mB = tensor(spec.b_dtype, (n, k, *last), 1 if spec.b_major == "k" else 0)
    raster = (cutlass.Int32(1),) * len((GroupRaster if spec.grouped else Raster)._fields)
    groups = (pointer(cutlass.Int32),) if spec.grouped else None
    if spec.gathered:
        groups += (pointer(cutlass.Int32), *((cutlass.Int32(1),) * 3))
    index = (pointer(cutlass.Int32), cutlass.Int32(1)) if spec.indexed else None
    extents = (cutlass.Int32(1),) * 2 if graph.needs_extents else None
    matrices = None
    if spec.zero_fill_warp:
        matrices = (pointer(cutlass.Int32), *((cutlass.Int32(1),) * 4))
    operands = tuple(map(operand, graph.operands)) or None  # of an empty tuple CuTeDSL warns
    counter = pointer(cutlass.Int32) if spec.tile_scheduler == "dynamic" else None
    GemmKernel.kernel.set_name_prefix(
        spec.name, remove_cutlass_symbol=True, keep_mangled_name=False
    )
    kernel = GemmKernel(spec)
    compiled = cute.compile(
        kernel.launch, mA, (mB,) * graph.accumulators, tuple(map(result, graph.results)),
        operands, groups, index, raster, cutlass.Int32(1), extents, matrices, counter,
        cute.runtime.make_fake_stream(),
        options=f"--gpu-arch sm_90a --keep-cubin --dump-dir {workdir}",
    )  # fmt: skip
    return compiled.__cubin__
