"""The producer that gathers one operand, whose rows an array of indices picks.

The other operand comes by TMA. Two loader warps copy the picked rows in pieces of 16 bytes
(cp.async), in the layout that TMA's 128-byte swizzle gives: in blocks of 128 bytes a row, whose
eight pieces are exchanged by the row's number modulo 8.

    barrier             arrivals
    ring full           1 + bytes of the operand that TMA brings + 64 threads
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_

from ...gemm.offsets import row_address

LOADER_WARPS = (0, 3)
THREADS = 32 * len(LOADER_WARPS)
PIECE = 16  # bytes
ROW_PIECES = 8  # pieces of a row of a block
ROW_BYTES = PIECE * ROW_PIECES
ROWS_AT_ONCE = THREADS // ROW_PIECES


def copy_piece(target, source, nbytes):
    """Copies `nbytes` from global to shared memory, asynchronously, and zeros to make it 16."""
    code = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};"
    cute.arch.inline_ptx(code, read_only_args=[target, source, nbytes])


@dataclass(frozen=True)
class GatherView:
    """What the loader warps need, whatever the tile."""

    pointer: Any  # global, to the array that rows are picked from
    gather: Any  # `Gather`, the indices and the array's extents
    length: Any  # number of indices
    row_bytes: Any  # between neighbouring rows
    stages: Any  # the gathered operand in shared memory, (bM or bN, bK, stages)
    tma: Any  # `TmaView` of the other operand


class Piece(NamedTuple):
    """A thread's part of a block: the same piece of every `ROWS_AT_ONCE`-th row from `row`."""

    piece: Any
    row: Any


class GatherProducer:
    """One operand by TMA, the other by copies of a row's pieces."""

    loader_warps = LOADER_WARPS
    arrivals = 1 + THREADS

    def __init__(self, spec, tma):
        self.spec = spec
        self.tma = tma  # `TmaOperand`, or an object with its methods
        self.tma_bytes = tma.nbytes
        self.gathers_a = spec.gathered == "a"
        self.itemsize = spec.a_itemsize if self.gathers_a else spec.b_itemsize
        self.piece_elements = PIECE // self.itemsize

    def make_tma_atoms(self, tensors):
        """Returns an atom for each tensor, and the pointer to the gathered one."""
        a, b = tensors[:1], tensors[1:]
        if self.gathers_a:
            return a + self.tma.make_tma_atoms(b)
        return self.tma.make_tma_atoms(a) + b

    def tensor_maps(self, tma_ab):
        return tma_ab[1:] if self.gathers_a else tma_ab[:1]

    def partition_for_load(self, args, stages, tma_coords, cta):
        return GatherView(
            pointer=args.tma_ab[0 if self.gathers_a else 1],
            gather=args.gather,
            length=args.raster.length,
            row_bytes=args.gather.stride * self.itemsize,
            stages=stages.sA if self.gathers_a else stages.sB,
            tma=self.tma.view(self.tensor_maps(args.tma_ab), stages, tma_coords, cta),
        )

    @cute.jit
    def load(self, view, ring, state, coords):
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        thread = select_(warp == 0, lane, lane + 32)
        at = Piece(thread % ROW_PIECES, thread // ROW_PIECES)
        slices = self.tma.partition(view.tma, coords)
        if cutlass.const_expr(self.spec.grouped == "m"):
            state = self._load_rows(view, ring, state, coords, slices, at, warp)
        else:
            state = self._load_k(view, ring, state, coords, slices, at, warp)
        return state

    @cute.jit
    def _load_rows(self, view, ring, state, coords, slices, at, warp):
        """Rows of A are rows of the tile: a thread's are the same for all k-tiles."""
        first = coords.first + at.row
        rows = self._rows(view, first, self.spec.tile_m // ROWS_AT_ONCE)
        for i in cutlass.range(coords.k_tiles, unroll=1):
            k_tile = coords.k_first + i
            self._begin_stage(view, ring, state, coords, slices, k_tile, warp)
            column = k_tile * self.spec.tile_k + at.piece * self.piece_elements
            wanted = coords.belongs & (column < view.gather.width)
            source, target = self._source(view, column), self._target(view, at, state.index)
            for j, row in enumerate(rows):
                at_row = target + ROWS_AT_ONCE * j * ROW_BYTES
                self._copy_piece(view, at_row, source, row, wanted & (row >= 0))
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.producer_get_barrier(state))
            state.advance()
        return state

    @cute.jit
    def _load_k(self, view, ring, state, coords, slices, at, warp):
        """Rows of A or B are those of K: other ones for each k-tile."""
        s = self.spec
        count = s.tile_k // ROWS_AT_ONCE
        tile, index = (s.tile_m, coords.m) if self.gathers_a else (s.d_tile_n, coords.n)
        block, blocks = ROW_BYTES // self.itemsize, tile * self.itemsize // ROW_BYTES
        columns = [index * tile + i * block + at.piece * self.piece_elements for i in range(blocks)]
        sources = [(self._source(view, column), column < view.gather.width) for column in columns]
        rows = self._rows(view, coords.first + coords.k_first * s.tile_k + at.row, count)
        for i in cutlass.range(coords.k_tiles, unroll=1):
            k_tile = coords.k_first + i
            first = coords.first + k_tile * s.tile_k + at.row
            # The indices of the next k-tile's rows arrive meanwhile.
            following = self._rows(view, first + s.tile_k, count)
            self._begin_stage(view, ring, state, coords, slices, k_tile, warp)
            target = self._target(view, at, state.index)
            for j, row in enumerate(rows):
                inside = (first + ROWS_AT_ONCE * j < coords.end) & (row >= 0)
                for block, (source, wanted) in enumerate(sources):
                    at_row = target + (block * s.tile_k + ROWS_AT_ONCE * j) * ROW_BYTES
                    self._copy_piece(view, at_row, source, row, inside & wanted)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.producer_get_barrier(state))
            state.advance()
            rows = following
        return state

    @cute.jit
    def _begin_stage(self, view, ring, state, coords, slices, k_tile, warp):
        """Waits for a stage to be free; the first loader warp sends the other operand."""
        if warp == 0:
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            self.tma.load(view.tma, slices, k_tile, state.index, full, coords)
        else:
            ring.sync_object_empty.wait(state.index, state.phase)

    def _rows(self, view, first, count):
        return [self._row(view, first + ROWS_AT_ONCE * i) for i in range(count)]

    def _source(self, view, column):
        """Returns the global address of the piece that begins at a column of a row 0."""
        return view.pointer.toint() + Int64(column) * self.itemsize

    def _copy_piece(self, view, target, source, row, wanted):
        """Copies a piece of a row, or zeros unless it is `wanted`; `source` is that of row 0."""
        address = row_address(source, row, view.row_bytes, Int64)
        copy_piece(target, address, select_(wanted, Int32(PIECE), Int32(0)))

    def _row(self, view, index):
        """Returns which row an element of the grouped axis is; -1 for one that does not exist."""
        row = cute.arch.load(view.gather.indices + smaller(index, view.length - 1), Int32)
        exists = (row >= 0) & (row < view.gather.rows)
        return select_(exists, row, Int32(-1))

    def _target(self, view, at, stage):
        """Returns the shared address of this thread's piece of a stage's first row."""
        rows = self.spec.tile_m if self.gathers_a else self.spec.tile_n
        stage_bytes = rows * self.spec.tile_k * self.itemsize
        swizzled = at.piece ^ (at.row % 8)
        offset = at.row * ROW_BYTES + swizzled * PIECE
        return view.stages.iterator.toint() + stage * stage_bytes + offset

    def before_read(self):
        # NOTE: the copies are ordinary writes, which wgmma reads by another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
