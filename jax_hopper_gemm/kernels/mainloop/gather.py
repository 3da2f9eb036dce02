"""wgmma of shared operands of which one is gathered: its rows are picked by an array of indices.

The other operand comes by TMA as ever. Two loader warps copy the picked rows in pieces of 16 bytes
(cp.async), in the layout that TMA's 128-byte swizzle gives: in blocks of 128 bytes a row, whose
eight pieces are exchanged by the row's number modulo 8.

    barrier             arrivals
    ring full           1 + bytes of the operand that TMA brings + 64 threads

The copies are ordinary writes, which wgmma reads by another proxy: a math warp that sees a stage
full puts a fence between them.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op, select_
from cutlass.cutlass_dsl import min as smaller

from ...gemm.offsets import row_address
from ...gemm.problem import ITEMSIZE
from .tma import SharedSharedMainloop

LOADER_WARPS = 2
THREADS = 32 * LOADER_WARPS
PIECE = 16  # bytes
ROW_PIECES = 8  # pieces of a row of a block
ROW_BYTES = PIECE * ROW_PIECES
ROWS_AT_ONCE = THREADS // ROW_PIECES


@dsl_user_op
def copy_piece(target, source, nbytes, *, loc=None, ip=None):
    """Copies 16 bytes from global address `source` to shared address `target`, asynchronously.

    Of those, all past the first `nbytes` are zeros and are not read.
    """
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in (target, source, nbytes)],
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        "r,l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


class GatheredMainloop(SharedSharedMainloop):
    """One operand by TMA, the other by copies of a row's pieces."""

    loader_warps = LOADER_WARPS

    def bind(self, gather, length):
        """Takes the kernel's parameters.

        Args:
          gather: `Gather`.
          length: number of indices.
        """
        self.rows, self.source, self.width = gather.indices, gather.rows, gather.width
        self.length = length
        self.row_bytes = gather.stride * ITEMSIZE[self.spec.ab_dtype]

    @property
    def gathers_a(self):
        return self.spec.gathered == "a"

    def partition_for_load(self, a, bs, coordinates, cta_m, cta_n):
        super().partition_for_load(a, bs, coordinates, cta_m, cta_n)
        self.pointer = a if self.gathers_a else bs[0]

    def make_tma_atoms(self, tensors):
        """Returns the kernel's parameters: an atom, or the pointer to what is gathered."""
        mA, *mBs = tensors
        if self.gathers_a:
            return (mA, *super().make_tma_atoms((None, *mBs))[1:])
        return (*super().make_tma_atoms((mA,)), *mBs)

    def atoms(self, factors):
        return factors[1:] if self.gathers_a else factors[:1]

    def make_pipeline(self, barriers, tile_warps):
        s = self.spec
        partners = s.cluster_m + s.cluster_n - 1
        by_tma = s.tile_n if self.gathers_a else s.tile_m
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=s.num_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1 + THREADS),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, partners * tile_warps),
            tx_count=by_tma * s.tile_k * ITEMSIZE[s.ab_dtype],
            cta_layout_vmnk=cute.make_layout((1, s.cluster_m, s.cluster_n, 1)),
            defer_sync=True,
        )

    @cute.jit
    def load(self, ring, state, place):
        """Loader warps: send a tile's k-tiles into the ring; return the next stage's state."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        thread = select_(warp == 0, lane, lane + 32)
        self.piece, self.first_row = thread % ROW_PIECES, thread // ROW_PIECES
        parts = self.partition_b(place) if self.gathers_a else self.partition_a(place)
        self.others = self.partition_others(place) if self.gathers_a else ()
        if cutlass.const_expr(self.spec.grouped == "m"):
            state = self._load_rows(ring, state, place, parts, warp)
        else:
            state = self._load_k(ring, state, place, parts, warp)
        return state

    @cute.jit
    def _load_rows(self, ring, state, place, parts, warp):
        """Rows of A are rows of the tile: a thread's are the same for all k-tiles."""
        first = place.first + self.first_row
        rows = [
            self._row(first + ROWS_AT_ONCE * i) for i in range(self.spec.tile_m // ROWS_AT_ONCE)
        ]
        for k_tile in cutlass.range(place.k_tiles, unroll=1):
            self._begin_stage(ring, state, place, parts, k_tile, warp)
            column = k_tile * self.spec.tile_k + self.piece * 8
            wanted = place.belongs & (column < self.width)
            source, target = self._source(column), self._target(state.index)
            for i, row in enumerate(rows):
                at = target + ROWS_AT_ONCE * i * ROW_BYTES
                self._copy_piece(at, source, row, wanted & (row >= 0))
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.producer_get_barrier(state))
            state.advance()
        return state

    @cute.jit
    def _load_k(self, ring, state, place, parts, warp):
        """Rows of A or B are those of K: other ones for each k-tile."""
        s = self.spec
        count = s.tile_k // ROWS_AT_ONCE
        tile, index = (s.tile_m, place.m) if self.gathers_a else (s.d_tile_n, place.n)
        columns = [index * tile + block * 64 + self.piece * 8 for block in range(tile // 64)]
        sources = [(self._source(column), column < self.width) for column in columns]
        rows = self._rows(place.first + self.first_row, count)
        for k_tile in cutlass.range(place.k_tiles, unroll=1):
            first = place.first + k_tile * s.tile_k + self.first_row
            following = self._rows(first + s.tile_k, count)  # their indices arrive meanwhile
            self._begin_stage(ring, state, place, parts, k_tile, warp)
            target = self._target(state.index)
            for i, row in enumerate(rows):
                inside = (first + ROWS_AT_ONCE * i < place.end) & (row >= 0)
                for block, (source, wanted) in enumerate(sources):
                    at = target + (block * s.tile_k + ROWS_AT_ONCE * i) * ROW_BYTES
                    self._copy_piece(at, source, row, inside & wanted)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.producer_get_barrier(state))
            state.advance()
            rows = following
        return state

    @cute.jit
    def _begin_stage(self, ring, state, place, parts, k_tile, warp):
        """Waits for a stage to be free; the first loader warp sends the other operand."""
        if warp == 0:
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            if cutlass.const_expr(self.gathers_a):
                self._load_b(parts, k_tile, state.index, full, place, self.others)
            else:
                self._load_a(parts, k_tile, state.index, full)
        else:
            ring.sync_object_empty.wait(state.index, state.phase)

    def _rows(self, first, count):
        return [self._row(first + ROWS_AT_ONCE * i) for i in range(count)]

    def _source(self, column):
        """Returns the global address of the piece that begins at a column of a row 0."""
        return self.pointer.toint() + Int64(column) * 2

    def _copy_piece(self, target, source, row, wanted):
        """Copies a piece of a row, or zeros where it is not wanted: its address is then not read.

        Args:
          source: address of the same piece of row 0.
        """
        address = row_address(source, row, self.row_bytes, Int64)
        copy_piece(target, address, select_(wanted, Int32(PIECE), Int32(0)))

    def _row(self, index):
        """Returns which row an element of the grouped axis is; -1 for one that does not exist."""
        row = cute.arch.load(self.rows + smaller(index, self.length - 1), Int32)
        exists = (row >= 0) & (row < self.source)
        return select_(exists, row, Int32(-1))

    def _target(self, stage):
        """Returns the shared address of this thread's piece of a stage's first row."""
        tensor = self.sA if self.gathers_a else self.sB
        rows = self.spec.tile_m if self.gathers_a else self.spec.tile_n
        stage_bytes = rows * self.spec.tile_k * ITEMSIZE[self.spec.ab_dtype]
        swizzled = self.piece ^ (self.first_row % 8)
        at = self.first_row * ROW_BYTES + swizzled * PIECE
        return tensor.iterator.toint() + stage * stage_bytes + at

    def _before_multiply(self):
        cute.arch.fence_proxy("async.shared", space="cta")
