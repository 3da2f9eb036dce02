"""wgmma with both operands in shared memory ("SS"), loaded by TMA into a ring of stages."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.tensor_utils as tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import max as larger
from cutlass.cutlass_dsl import select_

from ..dtypes import CUTE_DTYPE


def operand_smem_layout(dtype, is_k_major, rows, tile_k, stages, parts=1):
    """Returns the staged, swizzled layout (rows, tile_k, stages) of A or B.

    `parts` of the rows, each of `rows / parts`, are loaded by themselves: boxes cross none.
    """
    layout = tensor_utils.LayoutEnum.ROW_MAJOR if is_k_major else tensor_utils.LayoutEnum.COL_MAJOR
    atom = warpgroup.make_smem_layout_atom(
        sm90.get_smem_layout_atom(layout, dtype, tile_k if is_k_major else rows // parts), dtype
    )
    order = (0, 1, 2) if is_k_major else (1, 0, 2)
    return cute.tile_to_shape(atom, (rows, tile_k, stages), order=order)


class SharedSharedMainloop:
    """The protocol of a mainloop.

    Layouts and TMA atoms are made on the host, `load` and `multiply` run on the GPU.

    A gated product has two B's, gate and up. A stage holds a tile of each side by side, d_tile_n
    columns of gate and as many of up, and one wgmma of tile_n columns multiplies both.
    """

    loader_warps = 1

    def __init__(self, spec, atom_layout_m):
        s = self.spec = spec
        self.dtype = CUTE_DTYPE[s.ab_dtype]
        self.atom_layout_m = atom_layout_m
        self.a_is_k_major, self.b_is_k_major = s.a_major == "k", s.b_major == "k"

    def setup_layouts(self):
        """Builds the shared-memory layouts; needs an MLIR context, so host or device trace."""
        s = self.spec
        self.a_layout = operand_smem_layout(
            self.dtype, self.a_is_k_major, s.tile_m, s.tile_k, s.num_stages
        )
        self.b_layout = operand_smem_layout(
            self.dtype, self.b_is_k_major, s.tile_n, s.tile_k, s.num_stages, s.graph.accumulators
        )

    def allocate(self, memory):
        """Takes shared memory for the stages: (bM, bK, stages), (bN, bK, stages)."""
        self.sA = memory.tensor(self.dtype, self.a_layout)
        self.sB = memory.tensor(self.dtype, self.b_layout)

    def make_tma_atoms(self, tensors):
        """Returns the load atoms of A and of each B; only their types matter, the host sets the
        maps."""
        s = self.spec
        mA, *mBs = tensors

        def atom(tensor, layout, tile, multicast):
            op = (
                cpasync.CopyBulkTensorTileG2SMulticastOp()
                if multicast > 1
                else cpasync.CopyBulkTensorTileG2SOp()
            )
            one_stage = cute.slice_(layout, (None, None, 0))
            return cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile, multicast)[0]

        b_tile = (s.d_tile_n, s.tile_k)
        b_layout = operand_smem_layout(self.dtype, self.b_is_k_major, *b_tile, 1)
        a = None if mA is None else atom(mA, self.a_layout, (s.tile_m, s.tile_k), s.cluster_n)
        return (a, *(atom(mB, b_layout, b_tile, s.cluster_m) for mB in mBs))

    def atoms(self, factors):
        """Returns the tensor maps among the kernel's parameters for A and B."""
        return factors

    def make_tiled_mma(self, warpgroups):
        """Returns the MMA of `warpgroups` side by side along M."""
        mode = cute.nvgpu.OperandMajorMode
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            mode.K if self.a_is_k_major else mode.MN,
            mode.K if self.b_is_k_major else mode.MN,
            Float32,
            (warpgroups, 1, 1),
            tiler_mn=(64, self.spec.tile_n),
        )

    def make_pipeline(self, barriers, tile_warps):
        """Returns the ring: TMA fills a stage, every warp that works on the tile empties it.

        A multicast stage is emptied by the warps of all CTAs that it was sent to, or that sent
        a slice of it: `cluster_m + cluster_n - 1` of them.
        """
        s = self.spec
        partners = s.cluster_m + s.cluster_n - 1
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=s.num_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, partners * tile_warps),
            tx_count=s.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, s.cluster_m, s.cluster_n, 1)),
            defer_sync=True,
        )

    def partition_for_load(self, tma_a, tma_bs, coordinates, cta_m, cta_n):
        """Takes what the loader warp needs.

        Args:
          tma_a, tma_bs: tensor maps, of each B.
          coordinates: those of tiles.
          cta_m, cta_n: this CTA's place in its cluster.
        """
        s = self.spec
        self.tma_a, self.tma_bs, self.coordinates = tma_a, tma_bs, coordinates
        self.cta_m, self.cta_n = cta_m, cta_n
        # (bN of one B, bK, B's, 1, stages)
        self.sBs = cute.flat_divide(self.sB, (s.d_tile_n, s.tile_k))
        # CTA rank in the cluster is cta_m + cluster_m * cta_n.
        row = sum(1 << (s.cluster_m * j) for j in range(s.cluster_n))
        column = (1 << s.cluster_m) - 1
        self.a_mask = cutlass.Int16(row << cta_m) if s.cluster_n > 1 else None
        self.b_mask = cutlass.Int16(column << (s.cluster_m * cta_n)) if s.cluster_m > 1 else None
        self.own_mask = cutlass.Int16(1 << cta_m) if s.paired else None

    def _partition(self, atom, cta, ctas, shared, coordinates):
        """Returns the part of each stage, and of each k-tile, that this CTA of `ctas` loads."""
        tiles, at = coordinates
        stages, tiles = cpasync.tma_partition(
            atom, cta, cute.make_layout(ctas),
            cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2),
        )  # fmt: skip
        return stages, tiles[None, *at]

    def partition_a(self, place):
        """Returns this CTA's part of each stage and of each k-tile of A."""
        coordinates = self.coordinates.a(place)
        return self._partition(self.tma_a, self.cta_n, self.spec.cluster_n, self.sA, coordinates)

    def partition_b(self, place, cta=None):
        """Returns the same for each B, or the part of another CTA of the cluster."""
        coordinates, cta = self.coordinates.b(place), self.cta_m if cta is None else cta
        return [
            self._partition(
                tma_b, cta, self.spec.cluster_m, self.sBs[None, None, part, 0, None],
                coordinates,
            )
            for part, tma_b in enumerate(self.tma_bs)
        ]  # fmt: skip

    @cute.jit
    def load(self, ring, state, place):
        """Loader warp: sends a tile's k-tiles into the ring; returns the next stage's state."""
        a_part, b_parts = self.partition_a(place), self.partition_b(place)
        others = self.partition_others(place)
        for k_tile in cutlass.range(place.k_tiles, unroll=1):
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            self._load_b(b_parts, k_tile, state.index, full, place, others)
            self._load_a(a_part, k_tile, state.index, full)
            state.advance()
        return state

    def _load_a(self, a_part, k_tile, stage, full):
        tAsA, tAgA = a_part
        self._copy(self.tma_a, tAgA[None, k_tile], tAsA[None, stage], full, self.a_mask)

    def partition_others(self, place):
        """Returns the other CTA's part of each B where it may have other columns: then it is loaded
        here, too."""
        return self.partition_b(place, 1 - self.cta_m) if self.spec.paired else ()

    def _load_b(self, b_parts, k_tile, stage, full, place, others):
        if not self.spec.paired:
            self._copy_b(b_parts, k_tile, stage, full, self.b_mask)
            return
        mask = cutlass.Int16(select_(place.together, self.b_mask, self.own_mask))
        self._copy_b(b_parts, k_tile, stage, full, mask)
        self._copy_b_unless(place.together, others, k_tile, stage, full)

    @cute.jit
    def _copy_b_unless(self, condition, b_parts, k_tile, stage, full):
        if not condition:
            self._copy_b(b_parts, k_tile, stage, full, self.own_mask)

    def _copy_b(self, b_parts, k_tile, stage, full, mask):
        for tma_b, (tBsB, tBgB) in zip(self.tma_bs, b_parts, strict=True):
            self._copy(tma_b, tBgB[None, k_tile], tBsB[None, stage], full, mask)

    def _copy(self, atom, source, target, full, mask):
        if mask is None:
            cute.copy(atom, source, target, tma_bar_ptr=full)
        else:
            cute.copy(atom, source, target, tma_bar_ptr=full, mcast_mask=mask)

    def partition_for_math(self, warpgroup):
        """Makes one math warpgroup's operand descriptors; returns a thread's accumulator."""
        s = self.spec
        tiled_mma = self.make_tiled_mma(self.atom_layout_m)
        thread = warpgroup * 128 if self.atom_layout_m > 1 else 0  # one stands for its warpgroup
        thr_mma = tiled_mma.get_slice(thread)
        self.tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(self.sA))
        self.tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(self.sB))
        self.first_row = warpgroup * 64 if self.atom_layout_m > 1 else 0
        shape = thr_mma.partition_shape_C((s.tile_m, s.tile_n))
        return cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def multiply(self, ring, state, acc, place, on_issued: cutlass.Constexpr):
        """Math warps: accumulates a tile; returns the state past its last stage.

        `on_issued` is called when the tensor cores have all the tile's work, before it is awaited.
        """
        blocks = self.spec.rows_per_warpgroup // 64
        if cutlass.const_expr(self.spec.grouped == "m" and blocks == 2):
            # Behind the end of a group, 64 rows that nobody wants are left out.
            if place.left > self.first_row + 64 * self.atom_layout_m:
                state = self._accumulate(ring, state, acc, place.k_tiles, 2, on_issued)
            else:
                state = self._accumulate(ring, state, acc, place.k_tiles, 1, on_issued)
        elif cutlass.const_expr(self.spec.grouped == "k"):
            rest = place.left - (place.k_tiles - 1) * self.spec.tile_k
            state = self._accumulate(ring, state, acc, place.k_tiles, blocks, on_issued, rest)
        else:
            state = self._accumulate(ring, state, acc, place.k_tiles, blocks, on_issued)
        return state

    @cute.jit
    def pass_over(self, ring, state, place):
        """Math warps: frees a tile's stages, unread; returns the state past its last stage."""
        for _ in cutlass.range(place.k_tiles, unroll=1):
            ring.consumer_wait(state)
            ring.consumer_release(state)
            state.advance()
        return state

    @cute.jit
    def _accumulate(
        self, ring, state, acc, k_tiles, blocks: cutlass.Constexpr, on_issued: cutlass.Constexpr,
        last_elements=None,
    ):  # fmt: skip
        """Accumulates the first `blocks` of 64 rows.

        One wgmma group stays in flight: a stage is released one k-tile late, when the group
        that read it has retired.

        Args:
          last_elements: elements of K in the last k-tile where it is not the first; None: all.
        """
        release = state.clone()
        tiled_mma = self.make_tiled_mma(self.atom_layout_m)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        ring.consumer_wait(state)
        warpgroup.fence()
        self._multiply_stage(tiled_mma, acc, state.index, blocks)
        state.advance()
        whole = k_tiles if last_elements is None else k_tiles - 1
        for _ in cutlass.range(1, whole, unroll=1):
            ring.consumer_wait(state)
            self._multiply_stage(tiled_mma, acc, state.index, blocks)
            warpgroup.wait_group(1)
            ring.consumer_release(release)
            state.advance()
            release.advance()
        if cutlass.const_expr(last_elements is not None):
            for _ in cutlass.range(larger(whole, Int32(1)), k_tiles, unroll=1):  # one, or none
                ring.consumer_wait(state)
                self._multiply_part(acc, state.index, last_elements)
                warpgroup.wait_group(1)
                ring.consumer_release(release)
                state.advance()
                release.advance()
        on_issued()
        warpgroup.wait_group(0)
        ring.consumer_release(release)
        return state

    def _multiply_stage(self, tiled_mma, acc, stage, blocks):
        self._before_multiply()
        for k_block in range(cute.size(self.tCrA, mode=[2])):
            at = (None, None, k_block, stage)
            if blocks == cute.size(self.tCrA, mode=[1]):
                cute.gemm(tiled_mma, acc, self.tCrA[at], self.tCrB[at], acc)
            else:
                first = (None, (None, 0))
                rows = cute.logical_divide(acc, (None, blocks))[None, (None, 0), None]
                a = cute.logical_divide(self.tCrA[at], (None, blocks))[first]
                cute.gemm(tiled_mma, rows, a, self.tCrB[at], rows)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _multiply_part(self, acc, stage, elements):
        """Multiplies the first elements of a stage along K, in steps of an instruction's 16."""
        self._before_multiply()
        tiled_mma = self.make_tiled_mma(self.atom_layout_m)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        for k_block in cutlass.range((elements + 15) // 16, unroll=1):
            at = (None, None, k_block, stage)
            cute.gemm(tiled_mma, acc, self.tCrA[at], self.tCrB[at], acc)
        warpgroup.commit_group()

    def _before_multiply(self):
        """Called when a stage is full, before wgmma reads it."""

    def skip(self, state, k_tiles):
        """Returns `state` moved past a tile that another warpgroup works on."""
        position = state.index + k_tiles
        wraps = position // self.spec.num_stages
        index = position - wraps * self.spec.num_stages
        return pipeline.PipelineState(
            self.spec.num_stages, Int32(0), index, state.phase ^ (wraps & 1)
        )
