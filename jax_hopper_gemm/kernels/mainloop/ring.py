"""The ring of stages between producer and consumer: shared memory of A and B, and its barriers.

A stage holds a tile of A, (bM, bK), and one of B, (bN, bK). A gated product has two B's, gate and
up: their tiles lie side by side, d_tile_n columns of gate and as many of up, and one wgmma of
tile_n columns multiplies both.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.tensor_utils as tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from ...gemm.bf16_parts import num_parts
from ...gemm.smem import PART_BUFFERS, SMEM_ALIGNMENT, exchange_bytes, scale_stage_bytes
from ..dtypes import CUTE_DTYPE


@dataclass(frozen=True)
class Stages:
    """The operands in shared memory (`s`), swizzled."""

    sA: Any  # (bM, bK, stages)
    sB: Any  # (bN, bK, stages)
    parts: Any = None  # bfloat16 parts of float32 B, (bN, bK, parts of each of `PART_BUFFERS`)
    sS: tuple = ()  # of each B (bN, groups along K, stages): its scales
    scales: Any = None  # pointer to those of rows, then of columns, in stage 0
    exchange: Any = None  # where math warpgroups turn their accumulators, or add them up


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


def allocate_stages(spec, memory):
    """Returns the `Stages`, in the order of `GemmSpec.smem_bytes`."""
    s, a_dtype, b_dtype = spec, CUTE_DTYPE[spec.a_dtype], CUTE_DTYPE[spec.b_dtype]
    a_layout = operand_smem_layout(a_dtype, s.a_major == "k", s.tile_m, s.tile_k, s.num_stages)
    b_layout = operand_smem_layout(
        b_dtype, s.b_major == "k", *s.stored_b(s.tile_n, s.tile_k), s.num_stages,
        s.graph.accumulators,
    )  # fmt: skip
    stages = Stages(memory.tensor(a_dtype, a_layout), memory.tensor(b_dtype, b_layout))
    if s.cuts_operands:
        count = PART_BUFFERS * num_parts(s.bf16_terms)
        layout = operand_smem_layout(BFloat16, s.b_major == "k", s.tile_n, s.tile_k, count)
        return replace(stages, parts=memory.tensor(BFloat16, layout))
    stage = scale_stage_bytes(s)
    if s.a_block:
        pointer = memory.pointer(Float32, s.num_stages * stage, SMEM_ALIGNMENT)
        stages = replace(stages, scales=pointer)
    if s.k_group:
        rows, groups = s.d_tile_n, s.tile_k // s.k_group
        layout = cute.make_layout((rows, groups, s.num_stages), stride=(1, rows, stage // 4))
        pointer = memory.pointer(Float32, s.num_stages * stage, SMEM_ALIGNMENT)
        parts = range(s.graph.accumulators)
        sS = tuple(cute.make_tensor(pointer + part * rows * groups, layout) for part in parts)
        stages = replace(stages, sS=sS)
    if s.exchanges_in_ring:
        return replace(stages, exchange=cute.recast_ptr(memory.base, dtype=Float32))
    if nbytes := exchange_bytes(s):
        stages = replace(stages, exchange=memory.pointer(Float32, nbytes, SMEM_ALIGNMENT))
    return stages


def make_ring(spec, barriers, producer, stage_warps, stage_bytes):
    """Returns the pipeline: the producer fills a stage, so many math warps empty it.

    `stage_bytes` are those that TMA brings, or None where they are the producer's `tma_bytes`.
    """
    s = spec
    # A multicast stage is emptied in all CTAs that it was sent to, or that sent a slice of it.
    partners = s.cluster_m + s.cluster_n - 1
    ring = pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=s.num_stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, producer.arrivals),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, partners * stage_warps),
        tx_count=producer.tma_bytes,
        cta_layout_vmnk=cute.make_layout((1, s.cluster_m, s.cluster_n, 1)),
        defer_sync=True,
    )
    if s.promoted:  # its math warps must be quick from one k-tile to the next
        ring = _kept_in_registers(ring)
    if stage_bytes is not None:
        ring.sync_object_full.tx_count = stage_bytes  # `create` takes a Python int
    return ring


def _kept_in_registers(ring):
    """Returns the pipeline whose consumers hold on to which thread frees a stage, and where."""
    mask = ring.consumer_mask
    return replace(
        ring,
        consumer_mask=None if mask is None else kept_in_register(mask),
        is_signaling_thread=kept_in_register(ring.is_signaling_thread) != 0,
    )


def kept_in_register(value):
    """Returns an Int32 that is worked out once.

    ptxas would work out anew, in each k-tile, what follows from the thread's number, and warps wait
    for that. It does not know what comes out of a shuffle.
    """
    return cute.arch.shuffle_sync(Int32(value), cute.arch.lane_idx())


def either(condition, one, other):
    """Returns one consumer's state where a condition holds, else the other."""
    return pipeline.PipelineState(
        one.stages, Int32(0), *(
            select_(condition, a, b)
            for a, b in ((one.index, other.index), (one.phase, other.phase))
        ),
    )  # fmt: skip


def skip_tile(spec, state, coords):
    """Returns a consumer's state moved past a tile that another warpgroup works on."""
    position = state.index + coords.k_tiles
    wraps = position // spec.num_stages
    index = position - wraps * spec.num_stages
    return pipeline.PipelineState(spec.num_stages, Int32(0), index, state.phase ^ (wraps & 1))


@cute.jit
def pass_over_tile(ring, state, coords):
    """Frees a tile's stages, unread; returns a consumer's state past its last stage."""
    for _ in cutlass.range(coords.k_tiles, unroll=1):
        ring.consumer_wait(state)
        ring.consumer_release(state)
        state.advance()
    return state
