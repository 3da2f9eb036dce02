"""The kernel that quantizes in blocks, a CTA a tile. `gemm/quantization.py` has its parts.

A half-warp's threads have `CELL` rows of a tile, each `CELL` columns of them. So a row's largest
number is found by shuffles in a half-warp, a column's through shared memory, where values are
transposed too: 8 of a column's, one unit of 8 bytes, lie at unit (their place) xor (the thread's
place in the row), so that neither writes nor reads meet in a bank.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, select_
from cutlass.memory import SmemAllocator

from ..gemm.dtypes import DTYPES
from ..gemm.matrix_pass import THREADS, WARPS
from ..gemm.quantization import CELL, CELLS, TILE
from .dtypes import CUTE_DTYPE
from .epilogue.instructions import maximum
from .epilogue.quantize import saturated_unit

SMALLEST = 2.0**-126  # of a scale: what is not subnormal
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
MIN_CTAS = {2: 3, 4: 2}  # of an SM, by bytes of an element: some load while others store


class QuantizeKernel:
    """One kernel, for one `QuantizeSpec`."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = CUTE_DTYPE[spec.dtype]

    @cute.jit
    def launch(self, args, stream):
        """Host side, traced only to compile; `ffi/` launches for real."""
        itemsize = DTYPES[self.spec.dtype].itemsize
        self.kernel(args).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), smem=self.spec.smem_bytes, stream=stream,
            min_blocks_per_mp=MIN_CTAS[itemsize], preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, args):
        """Quantizes one tile; `args`: `QuantizeArgs`."""
        s = self.spec
        thread = cute.arch.thread_idx()[0]
        tile_c, tile_r, batch = cute.arch.block_idx()
        memory = SmemAllocator().allocate(s.smem_bytes, 16)
        place = thread // CELLS, thread % CELLS  # of the thread's cell in the tile: row, column
        row, column = tile_r * TILE + place[0] * CELL, tile_c * TILE + place[1] * CELL
        matrix = Int64(batch) * args.rows * args.columns
        x = self.read(args, matrix, row, column)

        if cutlass.const_expr(s.whole_tiles):  # first, while no scales of lines take registers
            of_tile = [self.scale_of_tile(args, self.wide(x), memory, thread)] * CELL
            if cutlass.const_expr(s.straight == TILE):
                self.write_straight(args, self.wide(x), of_tile, matrix, row, column)
            if cutlass.const_expr(s.transposed == TILE):
                self.write_transposed(args, self.wide(x), of_tile, memory, matrix, thread, place)
        if cutlass.const_expr(s.straight == 1):
            scales = self.scales_of_rows(args, self.wide(x), row, place[1])
            self.write_straight(args, self.wide(x), scales, matrix, row, column)
        if cutlass.const_expr(s.transposed == 1):
            scales = self.scales_of_columns(args, self.wide(x), memory, thread, place[1])
            self.write_transposed(args, self.wide(x), scales, memory, matrix, thread, place)

    @cute.jit
    def read(self, args, matrix, row, column):
        """Returns the thread's elements, (column, row), as they are; zeros outside."""
        raw = cute.make_rmem_tensor((CELL, CELL), self.dtype)
        raw.fill(0)
        nbytes = DTYPES[self.spec.dtype].itemsize
        base = args.x.toint() + (matrix + column) * nbytes
        if cutlass.const_expr(self.spec.picked):
            if (row < args.rows) & (column < args.columns):
                for i in cutlass.range_constexpr(CELL):
                    index = cute.arch.load(args.picks + (row + i), Int32)
                    if (index >= 0) & (index < args.source_rows):
                        self.read_line(base + Int64(index) * args.columns * nbytes, raw, i)
        elif (row < args.rows) & (column < args.columns):
            for i in cutlass.range_constexpr(CELL):
                self.read_line(base + Int64(row + i) * args.columns * nbytes, raw, i)
        return raw

    def read_line(self, address, raw, i):
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(CELL)), raw[None, i])

    def scale_of(self, largest):
        """Returns a scale and its inverse, as `primitives.quantize.scale_of` has it."""
        scale = maximum(largest * (1.0 / LARGEST[self.spec.to]), Float32(SMALLEST))
        scale = Float32(select_(largest == 0.0, Float32(1.0), scale))
        near = cute.arch.rcp_approx(scale)
        return scale, _fma(_fma(-scale, near, Float32(1.0)), near, near)

    def wide(self, raw):
        """Returns the elements as float32.

        Of 16 bits each pass over them widens its own: kept, they would take twice the registers.
        """
        if self.dtype.width == 16:
            words, held = cute.recast_tensor(raw, Int32), cute.make_rmem_tensor_like(raw)
            opaque = cute.recast_tensor(held, Int32)
            for i in range(cute.size(words)):
                opaque[i] = _opaque(words[i])
            raw = held
        x = cute.make_rmem_tensor((CELL, CELL), Float32)
        x.store(raw.load().to(Float32))
        return x

    @cute.jit
    def scales_of_rows(self, args, x, row, place):
        """Returns those of the thread's rows, and writes them."""
        tile_c, _, batch = cute.arch.block_idx()
        largest = [_largest([x[j, i] for j in range(CELL)]) for i in range(CELL)]
        scales = [self.scale_of(_over_lanes(y, (1, 2, 4, 8))) for y in largest]
        at = (batch * cute.arch.grid_dim()[0] + tile_c) * args.rows + row
        for i in cutlass.range_constexpr(CELL):  # each by a thread of the row
            if (place == i) & (row < args.rows):
                _write(args.scales, at + i, scales[i][0])
        return scales

    @cute.jit
    def scale_of_tile(self, args, x, memory, thread):
        """Returns the tile's scale and its inverse, and writes the scale."""
        tile_c, tile_r, batch = cute.arch.block_idx()
        own = _over_lanes(_largest([x[i] for i in range(CELL * CELL)]), (1, 2, 4, 8, 16))
        largest = cute.recast_ptr(memory + self.spec.before_tile, dtype=Float32)
        if thread % 32 == 0:
            cute.arch.store(largest + thread // 32, own, ss="cta")
        cute.arch.barrier()
        each = [cute.arch.load(largest + i, Float32, ss="cta") for i in range(WARPS)]
        scale, inverse = self.scale_of(_largest(each))
        if thread == 0:
            at = (batch * cute.arch.grid_dim()[1] + tile_r) * cute.arch.grid_dim()[0] + tile_c
            _write(args.tile_scales, at, scale)
        return scale, inverse

    @cute.jit
    def scales_of_columns(self, args, x, memory, thread, place):
        """Returns those of the thread's columns, and writes all of the tile's."""
        tile_c, tile_r, batch = cute.arch.block_idx()
        largest = cute.recast_ptr(memory + self.spec.before_columns, dtype=Float32)
        scales = largest + WARPS * TILE
        for j in cutlass.range_constexpr(CELL):
            own = _over_lanes(_largest([x[j, i] for i in range(CELL)]), (16,))
            if thread % 32 < CELLS:
                at = thread // 32 * TILE + place * CELL + j
                cute.arch.store(largest + at, own, ss="cta")
        cute.arch.barrier()
        if thread < TILE:
            each = [
                cute.arch.load(largest + (i * TILE + thread), Float32, ss="cta")
                for i in range(WARPS)
            ]
            scale, inverse = self.scale_of(_largest(each))
            cute.arch.store(scales + thread, scale, ss="cta")
            cute.arch.store(scales + (TILE + thread), inverse, ss="cta")
            column = tile_c * TILE + thread
            if column < args.columns:
                at = (batch * cute.arch.grid_dim()[1] + tile_r) * args.columns + column
                _write(args.transposed_scales, at, scale)
        cute.arch.barrier()
        of = [scales + (place * CELL + j) for j in range(CELL)]
        return [
            (
                cute.arch.load(p, Float32, ss="cta"),
                cute.arch.load(p + TILE, Float32, ss="cta"),
            )
            for p in of
        ]

    @cute.jit
    def write_straight(self, args, x, scales, matrix, row, column):
        """Writes the thread's rows."""
        if (row < args.rows) & (column < args.columns):
            first = matrix + Int64(row) * args.columns + column
            for i in cutlass.range_constexpr(CELL):
                unit = self.quantized([x[j, i] for j in range(CELL)], [scales[i]] * CELL)
                _write_unit(args.values, first + i * Int64(args.columns), unit)

    @cute.jit
    def write_transposed(self, args, x, scales, memory, matrix, thread, place):
        """Writes the tile's columns as rows."""
        tile_c, tile_r, _ = cute.arch.block_idx()
        down, across = place
        units = cute.recast_ptr(memory, dtype=Int64)
        for j in cutlass.range_constexpr(CELL):
            unit = self.quantized([x[j, i] for i in range(CELL)], [scales[j]] * CELL)
            at = (across * CELL + j) * CELLS + (down ^ across)
            cute.arch.store(units + at, unit, ss="cta")
        cute.arch.barrier()
        row = tile_r * TILE + across * CELL
        for j in cutlass.range_constexpr(CELL):
            line = j * CELLS + down  # of the tile's columns
            column = tile_c * TILE + line
            if (row < args.rows) & (column < args.columns):
                unit = cute.arch.load(
                    units + (line * CELLS + (across ^ (line // CELL))), Int64, ss="cta"
                )
                _write_unit(args.transposed_values, matrix + Int64(column) * args.rows + row, unit)

    def quantized(self, numbers, scales):
        """Returns 8 numbers as one int64.

        A quotient is rounded as IEEE has it, in three instructions: by the inverse, then by what
        that lacks (P. Markstein, IBM J. Res. Dev. 34, 1990).
        """
        quotients = []
        for x, (scale, inverse) in zip(numbers, scales, strict=True):
            near = x * inverse
            lacking = _fma(-near, scale, x)
            quotients.append(_fma(lacking, inverse, near))
        return saturated_unit(self.spec.to, quotients)


def _largest(numbers):
    """Returns the largest magnitude; NaN if there is one."""
    largest = cute.math.abs(numbers[0])
    for x in numbers[1:]:
        largest = maximum(largest, cute.math.abs(x))
    return largest


def _over_lanes(value, distances):
    for distance in distances:
        value = maximum(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value


def _fma(x, y, z):
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32],
        read_only_args=[x, y, z],
    )  # fmt: skip


def _opaque(word):
    options = {"has_side_effects": True, "is_align_stack": False}
    operand = [Int32(word).ir_value()]
    return Int32(llvm.inline_asm(T.i32(), operand, "mov.b32 $0, $1;", "=r,r", **options))


def _write(pointer, at, number):
    cute.arch.store(pointer + at, number)


def _write_unit(pointer, at, unit):
    """Writes 8 numbers from element `at`."""
    cute.arch.store(cute.recast_ptr(pointer + at, dtype=Int64), unit)
