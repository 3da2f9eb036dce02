"""Legality: every reason why a kernel cannot be compiled, as text.

`type_legality` says which types of problems there are kernels for, `dispatch.legality` which
problems a kernel can run, and where.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from . import simt
from .bf16_parts import BLOCK_N, RUN_K, TILE_K
from .conversion import BLOCK
from .dtypes import DTYPES, OPERANDS, one_of
from .epilogue_checks import epilogue_registers
from .problem_type import ProblemType
from .smem import EPI_TILE_M, SMEM_BARRIERS, SMEM_LIMIT, barrier_bytes, sums_in_exchange
from .spec import PROMOTION_K, GemmSpec, TileScheduler, WarpSchedule
from .tma_box import SWIZZLE_BYTES
from .type_legality import type_violations

MAX_TILE_N = 256  # columns of one wgmma
TILES_M = (64, 128, 192, 256)
MAX_GATED_IN_TURNS_K = 128  # elements of K of two B's that registers hold as they are loaded
IN_TURNS_STAGES = 4  # of two, a warpgroup would wait for the one that it still multiplies
CONVERTED_TILES_M = (16, 32, 64, 128, 256)  # where B is converted: columns of one wgmma
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
CLUSTERS_K = (1, 2, 4, 8)  # CTAs that share the k-tiles of a tile
# Registers of a math thread, by number of math warpgroups: what a CTA's 65,536 leave it. All but
# so many can be float32 accumulators, without a spill; with three warpgroups ptxas allows 96.
MATH_REGISTERS = {1: 240, 2: 240, 3: 160}
GATHERED_MATH_REGISTERS = 224  # where addresses of gathered rows take more of the others
OTHER_REGISTERS = 32
MAILBOX_REGISTERS = 16  # more, where tiles come from a mailbox
# More, where each column has a scale; those of float32 sums are free again without an epilogue.
COLUMN_SCALE_REGISTERS = {"float32": 8, "int32": 24}
PARTS_REGISTERS = 16  # more, where bfloat16 parts of A are in registers
# Accumulators beside which three parts leave no registers for epilogue tiles of over 16 columns.
NARROW_EPILOGUE_ACC_REGISTERS = 192
CONVERSION_REGISTERS = 48  # more, where B is converted: as it is, and as wgmma reads it
WIDE_SETS = 16  # the same of a block of 64 columns of float32, as wgmma reads it
# Of those that sums of a piece are promoted from: they are free where an epilogue runs. Where a
# tile is one piece, or rows are in groups, ptxas spills.
FREED_REGISTERS = 32
# Of those that two warpgroups leave where groups along K promote their sums, what scales of tensors
# take in epilogue tiles of 64 columns. More are free there, but what would take them is not timed.
FREED_FOR_SCALES = 4
MAX_ACC_REGISTERS = {1: 208, 2: 208, 3: 96}
# With three warpgroups, where half of them are sums of one k-tile; a scale of each column leaves
# too few.
PROMOTED_ACC_REGISTERS = 128
# Of K that is split, beside partial sums and an epilogue; and how many must be left, where twice as
# many partial sums as accumulators are held, for epilogue tiles of 64 columns.
SPLIT_K_ACC_REGISTERS = {1: 144, 2: 144, 3: 64}
WIDE_EPILOGUE_REGISTERS = 24


def max_accumulators(spec: GemmSpec) -> int:
    """Returns how many float32 accumulators a math thread of `spec` can hold without a spill."""
    warpgroups = spec.math_warpgroups
    if spec.promoted and warpgroups == 3 and spec.b_block != 1:
        needed = epilogue_registers(spec.epilogue, spec.epi_tile_n) if spec.epilogue else 0
        return PROMOTED_ACC_REGISTERS - max(0, needed - FREED_REGISTERS)
    left = MATH_REGISTERS[warpgroups] - OTHER_REGISTERS
    if spec.gathered:
        left = GATHERED_MATH_REGISTERS - OTHER_REGISTERS
    if spec.dynamic or spec.grouped:
        left -= MAILBOX_REGISTERS
    if spec.cuts_operands:
        left -= PARTS_REGISTERS
    if spec.b_block == 1 and (spec.epilogue or spec.sum_dtype == "int32"):
        left -= COLUMN_SCALE_REGISTERS[spec.sum_dtype]
    if spec.b_in_registers:
        left -= _registers_of_b(spec)
    if spec.epilogue:
        left -= _taken_registers(spec, epilogue_registers(spec.epilogue, spec.epi_tile_n))
    return min(MAX_ACC_REGISTERS[warpgroups], left)


def _registers_of_b(spec: GemmSpec) -> int:
    """Returns how many registers of a math thread hold B, where wgmma takes it from there."""
    if not spec.rounds_operands:
        return CONVERSION_REGISTERS
    return spec.converted_columns // BLOCK * (WIDE_SETS + BLOCK * spec.tile_k // 128)


def _taken_registers(spec: GemmSpec, needed: int) -> int:
    """Returns how many registers an epilogue takes of those that accumulators could have."""
    s, narrow = spec, spec.epi_tile_n <= 32
    if s.promoted and s.grouped == "k" and s.math_warpgroups == 2 and not narrow:
        return needed if needed > FREED_FOR_SCALES else 0
    in_pieces = s.promoted and s.acc_registers < 2 * s.tile_registers
    free = FREED_REGISTERS if in_pieces and narrow and s.grouped is None else 0
    return max(0, needed - free)


def violations(spec: GemmSpec) -> list[str]:
    """Returns every reason why no kernel is compiled for `spec`; empty when one can be."""
    policies = _simt_violations if spec.simt_width else _policy_violations
    if reasons := [*type_violations(ProblemType.of_spec(spec))]:
        return [*reasons, *policies(spec)]
    return [*configuration_violations(spec)]


def configuration_violations(spec: GemmSpec) -> Iterator[str]:
    """Yields the same of a spec for a type of problems that some kernel runs."""
    if spec.simt_width:
        yield from _simt_violations(spec)
        return
    if reasons := [*_policy_violations(spec)]:  # what follows does arithmetic on the fields
        yield from reasons
        return
    checks = _register_violations, _epilogue_tile_violations, _group_violations, memory_violations
    for check in checks:
        yield from check(spec)


def _policy_violations(spec: GemmSpec) -> Iterator[str]:
    s = spec
    if s.warp_schedule not in get_args(WarpSchedule):
        yield f"warp schedule {s.warp_schedule!r} is not {one_of(get_args(WarpSchedule))}"
    if s.tile_scheduler not in get_args(TileScheduler):
        yield f"tile scheduler {s.tile_scheduler!r} is not {one_of(get_args(TileScheduler))}"
    tiles_m = CONVERTED_TILES_M if s.b_in_registers else TILES_M
    if s.tile_m not in tiles_m:
        yield f"tile_m {s.tile_m} is not {one_of(tuple(map(str, tiles_m)))}"
    if s.b_in_registers:
        yield from _converted_tile_violations(s)
    if s.k_in_turns:
        yield from _in_turns_violations(s)
    if not 16 <= s.tile_n <= MAX_TILE_N or s.tile_n % 16:
        yield f"tile_n {s.tile_n} is not a multiple of 16 between 16 and {MAX_TILE_N}"
    if s.a_dtype in OPERANDS:
        row = SWIZZLE_BYTES // s.a_itemsize
        tiles_k = (row, 2 * row, 4 * row) if s.b_in_registers else (row, 2 * row)
        if s.tile_k not in tiles_k:
            yield f"tile_k {s.tile_k} is not {one_of(tuple(map(str, tiles_k)))}"
        elif s.promoted and s.tile_k != PROMOTION_K:
            yield f"tile_k {s.tile_k} of promoted accumulators is not {PROMOTION_K}"
        elif s.grouped == "k" and not s.spans_k and s.tile_k != PROMOTION_K:
            yield f"tile_k {s.tile_k}, but groups of K are multiples of {PROMOTION_K}"
        shared = s.rounds_operands and not s.b_in_registers
        if shared and s.d_tile_n > 16 and s.d_tile_n % 32:  # nvidia-cutlass-dsl aborts
            yield f"{s.d_tile_n} columns of {s.a_dtype} as it is are not 16 or a multiple of 32"
    if s.bf16_terms:
        yield from _parts_violations(s)
    if s.split_k and s.tile_scheduler != "static":
        yield f"K is split by clusters with fixed shares: the tile scheduler is {s.tile_scheduler}"
    if s.split_k and s.grouped:
        yield "the k-tiles of a grouped product are not known before it runs: do not split K"
    if s.split_k and s.a_dtype in OPERANDS and s.acc_dtype != "float32":
        yield f"partial sums are float32, accumulators {s.acc_dtype}: do not split K"
    if (s.cluster_m, s.cluster_n) not in CLUSTERS:
        clusters = one_of(tuple(f"{m}x{n}" for m, n in CLUSTERS))
        yield f"cluster {s.cluster_m}x{s.cluster_n} is not {clusters}"
    if s.cluster_k > 1:
        yield from _cluster_k_violations(s)
    if s.evict_first not in (None, "a", "b"):
        yield f"L2 evicts {s.evict_first!r} first, not 'a' or 'b'"
    elif s.evict_first and s.evict_first == s.gathered:
        yield f"{s.evict_first.upper()} is gathered, not loaded by TMA with a policy for L2"
    if s.short_boxes and (s.grouped or s.cluster_m * s.cluster_n > 1):
        yield "boxes end with their matrices, but groups or slices for a cluster end them elsewhere"


def _cluster_k_violations(spec: GemmSpec) -> Iterator[str]:
    s, graph = spec, spec.graph
    if s.cluster_k not in CLUSTERS_K:
        yield f"cluster_k {s.cluster_k} is not {one_of(tuple(map(str, CLUSTERS_K)))}"
    if s.cluster_m * s.cluster_n > 1 or s.tile_scheduler != "single" or s.split_k:
        yield (
            "CTAs of a cluster that share the k-tiles of one tile compute no other, and share "
            "them with no other cluster: take a cluster of 1x1, the scheduler single, no split-K"
        )
    if s.grouped or s.panels > 1 or graph.accumulators > 1:
        yield "CTAs of a cluster share the k-tiles of plain tiles: of no group, panel or gate"
    if s.acc_dtype != "float32" or s.bf16_terms:
        kind = "bfloat16 parts" if s.bf16_terms else s.a_dtype
        yield f"CTAs of a cluster add up float32 sums of wgmma, not those of {kind}"
    if len(graph.matrices) < len(graph.results) or graph.needs_whole_rows or graph.row_nodes:
        yield "each CTA of such a cluster stores some columns of a tile, but the epilogue reduces"


def _simt_violations(spec: GemmSpec) -> Iterator[str]:
    s = spec
    tiles = {"m": simt.TILES_M, "n": simt.TILES_N, "k": simt.TILES_K}
    for axis, legal in tiles.items():
        if (extent := getattr(s, f"tile_{axis}")) not in legal:
            yield f"tile_{axis} {extent} for FMA units is not {one_of(tuple(map(str, legal)))}"
    if s.tile_scheduler != "single" or s.cluster_size > 1 or s.split_k:
        yield "a CTA for FMA units computes one tile: take the scheduler single, alone, all of K"
    if s.num_stages < 2:
        yield f"num_stages {s.num_stages} is under 2"
    if s.smem_bytes > SMEM_LIMIT:
        yield f"{s.smem_bytes} bytes of shared memory; a CTA has {SMEM_LIMIT}"


def _parts_violations(spec: GemmSpec) -> Iterator[str]:
    s, tile_k = spec, RUN_K if spec.reads_parts else TILE_K
    if s.tile_k != tile_k:
        yield f"tile_k {s.tile_k} of bfloat16 parts is not {tile_k}"
    if s.cuts_operands and s.tile_m not in (64, 128):
        yield f"tile_m {s.tile_m} of bfloat16 parts is not 64 or 128, 64 rows a warpgroup"
    if s.cuts_operands and s.tile_n % BLOCK_N:
        yield f"tile_n {s.tile_n} of bfloat16 parts is not a multiple of {BLOCK_N}"
    if s.warp_schedule != "cooperative":
        yield (
            "math warpgroups cut B into bfloat16 parts together, or multiply while another one "
            "promotes its sums: schedule them cooperatively"
        )
    if s.split_k:
        yield "sums of bfloat16 parts leave no registers for partial sums: do not split K"


def _converted_tile_violations(spec: GemmSpec) -> Iterator[str]:
    s, parts = spec, spec.graph.accumulators * 64
    if s.warp_schedule != "cooperative":
        yield "warpgroups that convert B share the columns of a tile: take the cooperative schedule"
    elif s.converted_columns % parts:
        yield f"{s.converted_columns} columns a warpgroup are no multiple of {parts}"
    if s.k_group and s.tile_k % s.k_group:
        yield f"tile_k {s.tile_k} is no multiple of {s.k_group} elements that share a scale"
    if s.tile_m < 64 and s.grouped:
        yield f"tile_m {s.tile_m} is for few rows, but groups may have more"


def _in_turns_violations(spec: GemmSpec) -> Iterator[str]:
    s = spec
    if s.exchanges_in_ring and sums_in_exchange(s) > s.num_stages * s.stage_bytes:
        yield f"{s.num_stages} stages do not hold the sums that warpgroups exchange in their place"
    if s.b_in_registers and s.grouped:
        yield "warpgroups that take turns at k-tiles know no groups of rows"
    most = EPI_TILE_M // 2 if s.split_k else EPI_TILE_M  # both leave partial sums of all rows
    if s.b_in_registers and s.tile_m > most:
        yield f"tile_m {s.tile_m}: warpgroups that take turns add up {most} rows at most"
    # NOTE: of an odd number, a warpgroup would meet a stage every other time that it is filled. A
    # barrier tells fills apart by one bit: while the other's is on its way, the last but one of a
    # stage, which it had, would pass for its next. With 3 stages some 20 of 6,000 random products
    # were sums of old numbers.
    if s.num_stages < IN_TURNS_STAGES or s.num_stages % 2:
        yield (
            f"num_stages {s.num_stages} is no even number from {IN_TURNS_STAGES}, and warpgroups "
            "take turns at them"
        )
    if s.b_in_registers and s.graph.accumulators > 1 and s.tile_k > MAX_GATED_IN_TURNS_K:
        yield f"tile_k {s.tile_k}: numbers of two B's along more than {MAX_GATED_IN_TURNS_K} spill"
    if s.graph.accumulators > 1 and s.k_group:
        yield "warpgroups that take turns at k-tiles know no scales along K of two B's"


def _register_violations(spec: GemmSpec) -> Iterator[str]:
    s, limit = spec, max_accumulators(spec)
    if s.acc_registers > limit:
        yield (
            f"{s.acc_registers} accumulators a thread; {limit} fit with {s.math_warpgroups} math "
            f"warpgroups, a {s.tile_scheduler} tile scheduler and "
            f"{'this' if s.epilogue else 'no'} epilogue"
        )
    narrow = NARROW_EPILOGUE_ACC_REGISTERS
    if s.cuts_operands and s.bf16_terms > 3 and s.acc_registers >= narrow and s.epi_tile_n > 16:
        yield f"{s.acc_registers} accumulators a thread: take epilogue tiles of 16 columns"
    most = SPLIT_K_ACC_REGISTERS[s.math_warpgroups]
    if s.split_k and (s.epilogue or s.math_warpgroups == 3) and s.acc_registers > most:
        yield (
            f"{s.acc_registers} accumulators a thread beside partial sums; {most} fit with "
            f"{s.math_warpgroups} math warpgroups"
        )
    spare = MATH_REGISTERS[s.math_warpgroups] - OTHER_REGISTERS - 3 * s.tile_registers
    if s.split_k and s.epilogue and s.epi_tile_n == 64 and 0 <= spare < WIDE_EPILOGUE_REGISTERS:
        yield "partial sums leave no registers for epilogue tiles of 64 columns: take narrower ones"
    if s.warp_schedule == "pingpong":
        if s.tile_m > 128:
            yield f"pingpong gives one warpgroup a whole tile; tile_m {s.tile_m} exceeds 128"
        if not s.persistent:
            yield "pingpong alternates tiles, so it needs a persistent scheduler"


def _epilogue_tile_violations(spec: GemmSpec) -> Iterator[str]:
    """Yields why tiles of D cannot be cut as the epilogue stores and loads them."""
    s, graph, columns = spec, spec.graph, spec.d_tile_n
    if s.tile_n % (16 * graph.accumulators):
        yield f"tile_n {s.tile_n} does not split into gate and up of multiples of 16 columns"
    if columns % (16 * s.cluster_m):
        yield f"{columns} columns do not split into {s.cluster_m} multicast slices of 16"
    stored = s.of_slice.d_tile_n // s.warpgroups_n
    if s.epi_tile_n not in (16, 32, 64) or stored % s.epi_tile_n:
        yield f"epi_tile_n {s.epi_tile_n} is not 16, 32 or 64 dividing {stored} columns"
    if s.epi_tile_n < 32 and any(o.dtype == "bool" for o in graph.operands):
        yield f"epi_tile_n {s.epi_tile_n} is under 32, too narrow for a bool operand"
    if s.epi_tile_n < 32 and any(DTYPES[r.dtype].itemsize == 1 for r in graph.matrices):
        yield f"epi_tile_n {s.epi_tile_n} is under 32, too narrow for a result of 8 bits"
    if s.epi_load_stages < 2 if graph.loaded else s.epi_load_stages:
        yield (
            f"epi_load_stages {s.epi_load_stages}, of an epilogue that loads {len(graph.loaded)} "
            "operands"
        )
    if graph.loaded and s.math_warpgroups > 2:
        yield (
            f"{s.math_warpgroups} math warpgroups, but two warps that load an epilogue's operands, "
            "one for each: take another tile_m than 192"
        )


def _group_violations(spec: GemmSpec) -> Iterator[str]:
    s = spec
    if s.grouped and not s.persistent:
        yield "the number of tiles depends on the groups' sizes: take a persistent scheduler"
    if s.gathered:
        yield from _gather_violations(s)
    if s.grouped == "m" and s.cluster_size > 2:
        yield "four CTAs would widen tiles beyond the ends of groups"


def _gather_violations(spec: GemmSpec) -> Iterator[str]:
    s, of_a = spec, spec.gathered == "a"
    tile, shared = (s.tile_m, s.cluster_n) if of_a else (s.d_tile_n, s.cluster_m)
    block = SWIZZLE_BYTES // (s.a_itemsize if of_a else s.b_itemsize)
    if s.tile_k != block:
        yield f"tile_k {s.tile_k} is not {block}, a block of the rows that are gathered"
    if s.grouped == "k" and tile % block:
        yield f"{tile} gathered columns of a tile are no multiple of {block}"
    if shared > 1:
        yield "CTAs of a cluster cannot share an operand that is gathered"
    if s.math_warpgroups > 2:
        yield "three math warpgroups leave no registers for warps that gather"
    if s.tile_m > 128 and of_a and s.grouped == "m":
        yield f"tile_m {s.tile_m}: a thread has registers for the rows of 128"


def memory_violations(spec: GemmSpec) -> Iterator[str]:
    """Yields why shared memory does not hold a kernel's stages, nor barriers for them."""
    s = spec
    if s.num_stages < 2:
        yield f"num_stages {s.num_stages} is under 2"
    if s.epi_stages < 2:
        yield f"epi_stages {s.epi_stages} is under 2"
    if s.smem_bytes > SMEM_LIMIT:
        yield f"{s.smem_bytes} bytes of shared memory; a CTA has {SMEM_LIMIT}"
    if barrier_bytes(s) > SMEM_BARRIERS:
        yield f"{barrier_bytes(s)} bytes of barriers; there is room for {SMEM_BARRIERS}"
