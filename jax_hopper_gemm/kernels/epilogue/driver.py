"""The epilogue: accumulator and operands → the graph's values → matrices and reductions.

A math warpgroup goes through its rows of a tile in subtiles of (64, epi_tile_n). For each:

    wait for its operands (ring filled by a loader warp), read them, free their slot
    evaluate the graph for each of a thread's values; add to reductions, convert, stage
    barrier of the warpgroup
    one of its warps sends each staged matrix by TMA, all in one group

A thread's v-th value of a subtile is the one that wgmma leaves it: row 16 * (t // 32) +
t % 32 // 4 + 8 * (v // 2 % 2), column 8 * (v // 4) + 2 * (t % 4) + v % 2, of thread t of 128. A
gated product's columns of up lie tile_n / 2 further in the accumulator: the same threads hold them.

A graph that reads statistics of whole rows goes through a block of 64 rows once for each of them
and a last time to store; its operands are loaded as often.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32
from cutlass.cutlass_dsl import select_

from ...gemm.spec import EPI_TILE_M
from ..named_barriers import WARPGROUP, BarrierId
from .graph_codegen import Elements
from .matrix_store import StagedMatrix, copy_by_accumulator
from .operand_loads import OperandRing
from .reductions import RowStatistic, make_reductions

MAX_BRANCHES = 16  # one within the other; each takes a dozen frames of Python's stack


class SubtilePlace(NamedTuple):
    """Where a subtile lies, for reductions.

    Attributes:
      rows, n: extents of D.
      m: where its rows end: those of D, or of a span of them.
      row0, column0: its first row and column.
      batch: its matrix.
      tile_n, tiles_n: its tile along N, and how many of those D has.
    """

    rows: Any
    m: Any
    n: Any
    row0: Any
    column0: Any
    batch: Any
    tile_n: Any
    tiles_n: Any


class FusedEpilogue:
    """The protocol of an epilogue: layouts and atoms on the host, `store_tile` on the GPU.

    Attributes:
      ring: the operands that a loader warp brings, see there.
      smem_words: int64 words of barriers.
    """

    def __init__(self, spec):
        self.spec = spec
        self.graph = spec.graph
        self.matrices = [StagedMatrix(spec, result) for result in self.graph.matrices]
        self.reductions = make_reductions(spec)
        self.ring = OperandRing(spec)
        self.smem_words = self.ring.smem_words
        self.subtiles_m = spec.rows_per_warpgroup // EPI_TILE_M
        self.subtiles_n = spec.d_tile_n // spec.epi_tile_n
        self.values = spec.epi_tile_n // 2  # of a thread's subtile
        self.needs_barrier = bool(self.matrices) or any(r.needs_barrier for r in self.reductions)
        # A cooperative tile's row blocks alternate between its warpgroups.
        self.shares_tile = spec.warp_schedule == "cooperative"
        self.row_blocks = spec.math_warpgroups if self.shares_tile else 1

    def setup_layouts(self):
        for matrix in self.matrices:
            matrix.setup_layouts()
        self.ring.setup_layouts()

    def make_tma_atoms(self, results, operands):
        """Returns the kernel's parameters for results and operands: matrices become atoms.

        Args:
          results: a tensor for each matrix, a pointer for each other result.
          operands: a tensor each, of a scalar a pointer and a batch stride; None if there are none.
        """
        matrices, loaded = iter(self.matrices), iter(self.ring.operands)
        atoms = tuple(
            next(matrices).make_tma_atom(given) if result.kind == "matrix" else given
            for result, given in zip(self.graph.results, results, strict=True)
        )
        loads = tuple(
            given if operand.kind == "scalar" else next(loaded).make_tma_atom(given)
            for operand, given in zip(self.graph.operands, operands or (), strict=True)
        )
        return atoms, loads or None

    def check_boxes(self, results, operands, check_box):
        """Calls `check_box(atom, box, 1)` for the tensor maps among the kernel's parameters."""
        given = zip(
            (*self.graph.results, *self.graph.operands), (*results, *(operands or ())), strict=True
        )
        for of, atom in given:
            if of.kind == "matrix":
                check_box(atom, self.spec.epi_box(of.dtype), 1)

    def allocate(self, memory):
        """Takes shared memory, in the order of `GemmSpec.smem_bytes`."""
        for matrix in self.matrices:
            matrix.allocate(memory)
        self.ring.allocate(memory)
        turn = 2 * 4 * self.spec.epi_tile_n  # floats of one column_sum of one warpgroup
        self.scratch = [
            memory.pointer(Float32, 4 * turn * self.spec.math_warpgroups, 16)
            if reduction.needs_barrier
            else None
            for reduction in self.reductions
        ]
        self.scratch_turn = turn

    def bind(self, results, operands, k_tiles, extents):
        """Takes the kernel's parameters.

        Args:
          results, operands: see `make_tma_atoms`.
          extents: (M, N) of D if the graph needs them, else None.
        """
        graph = self.graph
        self.k_tiles, self.extents = k_tiles, extents
        by_kind = list(zip(graph.results, results, strict=True))
        self.stores = [given for result, given in by_kind if result.kind == "matrix"]
        self.pointers = [given for result, given in by_kind if result.kind != "matrix"]
        kinds = list(zip(graph.operands, operands or (), strict=True))
        self.loads = [given for operand, given in kinds if operand.kind != "scalar"]
        self.scalars = {
            graph.accumulators + i: given
            for i, (operand, given) in enumerate(kinds)
            if operand.kind == "scalar"
        }

    @property
    def atoms(self):
        """All tensor maps in use."""
        return (*self.stores, *self.loads)

    def partition_for_load(self, coordinates):
        """Takes what a loader warp needs: the coordinates of tiles."""
        self.coordinates = coordinates

    @cute.jit
    def load_tile(self, warpgroup, loaded, place):
        """Loader warp: sends a tile's operands to a math warpgroup.

        Args:
          loaded: subtiles sent to that warpgroup before.

        Returns:
          `loaded`, advanced.
        """
        self.ring.partition_for_load(self.loads, self.coordinates, place)
        passes = self.graph.passes * self.subtiles_n  # steps of a row block
        steps = self.subtiles_m * passes
        if not self.has_rows(place, warpgroup):
            steps = 0
        for step in cutlass.range(steps, unroll=1):
            block_m = self.block_m(step // passes, warpgroup)
            self.ring.load(warpgroup, loaded + step, block_m, step % self.subtiles_n)
        return loaded + steps

    @cute.jit
    def load_tile_of_both(self, loaded, place, turn):
        """Loader warp: sends a tile's operands to the math warpgroups that work on it.

        Args:
          loaded: for each of two, subtiles sent to it before.
          turn: which of the two, where they alternate.

        Returns:
          `loaded`, advanced.
        """
        if cutlass.const_expr(self.shares_tile):
            self.ring.partition_for_load(self.loads, self.coordinates, place)
            passes = self.graph.passes * self.subtiles_n
            steps = self.subtiles_m * passes
            both = self.has_rows(place, 1)
            for step in cutlass.range(steps, unroll=1):
                i_m, i_n = step // passes, step % self.subtiles_n
                self.ring.load(0, loaded[0] + step, self.block_m(i_m, 0), i_n)
                if both:
                    self.ring.load(1, loaded[1] + step, self.block_m(i_m, 1), i_n)
            loaded = [loaded[0] + steps, loaded[1] + (steps if both else 0)]
        elif turn == 0:
            loaded = [self.load_tile(0, loaded[0], place), loaded[1]]
        else:
            loaded = [loaded[0], self.load_tile(1, loaded[1], place)]
        return loaded

    def has_rows(self, tile, warpgroup):
        """Returns whether a warpgroup has rows of a tile that are not past the end of a group."""
        if self.spec.grouped != "m" or not self.shares_tile:
            return True
        return tile.left > warpgroup * EPI_TILE_M

    def block_m(self, i_m, warpgroup):
        """Returns which 64 rows of a tile a warpgroup's i_m-th row block is."""
        return i_m * self.row_blocks + (warpgroup if self.shares_tile else 0)

    def partition_for_math(self, warpgroup_mma, warpgroup, thread, acc, coordinates):
        """Makes one math thread's views.

        Args:
          warpgroup_mma: the tiled MMA of one warpgroup.
          warpgroup, thread: index of the math warpgroup, and of the thread in it.
          acc: its accumulator.
          coordinates: those of tiles.
        """
        self.acc, self.warpgroup, self.thread = acc, warpgroup, thread
        self.coordinates = coordinates
        self.first_buffer = warpgroup * self.spec.epi_stages
        self.barrier = pipeline.NamedBarrier(BarrierId.WARPGROUP + warpgroup, WARPGROUP)
        by_acc = copy_by_accumulator(warpgroup_mma)
        for matrix, tma_d in zip(self.matrices, self.stores, strict=True):
            matrix.partition(tma_d, by_acc, thread)
        self.ring.partition_for_math(by_acc, warpgroup, thread)
        parts = zip(self.reductions, self.pointers, self.scratch, strict=True)
        for reduction, pointer, scratch in parts:
            if scratch is not None:
                scratch = scratch + warpgroup * self.scratch_turn
            reduction.partition(pointer, warpgroup, thread, scratch)

    def load_scalars(self, batch):
        """Returns the scalars of a tile; called before it is multiplied, which hides the wait."""
        return tuple(
            cute.arch.load(pointer + batch * stride, Float32)
            for pointer, stride in self.scalars.values()
        )

    def store_tile(self, scalars, is_store_warp, written, tile):
        """Turns the accumulator into a tile of the results.

        Args:
          scalars: what `load_scalars` returned.
          is_store_warp: whether this warp issues its warpgroup's TMA stores.
          written: subtiles that this warpgroup has written before; selects the buffers.
          tile: its place.

        Returns:
          `written`, advanced.
        """
        self.ring.begin_tile(tile)
        for matrix in self.matrices:
            matrix.begin_tile(self.coordinates.result(tile))
        for reduction in self.reductions:
            reduction.begin_tile()
        steps = []
        for i_m in range(self.subtiles_m):
            steps += self.steps_of_rows(scalars, is_store_warp, written, i_m, tile)
        self.run(steps)
        return written + self.subtiles_m * self.subtiles_n

    def steps_of_rows(self, scalars, is_store_warp, written, i_m, tile):
        """Returns what to do with a row block's subtiles: functions to be called in order."""
        known = dict(zip(self.scalars, scalars, strict=True))
        row_block = self.block_m(i_m, self.warpgroup)
        place = self.place(tile, row_block)
        before = written + i_m * self.subtiles_n
        read = before * self.graph.passes
        steps = []
        for number in self.graph.row_nodes:
            rows = self.row_statistics(number)
            for i_n in range(self.subtiles_n):
                step = partial(self.add_to_rows, rows, number, known, i_m, i_n, read + i_n, place)
                steps.append(step)
            read = read + self.subtiles_n
        for i_n in range(self.subtiles_n):
            buffer = self.first_buffer + (before + i_n) % self.spec.epi_stages
            steps.append(
                partial(
                    self.finish_subtile, is_store_warp, known, i_m, i_n, read + i_n, place,
                    buffer, (row_block, i_n), tile.belongs,
                )
            )  # fmt: skip
        return steps

    def run(self, steps):
        """Calls `steps` in order, and keeps their code in it.

        ptxas would compute all subtiles before it stores the first: stores would start late, and
        registers run out. It moves nothing over a branch whose condition it cannot know, so what
        follows a step lies behind one that is always taken. A plain kernel needs none.
        """
        together = -(-len(steps) // MAX_BRANCHES) if self.spec.epilogue else len(steps)
        self.run_together(steps[:together])
        if steps[together:]:
            self.run_behind_branches(steps[together:], together)

    @cute.jit
    def run_behind_branches(self, steps: cutlass.Constexpr, together: cutlass.Constexpr):
        if self.k_tiles != -len(steps):
            self.run_together(steps[:together])
            if cutlass.const_expr(len(steps) > together):
                self.run_behind_branches(steps[together:], together)

    def run_together(self, steps):
        for step in steps:
            step()

    def finish_subtile(
        self, is_store_warp, known, i_m, i_n, count, place, buffer, subtile, belongs
    ):
        """Evaluates a subtile, reduces it and stores it."""
        elements = self.elements(known, i_m, i_n, count)
        place = self.moved(place, i_n)
        self.write_subtile(elements, i_m, i_n, buffer, place, belongs)
        if self.needs_barrier:
            # One barrier a subtile: the store warp arrives here only after all but the newest
            # `epi_stages - 2` groups of stores have been read out, so the next buffer is free
            # behind it.
            self.barrier.arrive_and_wait()
        if self.matrices:
            self.store_subtile(is_store_warp, buffer, subtile)
        for reduction in self.reductions:
            reduction.end_subtile(i_m, i_n, place)
        if i_n == self.subtiles_n - 1:
            for reduction in self.reductions:
                reduction.end_rows(i_m, place)

    def elements(self, known, i_m, i_n, count):
        """Returns the values of a thread's subtile (i_m, i_n).

        Args:
          known: by number, scalars and statistics (of a thread's two rows).
          count: subtiles of operands read before.
        """
        loaded = self.ring.read(count) if self.ring.operands else None
        columns = self.spec.tile_n // 2  # accumulators of a row block
        first = i_m * columns + i_n * self.values

        def read(leaf, v):
            if leaf < self.graph.accumulators:
                return self.acc[first + leaf * (columns // 2) + v]
            if leaf in known:
                found = known[leaf]
                return found[v // 2 % 2] if isinstance(found, tuple) else found
            return loaded(leaf, v)

        return Elements(
            self.graph,
            read,
            row_of=lambda v: v // 2 % 2,
            column_of=lambda v: v // 4 * 2 + v % 2,
        )

    def write_subtile(self, elements, i_m, i_n, buffer, place, belongs):
        """Evaluates a subtile: adds to the reductions, stages the matrices.

        Where rows may belong to no group (`belongs` is not None), theirs are zeros, as those of a
        plain product already are, and count in no reduction.
        """
        fragments = [matrix.make_fragment() for matrix in self.matrices]
        inside = self.inside(place) if self.reductions else None
        for v in range(self.values):
            for matrix, fragment in zip(self.matrices, fragments, strict=True):
                value = elements.value(matrix.result.value, v)
                if belongs is not None and self.spec.epilogue:
                    value = select_(belongs, value, Float32(0))
                fragment[v] = value
            for reduction in self.reductions:
                value = elements.value(reduction.result.value, v)
                counts = reduction.rows_count, reduction.columns_count
                value = self.masked(value, v, inside, *counts, reduction.identity)
                if belongs is not None:
                    value = select_(belongs, value, Float32(reduction.identity))
                reduction.add(value, v, i_m, i_n)
        for matrix, fragment in zip(self.matrices, fragments, strict=True):
            matrix.write(fragment, buffer)
        if self.matrices:
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def store_subtile(self, is_store_warp, buffer, subtile):
        if is_store_warp:
            self.send(buffer, subtile)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(self.spec.epi_stages - 2, read=True)

    def send(self, buffer, subtile):
        for matrix in self.matrices:
            matrix.store(buffer, subtile)

    def row_statistics(self, number):
        """Returns what gathers a row_sum or row_max of a thread's two rows."""
        operation = self.graph.node(number).op
        return RowStatistic(operation), RowStatistic(operation)

    def add_to_rows(self, rows, number, known, i_m, i_n, count, place):
        """Adds a subtile to the statistics of its rows; the last one makes them known."""
        (argument,) = self.graph.node(number).args
        elements = self.elements(known, i_m, i_n, count)
        _, columns = self.inside(self.moved(place, i_n))
        for v in range(self.values):
            rows[v // 2 % 2].add(elements.value(argument, v), columns[v // 4 * 2 + v % 2])
        if i_n == self.subtiles_n - 1:
            known[number] = tuple(row.value() for row in rows)

    def place(self, tile, row_block):
        """Returns the place of a row block's first subtile; None if nobody asks."""
        if not self.extents:
            return None
        rows, n = self.extents
        columns = self.spec.d_tile_n
        tiles_n = (n + columns - 1) // columns
        if self.spec.grouped == "m":
            m, batch, row0 = tile.end, 0, tile.first + row_block * EPI_TILE_M
        else:
            m, batch = rows, tile.batch
            row0 = (tile.m * (self.spec.tile_m // EPI_TILE_M) + row_block) * EPI_TILE_M
        return SubtilePlace(rows, m, n, row0, tile.n * columns, batch, tile.n, tiles_n)

    def moved(self, place, i_n):
        if place is None:
            return None
        return place._replace(column0=place.column0 + i_n * self.spec.epi_tile_n)

    def inside(self, place):
        """Returns which of a thread's two rows of a subtile, and of its columns, lie in D."""
        row = place.row0 + self.thread // 32 * 16 + self.thread % 32 // 4
        column = place.column0 + self.thread % 4 * 2
        rows = [row + 8 * i < place.m for i in range(2)]
        columns = [column + (8 * (i // 2) + i % 2) < place.n for i in range(self.values // 2)]
        return rows, columns

    def masked(self, value, v, inside, rows_count, columns_count, identity):
        """Returns the value, or the identity where it lies outside of D and would count."""
        rows, columns = inside
        if rows_count:
            value = select_(rows[v // 2 % 2], value, Float32(identity))
        if columns_count:
            value = select_(columns[v // 4 * 2 + v % 2], value, Float32(identity))
        return value

    @cute.jit
    def drain(self, is_store_warp):
        """Waits until all stores of this warpgroup have been read from shared memory."""
        if cutlass.const_expr(len(self.matrices) > 0):
            if is_store_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
