"""The kernels that are worth considering.

Two sets. `model_specs` is small and closed: what the cost model may choose with no measurement,
so that all of it can be built ahead. `tuner_specs` is wide: what a measurement may find better.
A configuration names tile, cluster and schedule; `filled_spec` gives it as many stages as fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.legality import violations
from ..gemm.problem import ITEMSIZE, GemmProblem, Major, VarlenAxis
from ..gemm.spec import SMEM_LIMIT, GemmSpec, RasterOrder, TileScheduler, WarpSchedule

MIN_STAGES = 3  # with fewer, the load of a stage cannot hide behind the others' math
MAX_STAGES = 12  # deeper rings hold more bytes than the memory's latency times its bandwidth
RING_BEFORE_LOADS = 4  # operand stages that more epilogue stages must leave
LOAD_STAGES = 4  # of the epilogue's matrices: they hide the memory's latency behind fewer waits
MIN_SWIZZLE = 64  # bytes; narrower rows of MN-major operands cost shared-memory bandwidth

TRAVERSALS = tuple(RasterOrder(along, s) for s in (8, 4, 16, 2, 1) for along in ("m", "n"))


@dataclass(frozen=True)
class Config:
    """A kernel but for dtypes, layout, epilogue and the depth of its rings."""

    tile_m: int
    tile_n: int
    tile_k: int = 64
    cluster_m: int = 1
    cluster_n: int = 1
    warp_schedule: WarpSchedule = "cooperative"
    tile_scheduler: TileScheduler = "static"
    epi_tile_n: int | None = None  # None: the first of `_widths` that is legal

    @classmethod
    def of(cls, spec: GemmSpec) -> Config:
        """Returns the configuration of a kernel."""
        s = spec
        return cls(
            s.tile_m, s.tile_n, s.tile_k, s.cluster_m, s.cluster_n, s.warp_schedule,
            s.tile_scheduler, s.epi_tile_n,
        )  # fmt: skip


@dataclass(frozen=True)
class OperandTypes:
    """What a problem fixes of its kernel."""

    ab_dtype: str
    d_dtype: str
    a_major: Major
    b_major: Major
    epilogue: EpilogueGraph | None = None
    grouped: VarlenAxis | None = None
    gathered: Literal["a", "b"] | None = None

    @classmethod
    def of(cls, problem: GemmProblem) -> OperandTypes:
        p = problem
        groups = (p.groups.axis, p.groups.gathered) if p.groups else (None, None)
        return cls(p.ab_dtype, p.d_dtype, p.a.major, p.b.major, p.epilogue, *groups)

    @classmethod
    def of_spec(cls, spec: GemmSpec) -> OperandTypes:
        s = spec
        return cls(
            s.ab_dtype, s.d_dtype, s.a_major, s.b_major, s.epilogue, s.grouped, s.gathered
        )  # fmt: skip

    @property
    def plain(self) -> OperandTypes:
        """The same of the product that a measured table holds."""
        return replace(self, epilogue=None, gathered=None)


# Configurations with N and M exchanged, where they differ, serve the transposed problem.
MODEL_CONFIGS = (
    # Large products: 128 accumulators a thread or more, and multicast: most math per byte loaded.
    Config(128, 256, cluster_m=2),
    Config(128, 256, cluster_n=2),
    Config(256, 128, cluster_n=2),
    # Rows that are no multiple of a line of L2 cost twice their lines, so share all of them.
    Config(128, 256, cluster_m=2, cluster_n=2, epi_tile_n=64),
    # Extents that the tiles above cover badly.
    Config(256, 160, cluster_n=2),
    Config(256, 192, cluster_n=2),
    Config(128, 192, cluster_m=2, warp_schedule="pingpong"),
    # Short K, or a better fit of waves: one warpgroup stores while the other multiplies.
    Config(128, 128, cluster_m=2, warp_schedule="pingpong"),
    Config(128, 128, cluster_n=2, warp_schedule="pingpong"),
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
    Config(64, 32, 128),
)


# Rows of A are cut into groups. Pairs of CTAs share columns of B, most of what they load.
GROUPED_M_CONFIGS = (
    # Many rows a group. Tiles without rows in their second half take half the time of others: a
    # counter evens that out; measured on an H200, 2 to 8 % of a fixed stride's time.
    Config(128, 192, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(128, 256, cluster_m=2, tile_scheduler="dynamic"),
    Config(128, 128, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(256, 128, cluster_n=2, tile_scheduler="dynamic"),
    # Few rows a group: matrices of B stream through deep rings.
    Config(64, 256),
    Config(64, 128, cluster_n=2),
    Config(64, 128),
    Config(64, 64),
)
GROUPED_K_CONFIGS = (
    # Groups differ in their k-tiles.
    Config(128, 192, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(128, 256, cluster_m=2, tile_scheduler="dynamic"),
    Config(128, 160, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
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
    Config(64, 256),
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

# Rows that must fit a tile, with fewer accumulators than the widest tiles have.
WHOLE_ROW_CONFIGS: dict[VarlenAxis | None, tuple[Config, ...]] = {
    None: (Config(64, 192), Config(128, 192, cluster_m=2)),
    "m": (Config(128, 192),),
    "k": (Config(64, 192), Config(128, 192, cluster_m=2)),
}


@lru_cache(maxsize=1024)
def model_specs(types: OperandTypes) -> tuple[GemmSpec, ...]:
    """Returns the kernels that the cost model chooses among."""
    whole_rows = types.epilogue is not None and types.epilogue.needs_whole_rows
    configs = _configs(types)
    return _legal(configs + (WHOLE_ROW_CONFIGS[types.grouped] if whole_rows else ()), types)


@lru_cache(maxsize=64)
def tuner_specs(types: OperandTypes) -> tuple[GemmSpec, ...]:
    """Returns the kernels that the tuner chooses among, `model_specs` first."""
    specs = dict.fromkeys(_legal(_configs(types), types))
    specs |= dict.fromkeys(_legal(_tuner_configs(), types))
    return tuple(specs)


def _configs(types: OperandTypes) -> tuple[Config, ...]:
    if types.gathered:
        return GATHERED_M_CONFIGS if types.grouped == "m" else GATHERED_K_CONFIGS
    return {None: MODEL_CONFIGS, "m": GROUPED_M_CONFIGS, "k": GROUPED_K_CONFIGS}[types.grouped]


def _tuner_configs() -> Iterable[Config]:
    tiles = [(64, n) for n in (16, 32, 48, 64, 96, 128, 160, 192, 256)]
    tiles += [(128, n) for n in (16, 32, 64, 96, 128, 160, 176, 192, 208, 224, 256)]
    tiles += [(192, n) for n in (64, 96, 128, 160, 192)]
    tiles += [(256, n) for n in (32, 64, 96, 128, 160, 192)]
    clusters = ((1, 1), (2, 1), (1, 2), (2, 2))
    schedules = product(("cooperative", "pingpong"), ("static", "single", "dynamic"))
    for (tile_m, tile_n), (cm, cn), (warps, scheduler), tile_k, epi_tile_n in product(
        tiles, clusters, tuple(schedules), (64, 128), (None, 16, 32, 64)
    ):
        yield Config(tile_m, tile_n, tile_k, cm, cn, warps, scheduler, epi_tile_n)


def _legal(configs: Iterable[Config], types: OperandTypes) -> tuple[GemmSpec, ...]:
    specs = (filled_spec(config, types) for config in configs)
    return tuple(spec for spec in specs if spec is not None and worthwhile(spec))


def filled_spec(config: Config, types: OperandTypes) -> GemmSpec | None:
    """Returns the kernel of `config` with its shared memory filled, or None where none fits.

    Two epilogue stages of each kind are set aside, and operand stages take what they can. Where
    the epilogue loads matrices, the last operand stage makes room for more stages of them, as long
    as `RING_BEFORE_LOADS` remain. What is left goes to loads first, then to two more epilogue
    stages: a store is then read while the next is written.
    """
    for epi_tile_n in _widths(config, types):
        least = GemmSpec(
            types.ab_dtype, types.d_dtype, types.a_major, types.b_major,
            config.tile_m, config.tile_n, config.tile_k, config.cluster_m, config.cluster_n,
            config.warp_schedule, config.tile_scheduler, MIN_STAGES, epi_tile_n, epi_stages=2,
            epilogue=types.epilogue,
            epi_load_stages=2 if types.epilogue and types.epilogue.loaded else 0,
            grouped=types.grouped, gathered=types.gathered,
        )  # fmt: skip
        if not violations(least):
            return _filled(least)
    return None


def _widths(config: Config, types: OperandTypes) -> tuple[int, ...]:
    """Returns the columns that an epilogue tile may have, the preferred first.

    Measured on an H200 with tiles of 128x256: what a cooperative epilogue loads is waited for less
    often in wide tiles; 1 % of a product of 4096^3.
    """
    if config.epi_tile_n:
        return (config.epi_tile_n,)
    loads = types.epilogue is not None and bool(types.epilogue.loaded)
    return (64, 32, 16) if loads and config.warp_schedule == "cooperative" else (32, 16)


def _filled(least: GemmSpec) -> GemmSpec:
    room = (SMEM_LIMIT - least.smem_bytes) // least.stage_bytes
    spec = replace(least, num_stages=min(MAX_STAGES, MIN_STAGES + room))
    if any(operand.kind == "matrix" for operand in spec.graph.operands):
        for num_stages in (spec.num_stages, spec.num_stages - 1):
            deeper = replace(spec, num_stages=num_stages, epi_load_stages=LOAD_STAGES)
            if num_stages >= min(RING_BEFORE_LOADS, spec.num_stages) and not violations(deeper):
                spec = deeper
                break
    deeper = replace(spec, epi_stages=4)
    return spec if not spec.graph.matrices or violations(deeper) else deeper


def worthwhile(spec: GemmSpec) -> bool:
    """Returns whether operands arrive in rows of `MIN_SWIZZLE` bytes, or as wide as the tile."""
    a_extent = spec.tile_k if spec.a_major == "k" else spec.tile_m
    b_extent = spec.tile_k if spec.b_major == "k" else spec.d_tile_n
    itemsize = ITEMSIZE[spec.ab_dtype]
    return all(
        box.swizzle >= min(MIN_SWIZZLE, extent * itemsize)
        for box, extent in ((spec.a_box, a_extent), (spec.b_box, b_extent))
    )
