"""The skeleton of every GEMM kernel: roles, barriers, the tile loop. It knows no policy by name.

    warp        role           does
    0           loader         A and B tiles → ring of stages, by TMA
    1           scheduler      next tile → mailbox (only where the scheduler needs one)
    2, 3        operands       the epilogue's operands → ring of math warpgroup 0, 1, by TMA
                               (nothing where it loads none)
    2           zero fill      matrices of empty groups, where these are no tiles
    0, 3        loader         where rows of A or B are gathered; 2 then serves both warpgroups
    4 ...       math           ring → accumulator (wgmma) → finish → results; four warps a warpgroup

    barrier             arrivals                                     waited on by
    ring full           the producer's, and bytes                    math
    ring empty          a warp of each that works on the tile,       loader
                        in each CTA that shares the stage
    operands            see epilogue/operand_ring.py                 operands, math
    mailbox             see mailbox.py                               all but the scheduler
    sums                bytes of all CTAs that share K               math, see finish.py
    named               see `BarrierId` in shared_memory.py          math

Stages that a tile leaves free fill with the next tile's loads while it is still stored.
"""

from functools import partial, reduce
from operator import or_

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.pipeline import PipelineUserType, make_pipeline_state

from ..gemm.kernel_params import map_args
from .epilogue import CtaView, FusedEpilogue, Parameters
from .finish import make_finish
from .mainloop import make_consumer, make_producer
from .mainloop.ring import allocate_stages, make_ring, pass_over_tile, skip_tile
from .shared_memory import WARPGROUP, SharedMemory
from .tile_coords import CtaInCluster, Tiles, TmaCoords
from .tile_scheduler import make_scheduler
from .warp_schedule import WARP_SCHEDULES, NoTurn
from .zero_fill import ZeroFillWarp

SCHEDULER_WARP, FIRST_OPERAND_WARP, ZERO_FILL_WARP, FIRST_MATH_WARP = 1, 2, 2, 4


class GemmKernel:
    """One kernel, for one `GemmSpec`."""

    def __init__(self, spec):
        self.spec = spec
        self.schedule = WARP_SCHEDULES[spec.warp_schedule](spec)
        self.scheduler = make_scheduler(spec)
        self.producer = make_producer(spec)
        self.consumer = make_consumer(spec, self.producer, self.schedule.atom_layout_m)
        self.finish = make_finish(spec)
        self.epilogue = FusedEpilogue(spec.of_slice)
        self.zero_fill = ZeroFillWarp(spec)
        self.skip = partial(skip_tile, spec)

    @cute.jit
    def launch(self, args, stream):
        """Host side, traced only to make the TMA atoms' types; `ffi/` launches for real.

        `args` are those of `kernel`, with a tensor in place of each tensor map.
        """
        s = self.spec
        tma_ab = self.producer.make_tma_atoms(args.tma_ab)
        results, operands = self.epilogue.make_tma_atoms(args.results, args.operands)
        self.kernel(args._replace(tma_ab=tma_ab, results=results, operands=operands)).launch(
            grid=(s.cluster_m, s.cluster_n, s.cluster_k),
            block=(s.threads, 1, 1),
            cluster=(s.cluster_m, s.cluster_n, s.cluster_k),
            smem=s.smem_bytes,
            min_blocks_per_mp=1,  # NOTE: without it ptxas silently drops setmaxnreg
            stream=stream,
        )

    @cute.kernel
    def kernel(self, args):
        """Sets up what all threads share, then gives each warp its role; `args`: `KernelArgs`."""
        s = self.spec
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_m, cta_n, cta_k = cute.arch.block_in_cluster_idx()
        cta = CtaInCluster(cta_m, cta_n, cta_k)

        parameters = Parameters.of(s.graph, args)
        if warp == self.producer.loader_warps[0]:
            of_ab = self.producer.tensor_maps(args.tma_ab)
            stores = parameters.stores if self.epilogue.stores_by_tma else ()
            self.prefetch((of_ab, stores, parameters.loads))

        stages, slots, shared, barriers = self.allocate_shared_memory()
        ring = make_ring(s, barriers["ring"], self.producer, s.stage_warps, args.stage_bytes)
        operand_barriers = self.epilogue.ring.setup(barriers["operands"])
        scheduled = self.scheduler.setup(barriers["mailbox"], args, self.reader_warps)
        self.finish.setup(barriers["sums"], cta)
        pipeline.pipeline_init_arrive((s.cluster_m, s.cluster_n * s.cluster_k), is_relaxed=True)

        tiles = Tiles(s, self.scheduler, scheduled, args, cta)
        tma_coords = TmaCoords(s, args)
        epilogue = CtaView(parameters, shared, operand_barriers, TmaCoords(s.of_slice, args))

        pipeline.pipeline_init_wait((s.cluster_m, s.cluster_n * s.cluster_k))

        loader_registers, math_registers = self.schedule.registers
        if warp < FIRST_MATH_WARP:
            cute.arch.setmaxregister_decrease(loader_registers)
            if self.is_loader(warp):
                view = self.producer.partition_for_load(args, stages, tma_coords, cta)
                self.load(view, ring, tiles)
            if cutlass.const_expr(self.scheduler.needs_scheduler_warp):
                if warp == SCHEDULER_WARP and cta_m + cta_n == 0:
                    self.scheduler.run_scheduler_warp(scheduled, self.schedule.tiles_in_turn)
            operand_warps = self.epilogue.ring.loader_warps
            if cutlass.const_expr(operand_warps > 0):
                served = warp - FIRST_OPERAND_WARP
                if served >= 0 and served < operand_warps:
                    if cutlass.const_expr(operand_warps < s.math_warpgroups):
                        self.load_all_operands(epilogue, tiles)
                    else:
                        self.load_operands(epilogue, served, tiles)
            if cutlass.const_expr(self.zero_fill.warps > 0):
                if warp == ZERO_FILL_WARP:
                    self.zero_fill.run(tiles)
        else:
            cute.arch.setmaxregister_increase(math_registers)
            exchange = self.finish.cta_view(args, cta, slots, barriers["sums"])
            self.math(stages, ring, tiles, epilogue, exchange)

        if cutlass.const_expr(self.scheduler.needs_scheduler_warp and s.cluster_size > 1):
            # NOTE: the mailbox's first CTA must not leave while others may still arrive on it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def prefetch(self, atoms):
        map_args(cute.nvgpu.cpasync.prefetch_descriptor, atoms)

    def allocate_shared_memory(self):
        """Returns all shared memory: stages, slots of sums, the epilogue's, barriers by user."""
        memory = SharedMemory(self.spec.smem_bytes)
        stages = allocate_stages(self.spec, memory)
        slots = self.finish.allocate(memory)
        shared = self.epilogue.allocate(memory)
        barriers = memory.barriers(
            self.spec,
            ring=2 * self.spec.num_stages,  # one full and one empty for each stage
            operands=self.epilogue.ring.smem_words,
            sums=self.finish.smem_words,
            mailbox=self.scheduler.smem_words,
        )
        return stages, slots, shared, barriers

    @property
    def reader_warps(self):
        """Warps of a CTA that go through its tiles."""
        loading = len(self.producer.loader_warps) + self.epilogue.ring.loader_warps
        return loading + self.zero_fill.warps + 4 * self.spec.math_warpgroups

    def is_loader(self, warp):
        return reduce(or_, (warp == loader for loader in self.producer.loader_warps))

    @cute.jit
    def load(self, view, ring, tiles):
        state = make_pipeline_state(PipelineUserType.Producer, self.spec.num_stages)
        tile, reader = tiles.first()
        while tiles.exists(tile):
            state = self.producer.load(view, ring, state, tiles.coords(tile))
            tile, reader = tiles.next(tile, reader)
        # NOTE: no CTA leaves before its partners' last arrivals on its barriers have landed. A
        # relaxed cluster barrier is no guard: launches failed now and then.
        ring.producer_tail(state)

    @cute.jit
    def load_operands(self, epilogue, warpgroup, tiles):
        """An operand warp, of one math warpgroup. It may leave before its last loads have landed:
        the warpgroup waits for them, and no other CTA arrives on its barriers."""
        tile, reader, loaded = self.schedule.first_tile(tiles, warpgroup, Int32(0), keep, NoTurn())
        while tiles.exists(tile):
            coords = tiles.coords(tile)
            if self.finish.stores(coords):
                own = self.finish.slice_coords(coords)
                loaded = self.epilogue.loads.load_tile(epilogue, warpgroup, loaded, own)
            tile, reader = tiles.next(tile, reader)
            tile, reader, loaded = self.schedule.skip_partner_tile(
                tiles, tile, reader, loaded, keep
            )

    @cute.jit
    def load_all_operands(self, epilogue, tiles):
        """The operand warp that serves both math warpgroups."""
        tile, reader = tiles.first()
        loaded = [Int32(0), Int32(0)]
        turn = Int32(0)
        while tiles.exists(tile):
            loaded = self.epilogue.loads.load_tile_of_both(
                epilogue, loaded, tiles.coords(tile), turn
            )
            turn = turn ^ 1
            tile, reader = tiles.next(tile, reader)

    @cute.jit
    def math(self, stages, ring, tiles, epilogue, exchange):
        math_thread = cute.arch.thread_idx()[0] - WARPGROUP
        math_warp = cute.arch.make_warp_uniform(math_thread // 32)
        warpgroup = cute.arch.make_warp_uniform(math_thread // WARPGROUP)
        turn = self.schedule.turn_of(warpgroup)
        is_store_warp = math_warp % 4 == 0

        view = self.consumer.partition_for_math(stages, warpgroup, tiles.args)
        mma = self.consumer.make_tiled_mma(1)
        stored = self.finish.slice_registers(view.acc)
        results = self.epilogue.math_view(epilogue, mma, warpgroup, math_thread % WARPGROUP, stored)

        state = make_pipeline_state(PipelineUserType.Consumer, self.spec.num_stages)
        written = Int32(0)
        tile, reader, state = self.schedule.first_tile(tiles, warpgroup, state, self.skip, turn)
        while tiles.exists(tile):
            coords = tiles.coords(tile)
            if self.epilogue.row_blocks.any_of(coords, warpgroup):
                scalars = self.epilogue.load_scalars(results, coords)
                turn.wait()
                state = self.consumer.multiply(view, ring, state, coords, turn.hand_over)
                sums = self.consumer.sums(view)
                if cutlass.const_expr(self.finish.settled):
                    self.consumer.settle(view)
                    sums = view.acc
                if self.finish.combine(exchange, sums, stored, coords):
                    if cutlass.const_expr(not self.finish.settled):
                        self.consumer.settle(view)
                    written = self.epilogue.store_tile(
                        results, scalars, is_store_warp, written, self.finish.slice_coords(coords)
                    )
            else:
                state = pass_over_tile(ring, state, coords)
            tile, reader = tiles.next(tile, reader)
            tile, reader, state = self.schedule.skip_partner_tile(
                tiles, tile, reader, state, self.skip
            )
        self.epilogue.drain(is_store_warp)


def keep(state, coords):
    """Returns `state`: a role that loads operands carries nothing past a skipped tile."""
    return state
