"""Which configurations are considered for which problems: by the cost model, and by the tuner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Literal, get_args

from ..gemm.dtypes import DTYPES, HALVES
from ..gemm.legality import CLUSTERS
from ..gemm.problem import GemmProblem
from ..gemm.problem_type import ProblemType
from ..gemm.spec import TileScheduler, WarpSchedule
from ..gemm.tma_box import SWIZZLE_BYTES
from .configs import (
    BATCH_CONFIGS,
    CONFIGS,
    CONVERTED_CONFIGS,
    LONG_K_CONFIGS,
    MANY_TILES_CONFIGS,
    MEDIUM_CONFIGS,
    MORE_CONFIGS,
    NARROW_CONFIGS,
    NARROW_CONVERTED_CONFIGS,
    NARROW_PROMOTED_CONFIGS,
    PARTS_CONFIGS,
    PROMOTED_CONFIGS,
    PROMOTED_K_CONFIGS,
    SHORT_K_CONFIGS,
    SIMT_CONFIGS,
    STORED_PARTS_CONFIGS,
    TRANSPOSED_CONFIGS,
    WHOLE_ROW_CONFIGS,
    WIDE_STORE_CONFIGS,
    Config,
)

# Medium products: of more rows and columns, of up to so many elements of D, and of K from.
MEDIUM_SIDE, MEDIUM_ELEMENTS, MEDIUM_K = 64, 6 * 2**20, 512
# Short K and long K, and elements of D that are many. Measured, where the model would choose tiles
# of 256x208 or dynamic ones of 256x192: of 15 products with K from 2,000 these are 1.02 times as
# fast as others, of 54 with less 0.94 times. Dynamic tiles beside static ones of the same size, in
# two to four waves: 0.92 times as fast (35 pairs); in over 25: 1.006 times (95).
SHORT_K, LONG_K, MANY_ELEMENTS = 384, 2000, 2**26
# Narrow products: of a side of up to so many rows or columns, of so many elements of D, of all
# matrices, and that move up to so many bytes, with weights fewer; of K from, by the bytes of A's
# elements. Measured, of 150 products of 16 bits with up to 2^19 elements and K from 1024: 82 of
# these have another kernel for it, 1.23 times as fast; sides over 128 gain 0.96 times, shorter K
# 1.00. Of weights those over 20 MB are 0.95 times as fast (14), others 1.31 times (93).
NARROW_SIDE, NARROW_ELEMENTS, NARROW_BYTES, NARROW_CONVERTED_BYTES = 128, 2**18, 60e6, 20e6
NARROW_K = {1: 2048, 2: 1408, 4: 1024}

ConfigsOf = Callable[[ProblemType], tuple[Config, ...]]


def model_configs(problem_type: ProblemType) -> tuple[Config, ...]:
    """Returns the configurations of `model_specs`, legal or not."""
    considered, epilogue = usual_configs(problem_type), problem_type.epilogue
    if epilogue and epilogue.needs_whole_rows:
        considered += WHOLE_ROW_CONFIGS[problem_type.grouped]
    return considered


def wide_store_configs(problem_type: ProblemType) -> tuple[Config, ...]:
    """Returns configurations that store wider lines, for D with `splits_sectors`, legal or not."""
    narrow = DTYPES[problem_type.d_dtype].itemsize < 4 and problem_type.d_major == "n"
    return WIDE_STORE_CONFIGS if narrow and _is_dense_half(problem_type) else ()


def _of_dense_halves(configs: tuple[Config, ...]) -> ConfigsOf:
    """Returns the function of a type that has these configurations, legal or not, if it is one."""
    return lambda problem_type: configs if _is_dense_half(problem_type) else ()


batch_configs = _of_dense_halves(BATCH_CONFIGS)
medium_configs = _of_dense_halves(MEDIUM_CONFIGS)
short_k_configs = _of_dense_halves(SHORT_K_CONFIGS)
long_k_configs = _of_dense_halves(LONG_K_CONFIGS)
many_tiles_configs = _of_dense_halves(MANY_TILES_CONFIGS)


def has_short_k(problem: GemmProblem) -> bool:
    """Whether a product that is none of a batch has K up to `SHORT_K`."""
    return problem.l == 1 and problem.k <= SHORT_K


def has_long_k(problem: GemmProblem) -> bool:
    """Whether a product, or each of a batch, has K from `LONG_K`."""
    return problem.k >= LONG_K


def has_many_tiles(problem: GemmProblem) -> bool:
    """Whether K is long and D has tiles of 256x192 for about ten waves."""
    return has_long_k(problem) and problem.l * problem.m * problem.n >= MANY_ELEMENTS


def is_medium(problem: GemmProblem) -> bool:
    """Whether D has tiles for about one wave, neither side is short and K is not."""
    p, columns = problem, problem.n * problem.graph.accumulators
    sides = min(p.m, columns) > MEDIUM_SIDE and p.m * columns <= MEDIUM_ELEMENTS
    return p.l == 1 and sides and p.k >= MEDIUM_K


def narrow_configs(problem_type: ProblemType) -> tuple[Config, ...]:
    """Returns configurations for narrow products (`is_narrow`), legal or not.

    Of few rows they stream the other operand: B, or A where the kernel computes D's transpose.
    """
    if problem_type.grouped or problem_type.bf16_terms or problem_type.simt_width:
        return ()
    if problem_type.b_in_registers:
        return tuple(replace(c, evict_first="b") for c in NARROW_CONVERTED_CONFIGS)
    configs = NARROW_PROMOTED_CONFIGS if problem_type.promoted else NARROW_CONFIGS
    streamed: Literal["a", "b"] = "b" if problem_type.d_major == "n" else "a"
    return (*(replace(c, evict_first=streamed) for c in configs), *configs)


def is_narrow(problem: GemmProblem) -> bool:
    """Whether D has few tiles of long K, as of a router, or of a factor of low rank."""
    p = problem
    small = min(p.m, p.n) <= NARROW_SIDE and p.l * p.m * p.n <= NARROW_ELEMENTS
    a, b = DTYPES[p.a_dtype], DTYPES[p.b_dtype]
    most_bytes = NARROW_CONVERTED_BYTES if b.bits < a.bits else NARROW_BYTES
    return small and p.k >= NARROW_K[a.itemsize] and p.bytes <= most_bytes


def _is_dense_half(problem_type: ProblemType) -> bool:
    plain = problem_type.grouped is None and not problem_type.b_in_registers
    return plain and problem_type.a_dtype in HALVES


def usual_configs(problem_type: ProblemType) -> tuple[Config, ...]:
    """Returns those of a type's arithmetic and groups, whatever its epilogue is."""
    if problem_type.simt_width:
        return SIMT_CONFIGS
    if problem_type.bf16_terms:
        in_memory = problem_type.a_dtype != "float32"
        return STORED_PARTS_CONFIGS if in_memory else PARTS_CONFIGS[problem_type.grouped]
    if problem_type.b_in_registers:
        return CONVERTED_CONFIGS
    if problem_type.d_major == "m":
        return TRANSPOSED_CONFIGS
    configs = CONFIGS[problem_type.grouped, problem_type.gathered is not None]
    if problem_type.promoted:
        configs += PROMOTED_K_CONFIGS if problem_type.grouped == "k" else PROMOTED_CONFIGS
        # While a warpgroup promotes its sums another one must multiply.
        return tuple(dict.fromkeys(c for c in configs if c.warp_schedule != "pingpong"))
    measured = problem_type.a_dtype in HALVES or problem_type.rounds_operands
    return configs + MORE_CONFIGS if measured and problem_type.grouped is None else configs


# Sets of configurations, by type, and the problems whose kernels are chosen from them.
CONFIG_SETS: dict[ConfigsOf, Callable[[GemmProblem], bool]] = {
    model_configs: lambda _: True,
    wide_store_configs: lambda problem: problem.splits_sectors,
    batch_configs: lambda problem: problem.l > 1 or has_short_k(problem),
    medium_configs: lambda problem: is_medium(problem) or has_short_k(problem),
    short_k_configs: has_short_k,
    long_k_configs: has_long_k,
    many_tiles_configs: has_many_tiles,
    narrow_configs: is_narrow,
}


def config_sets(problem: GemmProblem) -> list[ConfigsOf]:
    return [configs_of for configs_of, serves in CONFIG_SETS.items() if serves(problem)]


# What the tuner tries, each with each.
TUNER_TILES = {  # tile_n for each tile_m
    64: (16, 32, 48, 64, 96, 128, 160, 192, 256),
    128: (16, 32, 64, 96, 128, 160, 176, 192, 208, 224, 256),
    192: (64, 96, 128, 160, 192),
    256: (32, 64, 96, 128, 160, 192),
}
TUNER_TILE_SCHEDULERS: tuple[tuple[TileScheduler, bool], ...] = (  # and whether K is split
    ("static", False), ("single", False), ("dynamic", False), ("static", True),
)  # fmt: skip
TUNER_K_BYTES = (SWIZZLE_BYTES, 2 * SWIZZLE_BYTES)
TUNER_EPI_TILES_N = (None, 16, 32, 64)


def tuner_configs() -> Iterator[Config]:
    """Yields what the tuner tries, legal or not."""
    tiles = [(tile_m, tile_n) for tile_m, widths in TUNER_TILES.items() for tile_n in widths]
    policies = list(product(CLUSTERS, get_args(WarpSchedule), TUNER_TILE_SCHEDULERS))
    for tile, (cluster, schedule, (scheduler, split_k)), k_bytes, epi_tile_n in product(
        tiles, policies, TUNER_K_BYTES, TUNER_EPI_TILES_N
    ):
        yield Config(*tile, k_bytes, *cluster, schedule, scheduler, epi_tile_n, split_k=split_k)
    for tile_n in TUNER_TILES[64]:
        for k_bytes, (scheduler, split_k) in product(TUNER_K_BYTES, TUNER_TILE_SCHEDULERS):
            if not split_k:
                stream = Config(64, tile_n, k_bytes, tile_scheduler=scheduler, short_boxes=True)
                yield from (stream, replace(stream, evict_first="b"))
    yield from NARROW_CONFIGS
