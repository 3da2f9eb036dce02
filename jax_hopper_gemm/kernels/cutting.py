"""The kernel that cuts float32 into bfloat16 parts, a CTA a tile. `gemm/cutting.py` says what.

A warp reads a tile's row at once, each thread all its rows before it writes: `VECTOR` numbers of
one part at a time. Lines of a tile are whole runs of K, but for the last one, which zeros fill up.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64

from ..gemm.bf16_parts import RUN_K
from ..gemm.cutting import COLUMNS, LINES, ROWS, VECTOR, place_of
from ..gemm.matrix_pass import THREADS, WARPS
from .copies import adjacent


class CutKernel:
    """One kernel, for one `CutSpec`."""

    def __init__(self, spec):
        self.spec = spec

    @cute.jit
    def launch(self, args, stream):
        """Host side, traced only to compile; `ffi/` launches for real."""
        self.kernel(args).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args):
        """Cuts one tile; `args`: `CutArgs`."""
        thread, tile = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        tiles_c, tiles_r = cute.ceil_div(args.columns, COLUMNS), cute.ceil_div(args.rows, ROWS)
        row = tile // tiles_c % tiles_r * ROWS + thread // 32
        column = tile % tiles_c * COLUMNS + thread % 32 * VECTOR
        matrix = Int64(tile // tiles_c // tiles_r)
        rest = self.read(args, matrix, row, column)
        for part in cutlass.range_constexpr(self.spec.parts):
            rounded = cute.make_rmem_tensor_like(rest, BFloat16)
            rounded.store(rest.load().to(BFloat16))
            if cutlass.const_expr(part + 1 < self.spec.parts):
                rest.store(rest.load() - rounded.load().to(Float32))
            self.write(args, rounded, part, matrix, row, column)

    @cute.jit
    def read(self, args, matrix, row, column):
        """Returns the thread's numbers, (column, row); zeros outside."""
        x = cute.make_rmem_tensor((VECTOR, LINES), Float32)
        x.fill(0.0)
        for i in cutlass.range_constexpr(LINES):
            line = row + i * WARPS
            at = args.x + ((matrix * args.rows + line) * args.columns + column)
            if cutlass.const_expr(self.spec.aligned):
                if (line < args.rows) & (column < args.columns):
                    cute.autovec_copy(_vector(Float32, at), x[None, i])
            else:
                for j in cutlass.range_constexpr(VECTOR):
                    if (line < args.rows) & (column + j < args.columns):
                        x[j, i] = cute.arch.load(at + j, Float32)
        return x

    @cute.jit
    def write(self, args, rounded, part: cutlass.Constexpr, matrix, row, column):
        """Writes one part of the thread's numbers."""
        rows, columns, first = args.rows, args.columns, column
        if cutlass.const_expr(self.spec.along == "rows"):
            rows = self.stored(rows)
        else:
            columns, first = self.stored(columns), place_of(column, part, self.spec.parts)
        for i in cutlass.range_constexpr(LINES):
            line = row + i * WARPS
            inside = (line < args.rows) & (column // RUN_K * RUN_K < args.columns)
            if cutlass.const_expr(self.spec.along == "rows"):
                inside = (line // RUN_K * RUN_K < args.rows) & (column < args.columns)
                line = place_of(line, part, self.spec.parts)
            if inside:
                at = args.parts + ((matrix * rows + line) * columns + first)
                cute.autovec_copy(rounded[None, i], _vector(BFloat16, at))

    def stored(self, extent):
        """Returns the elements along K of the parts of an array."""
        return cute.ceil_div(extent, RUN_K) * (RUN_K * self.spec.parts)


def _vector(dtype, pointer):
    return adjacent(dtype, pointer.toint(), VECTOR, cute.AddressSpace.gmem)
