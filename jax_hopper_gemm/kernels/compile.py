"""spec → cubin, with CuTeDSL and no GPU."""

import os
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute

from ..gemm.cutting import CutSpec
from ..gemm.kernel_params import KernelParam, KernelSpec, kernel_params, map_args
from ..gemm.quantization import QuantizeSpec
from ..gemm.spec import TMA_ALIGNMENT
from .cutting import CutKernel
from .dtypes import CUTE_DTYPE
from .quantization import QuantizeKernel
from .simt import SimtKernel
from .skeleton import GemmKernel


def compile_cubin(spec: KernelSpec, workdir: Path) -> bytes:
    """Returns the sm_90a cubin of `spec`'s kernel; `workdir` holds the compiler's files."""
    kernel = _kernel_of(spec)
    kernel.kernel.set_name_prefix(spec.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    compiled = cute.compile(
        kernel(spec).launch, example_args(spec), cute.runtime.make_fake_stream(),
        options=f"--gpu-arch sm_90a --keep-cubin --dump-dir {workdir}", no_jit_engine=True,
    )  # fmt: skip
    return compiled.__cubin__


def _kernel_of(spec: KernelSpec):
    if isinstance(spec, QuantizeSpec):
        return QuantizeKernel
    if isinstance(spec, CutSpec):
        return CutKernel
    return SimtKernel if spec.simt_width else GemmKernel


def example_args(spec: KernelSpec):
    """Returns arguments of the types to compile for; a tensor stands for each tensor map."""
    extents = {}

    def tensor(param: KernelParam):
        modes, contiguous = param.modes, param.modes.index(param.contiguous)
        shape = tuple(extents.setdefault(mode, cute.sym_int(divisibility=8)) for mode in modes)
        order = (contiguous, *(i for i in range(len(modes)) if i != contiguous))
        return cute.runtime.make_fake_compact_tensor(
            CUTE_DTYPE[param.dtype], shape,
            stride_order=tuple(order.index(i) for i in range(len(modes))),
            assumed_align=TMA_ALIGNMENT,
        )  # fmt: skip

    def example(param: KernelParam):
        if param.kind == "tensor_map":
            return tensor(param)
        if param.kind == "pointer":
            dtype, space = CUTE_DTYPE[param.dtype], cute.AddressSpace.gmem
            return cute.runtime.make_ptr(dtype, 0, space, param.alignment)
        return cutlass.Int32(1)

    return map_args(example, kernel_params(spec))
