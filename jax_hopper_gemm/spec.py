"""How a GEMM runs: the choices that are compiled into a kernel, and those made at launch.

`GemmSpec` names one cubin: equal specs share it, whatever the extents. `Traversal` is what a
launch may still choose. `violations` is the one list of what the kernels can do.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from .epilogue import EpilogueGraph, Operand, epilogue_registers, graph_violations
from .problem import ITEMSIZE, GroupedAxis, Major, plain_graph

SMEM_LIMIT = 227 * 1024  # bytes of shared memory a CTA may use on sm_90
SMEM_ALIGNMENT = 1024  # bytes: where the 128-byte swizzle repeats
SMEM_VECTOR = 128  # bytes: alignment of rows and columns that TMA loads
GROUPED_MAILBOX_BYTES = 144  # three slots of a tile and their barriers
SMEM_BARRIERS = 512  # bytes behind everything else: mbarriers, scheduler mailbox
TMA_ALIGNMENT = 16  # bytes: addresses and strides that a tensor map takes are multiples
EPI_TILE_M = 64  # rows of a staged epilogue tile: those that one warpgroup's wgmma writes
# Registers of a math thread, by number of math warpgroups: what a CTA's 65,536 leave it. All but
# so many can be float32 accumulators, without a spill; with three warpgroups ptxas allows 96.
MATH_REGISTERS = {1: 240, 2: 240, 3: 160}
GATHERED_MATH_REGISTERS = 224  # where addresses of gathered rows take more of the others
OTHER_REGISTERS = 32
MAILBOX_REGISTERS = 16  # more, with the dynamic scheduler
MAX_ACC_REGISTERS = {1: 208, 2: 208, 3: 96}

D_DTYPES = ("bfloat16", "float16", "float32")

WarpSchedule = Literal["cooperative", "pingpong"]
TileScheduler = Literal["single", "static", "dynamic"]


@dataclass(frozen=True)
class TmaBox:
    """What one TMA copy moves: `contiguous` elements by `other`, in a `swizzle`-byte pattern.

    A box is as wide as the swizzle and as long as the tile, so a wider tile takes several. CTAs
    of a cluster that share a tile each load a part of every box and multicast it.
    """

    contiguous: int
    other: int
    swizzle: int


@dataclass(frozen=True)
class GemmSpec:
    """One kernel. All fields are compile-time constants of it.

    Attributes:
      ab_dtype, d_dtype: as in `GemmProblem`.
      a_major, b_major: "k" or "m"; "k" or "n".
      tile_m, tile_n, tile_k: the block of D one CTA (cooperative) or one math warpgroup
        (pingpong) computes, and the K extent of one stage.
      cluster_m, cluster_n: CTAs of a cluster along M and N; they share loads by multicast. Where
        rows are grouped, a cluster of two along M is `paired`.
      warp_schedule: "cooperative" (all math warpgroups share a tile) or "pingpong" (two
        math warpgroups work on alternate tiles).
      tile_scheduler: "single" (one tile a CTA), "static" (persistent, fixed stride) or
        "dynamic" (persistent, atomic tile counter).
      num_stages: stages of the A/B ring in shared memory.
      epi_tile_n: columns of one staged epilogue tile; it has `EPI_TILE_M` rows.
      epi_stages: staged epilogue tiles in shared memory, for each math warpgroup and each matrix
        of the results.
      epilogue: as in `GemmProblem`. A gated product's tile has `tile_n` accumulator columns, the
        first half of gate, the second of up, and so `tile_n / 2` columns of D.
      epi_load_stages: epilogue tiles of operands in shared memory, for each math warpgroup; 0
        where the epilogue loads none.
      grouped: the axis that is cut into groups, as in `Groups`; None: there are no groups.
      gathered: the operand whose rows are picked by indices, as in `Groups`.
      indexed: the operand that is one matrix of a stack, as in `GemmProblem`.
    """

    ab_dtype: str
    d_dtype: str
    a_major: Major
    b_major: Major
    tile_m: int
    tile_n: int
    tile_k: int = 64
    cluster_m: int = 1
    cluster_n: int = 1
    warp_schedule: WarpSchedule = "cooperative"
    tile_scheduler: TileScheduler = "static"
    num_stages: int = 4
    epi_tile_n: int = 32
    epi_stages: int = 4
    epilogue: EpilogueGraph | None = None
    epi_load_stages: int = 0
    grouped: GroupedAxis | None = None
    gathered: Literal["a", "b"] | None = None
    indexed: Literal["a", "b"] | None = None

    @property
    def graph(self) -> EpilogueGraph:
        """The epilogue; where there is none, the graph that says so."""
        return self.epilogue or plain_graph(self.d_dtype)

    @property
    def d_tile_n(self) -> int:
        """Columns of D that a tile covers."""
        return self.tile_n // self.graph.accumulators

    @property
    def math_warpgroups(self) -> int:
        """Math warpgroups of a CTA; one more loads."""
        if self.warp_schedule == "pingpong":
            return 2
        return {64: 1, 128: 2, 192: 3, 256: 2}[self.tile_m]

    @property
    def rows_per_warpgroup(self) -> int:
        """Rows of a tile that one math warpgroup accumulates."""
        share = 1 if self.warp_schedule == "pingpong" else self.math_warpgroups
        return self.tile_m // share

    @property
    def acc_registers(self) -> int:
        """float32 accumulators of one math thread."""
        return self.rows_per_warpgroup * self.tile_n // 128

    @property
    def threads(self) -> int:
        return 128 * (self.math_warpgroups + 1)

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def paired(self) -> bool:
        """Whether a cluster takes two tiles of grouped rows, or two of columns where a group has
        no second (see `grouping.tile_in_pair`)."""
        return self.grouped == "m" and self.cluster_m == 2

    @property
    def walk_m(self) -> int:
        """Tiles along M in a step of the walk over cluster tiles."""
        return 1 if self.paired else self.cluster_m

    @property
    def walk_n(self) -> int:
        """Tiles along N in a step of the walk over cluster tiles."""
        return 2 if self.paired else self.cluster_n

    @property
    def zeros_apart(self) -> bool:
        """Whether the matrices of empty groups are no tiles, but filled by a warp that does nothing
        else. With an epilogue they may hold more than zeros."""
        return self.grouped == "k" and self.epilogue is None

    @property
    def zero_part(self) -> int:
        """16-byte vectors of such a matrix that the warp writes at a time: those of a tile."""
        return self.tile_m * self.tile_n * ITEMSIZE[self.d_dtype] // TMA_ALIGNMENT

    @property
    def stage_bytes(self) -> int:
        """Bytes of one A/B stage."""
        return (self.tile_m + self.tile_n) * self.tile_k * ITEMSIZE[self.ab_dtype]

    @property
    def epi_stage_bytes(self) -> int:
        """Bytes of one staged epilogue tile of one math warpgroup, of all results together."""
        elements = EPI_TILE_M * self.epi_tile_n
        return elements * sum(ITEMSIZE[result.dtype] for result in self.graph.matrices)

    def loaded_bytes(self, operand: Operand) -> int:
        """Returns the bytes that one epilogue tile of an operand takes in shared memory."""
        if operand.kind == "matrix":
            return EPI_TILE_M * self.epi_tile_n * ITEMSIZE[operand.dtype]
        row = operand.kind == "row"
        elements = self.epi_tile_n if row else self.column_elements(operand.dtype)
        return _padded(elements * ITEMSIZE[operand.dtype], SMEM_VECTOR)

    def column_elements(self, dtype: str) -> int:
        """Returns how many elements of a column one copy brings.

        Those of 64 rows; where tiles begin at any row, the copy begins at the multiple of 16 bytes
        before them.
        """
        return EPI_TILE_M + (TMA_ALIGNMENT // ITEMSIZE[dtype] if self.grouped == "m" else 0)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a launch, its parts in this order.

        Stages of A and B; for each matrix of the results its staged tiles; for each operand that
        is loaded its tiles, matrices first; scratch; barriers.
        """
        ring = self.num_stages * self.stage_bytes
        staged = self.math_warpgroups * self.epi_stages * self.epi_stage_bytes
        buffers = self.math_warpgroups * self.epi_load_stages
        loaded = buffers * sum(map(self.loaded_bytes, self.graph.loaded))
        return ring + staged + loaded + self.scratch_bytes + SMEM_BARRIERS

    @property
    def scratch_bytes(self) -> int:
        """Bytes in which the four warps of a warpgroup add up columns, in two turns."""
        sums = sum(result.kind == "column_sum" for result in self.graph.results)
        return sums * self.math_warpgroups * 2 * 4 * self.epi_tile_n * 4

    @property
    def barrier_bytes(self) -> int:
        """Bytes of barriers and mailbox in use: of A and B, of the epilogue's operands, of the
        dynamic scheduler."""
        rings = self.num_stages + self.math_warpgroups * self.epi_load_stages
        mailbox = 72 if self.tile_scheduler == "dynamic" else 0
        return 16 * rings + (GROUPED_MAILBOX_BYTES if self.grouped else mailbox)

    @property
    def a_box(self) -> TmaBox:
        return _box(self.a_major == "k", self.tile_m, self.tile_k, self.cluster_n, self.ab_dtype)

    @property
    def b_box(self) -> TmaBox:
        """The box of B, or of each of a gated product's B's."""
        columns = self.d_tile_n
        return _box(self.b_major == "k", columns, self.tile_k, self.cluster_m, self.ab_dtype)

    def epi_box(self, dtype: str) -> TmaBox:
        """Returns the box of an epilogue tile: D's, another result's, an operand's."""
        return _box(True, EPI_TILE_M, self.epi_tile_n, 1, dtype)

    @property
    def name(self) -> str:
        """A name a person understands in a profile: operation, dtypes, layout, tile, schedule."""
        short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
        layout = ("t" if self.a_major == "k" else "n") + ("t" if self.b_major == "n" else "n")
        kind = "gemm" if self.grouped is None else f"grouped_{self.grouped}"
        if self.gathered:
            kind += f"_gather_{self.gathered}"
        if self.indexed:
            kind += f"_index_{self.indexed}"
        return (
            f"jhg_{kind}_{short[self.ab_dtype]}_{short[self.d_dtype]}_{layout}"
            f"_{self.tile_m}x{self.tile_n}x{self.tile_k}_{self.cluster_m}x{self.cluster_n}"
            f"_{self.warp_schedule}_{self.tile_scheduler}"
            f"_s{self.num_stages}_e{self.epi_tile_n}x{self.epi_stages}"
            + (f"_l{self.epi_load_stages}" if self.epi_load_stages else "")
            + (f"_{self.epilogue.label}" if self.epilogue else "")
        )

    def to_json(self) -> str:
        """Returns canonical JSON: the same text for equal specs."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GemmSpec:
        fields = json.loads(text)
        if fields.get("epilogue"):
            fields["epilogue"] = EpilogueGraph.from_dict(fields["epilogue"])
        return cls(**fields)


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _box(second_is_contiguous: bool, first: int, second: int, shares: int, dtype: str) -> TmaBox:
    contiguous, other = (second, first) if second_is_contiguous else (first, second)
    itemsize = ITEMSIZE[dtype]
    swizzle = next(width for width in (128, 64, 32) if contiguous * itemsize % width == 0)
    return TmaBox(swizzle // itemsize, other // shares, swizzle)


@dataclass(frozen=True)
class Traversal:
    """The order in which tiles are visited, chosen at launch; it compiles nothing.

    Attributes:
      along: the direction the walk advances in, "m" or "n".
      swizzle: tiles side by side across that direction before it advances, 1 to 16.
    """

    along: Literal["m", "n"] = "m"
    swizzle: int = 8


def max_accumulators(spec: GemmSpec) -> int:
    """Returns how many float32 accumulators a math thread of `spec` can hold without a spill."""
    warpgroups = spec.math_warpgroups
    left = MATH_REGISTERS[warpgroups] - OTHER_REGISTERS
    if spec.gathered:
        left = GATHERED_MATH_REGISTERS - OTHER_REGISTERS
    if spec.tile_scheduler == "dynamic" or spec.grouped:
        left -= MAILBOX_REGISTERS
    if spec.epilogue:
        left -= epilogue_registers(spec.epilogue, spec.epi_tile_n)
    return min(MAX_ACC_REGISTERS[warpgroups], left)


def violations(spec: GemmSpec) -> list[str]:
    """Returns every reason why no kernel is compiled for `spec`; empty when one can be."""
    found = []

    def need(ok: bool, reason: str) -> None:
        if not ok:
            found.append(reason)

    need(spec.ab_dtype in ("bfloat16", "float16"), f"A and B are {spec.ab_dtype}, not 16-bit float")
    need(spec.d_dtype in D_DTYPES, f"D is {spec.d_dtype}, not bfloat16, float16 or float32")
    need(spec.a_major in ("k", "m"), f"a_major is {spec.a_major!r}, not 'k' or 'm'")
    need(spec.b_major in ("k", "n"), f"b_major is {spec.b_major!r}, not 'k' or 'n'")
    need(spec.warp_schedule in ("cooperative", "pingpong"), f"no schedule {spec.warp_schedule!r}")
    need(spec.tile_scheduler in ("single", "static", "dynamic"), f"no {spec.tile_scheduler!r}")
    need(spec.tile_m in (64, 128, 192, 256), f"tile_m {spec.tile_m} is not 64, 128, 192 or 256")
    need(
        16 <= spec.tile_n <= 256 and spec.tile_n % 16 == 0,
        f"tile_n {spec.tile_n} is not a multiple of 16 between 16 and 256",
    )
    need(spec.tile_k in (64, 128), f"tile_k {spec.tile_k} is not 64 or 128")
    need(
        (spec.cluster_m, spec.cluster_n) in ((1, 1), (2, 1), (1, 2), (2, 2)),
        f"cluster {spec.cluster_m}x{spec.cluster_n} is not 1x1, 2x1, 1x2 or 2x2",
    )
    if spec.epilogue:
        found += [f"epilogue: {reason}" for reason in graph_violations(spec.epilogue)]
    if found:  # what follows does arithmetic on the fields above
        return found
    graph, columns = spec.graph, spec.d_tile_n
    need(
        not graph.matrices or graph.matrices[0].dtype == spec.d_dtype,
        f"d_dtype is {spec.d_dtype}, but the epilogue's first result is another",
    )
    need(
        spec.tile_n % (16 * graph.accumulators) == 0,
        f"tile_n {spec.tile_n} does not split into gate and up of multiples of 16 columns",
    )
    limit = max_accumulators(spec)
    need(
        spec.acc_registers <= limit,
        f"{spec.acc_registers} accumulators a thread; {limit} fit with "
        f"{spec.math_warpgroups} math warpgroups, a {spec.tile_scheduler} tile scheduler and "
        f"{'this' if spec.epilogue else 'no'} epilogue",
    )
    need(
        spec.warp_schedule == "cooperative" or spec.tile_m <= 128,
        f"pingpong gives one warpgroup a whole tile; tile_m {spec.tile_m} exceeds 128",
    )
    need(
        spec.warp_schedule == "cooperative" or spec.tile_scheduler != "single",
        "pingpong alternates tiles, so it needs a persistent scheduler",
    )
    need(
        columns % (16 * spec.cluster_m) == 0,
        f"{columns} columns do not split into {spec.cluster_m} multicast slices of 16",
    )
    need(
        spec.epi_tile_n in (16, 32, 64) and columns % spec.epi_tile_n == 0,
        f"epi_tile_n {spec.epi_tile_n} is not 16, 32 or 64 dividing {columns} columns",
    )
    need(
        spec.epi_tile_n >= 32 or not any(o.dtype == "bool" for o in graph.operands),
        f"epi_tile_n {spec.epi_tile_n} is under 32, too narrow for a bool operand",
    )
    need(
        spec.epi_load_stages >= 2 if graph.loaded else spec.epi_load_stages == 0,
        f"epi_load_stages {spec.epi_load_stages}, of an epilogue that loads {len(graph.loaded)} "
        "operands",
    )
    need(
        not graph.loaded or spec.math_warpgroups <= 2,
        f"{spec.math_warpgroups} math warpgroups, but two warps that load an epilogue's operands, "
        "one for each: take another tile_m than 192",
    )
    found += _grouped_violations(spec)
    need(spec.num_stages >= 2, f"num_stages {spec.num_stages} is under 2")
    need(spec.epi_stages >= 2, f"epi_stages {spec.epi_stages} is under 2")
    need(
        spec.smem_bytes <= SMEM_LIMIT,
        f"{spec.smem_bytes} bytes of shared memory; a CTA has {SMEM_LIMIT}",
    )
    need(
        spec.barrier_bytes <= SMEM_BARRIERS,
        f"{spec.barrier_bytes} bytes of barriers; there is room for {SMEM_BARRIERS}",
    )
    return found


def _grouped_violations(spec: GemmSpec) -> list[str]:
    """Returns why no kernel is compiled for the groups of `spec`, which is legal otherwise."""
    found = []
    if spec.grouped not in (None, "m", "k"):
        found.append(f"grouped is {spec.grouped!r}, not 'm', 'k' or None")
    if spec.gathered not in (None, "a", "b"):
        found.append(f"gathered is {spec.gathered!r}, not 'a', 'b' or None")
    if spec.indexed not in (None, "a", "b"):
        found.append(f"indexed is {spec.indexed!r}, not 'a', 'b' or None")
    if spec.grouped is None:
        if spec.gathered:
            found.append("rows are gathered of grouped products alone")
        return found
    if spec.indexed:
        found.append("an operand of a grouped product is not one matrix of a stack")
    if spec.tile_scheduler == "single":
        found.append(
            "the number of tiles depends on the groups' sizes: take a persistent scheduler"
        )
    if spec.grouped == "k" and (spec.a_major, spec.b_major) != ("m", "n"):
        found.append("groups of k end between rows of A and B, which must be 'm'- and 'n'-major")
    found += _gathered_violations(spec)
    if spec.grouped == "m":
        if spec.cluster_size > 2:
            found.append("four CTAs would widen tiles beyond the ends of groups")
        unaligned = {r.kind for r in spec.graph.results} & {"column_sum", "max"}
        for kind in sorted(unaligned):
            found.append(f"a {kind} is reduced over blocks of rows that groups would cut")
    return found


def _gathered_violations(spec: GemmSpec) -> list[str]:
    """Returns why no kernel is compiled that gathers rows as `spec` says."""
    if spec.gathered is None:
        return []
    found = []
    if spec.grouped == "m" and (spec.gathered, spec.a_major) != ("a", "k"):
        found.append("where rows are grouped, those of a 'k'-major A are gathered and no others")
    if spec.tile_k != 64:
        found.append(f"tile_k {spec.tile_k} is not 64, a block of the rows that are gathered")
    tile, shared = spec.tile_m, spec.cluster_n
    if spec.gathered == "b":
        tile, shared = spec.d_tile_n, spec.cluster_m
        if spec.graph.accumulators > 1:
            found.append("a gated product's B's are not gathered")
    if spec.grouped == "k" and tile % 64:
        found.append(f"{tile} gathered columns of a tile are no multiple of 64")
    if shared > 1:
        found.append("CTAs of a cluster cannot share an operand that is gathered")
    if spec.math_warpgroups > 2:
        found.append("three math warpgroups leave no registers for warps that gather")
    if spec.tile_m > 128 and spec.gathered == "a" and spec.grouped == "m":
        found.append(f"tile_m {spec.tile_m}: a thread has registers for the rows of 128")
    return found
