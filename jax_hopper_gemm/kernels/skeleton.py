"""The skeleton of every GEMM kernel: roles, barriers, the tile loop. It knows no policy by name.

    warp        role           does
    0           loader         A and B tiles → ring of stages, by TMA
    1           scheduler      next tile → mailbox (only where the scheduler needs one)
    2, 3        operands       the epilogue's operands → ring of math warpgroup 0, 1, by TMA
                               (nothing where it loads none)
    2           zeros          matrices of empty groups, where these are no tiles
    0, 3        loader         where rows of A or B are gathered; 2 then serves both warpgroups
    4 ...       math           ring → accumulator (wgmma) → results; four warps a warpgroup

    barrier             arrivals                                     waited on by
    ring full           1 + bytes of a stage                         math
    ring empty          a warp of each that works on the tile,       loader
                        in each CTA that shares the stage
    operands            see epilogue/operand_ring.py                    operands, math
    mailbox             see tile_scheduler/                          loader, operands or zeros, math
    named 1, 2, 3       the 128 threads of a math warpgroup          the same: see epilogue/
    named 5, 6          256: see warp_schedule/pingpong.py           math

Stages that a tile leaves free fill with the next tile's loads while it is still stored.
"""

import re

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64

from ..gemm.group_search import GroupRaster
from ..gemm.raster import Raster
from ..gemm.spec import SMEM_BARRIERS
from .epilogue import FusedEpilogue
from .mainloop import make_mainloop
from .shared_memory import SharedMemory
from .tile_coords import Coordinates, place_of
from .tile_scheduler import make_scheduler
from .warp_schedule import WARP_SCHEDULES
from .zero_fill import ZeroWriter

WARPGROUP = 128  # threads
LOADER_WARP, SCHEDULER_WARP, FIRST_OPERAND_WARP, FIRST_MATH_WARP = 0, 1, 2, 4
ZERO_WARP, SECOND_LOADER_WARP = 2, 3


def check_box(atom, box, shares):
    """Asserts that the compiled copy moves the box that the host's tensor map will name."""
    compiled = re.search(r'tma_gbasis = <"\((\d+),(\d+)(?:,1)+\)', str(atom._trait.value.type))
    assert compiled is not None, f"no box in {atom._trait.value.type}"
    assert tuple(map(int, compiled.groups())) == (box.contiguous, box.other * shares), (
        f"kernel copies {compiled.group(0)}, spec says {box} in {shares} shares"
    )


class GemmKernel:
    """One kernel, for one `GemmSpec`."""

    def __init__(self, spec):
        self.spec = spec
        self.schedule = WARP_SCHEDULES[spec.warp_schedule](spec)
        self.scheduler = make_scheduler(spec)
        self.mainloop = make_mainloop(spec, self.schedule.atom_layout_m)
        self.epilogue = FusedEpilogue(spec)
        self.zeros = ZeroWriter(spec, self.scheduler)

    @cute.jit
    def launch(
        self, mA, mBs, results, operands, groups, index, raster, k_tiles, extents, matrices,
        tile_counter, stream,
    ):  # fmt: skip
        """Host side, traced only to make the TMA atoms' types; `ffi/` launches for real."""
        s = self.spec
        self.mainloop.setup_layouts()
        factors = self.mainloop.make_tma_atoms(mA, mBs)
        results, operands = self.epilogue.make_tma_atoms(results, operands)
        if cutlass.const_expr(s.gathered != "a"):
            check_box(factors[0], s.a_box, s.cluster_n)
        if cutlass.const_expr(s.gathered != "b"):
            for tma_b in factors[1:]:
                check_box(tma_b, s.b_box, s.cluster_m)
        self.epilogue.check_boxes(results, operands, check_box)
        self.kernel(
            factors,
            results,
            operands,
            groups,
            index,
            raster,
            k_tiles,
            extents,
            matrices,
            tile_counter,
        ).launch(
            grid=(s.cluster_m, s.cluster_n, 1),
            block=(s.threads, 1, 1),
            cluster=(s.cluster_m, s.cluster_n, 1),
            smem=s.smem_bytes,
            min_blocks_per_mp=1,  # or ptxas drops setmaxnreg
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, factors, results, operands, groups, index, raster, k_tiles, extents, matrices,
        tile_counter,
    ):  # fmt: skip
        """Sets up what all threads share, then gives each warp its role.

        Args:
          factors: tensor maps of A and B, and of up in a gated product; a pointer to the one that
            is gathered.
          results: a tensor map for each matrix, a pointer for each other result.
          operands: a tensor map each; of a scalar a pointer and a batch stride in elements; None
            if there are none.
          groups: None if there are none, else a global pointer to their int32 sizes; and where
            rows are gathered what `GatheredMainloop.bind` takes.
          index: where an operand is one matrix of a stack, a global pointer to the int32 that says
            which, and how many there are; else None.
          walk: the fields of `Raster` over the grid of cluster tiles, or of `GroupRaster`.
          k_tiles: k-tiles of a tile, unless K is grouped.
          extents: (M, N) if the epilogue must know them, else None.
          matrices: where zeros are written apart, what `ZeroWriter.bind` takes; else None.
          tile_counter: global pointer to an int32 that is zero, for the dynamic scheduler.
        """
        s = self.spec
        raster = (GroupRaster if s.grouped else Raster)(*raster)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_m, cta_n, _ = cute.arch.block_in_cluster_idx()

        parameters = self.epilogue.parameters(results, operands, k_tiles, extents)
        if cutlass.const_expr(s.gathered is not None):
            self.mainloop.bind(*groups[1:], raster.length)
        if warp == LOADER_WARP:
            self.prefetch((*self.mainloop.atoms(factors), *parameters.atoms))

        words, shared = self.allocate_shared_memory()
        ring = self.mainloop.make_pipeline(words, self.schedule.tile_warps)
        words += 2 * s.num_stages
        barriers = self.epilogue.ring.setup(words)
        words += self.epilogue.ring.smem_words
        operand_warps = self.epilogue.ring.loader_warps
        readers = self.mainloop.loader_warps + operand_warps + 4 * s.math_warpgroups
        readers += s.zero_fill_warp
        sizes = groups[0] if s.grouped else None
        self.scheduler.setup(words, tile_counter, raster, sizes, readers)
        pipeline.pipeline_init_arrive((s.cluster_m, s.cluster_n), is_relaxed=True)

        coordinates = Coordinates(s, raster.length if s.grouped else raster.total, index)
        epilogue = self.epilogue.cta_view(parameters, shared, barriers, coordinates)

        pipeline.pipeline_init_wait((s.cluster_m, s.cluster_n))

        loader_registers, math_registers = self.schedule.registers
        if warp < FIRST_MATH_WARP:
            cute.arch.setmaxregister_decrease(loader_registers)
            if self.is_loader(warp):
                self.mainloop.partition_for_load(factors[0], factors[1:], coordinates, cta_m, cta_n)
                self.load(ring, raster, cta_m, cta_n, k_tiles)
            if cutlass.const_expr(self.scheduler.needs_scheduler_warp):
                if warp == SCHEDULER_WARP and cta_m + cta_n == 0:
                    self.scheduler.run_scheduler_warp(self.schedule.tiles_in_turn)
            if cutlass.const_expr(operand_warps > 0):
                served = warp - FIRST_OPERAND_WARP
                if served >= 0 and served < operand_warps:
                    if cutlass.const_expr(operand_warps < s.math_warpgroups):
                        self.load_all_operands(epilogue, raster, cta_m, cta_n, k_tiles)
                    else:
                        self.load_operands(epilogue, served, raster, cta_m, cta_n, k_tiles)
            if cutlass.const_expr(s.zero_fill_warp):
                if warp == ZERO_WARP:
                    self.zeros.bind(*matrices)
                    self.zeros.run()
        else:
            cute.arch.setmaxregister_increase(math_registers)
            self.math(ring, epilogue, raster, cta_m, cta_n, k_tiles)

        if cutlass.const_expr(self.scheduler.needs_scheduler_warp and s.cluster_size > 1):
            # The mailbox's first CTA must not leave while others may still arrive on it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def prefetch(self, atoms):
        for atom in atoms:
            cute.nvgpu.cpasync.prefetch_descriptor(atom)

    def allocate_shared_memory(self):
        """Takes all parts' shared memory; returns that of barriers and mailbox as int64 words,
        and the epilogue's."""
        self.mainloop.setup_layouts()
        memory = SharedMemory(self.spec.smem_bytes)
        self.mainloop.allocate(memory)
        shared = self.epilogue.allocate(memory)
        words = memory.pointer(Int64, SMEM_BARRIERS, 8)
        assert memory.used == self.spec.smem_bytes, (
            f"{memory.used} bytes are taken, spec says {self.spec.smem_bytes}"
        )
        in_use = 2 * self.spec.num_stages + self.epilogue.ring.smem_words
        in_use = 8 * (in_use + self.scheduler.smem_words)
        assert in_use == self.spec.barrier_bytes <= SMEM_BARRIERS, (
            f"{in_use} bytes of barriers, spec says {self.spec.barrier_bytes}"
        )
        return words, shared

    def is_loader(self, warp):
        if self.mainloop.loader_warps == 1:
            return warp == LOADER_WARP
        return (warp == LOADER_WARP) | (warp == SECOND_LOADER_WARP)

    @cute.jit
    def load(self, ring, raster, cta_m, cta_n, k_tiles):
        """A loader warp."""
        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.spec.num_stages
        )
        tile, reader = self.scheduler.first_tile()
        while self.scheduler.exists(tile):
            place = place_of(self.spec, raster, tile, cta_m, cta_n, k_tiles)
            state = self.mainloop.load(ring, state, place)
            tile, reader = self.scheduler.next_tile(tile, reader)
        # No CTA leaves before its partners' last arrivals on its barriers have landed.
        ring.producer_tail(state)

    @cute.jit
    def load_operands(self, epilogue, warpgroup, raster, cta_m, cta_n, k_tiles):
        """An operand warp: walks the tiles of the math warpgroup that it serves.

        It may leave before its last loads have landed: the warpgroup waits for them, and no other
        CTA arrives on its barriers.
        """
        tile, reader = self.scheduler.first_tile()
        loaded = Int32(0)
        if cutlass.const_expr(self.schedule.tiles_in_turn == 2):
            if warpgroup == 1:
                tile, reader = self.scheduler.next_tile(tile, reader)
        while self.scheduler.exists(tile):
            place = place_of(self.spec, raster, tile, cta_m, cta_n, k_tiles)
            loaded = self.epilogue.loads.load_tile(epilogue, warpgroup, loaded, place)
            tile, reader = self.scheduler.next_tile(tile, reader)
            if cutlass.const_expr(self.schedule.tiles_in_turn == 2):
                tile, reader = self.scheduler.next_tile(tile, reader)

    @cute.jit
    def load_all_operands(self, epilogue, raster, cta_m, cta_n, k_tiles):
        """The operand warp that serves both math warpgroups."""
        tile, reader = self.scheduler.first_tile()
        loaded = [Int32(0), Int32(0)]
        turn = Int32(0)
        while self.scheduler.exists(tile):
            place = place_of(self.spec, raster, tile, cta_m, cta_n, k_tiles)
            loaded = self.epilogue.loads.load_tile_of_both(epilogue, loaded, place, turn)
            turn = turn ^ 1
            tile, reader = self.scheduler.next_tile(tile, reader)

    @cute.jit
    def math(self, ring, epilogue, raster, cta_m, cta_n, k_tiles):
        """The math warps."""
        math_thread = cute.arch.thread_idx()[0] - WARPGROUP
        math_warp = cute.arch.make_warp_uniform(math_thread // 32)
        warpgroup = cute.arch.make_warp_uniform(math_thread // WARPGROUP)
        self.schedule.setup(warpgroup)
        is_store_warp = math_warp % 4 == 0

        acc = self.mainloop.partition_for_math(warpgroup)
        view = self.epilogue.math_view(
            epilogue, self.mainloop.make_tiled_mma(1), warpgroup, math_thread % WARPGROUP, acc
        )

        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.spec.num_stages
        )
        tile, reader = self.scheduler.first_tile()
        written = Int32(0)
        if cutlass.const_expr(self.schedule.tiles_in_turn == 2):
            if warpgroup == 1:
                self.schedule.pass_math()  # the first turn is warpgroup 0's
                place = place_of(self.spec, raster, tile, cta_m, cta_n, k_tiles)
                state = self.mainloop.skip(state, place.k_tiles)
                tile, reader = self.scheduler.next_tile(tile, reader)

        while self.scheduler.exists(tile):
            place = place_of(self.spec, raster, tile, cta_m, cta_n, k_tiles)
            if self.epilogue.row_blocks.any_of(place, warpgroup):
                scalars = self.epilogue.load_scalars(view, place.batch)
                self.schedule.wait_for_math()
                state = self.mainloop.multiply(ring, state, acc, place, self.schedule.pass_math)
                written = self.epilogue.store_tile(view, scalars, is_store_warp, written, place)
            else:
                state = self.mainloop.pass_over(ring, state, place)
            tile, reader = self.scheduler.next_tile(tile, reader)
            if cutlass.const_expr(self.schedule.tiles_in_turn == 2):
                place = place_of(self.spec, raster, tile, cta_m, cta_n, k_tiles)
                state = self.mainloop.skip(state, place.k_tiles)
                tile, reader = self.scheduler.next_tile(tile, reader)
        self.epilogue.drain(is_store_warp)
