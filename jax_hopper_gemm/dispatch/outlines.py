"""Outlines of kernels: the configurations that a problem may choose among, estimated all at once.

To make a kernel of a configuration, with its shared memory filled and its legality known, takes
longer than to estimate it. Outlines cost little, and are estimated in arrays. None is expected to
take longer than the kernel of its configuration, which differs by fewer stages and by waits of its
epilogue: so they tell which kernels to make, and when to stop.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from ..gemm.conversion import BLOCK
from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.problem import GemmProblem, plain_graph
from ..gemm.problem_type import ProblemType
from ..gemm.smem import SMEM_LIMIT
from ..gemm.spec import GemmSpec
from .candidates import MAX_STAGES, MIN_STAGES, WIDE_EPI_TILE, along_k, types_of, with_rings
from .config_sets import ConfigsOf, config_sets
from .configs import Config
from .several import Several

# Types with other epilogues and results have the same outlines, but for what `OF_RESULTS` names.
BARE = {n: EpilogueGraph(n, results=plain_graph("bfloat16").results) for n in (1, 2)}
OF_RESULTS = ("d_dtype", "loose_d", "epilogue", "graph", "epi_box", "epi_stage_bytes")
BARE_BATCH: dict[str, Any] = {"nested": False, "indexed": None}  # on which no cost depends


class Outlines(NamedTuple):
    """Configurations of one type, and their outlines."""

    problem_type: ProblemType
    configs: tuple[Config, ...]
    kernels: Several


def outlined(problem: GemmProblem) -> list[Outlines]:
    """Returns the outlines of `considered_specs`, in their order."""
    pairs = product(config_sets(problem), types_of(problem))
    found = (_outlines(kind, configs_of) for configs_of, kind in pairs)
    return [outlines for outlines in found if outlines.configs]


@lru_cache(maxsize=1024)
def _outlines(problem_type: ProblemType, configs_of: ConfigsOf) -> Outlines:
    """Returns a type's outlines: those of a bare epilogue and batch, but for what they share."""
    bare, graph = replace(problem_type, **BARE_BATCH), problem_type.epilogue
    # Of whole rows there are more configurations; of reductions promoted sums are in no turns.
    differs = graph and (graph.needs_whole_rows or problem_type.promoted and graph.needs_extents)
    if not differs:
        graph = BARE[graph.accumulators if graph else 1]
        bare = replace(bare, epilogue=graph, d_dtype="bfloat16", loose_d=False)
    configs, kernels = _stored(bare, configs_of)
    if not configs or not configs_of(problem_type):
        return Outlines(problem_type, (), kernels)
    one = _outline(configs[0], problem_type)
    common = {name: getattr(one, name) for name in OF_RESULTS}
    return Outlines(problem_type, configs, kernels.varied(**common))


@lru_cache(maxsize=256)
def _stored(problem_type: ProblemType, configs_of: ConfigsOf) -> tuple[tuple[Config, ...], Several]:
    """Returns the same of bare epilogues; along which axes operands lie, only boxes depend on."""
    configs, specs, kernels = _alike(along_k(problem_type), configs_of)
    majors = {"a_major": problem_type.a_major, "b_major": problem_type.b_major}
    tiles = [(s.tile_m, s.tile_n, s.tile_k, s.cluster_m, s.cluster_n) for s in specs]
    of_tile = dict(zip(tiles, specs, strict=True))  # boxes are the same of all others
    stored = {tile: spec.varied(**majors) for tile, spec in of_tile.items()}
    boxes = {
        name: Several([getattr(stored[tile], name) for tile in tiles])
        for name in ("a_box", "b_box")
    }
    return configs, kernels.varied(**majors, **boxes)


@lru_cache(maxsize=256)
def _alike(
    problem_type: ProblemType, configs_of: ConfigsOf
) -> tuple[tuple[Config, ...], list[GemmSpec], Several]:
    made = [(config, _outline(config, problem_type)) for config in configs_of(problem_type)]
    specs = [spec for _, spec in made if spec]
    return tuple(config for config, spec in made if spec), specs, Several(specs)


def _outline(config: Config, problem_type: ProblemType) -> GemmSpec | None:
    """Returns a kernel whose operands have all of shared memory, and whose epilogue never waits."""
    graph = problem_type.epilogue
    least = BLOCK if problem_type.b_in_registers else 16
    if graph and config.tile_n % (least * graph.accumulators):  # no box is so narrow
        return None
    bare = with_rings(config, problem_type, num_stages=0, epi_tile_n=WIDE_EPI_TILE, epi_stages=0)
    stages = min(MAX_STAGES, (SMEM_LIMIT - bare.smem_bytes) // bare.stage_bytes)
    return bare.varied(num_stages=stages, epi_stages=4) if stages >= MIN_STAGES else None
