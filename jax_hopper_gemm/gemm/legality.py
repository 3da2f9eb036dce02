"""Legality: every reason why a kernel cannot be compiled, as text.

`type_violations` says which types of problems there are kernels for, `violations` what a kernel
may be. Which problems a kernel can run, and where, is `dispatch.legality`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from . import simt
from .bf16_parts import BLOCK_N, PRESETS, TILE_K
from .dtypes import (
    DTYPES,
    HALVES,
    OPERANDS,
    QUANTIZED,
    RESULTS,
    converts,
    multiply,
    names,
    one_of,
    results_of,
)
from .epilogue_checks import epilogue_registers, graph_violations
from .problem import VarlenAxis
from .spec import (
    BLOCKS,
    K_GROUPS,
    PROMOTION_K,
    SMEM_BARRIERS,
    SMEM_LIMIT,
    SWIZZLE_BYTES,
    GemmSpec,
    ProblemType,
    TileScheduler,
    WarpSchedule,
)

MAX_TILE_N = 256  # columns of one wgmma
TILES_M = (64, 128, 192, 256)
CONVERTED_TILES_M = (16, 32, 64, 128, 256)  # where B is converted: columns of one wgmma
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))
# Operands that a kernel can gather by an array of indices, for each grouped axis.
GATHERABLE: dict[VarlenAxis | None, tuple[Literal["a", "b"], ...]] = {
    None: (), "m": ("a",), "k": ("a", "b"),
}  # fmt: skip

# Registers of a math thread, by number of math warpgroups: what a CTA's 65,536 leave it. All but
# so many can be float32 accumulators, without a spill; with three warpgroups ptxas allows 96.
MATH_REGISTERS = {1: 240, 2: 240, 3: 160}
GATHERED_MATH_REGISTERS = 224  # where addresses of gathered rows take more of the others
OTHER_REGISTERS = 32
MAILBOX_REGISTERS = 16  # more, where tiles come from a mailbox
STAGED_SCALE_REGISTERS = {"float32": 8, "int32": 24}  # more, where scales are read from stages
COLUMN_SCALE_REGISTERS = 16  # more, where each column of a block of K has a scale
PARTS_REGISTERS = 16  # more, where bfloat16 parts of A are in registers
# Accumulators beside which three parts leave no registers for epilogue tiles of over 16 columns.
NARROW_EPILOGUE_ACC_REGISTERS = 192
CONVERSION_REGISTERS = 48  # more, where B is converted: as it is, and as wgmma reads it
# Of those that sums of a piece are promoted from: they are free where an epilogue runs. Where a
# tile is one piece, or rows are in groups, ptxas spills.
FREED_REGISTERS = 32
MAX_ACC_REGISTERS = {1: 208, 2: 208, 3: 96}
# Of K that is split, beside partial sums and an epilogue; and how many must be left, where twice as
# many partial sums as accumulators are held, for epilogue tiles of 64 columns.
SPLIT_K_ACC_REGISTERS = {1: 144, 2: 144, 3: 64}
WIDE_EPILOGUE_REGISTERS = 24


def max_accumulators(spec: GemmSpec) -> int:
    """Returns how many float32 accumulators a math thread of `spec` can hold without a spill."""
    warpgroups = spec.math_warpgroups
    left = MATH_REGISTERS[warpgroups] - OTHER_REGISTERS
    if spec.gathered:
        left = GATHERED_MATH_REGISTERS - OTHER_REGISTERS
    if spec.dynamic or spec.grouped:
        left -= MAILBOX_REGISTERS
    if spec.bf16_terms:
        left -= PARTS_REGISTERS
    if spec.stages_scales:
        left -= STAGED_SCALE_REGISTERS[spec.sum_dtype]
    elif spec.b_block == 1:  # those of all columns of a thread, and their addresses
        left -= spec.tile_n // 4 + COLUMN_SCALE_REGISTERS
    if spec.converts_b:
        left -= CONVERSION_REGISTERS
    if spec.epilogue:
        in_pieces = spec.promoted and spec.acc_registers < 2 * spec.tile_registers
        narrow = spec.epi_tile_n <= 32 and spec.grouped is None
        free = FREED_REGISTERS if in_pieces and narrow else 0
        left -= max(0, epilogue_registers(spec.epilogue, spec.epi_tile_n) - free)
    return min(MAX_ACC_REGISTERS[warpgroups], left)


def violations(spec: GemmSpec) -> list[str]:
    """Returns every reason why no kernel is compiled for `spec`; empty when one can be."""
    policies = _simt_violations if spec.simt_width else _policy_violations
    if reasons := [*type_violations(ProblemType.of_spec(spec))]:
        return [*reasons, *policies(spec)]
    return configuration_violations(spec)


def configuration_violations(spec: GemmSpec) -> list[str]:
    """Returns the same of a spec for a type of problems that some kernel runs."""
    if spec.simt_width:
        return [*_simt_violations(spec)]
    if reasons := [*_policy_violations(spec)]:  # what follows does arithmetic on the fields
        return reasons
    checks = _register_violations, _epilogue_tile_violations, _group_violations, memory_violations
    return [reason for check in checks for reason in check(spec)]


def type_violations(t: ProblemType) -> Iterator[str]:
    """Yields every reason why there is no kernel for a type of problems."""
    if t.simt_width:
        yield from _simt_type_violations(t)
    elif t.bf16_terms:
        yield from _terms_violations(t)
    elif t.a_dtype == t.b_dtype and t.a_dtype not in OPERANDS:
        yield f"A and B are {t.a_dtype}: cast them to {one_of(OPERANDS)}"
    elif not (multiply(t.a_dtype, t.b_dtype) or converts(t.a_dtype, t.b_dtype)):
        yield f"A is {t.a_dtype} and B {t.b_dtype}: cast one to the other's dtype"
    results = results_of(t.a_dtype) if t.a_dtype in OPERANDS else RESULTS
    if t.promoted:
        results = tuple(name for name in results if name not in names("sum"))
    if t.d_dtype not in results + (QUANTIZED if t.epilogue else ()):
        yield f"D is {t.d_dtype}: ask for {one_of(results)}"
    if t.promoted and not t.a_block and t.a_dtype in OPERANDS:
        if not DTYPES[t.a_dtype].promoted_algorithm:
            yield f"sums of {t.a_dtype} have all digits already: promote none"
    if t.a_block or t.b_block:
        yield from _block_violations(t)
    # What passes through registers on its way to the tensor cores may have any layout.
    any_major = bool(t.bf16_terms or t.simt_width)
    yield from _major_violations("A", "MK", t.a_dtype, t.a_major, any_major)
    any_major |= converts(t.a_dtype, t.b_dtype)
    yield from _major_violations("B", "NK", t.b_dtype, t.b_major, any_major)
    yield from _conversion_violations(t)
    broken = [*graph_violations(t.epilogue)] if t.epilogue else []
    yield from (f"epilogue: {reason}" for reason in broken)
    if not broken and t.epilogue and t.epilogue.matrices:
        first = t.epilogue.matrices[0].dtype
        if first != t.d_dtype:
            yield f"D is {t.d_dtype}, the epilogue's first result {first}"
        sums = {result.dtype for result in t.epilogue.matrices} & set(names("sum"))
        for dtype in sorted(sums - {a and a.accumulator for a in (DTYPES.get(t.a_dtype),)}):
            yield f"accumulators of {t.a_dtype} are stored as {dtype}: convert the product instead"
    if t.grouped not in (None, "m", "k"):
        yield f"groups cut the axis {t.grouped!r}, not 'm' or 'k'"
        return
    yield from _stack_violations(t)
    yield from _loose_violations(t)
    if t.gathered and t.gathered not in GATHERABLE[t.grouped]:
        where = f"where groups cut {t.grouped.upper()}" if t.grouped else "without groups"
        yield f"no kernel gathers {t.gathered.upper()} by indices {where}: gather it beforehand"
    elif t.gathered == "b" and t.epilogue and t.epilogue.accumulators > 1:
        yield "no kernel gathers two B's: gather them beforehand"
    elif t.gathered and t.a_dtype in OPERANDS and DTYPES[t.a_dtype].rounding_map and not any_major:
        yield f"no kernel rounds rows of {t.a_dtype} that it gathers: gather them beforehand"
    if t.grouped == "m":
        if t.a_major != "k":
            yield "rows of A are cut into groups, so A must be stored (M, K): copy it"
        results = t.epilogue.results if t.epilogue else ()
        for kind in sorted({r.kind for r in results} & {"column_sum", "max"}):
            yield f"a {kind} of rows that are cut into groups: leave it to XLA"
    if t.d_major != "n":
        yield from _transposed_violations(t)
    if t.grouped == "k":
        yield from _varlen_k_violations(t)


def _varlen_k_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel contracts groups of rows that lie as A and B have them."""
    if t.a_dtype in OPERANDS and DTYPES[t.a_dtype].itemsize == 1:
        if t.gathered:
            yield f"rows of {t.a_dtype} are contracted, which lie along K: gather them beforehand"
    elif (t.a_major, t.b_major) != ("m", "n"):
        yield (
            "K is cut into groups, so A must be stored (K, M) and B (K, N): copy what is stored "
            "otherwise"
        )


def _terms_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel multiplies bfloat16 parts of the operands."""
    if t.bf16_terms not in PRESETS:
        yield f"{t.bf16_terms} products of bfloat16 parts, not {one_of(tuple(map(str, PRESETS)))}"
    if (t.a_dtype, t.b_dtype) != ("float32", "float32"):
        yield f"A is {t.a_dtype} and B {t.b_dtype}: float32 is cut into bfloat16 parts"
    if t.promoted or t.a_block or t.b_block:
        yield "sums of bfloat16 parts are promoted already, and blocks of float32 have no scales"


def _conversion_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel converts B to A's dtype."""
    if not converts(t.a_dtype, t.b_dtype):
        if t.k_group:
            yield f"groups along K of {t.b_dtype} have scales beside {t.a_dtype}: multiply by them"
        return
    if t.k_group and t.k_group not in K_GROUPS:
        groups = one_of(tuple(map(str, K_GROUPS)))
        yield f"scales of {t.k_group} elements of K, not {groups}: multiply by them"
    if t.k_group and t.nested:
        yield "groups along K have scales, and the product has a nested batch: copy it"
    if t.grouped == "k":
        yield f"B is {t.b_dtype}, and K is cut into groups: cast it to {t.a_dtype}"
    if t.gathered == "b" or (t.indexed == "b" and t.k_group):
        yield f"B is {t.b_dtype}, one of an array's rows or matrices: copy it"
    for kind in dict.fromkeys(r.kind for r in t.epilogue.results) if t.epilogue else ():
        if kind != "matrix":
            yield f"a {kind} of a product whose B is converted: leave it to XLA"
    if t.epilogue and t.epilogue.row_nodes:
        yield "statistics of rows of a product whose B is converted: leave them to XLA"


def _transposed_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel stores D along M."""
    if t.d_major != "m":
        yield f"D has major {t.d_major!r}, not 'm' or 'n'"
    others = {
        "groups": t.grouped, "bfloat16 parts": t.bf16_terms, "FMA units": t.simt_width,
        "promoted sums": t.promoted, "two B's": t.epilogue and t.epilogue.accumulators > 1,
        f"operands of {t.a_dtype} and {t.b_dtype}": {t.a_dtype, t.b_dtype} - set(HALVES),
        "reductions": t.epilogue and t.epilogue.needs_extents,
    }  # fmt: skip
    for name, there in others.items():
        if there:
            yield f"kernels that store D along M have no code for {name}"
    arrays = [*t.epilogue.matrices, *t.epilogue.operands] if t.epilogue else []
    for array in arrays:
        if array.kind == "matrix" and DTYPES[array.dtype].itemsize == 1:
            yield f"a thread has no two neighbours of {array.dtype} where D is stored along M"


def _loose_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel stores rows of D that begin and end anywhere."""
    results = t.epilogue.matrices if t.epilogue else ()
    others = {
        "groups": t.grouped, "a nested batch": t.nested, "D stored along M": t.d_major == "m",
        "FMA units": t.simt_width, "gate and up side by side": any(r.planes > 1 for r in results),
        "results of 4 or 8 bits": any(DTYPES[r.dtype].itemsize == 1 for r in results),
        f"operands of {t.a_dtype} and {t.b_dtype}": {t.a_dtype, t.b_dtype} - set(HALVES),
    }  # fmt: skip
    for name, there in others.items():
        if there and t.loose_d:
            yield f"rows of D that are no multiples of 16 bytes, and {name}: pad N"


def _simt_type_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel adds up the products in FMA units."""
    if t.simt_width not in (1, simt.VECTOR):
        yield f"vectors of FMA units have {t.simt_width} elements, not 1 or {simt.VECTOR}"
    if (t.a_dtype, t.b_dtype, t.d_dtype) != ("float32",) * 3:
        yield (
            f"A is {t.a_dtype}, B {t.b_dtype} and D {t.d_dtype}: kernels for FMA units have "
            "float32 alone"
        )
    others = {
        "an epilogue": t.epilogue, "groups": t.grouped, "gathered rows": t.gathered,
        "one matrix of a stack": t.indexed, "promoted sums": t.promoted,
        "block scales": t.a_block or t.b_block, "a nested batch": t.nested,
        "bfloat16 parts": t.bf16_terms,
    }  # fmt: skip
    for name, there in others.items():
        if there:
            yield f"kernels for FMA units have no code for {name}: leave the product to XLA"


def _block_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel multiplies blocks of 128 along K by scales of their own."""
    if DTYPES[t.a_dtype].itemsize != 1:
        yield f"blocks of {t.a_dtype} have scales: kernels scale blocks of 8-bit operands"
    for operand, block in (("A", t.a_block), ("B", t.b_block)):
        if block not in BLOCKS:
            yield f"blocks of {operand} have {block} lines, not {one_of(tuple(map(str, BLOCKS)))}"
    if not t.promoted:
        yield "block scales are multiplied in where accumulators are promoted: promote them"
    if t.epilogue and t.epilogue.accumulators > 1:
        yield "a product with two B's has block scales: multiply one after the other"
    if t.nested:
        yield "blocks have scales, and the product has a nested batch: copy it"
    if t.grouped == "m" and t.a_block != 1:
        yield "groups begin within blocks of A: take blocks of one row, or copy it"


def _major_violations(
    operand: str, axes: str, dtype: str, major: str, any_major: bool
) -> Iterator[str]:
    """Yields why an operand cannot be stored with neighbours along an index in memory."""
    if major.upper() not in axes:
        yield f"{operand} has major {major!r}, not {' or '.join(map(repr, axes.lower()))}"
    elif not any_major and dtype in OPERANDS and major not in DTYPES[dtype].majors:
        yield (
            f"{operand} is {dtype}, which tensor cores read along K alone, so it must be stored "
            f"({axes[0]}, K): copy it"
        )


def _stack_violations(t: ProblemType) -> Iterator[str]:
    if t.indexed not in (None, "a", "b"):
        yield f"one matrix of a stack is {t.indexed!r}, not 'a' or 'b'"
    elif t.indexed and t.grouped:
        yield (
            f"{t.indexed.upper()} is one matrix of a stack, and the product has groups: copy it "
            "out of the stack"
        )


def _policy_violations(spec: GemmSpec) -> Iterator[str]:
    s = spec
    if s.warp_schedule not in get_args(WarpSchedule):
        yield f"warp schedule {s.warp_schedule!r} is not {one_of(get_args(WarpSchedule))}"
    if s.tile_scheduler not in get_args(TileScheduler):
        yield f"tile scheduler {s.tile_scheduler!r} is not {one_of(get_args(TileScheduler))}"
    tiles_m = CONVERTED_TILES_M if s.converts_b else TILES_M
    if s.tile_m not in tiles_m:
        yield f"tile_m {s.tile_m} is not {one_of(tuple(map(str, tiles_m)))}"
    if s.converts_b:
        yield from _converted_tile_violations(s)
    if not 16 <= s.tile_n <= MAX_TILE_N or s.tile_n % 16:
        yield f"tile_n {s.tile_n} is not a multiple of 16 between 16 and {MAX_TILE_N}"
    if s.a_dtype in OPERANDS:
        row = SWIZZLE_BYTES // s.a_itemsize
        tiles_k = (row, 2 * row, 4 * row) if s.converts_b else (row, 2 * row)
        if s.tile_k not in tiles_k:
            yield f"tile_k {s.tile_k} is not {one_of(tuple(map(str, tiles_k)))}"
        elif s.promoted and s.tile_k != PROMOTION_K:
            yield f"tile_k {s.tile_k} of promoted accumulators is not {PROMOTION_K}"
        elif s.grouped == "k" and not s.spans_k and s.tile_k != PROMOTION_K:
            yield f"tile_k {s.tile_k}, but groups of K are multiples of {PROMOTION_K}"
        if s.rounds_operands and s.d_tile_n > 16 and s.d_tile_n % 32:  # nvidia-cutlass-dsl aborts
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
    if s.evict_first not in (None, "a", "b"):
        yield f"L2 evicts {s.evict_first!r} first, not 'a' or 'b'"
    elif s.evict_first and s.evict_first == s.gathered:
        yield f"{s.evict_first.upper()} is gathered, not loaded by TMA with a policy for L2"
    if s.short_boxes and (s.grouped or s.cluster_size > 1):
        yield "boxes end with their matrices, but groups or slices for a cluster end them elsewhere"


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
    s = spec
    if s.tile_k != TILE_K:
        yield f"tile_k {s.tile_k} of bfloat16 parts is not {TILE_K}"
    if s.tile_m not in (64, 128):
        yield f"tile_m {s.tile_m} of bfloat16 parts is not 64 or 128, 64 rows a warpgroup"
    if s.tile_n % BLOCK_N:
        yield f"tile_n {s.tile_n} of bfloat16 parts is not a multiple of {BLOCK_N}"
    if s.warp_schedule != "cooperative":
        yield "math warpgroups cut B into bfloat16 parts together: schedule them cooperatively"
    if s.split_k:
        yield "sums of bfloat16 parts leave no registers for partial sums: do not split K"


def _converted_tile_violations(spec: GemmSpec) -> Iterator[str]:
    s, parts = spec, spec.graph.accumulators * 64
    if s.warp_schedule != "cooperative":
        yield "warpgroups that convert B share the columns of a tile: take the cooperative schedule"
    elif s.columns_per_warpgroup % parts:
        yield f"{s.columns_per_warpgroup} columns a warpgroup are no multiple of {parts}"
    if s.k_group and s.tile_k % s.k_group:
        yield f"tile_k {s.tile_k} is no multiple of {s.k_group} elements that share a scale"
    if s.tile_m < 64 and s.grouped:
        yield f"tile_m {s.tile_m} is for few rows, but groups may have more"


def _register_violations(spec: GemmSpec) -> Iterator[str]:
    s, limit = spec, max_accumulators(spec)
    if s.acc_registers > limit:
        yield (
            f"{s.acc_registers} accumulators a thread; {limit} fit with {s.math_warpgroups} math "
            f"warpgroups, a {s.tile_scheduler} tile scheduler and "
            f"{'this' if s.epilogue else 'no'} epilogue"
        )
    narrow = NARROW_EPILOGUE_ACC_REGISTERS
    if s.bf16_terms > 3 and s.acc_registers >= narrow and s.epi_tile_n > 16:
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
    if s.epi_tile_n not in (16, 32, 64) or columns % s.epi_tile_n:
        yield f"epi_tile_n {s.epi_tile_n} is not 16, 32 or 64 dividing {columns} columns"
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
    if s.barrier_bytes > SMEM_BARRIERS:
        yield f"{s.barrier_bytes} bytes of barriers; there is room for {SMEM_BARRIERS}"
