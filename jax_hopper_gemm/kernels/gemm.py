"""The skeleton of every GEMM kernel: roles, barriers, the tile loop. It knows no policy by name.

    warp        role           does
    0           loader         A and B tiles → ring of stages, by TMA
    1           scheduler      next tile → mailbox (only where the scheduler needs one)
    2, 3        -              nothing
    4 ...       math           ring → accumulator (wgmma) → D; four warps a warpgroup

    barrier             arrivals                                     waited on by
    ring full           1 + bytes of a stage                         math
    ring empty          a warp of each that works on the tile,       loader
                        in each CTA that shares the stage
    mailbox             see tile_scheduler/dynamic.py                loader, math
    named 1, 2, 3       the 128 threads of a math warpgroup          the same: see epilogue/
    named 5, 6          256: see warp_schedule/pingpong.py           math

Stages that a tile leaves free fill with the next tile's loads while it is still stored.
"""

import re

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from ..spec import SMEM_BARRIERS
from ..walk import Walk, tile_at
from .epilogue import StagedStore
from .mainloop import SharedSharedMainloop
from .tile_scheduler import TILE_SCHEDULERS
from .warp_schedule import WARP_SCHEDULES

WARPGROUP = 128  # threads
SMEM_ALIGNMENT = 1024  # bytes: where the 128-byte swizzle repeats
LOADER_WARP, SCHEDULER_WARP, FIRST_MATH_WARP = 0, 1, 4


def check_box(atom, box, shares):
    """Asserts that the compiled copy moves the box that the host's tensor map will name."""
    compiled = re.search(r'tma_gbasis = <"\((\d+),(\d+),1\)', str(atom._trait.value.type))
    assert compiled is not None, f"no box in {atom._trait.value.type}"
    assert tuple(map(int, compiled.groups())) == (box.contiguous, box.other * shares), (
        f"kernel copies {compiled.group(0)}, spec says {box} in {shares} shares"
    )


class GemmKernel:
    """One kernel, for one `GemmSpec`."""

    def __init__(self, spec):
        self.spec = spec
        self.schedule = WARP_SCHEDULES[spec.warp_schedule](spec)
        self.scheduler = TILE_SCHEDULERS[spec.tile_scheduler](spec)
        self.mainloop = SharedSharedMainloop(spec, self.schedule.atom_layout_m)
        self.epilogue = StagedStore(spec)

    @cute.jit
    def launch(self, mA, mB, mD, walk, k_tiles, tile_counter, stream):
        """Host side, traced only to make the TMA atoms' types; `ffi/` launches for real."""
        self.mainloop.setup_layouts()
        self.epilogue.setup_layouts()
        tma_a, tma_b = self.mainloop.make_tma_atoms(mA, mB)
        tma_d = self.epilogue.make_tma_atom(mD)
        for atom, box, shares in (
            (tma_a, self.spec.a_box, self.spec.cluster_n),
            (tma_b, self.spec.b_box, self.spec.cluster_m),
            (tma_d, self.spec.epi_box(self.spec.d_dtype), 1),
        ):
            check_box(atom, box, shares)
        self.kernel(tma_a, tma_b, tma_d, walk, k_tiles, tile_counter).launch(
            grid=(self.spec.cluster_m, self.spec.cluster_n, 1),
            block=(self.spec.threads, 1, 1),
            cluster=(self.spec.cluster_m, self.spec.cluster_n, 1),
            smem=self.spec.smem_bytes,
            min_blocks_per_mp=1,  # or ptxas drops setmaxnreg
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tma_a, tma_b, tma_d, walk, k_tiles, tile_counter):
        """Sets up what all threads share, then gives each warp its role.

        Args:
          tma_a, tma_b, tma_d: tensor maps of A, B and D.
          walk: the fields of `Walk` over the grid of cluster tiles.
          k_tiles: k-tiles of a tile.
          tile_counter: global pointer to an int32 that is zero, for the dynamic scheduler.
        """
        s = self.spec
        walk = Walk(*walk)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_m, cta_n, _ = cute.arch.block_in_cluster_idx()

        if warp == LOADER_WARP:
            for atom in (tma_a, tma_b, tma_d):
                cute.nvgpu.cpasync.prefetch_descriptor(atom)

        words, sA, sB, sD = self.allocate_shared_memory()
        ring_words = 2 * s.num_stages
        assert 8 * (ring_words + self.scheduler.smem_words) <= SMEM_BARRIERS
        ring = self.mainloop.make_pipeline(words, self.schedule.tile_warps)
        readers = 1 + 4 * s.math_warpgroups
        self.scheduler.setup(words + ring_words, tile_counter, walk.total, readers)
        pipeline.pipeline_init_arrive((s.cluster_m, s.cluster_n), is_relaxed=True)

        # Coordinates of tiles; only the tensor maps know the extents, and clip.
        gA_mkl = self.tiles(walk.total, s.a_major == "k", (s.tile_m, s.tile_k))
        gB_nkl = self.tiles(walk.total, s.b_major == "k", (s.tile_n, s.tile_k))
        gD_mnl = self.tiles(walk.total, True, (s.tile_m, s.tile_n))

        pipeline.pipeline_init_wait((s.cluster_m, s.cluster_n))

        loader_registers, math_registers = self.schedule.registers
        if warp < FIRST_MATH_WARP:
            cute.arch.setmaxregister_decrease(loader_registers)
            if warp == LOADER_WARP:
                self.mainloop.partition_for_load(tma_a, tma_b, gA_mkl, gB_nkl, sA, sB, cta_m, cta_n)
                self.load(ring, walk, cta_m, cta_n, k_tiles)
            if cutlass.const_expr(self.scheduler.needs_scheduler_warp):
                if warp == SCHEDULER_WARP and cta_m + cta_n == 0:
                    self.scheduler.run_scheduler_warp(self.schedule.tiles_in_turn)
        else:
            cute.arch.setmaxregister_increase(math_registers)
            self.math(ring, tma_d, sA, sB, sD, gD_mnl, walk, cta_m, cta_n, k_tiles)

        if cutlass.const_expr(self.scheduler.needs_scheduler_warp and s.cluster_size > 1):
            # The mailbox's first CTA must not leave while others may still arrive on it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def allocate_shared_memory(self):
        """Returns barriers and mailbox as 64-bit words, the ring of A and B, the staged D."""
        self.mainloop.setup_layouts()
        self.epilogue.setup_layouts()
        layouts = (self.mainloop.a_layout, self.mainloop.b_layout, self.epilogue.layout)
        dtypes = (self.mainloop.dtype, self.mainloop.dtype, self.epilogue.dtype)

        def aligned(dtype, count):
            return cute.struct.Align[cute.struct.MemRange[dtype, count], SMEM_ALIGNMENT]

        a, b, d = (aligned(dtype, cute.cosize(x)) for dtype, x in zip(dtypes, layouts, strict=True))

        @cute.struct
        class Storage:
            words: aligned(Int64, SMEM_BARRIERS // 8)
            sA: a
            sB: b
            sD: d

        storage = SmemAllocator().allocate(Storage)
        assert Storage.size_in_bytes() == self.spec.smem_bytes
        fields = zip((storage.sA, storage.sB, storage.sD), layouts, strict=True)
        tensors = (field.get_tensor(x.outer, swizzle=x.inner) for field, x in fields)
        return storage.words.data_ptr(), *tensors

    def tiles(self, any_extent, second_is_contiguous, tile):
        """Returns the TMA coordinates (tile, tile, tiles, tiles, L) of an operand."""
        first, second = (1, 0) if second_is_contiguous else (0, 1)
        stride = (cute.E(first), cute.E(second), cute.E(2))
        origin = cute.make_identity_tensor((1, 1, 1)).iterator
        coordinates = cute.make_tensor(origin, cute.make_layout((any_extent,) * 3, stride=stride))
        return cute.local_tile(coordinates, tile, (None, None, None))

    def tile_of_cta(self, index, walk, cta_m, cta_n):
        """Returns this CTA's (tile_m, tile_n, batch) of cluster tile `index`."""
        cluster_m, cluster_n, batch = tile_at(walk, index, Int64, Int32)
        s = self.spec
        return cluster_m * s.cluster_m + cta_m, cluster_n * s.cluster_n + cta_n, batch

    @cute.jit
    def load(self, ring, walk, cta_m, cta_n, k_tiles):
        """The loader warp."""
        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.spec.num_stages
        )
        index, reader = self.scheduler.first_tile(), self.scheduler.new_reader()
        while index < self.scheduler.total:
            tile_m, tile_n, batch = self.tile_of_cta(index, walk, cta_m, cta_n)
            state = self.mainloop.load(ring, state, tile_m, tile_n, batch, k_tiles)
            index, reader = self.scheduler.next_tile(index, reader)
        # No CTA leaves before its partners' last arrivals on its barriers have landed.
        ring.producer_tail(state)

    @cute.jit
    def math(self, ring, tma_d, sA, sB, sD, gD_mnl, walk, cta_m, cta_n, k_tiles):
        """The math warps."""
        math_thread = cute.arch.thread_idx()[0] - WARPGROUP
        math_warp = cute.arch.make_warp_uniform(math_thread // 32)
        warpgroup = cute.arch.make_warp_uniform(math_thread // WARPGROUP)
        self.schedule.setup(warpgroup)
        is_store_warp = math_warp % 4 == 0

        acc = self.mainloop.partition_for_math(warpgroup, sA, sB)
        self.epilogue.partition(
            tma_d,
            self.mainloop.make_tiled_mma(1),
            warpgroup,
            math_thread % WARPGROUP,
            acc,
            sD,
            gD_mnl,
        )

        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.spec.num_stages
        )
        index, reader = self.scheduler.first_tile(), self.scheduler.new_reader()
        written = Int32(0)
        if cutlass.const_expr(self.schedule.tiles_in_turn == 2):
            if warpgroup == 1:
                self.schedule.pass_math()  # the first turn is warpgroup 0's
                state = self.mainloop.skip(state, k_tiles)
                index, reader = self.scheduler.next_tile(index, reader)

        while index < self.scheduler.total:
            tile_m, tile_n, batch = self.tile_of_cta(index, walk, cta_m, cta_n)
            self.schedule.wait_for_math()
            state = self.mainloop.multiply(ring, state, acc, k_tiles, self.schedule.pass_math)
            written = self.epilogue.store_tile(is_store_warp, written, tile_m, tile_n, batch)
            index, reader = self.scheduler.next_tile(index, reader)
            if cutlass.const_expr(self.schedule.tiles_in_turn == 2):
                state = self.mainloop.skip(state, k_tiles)
                index, reader = self.scheduler.next_tile(index, reader)
        self.epilogue.drain(is_store_warp)
