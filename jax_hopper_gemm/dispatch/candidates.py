"""The kernels that are worth considering for a type of problems, made of `config_sets`.

`model_specs` is small and closed: what the cost model may choose with no measurement, so that all
of it can be built ahead. `tuner_specs` is wide: what a measurement may find better.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from typing import Any

from ..gemm import simt
from ..gemm.dtypes import DTYPES, HALVES, RESULTS
from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.grid import k_split
from ..gemm.legality import IN_TURNS_STAGES, configuration_violations, violations
from ..gemm.problem import GemmProblem, Major, VarlenAxis
from ..gemm.problem_type import ProblemType
from ..gemm.raster import RasterOrder
from ..gemm.smem import SMEM_LIMIT
from ..gemm.spec import GemmSpec
from ..gemm.tma_box import SWIZZLE_BYTES
from ..gemm.type_legality import GATHERABLE
from .config_sets import (
    CONFIG_SETS,
    ConfigsOf,
    config_sets,
    model_configs,
    tuner_configs,
    usual_configs,
)
from .configs import RASTER_ORDERS, Config
from .device import Device
from .legality import device_violations, is_legal, no_kernels, pairing_violations
from .several import Several, least
from .table import tables_of

MIN_STAGES = 3  # with fewer, the load of a stage cannot hide behind the others' math
MAX_STAGES = 12  # deeper rings hold more bytes than the memory's latency times its bandwidth
# Of k-tiles of 256 that warpgroups take in turns. Measured, 1x8192x8192 of int4: 8, 10 and 12
# stages take 12.3, 12.5 and 12.9 us, 6 take 14.1; with 32 rows of int8 6 take 0.7 of 4's time.
MAX_STAGES_IN_TURNS = 8
ENOUGH_STAGES = 4  # of operands: they come before a preferred epilogue tile and more of its stages
LOAD_STAGES = 4  # of the epilogue's matrices: they hide the memory's latency behind fewer waits
WIDE_EPI_TILE = 64  # columns of an epilogue tile that make up for a ring of `MIN_STAGES`
MIN_SWIZZLE = 64  # bytes; narrower rows of MN-major operands cost shared-memory bandwidth

# Dtypes of operands and results. Kernels of others are built when they are first needed.
BUILT_AHEAD = tuple(product(HALVES, RESULTS))

LARGE_TILE = 128 * 192  # elements of D: those whose CTAs must not wait for one another

AXES: tuple[VarlenAxis | None, ...] = (None, "m", "k")
A_MAJORS: tuple[Major, ...] = ("k", "m")
B_MAJORS: tuple[Major, ...] = ("n", "k")


@lru_cache(maxsize=1024)
def model_specs(
    problem_type: ProblemType, configs_of: ConfigsOf = model_configs
) -> tuple[GemmSpec, ...]:
    """Returns the kernels of a type that the cost model may choose for any problem of it.

    Or those of another one of `CONFIG_SETS`, which it may choose for some (`config_sets`).
    """
    return _legal(configs_of(problem_type), problem_type)


def all_model_specs(problem_type: ProblemType) -> tuple[GemmSpec, ...]:
    """Returns the kernels of a type that the cost model may choose for some problem."""
    sets = (model_specs(problem_type, configs_of) for configs_of in CONFIG_SETS)
    return tuple(dict.fromkeys(chain.from_iterable(sets)))


@lru_cache(maxsize=4096)
def types_of(problem: GemmProblem) -> tuple[ProblemType, ...]:
    """Returns the types of kernels that may run a problem: its own, and that of its transpose.

    Of float32 as bfloat16 parts also those that read parts from memory, but of a matrix of a stack.
    """
    sides = [problem, problem.transposed] if problem.has_like_sides else [problem]
    if problem.bf16_terms and not (problem.reads_parts or problem.indexed):
        sides += [side.in_parts for side in sides]
    return tuple(ProblemType.of(side) for side in sides if is_legal(side))


def considered_specs(problem: GemmProblem) -> list[GemmSpec]:
    """Returns the kernels that the cost model chooses among for a problem."""
    pairs = product(config_sets(problem), types_of(problem))
    return [spec for configs_of, kind in pairs for spec in model_specs(kind, configs_of)]


@lru_cache(maxsize=64)
def tuner_specs(problem_type: ProblemType) -> tuple[GemmSpec, ...]:
    """Returns the kernels that the tuner chooses among, `model_specs` first."""
    specs = dict.fromkeys(_legal(usual_configs(problem_type), problem_type))
    specs |= dict.fromkeys(_legal(tuner_configs(), problem_type))
    return tuple(specs)


def _legal(considered: Iterable[Config], problem_type: ProblemType) -> tuple[GemmSpec, ...]:
    """Returns the kernels of configurations that are legal and `worthwhile`.

    Shared memory is filled alike whichever axis operands lie along, but of FMA units, which pad
    stages, and so it is filled once.
    """
    alike = along_k(problem_type)
    if problem_type.grouped == "k" or problem_type.simt_width or no_kernels(alike):
        alike = problem_type
    specs = _filled_specs(tuple(considered), alike)
    a_major, b_major = problem_type.a_major, problem_type.b_major
    stored = (spec.varied(a_major=a_major, b_major=b_major) for spec in specs)
    return tuple(filter(worthwhile, stored))


def along_k(problem_type: ProblemType) -> ProblemType:
    """Returns the type with both operands along K, if the same kernels multiply these."""
    alike = replace(problem_type, a_major="k", b_major="k")
    return alike if alike.b_in_registers == problem_type.b_in_registers else problem_type


@lru_cache(maxsize=64)  # of the tuner's configurations it holds thousands
def _filled_specs(
    considered: tuple[Config, ...], problem_type: ProblemType
) -> tuple[GemmSpec, ...]:
    return tuple(filter(None, (filled_spec(config, problem_type) for config in considered)))


def filled_spec(config: Config, problem_type: ProblemType) -> GemmSpec | None:
    """Returns the kernel of `config` with its shared memory filled, or None where none fits.

    Two epilogue stages of each kind are set aside, and operand stages take what they can; where K
    is in groups, four of what is stored, if enough of operands remain. Where the epilogue loads
    matrices, the last operand stage makes room for more stages of them, as long as `ENOUGH_STAGES`
    remain. What is left goes to loads first, then to two more epilogue stages: a store is then read
    while the next is written. Where warpgroups that convert B take k-tiles in turns, only
    `MAX_STAGES_IN_TURNS` are enough.
    """
    if no_kernels(problem_type):
        return None
    if problem_type.simt_width:
        alike = replace(config, warp_schedule="cooperative", short_boxes=False, evict_first=None)
        num_stages = simt.NUM_STAGES[config.k_bytes // simt.ITEMSIZE]
        spec = with_rings(alike, problem_type, num_stages=num_stages)
        return None if any(configuration_violations(spec)) else spec
    loads = problem_type.epilogue is not None and bool(problem_type.epilogue.loaded)
    narrow = None
    for epi_tile_n in _widths(config, problem_type, loads):
        fewest = with_rings(
            config, problem_type, num_stages=MIN_STAGES, epi_tile_n=epi_tile_n, epi_stages=2,
            epi_load_stages=2 if loads else 0,
        )  # fmt: skip
        if fewest.k_in_turns:
            fewest = fewest.varied(num_stages=IN_TURNS_STAGES)
        if any(configuration_violations(fewest)):
            continue
        spec = _filled(fewest)
        if spec.num_stages >= _enough_stages(spec) or spec.epi_tile_n >= WIDE_EPI_TILE:
            return spec
        if narrow is None or spec.num_stages > narrow.num_stages:
            narrow = spec
    return narrow


def with_rings(config: Config, problem_type: ProblemType, **rings: Any) -> GemmSpec:
    """Returns the kernel of a configuration, legal or not, with these rings and epilogue tile."""
    named = vars(problem_type) | vars(config)
    k_bytes, _ = named.pop("k_bytes"), named.pop("epi_tile_n")
    named.pop("b_in_registers", None)  # where it is cached
    return GemmSpec(**named, tile_k=k_bytes // DTYPES[problem_type.a_dtype].itemsize, **rings)


def _widths(config: Config, problem_type: ProblemType, loads: bool) -> tuple[int, ...]:
    """Returns the columns that an epilogue tile may have, the preferred first.

    Measured on an H200 with tiles of 128x256: what a cooperative epilogue `loads` is waited for
    less often in wide tiles; 1 % of a product of 4096^3. A fourth stage of operands is worth more
    than 32 columns in place of 16: 1,239 us in place of 1,481 for 8192x4096x14336, two matrices
    loaded. Of promoted sums over groups along K two warpgroups take 4 to 7 % less with 64 columns
    and a stage of operands less, three 2 % more.
    """
    if config.epi_tile_n:
        return (config.epi_tile_n,)
    short_k = problem_type.promoted and problem_type.grouped == "k" and config.tile_m != 192
    cooperative = config.warp_schedule == "cooperative"
    wide = short_k or loads and cooperative and not problem_type.b_in_registers
    return (64, 32, 16) if wide else (32, 16)


def _enough_stages(spec: GemmSpec) -> int:
    return MAX_STAGES_IN_TURNS if spec.k_in_turns and spec.b_in_registers else ENOUGH_STAGES


def _filled(fewest: GemmSpec) -> GemmSpec:
    s, warpgroups = fewest, fewest.math_warpgroups
    if s.grouped == "k":  # K is short, and a tile waits for stores of those before
        deeper = s.varied(epi_stages=4)
        least = deeper if s.promoted else deeper.varied(num_stages=ENOUGH_STAGES)
        s = deeper if least.smem_bytes <= SMEM_LIMIT else s
    free = SMEM_LIMIT - s.smem_bytes
    long = s.k_in_turns and s.b_in_registers and s.tile_k * s.a_itemsize > 2 * SWIZZLE_BYTES
    most = MAX_STAGES_IN_TURNS if long else MAX_STAGES
    step = 2 if s.k_in_turns else 1
    more = min(most - s.num_stages, free // s.stage_bytes) // step * step
    stages = s.num_stages + more
    free -= more * s.stage_bytes
    load_stages, epi_stages = s.epi_load_stages, s.epi_stages
    if any(operand.kind == "matrix" for operand in s.graph.operands):
        of_loads = (LOAD_STAGES - load_stages) * warpgroups * s.load_stage_bytes
        for given in (0, step):  # operand stages that make room
            room = free + given * s.stage_bytes - of_loads
            if room >= 0 and stages - given >= min(_enough_stages(s), stages):
                stages, load_stages, free = stages - given, LOAD_STAGES, room
                break
    if s.graph.matrices and epi_stages == 2 and 2 * warpgroups * s.epi_stage_bytes <= free:
        epi_stages += 2
    return s.varied(num_stages=stages, epi_load_stages=load_stages, epi_stages=epi_stages)


def worthwhile(spec: GemmSpec | Several) -> Any:
    """Returns whether operands arrive in rows of `MIN_SWIZZLE` bytes, or as wide as the tile."""
    s: Any = spec
    a_bytes = (s.tile_k if s.a_major == "k" else s.tile_m) * s.a_itemsize
    line = s.tile_k if s.b_major == "k" else s.d_tile_n
    b_bytes = DTYPES[s.b_dtype].nbytes(line)
    wide_a = s.a_box.swizzle >= least(MIN_SWIZZLE, a_bytes)
    return wide_a & (s.b_box.swizzle >= least(MIN_SWIZZLE, b_bytes))


def refilled_spec(plain: GemmSpec, problem_type: ProblemType) -> GemmSpec | None:
    """Returns a measured kernel's configuration for an epilogue or gathered rows, if it fits."""
    spec = filled_spec(replace(Config.of(plain), epi_tile_n=None), problem_type)
    return spec if spec is not None and worthwhile(spec) else None


def has_large_shares(spec: GemmSpec) -> bool:
    """Whether CTAs have fixed shares of large tiles."""
    fixed = spec.persistent and not spec.dynamic and not spec.grouped
    return fixed and spec.tile_m * spec.tile_n >= LARGE_TILE


def dynamic_spec(spec: GemmSpec) -> GemmSpec | None:
    """Returns the kernel with the dynamic scheduler if it has large shares, and registers."""
    dynamic = replace(spec, tile_scheduler="dynamic")
    return dynamic if has_large_shares(spec) and not violations(dynamic) else None


def legal_specs(problem: GemmProblem, device: Device) -> list[tuple[GemmSpec, RasterOrder]]:
    """Returns every kernel and order of tiles that the tuner may try on `problem`."""
    if device_violations(device):
        return []
    specs = (spec for kind in types_of(problem) for spec in tuner_specs(kind))
    legal = (spec for spec in specs if not pairing_violations(problem, spec))
    legal = (s for s in legal if not s.split_k or k_split(problem, s, device.num_sms).ranges)
    return list(product(legal, RASTER_ORDERS))


def table_specs(device: Device, dtypes: Iterable[tuple[str, str]] | None = None) -> list[GemmSpec]:
    """Returns every kernel without an epilogue that `choose` can return on `device`, once each.

    Dense ones first, then grouped ones, then what tables hold besides. `dtypes` are pairs, of A's
    and B's dtype and of D's, to restrict to; None means `BUILT_AHEAD`.
    """
    if device_violations(device):
        return []
    pairs = BUILT_AHEAD if dtypes is None else list(dtypes)
    specs: dict[GemmSpec, None] = {}
    for axis, (dtype, d_dtype) in product(AXES, pairs):
        for problem_type in problem_types(dtype, d_dtype, None, axis):
            specs |= dict.fromkeys(all_model_specs(problem_type))
    for measured in measured_specs(device):
        if (measured.a_dtype, measured.d_dtype) in pairs:
            plain = ProblemType.of_spec(measured)
            gathering = (replace(plain, gathered=g) for g in GATHERABLE[plain.grouped])
            refilled = (refilled_spec(measured, problem_type) for problem_type in gathering)
            specs |= dict.fromkeys((measured, *(spec for spec in refilled if spec)))
    return specs_on(device, specs)


def problem_types(
    dtype: str, d_dtype: str, graph: EpilogueGraph | None, axis: VarlenAxis | None
) -> list[ProblemType]:
    """Returns the types of legal problems with these dtypes, epilogue and grouped axis."""
    choices = product(A_MAJORS, B_MAJORS, (None, *GATHERABLE[axis]))
    types = [
        ProblemType(dtype, dtype, d_dtype, a, b, epilogue=graph, grouped=axis, gathered=rows)
        for a, b, rows in choices
    ]
    types += [replace(kind, epilogue=graph and graph.transposed, d_major="m") for kind in types]
    return [kind for kind in types if not no_kernels(kind)]


def measured_specs(device: Device) -> list[GemmSpec]:
    tables = tables_of(replace(device, comm_overlap=False))
    return [entry.spec for table in tables for entry in table.entries.values()]


def specs_on(device: Device, specs: Iterable[GemmSpec]) -> list[GemmSpec]:
    """Returns the kernels that `choose` returns on `device` where tables and model name these."""
    if device.comm_overlap:
        specs = [dynamic_spec(spec) or spec for spec in specs]
    staying = (replace(spec, evict_first=None) for spec in specs if spec.evict_first)
    return list(dict.fromkeys((*specs, *staying)))
