"""wgmma of float32 operands as TF32, for which CuTeDSL has an atom, but no operation in Python.

The tensor cores read the first 19 bits of a number. TMA has rounded it to these: its tensor maps
say TF32 (`DType.rounding_map`).
"""

from dataclasses import dataclass

import cutlass._mlir.dialects.cute_nvgpu as cute_nvgpu
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, TFloat32
from cutlass.cute.atom import make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup.mma import MmaOp, MmaTraits

MMA_K = 8


@dataclass(frozen=True)
class MmaTF32Op(MmaOp):
    """The operation, in the form of `warpgroup.MmaF16BF16Op`; both operands lie along K."""

    descriptive_name = "warpgroup TF32 MMA Operation"

    def _make_trait(self, *, loc=None, ip=None, **kwargs):
        kind = cute_nvgpu.MmaAtomSM90Type.get(
            _pack_shape(self.shape_mnk, loc=loc, ip=ip).type.attribute,
            self.a_major_mode._to_ir(), self.b_major_mode._to_ir(),
            self.a_dtype.mlir_type, self.b_dtype.mlir_type, self.acc_dtype.mlir_type,
            self.a_src._to_ir(),
        )  # fmt: skip
        return MmaTraits(make_atom(kind, [Boolean(False).ir_value(loc=loc, ip=ip)], loc=loc, ip=ip))


def make_tiled_mma(
    a_dtype, b_dtype, a_mode, b_mode, sum_dtype, warpgroups, tile_n,
    a_source=warpgroup.OperandSource.SMEM,
):  # fmt: skip
    """Returns the MMA of 64 rows a warpgroup; A may come from registers."""
    if a_dtype is not Float32:
        return sm90.make_trivial_tiled_mma(
            a_dtype, b_dtype, a_mode, b_mode, sum_dtype, (warpgroups, 1, 1),
            tiler_mn=(64, tile_n), a_source=a_source,
        )  # fmt: skip
    op = MmaTF32Op(TFloat32, TFloat32, sum_dtype, (64, tile_n, MMA_K), a_source, a_mode, b_mode)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (warpgroups, 1, 1))
