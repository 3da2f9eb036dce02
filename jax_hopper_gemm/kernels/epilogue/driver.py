"""The epilogue: accumulator and operands → the graph's values → matrices and reductions.

A math warpgroup goes through its rows of a tile in subtiles of (64, epi_tile_n). For each:

    wait for its operands (ring filled by an operand warp), read them, free their slot
    evaluate the graph for each of a thread's values; add to reductions, convert, stage
    barrier of the warpgroup
    one of its warps sends each staged matrix by TMA, all in one group; or all of them store it

A thread's v-th value of a subtile is the one that wgmma leaves it, see `gemm/wgmma_fragment.py`. A
gated product's columns of up lie tile_n / 2 further in the accumulator: the same threads hold them.

A graph that reads statistics of whole rows goes through a block of 64 rows once for each of them
and a last time to store; its operands are loaded as often.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32
from cutlass.cutlass_dsl import select_

from ...gemm.wgmma_fragment import line_of
from ..panels import own_scalar
from ..shared_memory import WARPGROUP, BarrierId
from .fold import RowStatistic
from .matrix_store import copy_by_accumulator, staged_matrix
from .op_codegen import Elements
from .operand_ring import OperandRing, OperandWarp
from .reductions import make_reductions
from .views import MathView, RowBlocks, SharedTensors, Subtile, TileView, first_coords

MAX_BRANCHES = 16  # one within the other; each takes a dozen frames of Python's stack


class FusedEpilogue:
    """The protocol of an epilogue: constants of the trace. See `views.py` for all else.

    host            make_tma_atoms
    all threads     allocate, ring.setup → the parts of a `CtaView`
    operand warps   loads.load_tile or loads.load_tile_of_both, for each tile
    math warps      math_view; load_scalars and store_tile, for each tile; drain
    """

    def __init__(self, spec):
        self.spec = spec
        self.graph = spec.graph
        self.matrices = [staged_matrix(spec, result) for result in self.graph.matrices]
        self.stores_by_tma = bool(self.matrices) and not spec.loose_d
        self.reductions = make_reductions(spec)
        self.ring = OperandRing(spec)
        self.row_blocks = RowBlocks(spec)
        self.loads = OperandWarp(spec, self.ring, self.row_blocks)
        self.subtiles_n = self.row_blocks.subtiles_n
        self.values = spec.epi_tile_n // 2  # of a thread's subtile
        self.needs_barrier = bool(self.matrices) or any(r.needs_barrier for r in self.reductions)

    def make_tma_atoms(self, results, operands):
        """Returns the kernel's parameters for results and operands: tensors become atoms."""
        matrices, loaded = iter(self.matrices), iter(self.ring.operands)
        stores = tuple(
            next(matrices).make_tma_atom(mD) if result.kind == "matrix" else mD
            for result, mD in zip(self.graph.results, results, strict=True)
        )
        loads = tuple(
            mC if operand.kind == "scalar" else next(loaded).make_tma_atom(mC)
            for operand, mC in zip(self.graph.operands, operands or (), strict=True)
        )
        return stores, loads or None

    def allocate(self, memory):
        """Returns the `SharedTensors`, taken in the order of `GemmSpec.smem_bytes`."""
        return SharedTensors(
            matrices=tuple(matrix.allocate(memory) for matrix in self.matrices),
            operands=self.ring.allocate(memory),
            scratch=tuple(reduction.allocate(memory) for reduction in self.reductions),
        )

    def math_view(self, cta, warpgroup_mma, warpgroup, thread, acc):
        """Returns one math thread's `MathView`; `warpgroup_mma` is that of one warpgroup."""
        first_buffer = warpgroup * self.spec.epi_stages
        barrier = pipeline.NamedBarrier(BarrierId.WARPGROUP + warpgroup, WARPGROUP)
        by_acc = copy_by_accumulator(warpgroup_mma)
        staged = zip(self.matrices, cta.parameters.stores, cta.shared.matrices, strict=True)
        matrices = tuple(
            matrix.thread_view(tma_d, sD, by_acc, thread) for matrix, tma_d, sD in staged
        )
        ring = self.ring.thread_view(cta, by_acc, warpgroup, thread)
        reductions = tuple(
            reduction.thread_view(cta.parameters.pointers, warpgroup, thread, scratch, barrier)
            for reduction, scratch in zip(self.reductions, cta.shared.scratch, strict=True)
        )
        return MathView(
            cta, acc, warpgroup, thread, first_buffer, barrier, matrices, ring, reductions
        )

    def load_scalars(self, view, coords):
        """Returns the scalars of a tile; called before it is multiplied, which hides the wait."""
        scalars = view.cta.parameters.scalars.values()
        return tuple(
            cute.arch.load(pointer + coords.batch * stride, Float32)
            for pointer, stride in (own_scalar(x, coords.panel) for x in scalars)
        )

    def store_tile(self, view, scalars, is_store_warp, written, coords):
        """Turns the accumulator into a tile of the results.

        `written` counts the subtiles that this warpgroup has written before, which selects the
        buffers; returned, advanced.
        """
        numbered = dict(zip(view.cta.parameters.scalars, scalars, strict=True))
        tile = self.tile_view(view, numbered, is_store_warp, coords)
        steps = []
        for i_m in range(self.row_blocks.count):
            steps += self.steps_of_rows(tile, written, i_m)
        if self.spec.epilogue:
            run_in_order(steps, view.cta.parameters.k_tiles)
        else:
            run(steps)
        return written + self.row_blocks.count * self.subtiles_n

    def tile_view(self, view, scalars, is_store_warp, coords):
        tma_coords = view.cta.tma_coords
        ring = view.ring.tile_view(coords)
        stores = tuple(
            matrix.tile_view(*tma_coords.result(coords), coords.panel) for matrix in view.matrices
        )
        folds = tuple(
            reduction.begin_tile(of_thread)
            for reduction, of_thread in zip(self.reductions, view.reductions, strict=True)
        )
        return TileView(view, coords, scalars, is_store_warp, ring, stores, folds)

    def steps_of_rows(self, tile, written, i_m):
        """Returns the steps of a row block's subtiles: functions to be called in order."""
        leaves = dict(tile.scalars)
        row_block = self.row_blocks.block_m(i_m, tile.math.warpgroup)
        extents = tile.math.cta.parameters.extents
        coords = first_coords(self.spec, extents, tile.coords, row_block)
        before = written + i_m * self.subtiles_n
        read = before * self.graph.passes
        steps = []
        for number in self.graph.row_nodes:
            operation = self.graph.node(number).op
            rows = RowStatistic(operation), RowStatistic(operation)  # a thread's two
            for i_n in range(self.subtiles_n):
                subtile = Subtile(i_m, i_n, read + i_n, coords)
                steps.append(partial(self.add_to_rows, tile, leaves, subtile, number, rows))
            read = read + self.subtiles_n
        for i_n in range(self.subtiles_n):
            buffer = tile.math.first_buffer + (before + i_n) % self.spec.epi_stages
            block = self.row_blocks.block(i_m, i_n, tile.math.warpgroup)
            subtile = Subtile(i_m, i_n, read + i_n, coords, block, buffer)
            steps.append(partial(self.finish_subtile, tile, leaves, subtile))
        return steps

    def add_to_rows(self, tile, leaves, subtile, number, rows):
        """Adds a subtile to the statistics of its rows; the last one makes them leaves."""
        (argument,) = self.graph.node(number).args
        elements = self.elements(tile, leaves, subtile)
        _, columns_inside = self.inside(tile, subtile.coords(self.spec.epi_tile_n))
        for v in range(self.values):
            row, column = line_of(v)
            rows[row].add(elements.value(argument, v), columns_inside[column])
        if subtile.i_n == self.subtiles_n - 1:
            leaves[number] = tuple(row.value() for row in rows)

    def finish_subtile(self, tile, leaves, subtile):
        elements = self.elements(tile, leaves, subtile)
        coords = subtile.coords(self.spec.epi_tile_n)
        self.write_subtile(tile, elements, subtile, coords)
        if self.needs_barrier:
            # NOTE: the one barrier of a subtile. The store warp arrives here only after all but
            # the newest `epi_stages - 2` groups of stores have been read out, so the next buffer
            # is free behind it.
            tile.math.barrier.arrive_and_wait()
        if self.stores_by_tma:
            self.store_subtile(tile.is_store_warp, tile.stores, subtile)
        else:
            # Two subtiles on, a barrier later, their buffer is written again.
            for store in tile.stores:
                store.scatter(subtile.buffer, coords)
        for fold in tile.folds:
            fold.end_subtile(subtile.i_m, subtile.i_n, coords)
        if subtile.i_n == self.subtiles_n - 1:
            for fold in tile.folds:
                fold.end_rows(subtile.i_m, coords)

    def elements(self, tile, leaves, subtile):
        """Returns the values of a thread's subtile; `leaves` are scalars and rows' statistics."""
        loaded = tile.ring.read(subtile.count) if self.ring.operands else None

        def read(leaf, v):
            if leaf < self.graph.accumulators:
                return self.accumulator(tile, subtile, leaf, v).to(Float32)
            if leaf in leaves:
                value = leaves[leaf]
                return value[line_of(v)[0]] if isinstance(value, tuple) else value
            return loaded(leaf, v)

        return Elements(
            self.graph, read, row_of=lambda v: line_of(v)[0], column_of=lambda v: line_of(v)[1]
        )

    def accumulator(self, tile, subtile, number, v):
        """Returns an accumulator of a thread's v-th element, as the tensor cores summed it."""
        columns = self.spec.columns_per_warpgroup // 2  # accumulators of a row block
        first = subtile.i_m * columns + subtile.i_n * self.values
        return tile.math.acc[first + number * (columns // 2) + v]

    def write_subtile(self, tile, elements, subtile, coords):
        """Evaluates a subtile: adds to the reductions, stages the matrices.

        Where rows may belong to no group (`belongs` is not None), theirs are zeros, as those of a
        plain product already are, and count in no reduction.
        """
        belongs = tile.coords.belongs
        views = tile.math.matrices
        fragments = [cute.make_rmem_tensor(x.registers, x.matrix.value_dtype) for x in views]
        inside = self.inside(tile, coords) if self.reductions else None
        for v in range(self.values):
            for matrix, fragment in zip(self.matrices, fragments, strict=True):
                if matrix.keeps_sums:
                    value = self.accumulator(tile, subtile, matrix.result.value, v)
                else:
                    value = elements.value(matrix.result.value, v)
                if belongs is not None and self.spec.epilogue:
                    value = select_(belongs, value, Float32(0))
                fragment[v] = value
            for fold in tile.folds:
                value = fold.masked(elements.value(fold.value, v), v, inside)
                if belongs is not None:
                    value = select_(belongs, value, Float32(fold.identity))
                fold.add(value, v, subtile.i_m, subtile.i_n)
        for view, fragment in zip(views, fragments, strict=True):
            view.write(fragment, subtile.buffer)
        if self.stores_by_tma:
            # TMA reads the staged tiles through another proxy than that which wrote them.
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def store_subtile(self, is_store_warp, stores, subtile):
        if is_store_warp:
            self.send(stores, subtile)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(self.spec.epi_stages - 2, read=True)

    def send(self, stores, subtile):
        for store in stores:
            store.store(subtile.buffer, subtile.block)

    def inside(self, tile, coords):
        """Returns which of a thread's two rows of a subtile, and of its columns, lie in D."""
        return coords.inside(tile.math.thread, self.values // 2)

    @cute.jit
    def drain(self, is_store_warp):
        """Waits until all stores of this warpgroup have been read from shared memory."""
        if cutlass.const_expr(self.stores_by_tma):
            if is_store_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)


def run_in_order(steps, k_tiles):
    """Calls `steps` in order, and keeps their code in it.

    NOTE: left alone, ptxas computes all subtiles before it stores the first: stores start late, and
    registers run out. It moves nothing over a branch whose condition it cannot know. So each step
    lies behind a branch that is always taken: `k_tiles` is an int32 of at least 0.
    """
    together = -(-len(steps) // MAX_BRANCHES)
    run(steps[:together])
    if steps[together:]:
        _run_behind_branches(steps[together:], together, k_tiles)


def run(steps):
    """Calls `steps` in order. A plain kernel's need no branches."""
    for step in steps:
        step()


@cute.jit
def _run_behind_branches(steps: cutlass.Constexpr, together: cutlass.Constexpr, k_tiles):
    if k_tiles != -len(steps):
        run(steps[:together])
        if cutlass.const_expr(len(steps) > together):
            _run_behind_branches(steps[together:], together, k_tiles)
