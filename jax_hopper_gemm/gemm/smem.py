"""Bytes of shared memory that a kernel takes, and what they hold.

Dynamic shared memory of a launch, its parts in this order: stages of A and B, with the scales that
belong to them; bfloat16 parts of B; where accumulators are turned; sums of a cluster's CTAs; for
each matrix of the results its staged tiles; for each operand that is loaded its tiles, matrices
first; scratch; barriers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import simt
from .bf16_parts import num_parts
from .dtypes import DTYPES
from .epilogue_graph import Operand
from .problem import TMA_ALIGNMENT

if TYPE_CHECKING:
    from .spec import GemmSpec

SMEM_LIMIT = 227 * 1024  # bytes of shared memory a CTA may use on sm_90
SMEM_ALIGNMENT = 1024  # bytes: where the widest swizzle repeats
SMEM_VECTOR = 128  # bytes: alignment of what TMA loads unswizzled, as rows and columns
SMEM_BARRIERS = 512  # bytes behind everything else: mbarriers, scheduler mailbox
MAILBOX_BYTES = 72  # in which a warp tells the others of a tile that it took from the counter
GROUPED_MAILBOX_BYTES = 144  # three slots of a tile and their barriers
EPI_TILE_M = 64  # rows of a staged epilogue tile: those that one warpgroup's wgmma writes
PART_BUFFERS = 3  # k-tiles of B in parts: one written, one multiplied, one that slower warps read
EXCHANGE_COLUMNS = 32  # of D that a warpgroup turns at a time, see `mainloop.rs`
EXCHANGE_PITCH = EXCHANGE_COLUMNS + 4  # float32 from one of the rows to the next


def total_bytes(spec: GemmSpec) -> int:
    """Returns the bytes of all parts."""
    ring = spec.num_stages * spec.stage_bytes + spec.parts_bytes
    if spec.simt_width:
        return ring
    staged = spec.epi_stages * spec.epi_stage_bytes
    loaded = spec.epi_load_stages * spec.load_stage_bytes
    tiles = spec.math_warpgroups * (staged + loaded)
    exchanged = exchange_bytes(spec) + spec.slot_bytes
    return ring + exchanged + tiles + scratch_bytes(spec) + SMEM_BARRIERS


def stage_bytes(spec: GemmSpec) -> int:
    """Returns the bytes of one A/B stage."""
    if spec.simt_width:
        return simt.stage_bytes(spec)
    a, b = DTYPES[spec.a_dtype], DTYPES[spec.b_dtype]
    operands = a.nbytes(spec.tile_m * spec.tile_k) + b.nbytes(spec.tile_n * spec.tile_k)
    return operands + scale_stage_bytes(spec)


def scale_bytes(spec: GemmSpec) -> int:
    """Returns the bytes of the scales that a stage gets: of B, or of a tile's rows and columns."""
    if spec.a_block:
        return 4 * sum(spec.scales_of_lines)
    return 4 * spec.tile_n * (spec.tile_k // spec.k_group) if spec.k_group else 0


def scale_stage_bytes(spec: GemmSpec) -> int:
    """Returns the bytes that are set aside for them."""
    return -(-spec.scale_bytes // SMEM_ALIGNMENT) * SMEM_ALIGNMENT


def parts_bytes(spec: GemmSpec) -> int:
    """Returns the bytes of B's bfloat16 parts where the kernel cuts it; A's are in registers."""
    if not spec.cuts_operands:
        return 0
    part = spec.tile_n * spec.tile_k * DTYPES["bfloat16"].itemsize
    return PART_BUFFERS * num_parts(spec.bf16_terms) * part


def exchange_bytes(spec: GemmSpec) -> int:
    """Returns the bytes that are set aside for what math warpgroups exchange."""
    return 0 if spec.exchanges_in_ring else sums_in_exchange(spec)


def sums_in_exchange(spec: GemmSpec) -> int:
    """Returns the bytes in which math warpgroups that share columns turn or add up their sums."""
    rows = EPI_TILE_M
    if spec.b_in_registers and spec.k_in_turns:
        rows = max(rows, spec.tile_m * spec.tile_n // EXCHANGE_COLUMNS)
    return spec.math_warpgroups * rows * EXCHANGE_PITCH * 4 if spec.warpgroups_n > 1 else 0


def slot_bytes(spec: GemmSpec) -> int:
    """Returns the bytes of the slots in which a CTA gets the sums of a slice from its cluster."""
    if spec.cluster_k == 1:
        return 0
    return 4 * spec.cluster_k * spec.slot_threads * spec.tile_registers // spec.slices


def epi_stage_bytes(spec: GemmSpec) -> int:
    """Returns the bytes of one staged epilogue tile of a math warpgroup, of all results."""
    elements = EPI_TILE_M * spec.epi_tile_n
    return elements * sum(DTYPES[result.dtype].itemsize for result in spec.graph.matrices)


def load_stage_bytes(spec: GemmSpec) -> int:
    """Returns the bytes of one epilogue tile of a math warpgroup, of all operands it loads."""
    return sum(loaded_bytes(spec, operand) for operand in spec.graph.loaded)


def loaded_bytes(spec: GemmSpec, operand: Operand) -> int:
    """Returns the bytes that one epilogue tile of an operand takes."""
    itemsize = DTYPES[operand.dtype].itemsize
    if operand.kind == "matrix":
        return EPI_TILE_M * spec.epi_tile_n * itemsize
    row = operand.kind == "row"
    nbytes = itemsize * (spec.epi_tile_n if row else column_elements(spec, operand.dtype))
    return -(-nbytes // SMEM_VECTOR) * SMEM_VECTOR


def column_elements(spec: GemmSpec, dtype: str) -> int:
    """Returns how many elements of a column one copy brings: those of 64 rows.

    Where tiles begin at any row, the copy begins at the multiple of 16 bytes before them.
    """
    return EPI_TILE_M + (TMA_ALIGNMENT // DTYPES[dtype].itemsize if spec.grouped == "m" else 0)


def scratch_bytes(spec: GemmSpec) -> int:
    """Returns the bytes in which the four warps of a warpgroup add up columns, in two turns."""
    sums = sum(result.kind == "column_sum" for result in spec.graph.results)
    return sums * spec.math_warpgroups * 2 * 4 * spec.epi_tile_n * 4


def barrier_bytes(spec: GemmSpec) -> int:
    """Returns the bytes in use: barriers of A, B, the epilogue's operands, slots; the mailbox."""
    rings = spec.num_stages + spec.math_warpgroups * spec.epi_load_stages
    mailbox = GROUPED_MAILBOX_BYTES if spec.grouped else MAILBOX_BYTES * spec.dynamic
    return 16 * rings + 8 * (spec.cluster_k > 1) + mailbox
