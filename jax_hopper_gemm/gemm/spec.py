"""What is compiled into a kernel: `GemmSpec` names one cubin.

Equal specs share it, whatever the extents. What a launch may still choose is a
`raster.RasterOrder`. What kernels can do is in `legality`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from . import simt, smem
from .bf16_parts import accumulator_sets
from .conversion import BLOCK
from .dtypes import DTYPES
from .epilogue_graph import EpilogueGraph
from .problem import TMA_ALIGNMENT as TMA_ALIGNMENT
from .problem import plain_graph
from .problem_type import ProblemType
from .smem import EPI_TILE_M
from .tma_box import TmaBox, make_box

PROMOTION_K = 128  # elements of K after which `promoted` accumulators are added up
MAX_SUM_COLUMNS = 192  # of promoted sums that fit beside a tile's accumulators, of as many columns
MAX_SCALED_COLUMNS = 176  # the same where each column has a scale of its own
SCALES_ALIGNMENT = 4  # float32 numbers: copies of block scales begin at multiples, of 16 bytes
BLOCKS = (1, 128)  # rows of A, and columns of B, that may share a scale
K_GROUPS = (32, 64, 128)  # elements of K of converted operands that may share a scale

WarpSchedule = Literal["cooperative", "pingpong"]
TileScheduler = Literal["single", "static", "dynamic"]


# By field, the one cached property of a `GemmSpec` that depends on it.
CACHED_OF = {
    "a_major": "a_box", "b_major": "b_box",
    **dict.fromkeys(("num_stages", "epi_stages", "epi_load_stages"), "smem_bytes"),
}  # fmt: skip


@dataclass(frozen=True)
class GemmSpec(ProblemType):
    """One kernel. All fields are compile-time constants of it.

    A tile is the block of D that one CTA (cooperative) or one math warpgroup (pingpong) computes.
    That of a gated product has `tile_n` accumulator columns, the first half of gate, the second of
    up, and so `tile_n / 2` columns of D. CTAs of a cluster share loads by multicast, or the k-tiles
    of one tile.

    Cached are the properties that choosing a kernel reads many times of each candidate.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 64  # elements of K in one stage
    cluster_m: int = 1  # CTAs of a cluster along M; two where rows are grouped are `paired`
    cluster_n: int = 1
    warp_schedule: WarpSchedule = "cooperative"  # all math warpgroups share a tile, or alternate
    tile_scheduler: TileScheduler = "static"  # one tile a CTA, a fixed stride, an atomic counter
    num_stages: int = 4  # of the A/B ring in shared memory
    epi_tile_n: int = 32  # columns of one staged epilogue tile; it has `EPI_TILE_M` rows
    epi_stages: int = 4  # such tiles for each math warpgroup and each matrix of the results
    epi_load_stages: int = 0  # such tiles of operands for each math warpgroup; 0: it loads none
    # Whether a box of rows along K ends with its matrix, where that has fewer rows than a tile. The
    # launch says how many bytes a stage then gets (`grid.loaded_bytes`).
    short_boxes: bool = False
    evict_first: Literal["a", "b"] | None = None  # the operand whose lines leave L2 first
    split_k: bool = False  # clusters may share the k-tiles of a tile, see `k_split`
    cluster_k: int = 1  # CTAs of a cluster that share the k-tiles of its tile, see `finish`

    @cached_property
    def graph(self) -> EpilogueGraph:
        """The epilogue; where there is none, the graph that says so."""
        return self.epilogue or plain_graph(self.d_dtype)

    @property
    def sum_dtype(self) -> str:
        """The dtype in which the tensor cores add up."""
        return DTYPES[self.a_dtype].accumulator

    @property
    def acc_dtype(self) -> str:
        """The dtype of a tile's accumulators."""
        return "float32" if self.promoted else self.sum_dtype

    @property
    def needs_extents(self) -> bool:
        """Whether the kernel must know M and N, which else tensor maps alone know."""
        return self.loose_d or self.graph.needs_extents

    @cached_property
    def d_tile_n(self) -> int:
        """Columns of D that a tile covers."""
        return self.tile_n // self.graph.accumulators

    @property
    def persistent(self) -> bool:
        """Whether a CTA works on tiles until there are no more, not on one."""
        return self.tile_scheduler != "single"

    @property
    def dynamic(self) -> bool:
        """Whether CTAs take tiles from a counter in memory while they run."""
        return self.tile_scheduler == "dynamic"

    @cached_property
    def math_warpgroups(self) -> int:
        """Math warpgroups of a CTA; one more loads."""
        if self.warp_schedule == "pingpong" or self.warpgroups_n == 2:
            return 2
        return {64: 1, 128: 2, 192: 3, 256: 2}[self.tile_m]

    @cached_property
    def rows_per_warpgroup(self) -> int:
        """Rows of a tile that one math warpgroup accumulates."""
        if self.warpgroups_n == 2:
            return self.d_tile_m
        share = 1 if self.warp_schedule == "pingpong" else self.math_warpgroups
        return self.tile_m // share

    @property
    def reads_parts(self) -> bool:
        """Whether A and B were cut into bfloat16 parts before the launch."""
        return self.bf16_terms > 0 and self.a_dtype != "float32"

    @property
    def cuts_operands(self) -> bool:
        """Whether the kernel cuts A and B into bfloat16 parts."""
        return self.bf16_terms > 0 and not self.reads_parts

    @property
    def warpgroups_n(self) -> int:
        """Math warpgroups that share the columns of a tile; others share its rows, or tiles."""
        return 2 if self.b_in_registers or self.k_in_turns else 1

    @property
    def d_tile_m(self) -> int:
        """Rows of D that an epilogue goes through: those of a tile, and 64 at least."""
        return max(self.tile_m, EPI_TILE_M)

    @property
    def columns_per_warpgroup(self) -> int:
        """Accumulator columns of a tile that one math warpgroup holds."""
        return self.tile_n // self.warpgroups_n

    @cached_property
    def k_in_turns(self) -> bool:
        """Whether math warpgroups multiply all of a tile, and take turns at its k-tiles.

        They do where a tile has not enough for two: no more columns of each B than one wgmma of
        those that convert B; 64 rows, where sums are promoted. Each then stores half the columns.
        """
        if self.b_in_registers:
            return self.tile_n == BLOCK * self.graph.accumulators
        alone = self.tile_m == EPI_TILE_M and self.warp_schedule == "cooperative"
        return self.promoted and alone and not (self.grouped or self.graph.needs_extents)

    @property
    def exchanges_in_ring(self) -> bool:
        """Whether the ring is free when warpgroups that took turns add up their sums: of one tile
        all stages have been read."""
        return self.k_in_turns and not self.persistent

    @property
    def converted_columns(self) -> int:
        """Columns of a stage that one math warpgroup converts, where B is converted."""
        return self.tile_n if self.k_in_turns else self.columns_per_warpgroup

    @property
    def sum_registers(self) -> int:
        """Those in which a math thread has summed its part of a tile, see `finish`."""
        if self.b_in_registers:
            return self.tile_m * self.converted_columns // 128
        return self.tile_registers

    @property
    def stage_warps(self) -> int:
        """Math warps that empty a stage."""
        return 4 if self.k_in_turns else self.tile_warps

    @property
    def acc_registers(self) -> int:
        """Accumulators of one math thread; those that are scaled are there twice.

        For bfloat16 parts see `bf16_parts`, for promoted sums `sum_columns`.
        """
        if self.promoted:
            totals = self.rows_per_warpgroup * self.tile_n // 128
            return totals + EPI_TILE_M * self.sum_columns // 128
        sets = 1 + (self.k_group > 0 or self.reads_parts)
        if self.cuts_operands:
            sets = accumulator_sets(self.bf16_terms)
        return sets * self.tile_registers

    @property
    def sum_columns(self) -> int:
        """Columns of 64 rows that are summed before they are `promoted`.

        They are a piece of a tile; one after the other takes the same registers.
        """
        most = MAX_SCALED_COLUMNS if self.b_block == 1 else MAX_SUM_COLUMNS
        return self.tile_n if self.tile_n <= most else self.tile_n // 2

    @property
    def scales_of_lines(self) -> tuple[int, int]:
        """float32 numbers that a stage gets of the block scales of A's lines, and of B's.

        Copies begin at multiples of `SCALES_ALIGNMENT`. A tile has lines of at most three blocks.
        """
        rows = self.tile_m + (SCALES_ALIGNMENT if self.grouped == "m" else 0)
        sides = (self.a_block, rows), (self.b_block, self.tile_n)
        of_a, of_b = (lines if block == 1 else 2 * SCALES_ALIGNMENT for block, lines in sides)
        return of_a, of_b

    @property
    def tile_registers(self) -> int:
        """Those that hold its elements of a tile."""
        return self.rows_per_warpgroup * self.columns_per_warpgroup // 128

    @property
    def tile_warps(self) -> int:
        """Math warps that work on one tile."""
        return 4 if self.warp_schedule == "pingpong" else 4 * self.math_warpgroups

    @property
    def threads(self) -> int:
        if self.simt_width:
            return simt.num_threads(self.tile_m, self.tile_n)
        return 128 * (self.math_warpgroups + 1)

    @cached_property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n * self.cluster_k

    @cached_property
    def slices(self) -> int:
        """Slices of a tile's columns, each stored by one of the CTAs that share its k-tiles.

        Columns come in steps of 16 for each math warpgroup that stores some, so some CTAs may store
        none. Of warpgroups that share columns those that convert their own store where these are.
        """
        if self.b_in_registers and not self.k_in_turns:
            return 1
        blocks = self.tile_n // (16 * self.warpgroups_n)
        return max(n for n in range(1, self.cluster_k + 1) if blocks % n == 0)

    @property
    def slot_threads(self) -> int:
        """Math threads that have accumulators of a tile's rows: a warp has 16 of 64."""
        return self.math_warpgroups * 32 * min(4, self.tile_m // 16)

    @property
    def of_slice(self) -> GemmSpec:
        """The kernel whose epilogue this one has: itself, or one whose tile is such a slice."""
        if self.cluster_k == 1:
            return self
        return replace(self, tile_n=self.tile_n // self.slices, cluster_k=1)

    @property
    def paired(self) -> bool:
        """Whether a cluster takes two tiles of grouped rows, or two of columns where a group has
        no second (see `group_search.tile_in_pair`)."""
        return self.grouped == "m" and self.cluster_m == 2

    @cached_property
    def raster_m(self) -> int:
        """Tiles along M in a step of the walk over cluster tiles."""
        return 1 if self.paired else self.cluster_m

    @cached_property
    def raster_n(self) -> int:
        """Tiles along N in a step of the walk over cluster tiles."""
        return 2 if self.paired else self.cluster_n

    @property
    def spans_k(self) -> bool:
        """Whether groups of K begin and end at any element; else at multiples of a k-tile."""
        return self.grouped == "k" and self.a_major == "m"

    @property
    def zero_fill_warp(self) -> bool:
        """Whether the matrices of empty groups are no tiles, but filled by a warp that does nothing
        else. With an epilogue they may hold more than zeros."""
        return self.grouped == "k" and self.epilogue is None

    @property
    def zero_part(self) -> int:
        """16-byte vectors of such a matrix that the warp writes at a time: those of a tile."""
        return self.tile_m * self.tile_n * DTYPES[self.d_dtype].itemsize // TMA_ALIGNMENT

    @property
    def a_itemsize(self) -> int:
        return DTYPES[self.a_dtype].itemsize

    @property
    def b_itemsize(self) -> int:
        return DTYPES[self.b_dtype].itemsize

    @property
    def mma_k(self) -> int:
        """Elements of K that one wgmma multiplies."""
        return DTYPES["bfloat16" if self.bf16_terms else self.a_dtype].mma_k

    stage_bytes = cached_property(smem.stage_bytes)
    scale_bytes = property(smem.scale_bytes)
    parts_bytes = property(smem.parts_bytes)
    slot_bytes = property(smem.slot_bytes)
    epi_stage_bytes = cached_property(smem.epi_stage_bytes)
    load_stage_bytes = cached_property(smem.load_stage_bytes)
    smem_bytes = cached_property(smem.total_bytes)

    @property
    def name(self) -> str:
        """A name a person understands in a profile: operation, dtypes, layout, tile, schedule."""
        s, blocks = self, self.a_block or self.b_block
        clusters = (s.cluster_m, s.cluster_n, *([s.cluster_k] if s.cluster_k > 1 else []))
        operands = dict.fromkeys((s.a_dtype, s.b_dtype))  # one name where they are the same
        dtypes = "_".join(DTYPES[name].short for name in (*operands, s.d_dtype))
        layout = ("t" if s.a_major == "k" else "n") + ("t" if s.b_major == "n" else "n")
        kind = {
            f"gather_{s.gathered}": s.gathered, f"index_{s.indexed}": s.indexed,
            f"blocks_{s.a_block}_{s.b_block}": blocks, "promoted": s.promoted and not blocks,
            f"scales_{s.k_group}": s.k_group, "nested": s.nested, "split_k": s.split_k,
            f"bf16x{s.bf16_terms}": s.bf16_terms, f"simt{s.simt_width}": s.simt_width,
            DTYPES[s.a_dtype].mma: s.rounds_operands, "transposed": s.d_major == "m",
            "loose": s.loose_d, f"panels_{s.panels}": s.panels > 1,
        }  # fmt: skip
        further = {
            f"l{s.epi_load_stages}": s.epi_load_stages, "short": s.short_boxes,
            f"stream_{s.evict_first}": s.evict_first,
        }  # fmt: skip
        parts = [
            "jhg", f"grouped_{s.grouped}" if s.grouped else "gemm",
            *(part for part, named in kind.items() if named), dtypes, layout,
            f"{s.tile_m}x{s.tile_n}x{s.tile_k}", "x".join(map(str, clusters)),
            s.warp_schedule, s.tile_scheduler, f"s{s.num_stages}",
            f"e{s.epi_tile_n}x{s.epi_stages}",
            *(part for part, named in further.items() if named),
            *([s.epilogue.label] if s.epilogue else []),
        ]  # fmt: skip
        return "_".join(parts)

    def stored_b(self, columns: int, k: int) -> tuple[int, int]:
        """Returns the extents of a part of B, (N, K), where `packed` elements count as one."""
        packed = DTYPES[self.b_dtype].packed
        return (columns, k // packed) if self.b_major == "k" else (columns // packed, k)

    @cached_property
    def a_box(self) -> TmaBox:
        return make_box(self.a_major == "k", self.tile_m, self.tile_k, self.cluster_n, self.a_dtype)

    @cached_property
    def b_box(self) -> TmaBox:
        """The box of B, or of each of a gated product's B's."""
        columns, k = self.stored_b(self.d_tile_n, self.tile_k)
        return make_box(self.b_major == "k", columns, k, self.cluster_m, self.b_dtype)

    def epi_box(self, dtype: str) -> TmaBox:
        """Returns the box of an epilogue tile: D's, another result's, an operand's."""
        return make_box(self.d_major == "n", EPI_TILE_M, self.epi_tile_n, 1, dtype)

    def varied(self, **fields: Any) -> GemmSpec:
        """Returns the kernel with other values of some of `CACHED_OF`'s fields.

        As `replace`, in a tenth of its time: what is cached stays cached where it is still right.
        """
        spec = object.__new__(GemmSpec)
        vars(spec).update(vars(self), **fields)
        for field in fields:
            vars(spec).pop(CACHED_OF[field], None)
        return spec

    def to_json(self) -> str:
        """Returns canonical JSON: the same text for equal specs."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GemmSpec:
        named = json.loads(text)
        if "ab_dtype" in named:  # exported programs may say one dtype for both
            named["a_dtype"] = named["b_dtype"] = named.pop("ab_dtype")
        if named.get("epilogue"):
            named["epilogue"] = EpilogueGraph.from_dict(named["epilogue"])
        return cls(**named)
