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

from ..problem import ITEMSIZE, Major
from ..spec import (
    SMEM_BARRIERS,
    SMEM_LIMIT,
    GemmSpec,
    TileScheduler,
    Traversal,
    WarpSchedule,
    violations,
)

MIN_STAGES = 3  # with fewer, the load of a stage cannot hide behind the others' math
MAX_STAGES = 12  # deeper rings hold more bytes than the memory's latency times its bandwidth
MIN_SWIZZLE = 64  # bytes; narrower rows of MN-major operands cost shared-memory bandwidth

TRAVERSALS = tuple(Traversal(along, s) for s in (8, 4, 16, 2, 1) for along in ("m", "n"))


@dataclass(frozen=True)
class Config:
    """A kernel but for dtypes, layout and the depth of its rings."""

    tile_m: int
    tile_n: int
    tile_k: int = 64
    cluster_m: int = 1
    cluster_n: int = 1
    warp_schedule: WarpSchedule = "cooperative"
    tile_scheduler: TileScheduler = "static"
    epi_tile_n: int | None = None  # None: the widest of 32 and 16 that divides tile_n


@dataclass(frozen=True)
class OperandTypes:
    """What a problem fixes of its kernel."""

    ab_dtype: str
    d_dtype: str
    a_major: Major
    b_major: Major


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


@lru_cache(maxsize=64)
def model_specs(types: OperandTypes) -> tuple[GemmSpec, ...]:
    """Returns the kernels that the cost model chooses among."""
    return _legal(MODEL_CONFIGS, types)


@lru_cache(maxsize=64)
def tuner_specs(types: OperandTypes) -> tuple[GemmSpec, ...]:
    """Returns the kernels that the tuner chooses among, `model_specs` first."""
    specs = dict.fromkeys(_legal(MODEL_CONFIGS, types))
    specs |= dict.fromkeys(_legal(_tuner_configs(), types))
    return tuple(specs)


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

    Two epilogue stages are set aside, operand stages take what they can, and two more epilogue
    stages what is left: a store is then read while the next is written.
    """
    epi_tile_n = config.epi_tile_n or (32 if config.tile_n % 32 == 0 else 16)
    shape = GemmSpec(
        types.ab_dtype, types.d_dtype, types.a_major, types.b_major,
        config.tile_m, config.tile_n, config.tile_k, config.cluster_m, config.cluster_n,
        config.warp_schedule, config.tile_scheduler, MIN_STAGES, epi_tile_n, epi_stages=2,
    )  # fmt: skip
    if violations(shape):
        return None
    staged = shape.math_warpgroups * shape.epi_stage_bytes
    room = SMEM_LIMIT - SMEM_BARRIERS - 2 * staged
    num_stages = min(MAX_STAGES, room // shape.stage_bytes)
    left = room - num_stages * shape.stage_bytes
    epi_stages = 4 if left >= 2 * staged else 2
    return replace(shape, num_stages=num_stages, epi_stages=epi_stages)


def worthwhile(spec: GemmSpec) -> bool:
    """Returns whether operands arrive in rows of `MIN_SWIZZLE` bytes, or as wide as the tile."""
    a_extent = spec.tile_k if spec.a_major == "k" else spec.tile_m
    b_extent = spec.tile_k if spec.b_major == "k" else spec.tile_n
    itemsize = ITEMSIZE[spec.ab_dtype]
    return all(
        box.swizzle >= min(MIN_SWIZZLE, extent * itemsize)
        for box, extent in ((spec.a_box, a_extent), (spec.b_box, b_extent))
    )
