"""The configurations that are considered, as data.

A configuration names tile, cluster and policies. The tables hold those among which the cost model
chooses: for a new tile or policy add it here. Which problems a table is for is in `config_sets`;
`candidates` leaves out what is not legal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Literal

from ..gemm.problem import VarlenAxis
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec, TileScheduler, WarpSchedule
from ..gemm.tma_box import SWIZZLE_BYTES

RASTER_ORDERS = tuple(RasterOrder(along, s) for s in (8, 4, 16, 2, 1) for along in ("m", "n"))


@dataclass(frozen=True)
class Config:
    """A kernel but for dtypes, layout, epilogue and the depth of its rings."""

    tile_m: int
    tile_n: int
    k_bytes: int = SWIZZLE_BYTES  # of a stage's rows along K
    cluster_m: int = 1
    cluster_n: int = 1
    warp_schedule: WarpSchedule = "cooperative"
    tile_scheduler: TileScheduler = "static"
    epi_tile_n: int | None = None  # None: the first that is legal of those preferred
    short_boxes: bool = False
    evict_first: Literal["a", "b"] | None = None
    split_k: bool = False
    cluster_k: int = 1

    @classmethod
    def of(cls, spec: GemmSpec) -> Config:
        alike = (field.name for field in fields(cls) if field.name != "k_bytes")
        named = {name: getattr(spec, name) for name in alike}
        return cls(k_bytes=spec.tile_k * spec.a_itemsize, **named)


# Where storing a large D takes longest: what is written at one time lies close together.
LARGE_RESULTS = (
    Config(128, 256, cluster_m=2, tile_scheduler="dynamic"),
    Config(128, 192, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
)


def _in_clusters(*rows: tuple[int, int, int, int], split_k: bool = False) -> Iterator[Config]:
    """Yields configurations of `tile_m`, `tile_n`, `cluster_m` and `cluster_n`."""
    for tile_m, tile_n, m, n in rows:
        yield Config(tile_m, tile_n, cluster_m=m, cluster_n=n, split_k=split_k)


# Configurations with N and M exchanged, where they differ, serve the transposed problem.
DENSE_CONFIGS = (
    # Large products: 128 accumulators a thread or more, and multicast: most math per byte loaded.
    Config(128, 256, cluster_m=2),
    Config(128, 256, cluster_n=2),
    Config(256, 128, cluster_n=2),
    # Rows that are no multiple of a line of L2 cost twice their lines, so share all of them.
    Config(128, 256, cluster_m=2, cluster_n=2, epi_tile_n=64),
    # Extents that the tiles above cover badly.
    Config(256, 160, cluster_n=2),
    Config(256, 192, cluster_n=2),
    Config(128, 192, cluster_m=2),
    Config(128, 192, cluster_m=2, warp_schedule="pingpong"),
    Config(128, 160, cluster_m=2, warp_schedule="pingpong"),
    Config(128, 160, cluster_n=2, warp_schedule="pingpong"),
    # Short K, or a better fit of waves: one warpgroup stores while the other multiplies.
    Config(128, 128, cluster_m=2, warp_schedule="pingpong"),
    Config(128, 128, cluster_n=2, warp_schedule="pingpong"),
    *LARGE_RESULTS,
    # Fewer tiles than SMs, or a small M or N.
    Config(128, 128, cluster_m=2),
    Config(128, 128, cluster_n=2),
    Config(64, 256),
    Config(256, 64),
    Config(64, 128, cluster_m=2),
    Config(64, 128, cluster_n=2, tile_scheduler="single"),
    Config(128, 64, cluster_n=2, tile_scheduler="single"),
    Config(64, 64),
    Config(64, 64, cluster_m=2, tile_scheduler="single"),
    Config(64, 64, cluster_n=2, tile_scheduler="single"),
    Config(64, 32, k_bytes=2 * SWIZZLE_BYTES),
    # Few rows: a stream of B, each byte of it read once.
    Config(64, 32, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first="b"),
    Config(64, 64, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first="b"),
    Config(64, 128, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first="b"),
    # Long K over few tiles, or a last wave of tiles that most SMs would wait for.
    Config(128, 128, split_k=True),
    Config(128, 128, cluster_m=2, split_k=True),
    Config(128, 256, cluster_m=2, split_k=True),
    Config(128, 64, split_k=True),
    Config(128, 64, cluster_n=2, split_k=True),
    Config(64, 128, cluster_m=2, split_k=True),
    Config(64, 64, split_k=True),
)

# Either side of D lies on the tile's columns, which come in steps of 16: of a small side few are
# past its end, and waves of a large one fill better. Beside `DENSE_CONFIGS`, and where D's
# transpose is computed.
_EITHER_ORDER = (
    *_in_clusters(
        (64, 16, 1, 1), (64, 32, 1, 2), (64, 80, 1, 2), (64, 192, 2, 1), (128, 80, 1, 2),
        (128, 96, 1, 2), (128, 144, 1, 2), (128, 160, 2, 1), (128, 176, 1, 2), (128, 224, 2, 1),
        (256, 112, 1, 2), (256, 144, 1, 1), (256, 160, 2, 1), (256, 192, 2, 1),
    ),
    *_in_clusters(
        (64, 16, 1, 1), (64, 32, 1, 2), (64, 48, 1, 2), (64, 96, 2, 1), (128, 48, 1, 2),
        (128, 80, 1, 2), (128, 96, 2, 1), (128, 144, 1, 2), (128, 160, 2, 1), (128, 192, 2, 1),
        (256, 80, 1, 2), (256, 96, 1, 2), (256, 160, 1, 2), split_k=True,
    ),
    # One wave of tiles of medium products: three warpgroups, and more steps in between.
    *_in_clusters(
        (64, 48, 1, 2), (128, 96, 2, 1), (192, 96, 1, 2), (192, 112, 1, 2), (192, 128, 2, 1),
        (192, 144, 1, 2), (192, 160, 2, 1), (192, 160, 1, 2), (192, 176, 1, 2), (192, 192, 1, 2),
        (256, 144, 1, 2),
    ),
)  # fmt: skip
MORE_CONFIGS = (  # for operands of 16 bits and in TF32, of which these have been measured
    Config(64, 16, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first="b"),
    *(
        Config(64, n, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first="b", split_k=True)
        for n in (16, 32, 64, 128)
    ),
    *_EITHER_ORDER,
)
TRANSPOSED_CONFIGS = (*_EITHER_ORDER, Config(128, 192, cluster_m=2), *LARGE_RESULTS)


# Rows of A are cut into groups. Pairs of CTAs share columns of B, most of what they load.
GROUPED_M_CONFIGS = (
    # Many rows a group. Tiles without rows in their second half take half the time of others: a
    # counter evens that out; measured on an H200, 2 to 8 % of a fixed stride's time.
    Config(128, 192, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(128, 256, cluster_m=2, tile_scheduler="dynamic"),
    Config(128, 128, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    # Few rows a group: matrices of B stream through deep rings.
    Config(64, 128, cluster_m=2, tile_scheduler="dynamic"),
    Config(64, 128, cluster_n=2),
    Config(64, 128),
    Config(64, 64),
)
GROUPED_K_CONFIGS = (
    # Groups differ in their k-tiles.
    Config(128, 192, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(128, 256, cluster_m=2, tile_scheduler="dynamic"),
    Config(256, 192, cluster_n=2, tile_scheduler="dynamic"),
    Config(128, 256, tile_scheduler="dynamic"),  # D is written faster by CTAs on their own
    Config(128, 128, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(256, 128, cluster_n=2, tile_scheduler="dynamic"),
    Config(64, 256),
    Config(256, 64),
    Config(128, 64, cluster_n=2),
    Config(64, 64),
)

# CTAs of a cluster cannot share what is gathered, whose loader takes registers and instructions:
# the wider a tile is across the gathered rows, the more is multiplied for each.
GATHERED_M_CONFIGS = (
    Config(128, 256, cluster_m=2, tile_scheduler="dynamic"),
    Config(128, 128, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(64, 256, cluster_m=2),
    Config(64, 128, cluster_m=2),
    Config(64, 128),
    Config(64, 64),
)
GATHERED_K_CONFIGS = (  # those whose clusters lie the wrong way are left out
    Config(128, 256, cluster_m=2, tile_scheduler="dynamic"),
    Config(256, 128, cluster_n=2, tile_scheduler="dynamic"),
    Config(128, 128, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(128, 128, cluster_n=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(64, 256),
    Config(256, 64),
    Config(64, 64),
)

# Where lines of D begin and end within sectors of memory, each line of a box that is stored costs
# two sectors that are written in parts: the wider the box, the fewer.
WIDE_STORE_CONFIGS = tuple(
    replace(config, epi_tile_n=64)
    for config in DENSE_CONFIGS
    if config.tile_m * config.tile_n >= 128 * 128 and not config.split_k
)

# Batches, beside `DENSE_CONFIGS` and where D's transpose is computed. Matrices have few tiles: most
# of these have no cluster, for which there may be no second one. K is short: one warpgroup stores
# while the other multiplies.
BATCH_CONFIGS = (
    *(
        Config(tile_m, tile_n, warp_schedule="pingpong")
        for tile_m, tile_n in ((64, 64), (64, 192), (128, 64), (128, 128), (128, 160))
    ),
    *(
        Config(*tile, cluster_m=m, warp_schedule="pingpong", tile_scheduler="dynamic")
        for *tile, m in (
            (64, 192, 1), (64, 256, 1), (128, 128, 1), (128, 128, 2), (128, 160, 1), (128, 160, 2),
        )
    ),
    Config(64, 128, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first="b"),
    Config(64, 32, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first="a"),
    Config(128, 80),
    Config(128, 224),
    Config(192, 32),
    Config(192, 96),
    Config(256, 16),
    Config(256, 32),
    Config(256, 96),
)  # fmt: skip

# Medium products, beside `DENSE_CONFIGS` and where D's transpose is computed. Their tiles are one
# wave or two, or share K. What counts is how these fill the SMs, how little of them lies
# outside of D, and how little CTAs that all begin at once ask of L2: clusters of four and eight.
MEDIUM_CONFIGS = (
    *_in_clusters(
        (64, 32, 2, 2), (64, 64, 1, 4), (64, 64, 4, 2), (64, 80, 1, 1), (64, 96, 2, 4),
        (64, 160, 2, 4), (128, 48, 1, 2), (128, 64, 2, 1), (128, 64, 4, 2), (128, 96, 2, 2),
        (128, 128, 1, 4), (128, 208, 1, 1), (192, 48, 1, 2), (192, 80, 1, 2), (256, 96, 2, 1),
    ),
    *_in_clusters(
        (64, 16, 1, 2), (64, 32, 2, 4), (64, 64, 4, 2), (64, 80, 1, 2), (64, 96, 2, 2),
        (128, 80, 1, 4), (128, 96, 1, 2), (128, 96, 2, 2), (128, 128, 2, 4), (128, 160, 2, 2),
        (128, 208, 1, 1), (128, 224, 2, 1), (256, 192, 2, 1), split_k=True,
    ),
)  # fmt: skip

# Products of long K.
LONG_K_CONFIGS = (Config(256, 208, cluster_n=2),)

# The same with many tiles: over many waves CTAs with fixed shares drift apart, and what they read.
MANY_TILES_CONFIGS = (
    Config(256, 192, cluster_n=2, tile_scheduler="dynamic"),
    Config(256, 192, cluster_m=2, tile_scheduler="dynamic"),
)

# Results of short K, beside those for batches and medium products and where D's transpose is
# computed: CTAs on their own, each with a tile.
SHORT_K_CONFIGS = (
    Config(64, 96, tile_scheduler="single"),
    Config(128, 16, tile_scheduler="single"),
    Config(192, 16, tile_scheduler="single"),
    Config(128, 64, tile_scheduler="single"),
    Config(64, 16, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first="a"),
)


def _along_k(tile_m: int, tile_n: int, rows: int, *clusters: int) -> Iterator[Config]:
    for ctas in clusters:
        yield Config(
            tile_m, tile_n, rows * SWIZZLE_BYTES, cluster_k=ctas, tile_scheduler="single",
            short_boxes=True,
        )  # fmt: skip


# Narrow products of long K: CTAs of a cluster share the k-tiles of each tile.
NARROW_CONFIGS = (
    *_along_k(64, 16, 2, 2, 4), *_along_k(64, 32, 2, 2, 4, 8), *_along_k(64, 48, 2, 4, 8),
    *_along_k(64, 64, 2, 2, 4, 8), *_along_k(64, 96, 1, 4, 8), *_along_k(64, 128, 1, 4, 8),
)  # fmt: skip

# The same where B is converted in registers.
NARROW_CONVERTED_CONFIGS = (
    *_along_k(16, 64, 2, 2, 4, 8), *_along_k(16, 64, 4, 2, 4, 8), *_along_k(32, 64, 2, 2, 4, 8),
    *_along_k(64, 64, 2, 2, 4, 8),
)  # fmt: skip

# The same of sums that are promoted.
NARROW_PROMOTED_CONFIGS = (*_along_k(64, 32, 1, 2, 4, 8), *_along_k(64, 64, 1, 2, 4, 8))

# Rows that must fit a tile, with fewer accumulators than the widest tiles have.
WHOLE_ROW_CONFIGS: dict[VarlenAxis | None, tuple[Config, ...]] = {
    None: (Config(64, 192), Config(128, 192, cluster_m=2)),
    "m": (Config(128, 192), Config(64, 256)),
    "k": (Config(64, 192), Config(128, 192, cluster_m=2)),
}

# With sums of a piece of a tile beside its accumulators, the widest tiles that registers hold. Of
# three warpgroups one promotes while two multiply.
PROMOTED_CONFIGS = (
    Config(192, 128, cluster_n=2),
    Config(192, 128, cluster_n=2, tile_scheduler="dynamic"),
    Config(128, 192, cluster_m=2),
    Config(128, 192, cluster_n=2),
    Config(128, 160, cluster_m=2),
    # Few rows: as `DENSE_CONFIGS` has them, with k-tiles that are promoted.
    Config(64, 32, short_boxes=True, evict_first="b"),
    Config(64, 64, short_boxes=True, evict_first="b"),
    Config(64, 64, short_boxes=True, evict_first="b", split_k=True),
)

# The same where groups along K differ in their k-tiles.
PROMOTED_K_CONFIGS = (
    Config(192, 128, cluster_n=2, tile_scheduler="dynamic"),
    Config(128, 192, cluster_m=2, tile_scheduler="dynamic"),
    Config(128, 128, cluster_m=2, tile_scheduler="dynamic"),
)

# Of bfloat16 parts in memory: half of the registers hold sums that are promoted to the others.
STORED_PARTS_CONFIGS = tuple(
    _in_clusters(
        (128, 208, 1, 2), (128, 192, 2, 1), (128, 192, 1, 2), (128, 160, 1, 2), (128, 128, 2, 1),
        (128, 128, 1, 2), (128, 64, 1, 2), (64, 192, 1, 1), (64, 128, 2, 1), (64, 64, 1, 1),
    )
)  # fmt: skip

# Of parts that kernels cut, by the grouped axis: 64 rows a warpgroup, as many columns as registers
# hold, and no pingpong.
PARTS_CONFIGS: dict[VarlenAxis | None, tuple[Config, ...]] = {
    None: (
        *_in_clusters(
            (128, 192, 2, 1), (128, 192, 1, 2), (128, 128, 2, 1), (128, 128, 1, 2),
            (128, 128, 1, 1), (128, 64, 1, 2), (64, 128, 1, 1), (64, 64, 1, 1),
        ),
        Config(64, 64, cluster_m=2, tile_scheduler="single"),
    ),
    "m": (
        Config(128, 128, cluster_m=2, tile_scheduler="dynamic"),
        Config(128, 64, tile_scheduler="dynamic"),
        Config(64, 128),
        Config(64, 64),
    ),
    "k": (
        Config(128, 128, cluster_m=2, tile_scheduler="dynamic"),
        Config(128, 64, tile_scheduler="dynamic"),
        Config(64, 64),
    ),
}  # fmt: skip

# B is converted in registers, by warpgroups that share a tile's columns. `candidates` leaves out
# those that are not legal, of groups for one.
_FEW_ROWS = [
    Config(tile_m, tile_n, rows * SWIZZLE_BYTES, short_boxes=True, evict_first="b", split_k=split_k)
    for (tile_m, rows), tile_n, split_k in product(
        ((16, 2), (16, 4), (32, 2), (32, 4), (64, 2)), (128, 256), (False, True)
    )
]
CONVERTED_CONFIGS = (
    # Few rows: a stream of B, each byte of it read once.
    *_FEW_ROWS,
    # The same of few columns: each SM has a tile of them, and all of its K.
    *(
        replace(config, evict_first="b")
        for tile_m, rows in ((16, 2), (16, 4), (32, 2), (32, 4), (64, 2))
        for config in _along_k(tile_m, 64, rows, 1)
    ),
    Config(64, 128, 2 * SWIZZLE_BYTES, tile_scheduler="dynamic"),
    Config(64, 256, 2 * SWIZZLE_BYTES, tile_scheduler="dynamic"),
    Config(64, 128, 2 * SWIZZLE_BYTES),
    Config(64, 256, 2 * SWIZZLE_BYTES),
    # More: each number that is converted is multiplied by as many rows as there are registers.
    *(
        Config(tile_m, tile_n, k_bytes, cluster_m=m, cluster_n=n, tile_scheduler=scheduler)
        for (tile_m, tile_n), k_bytes, (m, n), scheduler in product(
            ((128, 128), (128, 256), (256, 128)),
            (SWIZZLE_BYTES, 2 * SWIZZLE_BYTES),
            ((1, 1), (2, 1), (1, 2)),
            ("static", "dynamic"),
        )
    ),
)

# Of FMA units: a thread has 128 accumulators, and 256 threads reside on an SM.
SIMT_CONFIGS = tuple(
    Config(tile_m, tile_n, k_bytes, tile_scheduler="single")
    for tile_m, tile_n, k_bytes in ((128, 128, 128), (64, 128, 64), (128, 64, 64), (64, 64, 64))
)

# By the grouped axis, and whether an operand is gathered.
CONFIGS: dict[tuple[VarlenAxis | None, bool], tuple[Config, ...]] = {
    (None, False): DENSE_CONFIGS,
    ("m", False): GROUPED_M_CONFIGS,
    ("k", False): GROUPED_K_CONFIGS,
    ("m", True): GATHERED_M_CONFIGS,
    ("k", True): GATHERED_K_CONFIGS,
}
