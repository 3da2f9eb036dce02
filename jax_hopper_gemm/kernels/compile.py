"""spec → cubin, with CuTeDSL and no GPU."""

import os
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute

from ..spec import GemmSpec
from ..walk import Walk
from .dtypes import CUTE_DTYPE
from .gemm import GemmKernel


def parameter_names(spec: GemmSpec) -> tuple[str, ...]:
    """Returns the names of the kernel's parameters in order."""
    names = ("tma_a", "tma_b", "tma_d", *Walk._fields, "k_tiles")
    return (*names, "tile_counter") if spec.tile_scheduler == "dynamic" else names


def compile_cubin(spec: GemmSpec, workdir: Path) -> bytes:
    """Returns the sm_90a cubin of `spec`'s kernel; `workdir` holds the compiler's files."""
    any_extent = [cute.sym_int(divisibility=8) for _ in range(4)]
    m, n, k, l = any_extent  # noqa: E741

    def operand(dtype, shape, contiguous):
        order = (0, 1, 2) if contiguous == 0 else (1, 0, 2)
        return cute.runtime.make_fake_compact_tensor(
            CUTE_DTYPE[dtype], shape, stride_order=order, assumed_align=16
        )

    mA = operand(spec.ab_dtype, (m, k, l), 1 if spec.a_major == "k" else 0)
    mB = operand(spec.ab_dtype, (n, k, l), 1 if spec.b_major == "k" else 0)
    mD = operand(spec.d_dtype, (m, n, l), 1)
    walk = (cutlass.Int32(1),) * len(Walk._fields)
    counter = None
    if spec.tile_scheduler == "dynamic":
        counter = cute.runtime.make_ptr(cutlass.Int32, 16, cute.AddressSpace.gmem)
    GemmKernel.kernel.set_name_prefix(
        spec.name, remove_cutlass_symbol=True, keep_mangled_name=False
    )
    kernel = GemmKernel(spec)
    compiled = cute.compile(
        kernel.launch, mA, mB, mD, walk, cutlass.Int32(1), counter, cute.runtime.make_fake_stream(),
        options=f"--gpu-arch sm_90a --keep-cubin --dump-dir {workdir}",
    )  # fmt: skip
    return compiled.__cubin__
