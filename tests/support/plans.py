"""Problems, kernels and what their launch plans hold, for the tests of plans."""

from __future__ import annotations

from dataclasses import replace

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Result
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import Int32, LaunchPlan, TensorMap, make_plan

LARGE = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256)
PAIR = EpilogueGraph(2, nodes=(Node("mul", (0, 1)),), results=(Result("matrix", 2, "bfloat16"),))


def tensor_maps(problem: GemmProblem, spec: GemmSpec) -> list[TensorMap]:
    params = make_plan(problem, spec, RasterOrder(), 132).params
    return [param for param in params if isinstance(param, TensorMap)]


def scalars(plan: LaunchPlan) -> list[int]:
    return [param.value for param in plan.params if isinstance(param, Int32)]


def decode(words: tuple[int, ...]) -> dict:
    """Reads the encoding as `LaunchPlan.encode` documents it, for tests alone."""
    stream = iter(words)

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(stream) for _ in range(count))

    plan: dict = {"version": next(stream), "grid": take(3), "cluster": take(3)}
    plan |= {"threads": next(stream), "smem": next(stream)}
    plan["cleared"] = [take(2) for _ in range(next(stream))]
    plan["params"] = []
    for _ in range(next(stream)):
        kind = next(stream)
        if kind == 0:
            buffer, offset, dtype, swizzle, rank = take(5)
            shape = (take(rank), take(rank - 1), take(rank))
            plan["params"].append(("map", buffer, offset, dtype, swizzle, *shape))
        else:
            plan["params"].append(({1: "int32", 2: "pointer"}[kind], next(stream)))
    assert next(stream, None) is None, "words left over"
    return plan


def clearing(words: tuple[int, ...], buffer: int, nbytes: int) -> tuple[int, ...]:
    """Returns an encoded plan as programs of version 0.1 have it: the launcher clears a buffer."""
    return (*words[:9], 1, buffer, nbytes, *words[10:])


def epilogue_case(graph, *layouts, up_offset=None, m=328, n=512, k=64, batches=3, **changes):
    """Returns a problem of compact A, B and D with an epilogue, and a kernel for it."""
    problem = replace(
        GemmProblem.dense(m, n, k, batches), epilogue=graph, operands=layouts, up_offset=up_offset
    )
    changes = {"tile_n": 128, "epi_stages": 2, "num_stages": 3} | changes
    spec = replace(LARGE, epilogue=graph, epi_load_stages=2 if graph.loaded else 0, **changes)
    assert violations(spec) == []
    return problem, spec


def grouped_case(axis, m=320, n=512, k=200, groups=5, graph=None, operands=(), **changes):
    """Returns a problem whose axis `axis` is cut into groups, and a kernel for it."""
    problem = GemmProblem.grouped(axis, m, n, k, groups, d_dtype="bfloat16")
    problem = replace(problem, epilogue=graph, operands=operands)
    changes = {"tile_n": 128, "epi_stages": 2, "num_stages": 3} | changes
    spec = replace(
        LARGE, a_major=problem.a.major, epilogue=graph, grouped=axis,
        epi_load_stages=2 if graph and graph.loaded else 0, **changes,
    )  # fmt: skip
    assert violations(spec) == []
    return problem, spec
