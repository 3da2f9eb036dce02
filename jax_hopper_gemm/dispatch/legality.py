"""Legality of a problem, of a kernel for it, and of both on a device.

Each function returns every reason against, as text for the user; an empty list is a yes. What a
kernel may be at all, and of which types there are some, is `gemm.legality`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache

from ..gemm.grid import (
    launched_clusters,
    max_clusters,
    num_cluster_tiles,
    num_k_tiles,
    zero_rows,
)
from ..gemm.group_search import MAX_LENGTH
from ..gemm.group_search import MAX_TILES as MAX_GROUPED_TILES
from ..gemm.groups import GroupedAxis
from ..gemm.k_split import MAX_TAPE, is_worth_splitting
from ..gemm.legality import MAX_TILE_N
from ..gemm.problem import GemmProblem
from ..gemm.problem_type import ProblemType
from ..gemm.raster import MAX_TILES
from ..gemm.spec import GemmSpec
from ..gemm.type_legality import type_violations
from .device import Device
from .layout_legality import MAX_EXTENT, MAX_INT32, layout_violations

MAX_INT8_K = 2**31 // 128**2  # terms of (-128) * (-128) that int32 does not hold


def device_violations(device: Device) -> list[str]:
    """Returns why our kernels cannot run on `device`."""
    if device.compute_capability == (9, 0):
        return []
    major, minor = device.compute_capability
    return [
        f"the GPU has compute capability {major}.{minor}; the kernels are for 9.0 (H100, H200): "
        "use XLA there"
    ]


def limit_violations(problem: GemmProblem, spec: GemmSpec, device: Device) -> list[str]:
    """Returns why `spec`'s kernel does not keep to a limit of SMs."""
    if not device.limited:
        return []
    if spec.reads_parts:
        return [
            f"kernels that cut operands into bfloat16 parts take more than {device.num_sms} SMs"
        ]
    blocks = spec.cluster_size * launched_clusters(problem, spec, device.num_sms)
    if blocks <= device.num_sms:
        return []
    return [
        f"no kernel for it keeps to {device.num_sms} SMs: the last one tried launches {blocks} "
        "thread blocks"
    ]


def split_violations(problem: GemmProblem, spec: GemmSpec, device: Device) -> list[str]:
    """Returns why a kernel that splits K is not considered where nothing has been measured."""
    if not spec.split_k and spec.cluster_k == 1:
        return []
    tiles, clusters = num_cluster_tiles(problem, spec), max_clusters(spec, device.num_sms)
    if is_worth_splitting(tiles, clusters) if spec.split_k else tiles <= clusters:
        return []
    return [f"{tiles} clusters of tiles for {clusters} of SMs: nothing is gained by splitting K"]


@lru_cache(maxsize=1024)
def no_kernels(problem_type: ProblemType) -> tuple[str, ...]:
    """Returns why no kernel runs problems of a type."""
    return tuple(type_violations(problem_type))


def problem_violations(problem: GemmProblem) -> list[str]:
    """Returns why no kernel of ours can run `problem`."""
    p = problem
    reasons = [*no_kernels(ProblemType.of(p)), *_shape_violations(p)]
    if not reasons and len(p.operands) != len(p.graph.operands):
        reasons.append(
            f"the epilogue has {len(p.graph.operands)} operands, {len(p.operands)} are described"
        )
    if p.groups and p.groups.axis in ("m", "k"):
        sizes = list(_size_violations(p, p.groups))
        reasons += sizes or _matrix_violations(p, p.groups)
    reasons += _stack_violations(p)
    if reasons:  # what follows does arithmetic on the fields above
        return reasons
    return [*layout_violations(p), *_epilogue_violations(p)]


@lru_cache(maxsize=4096)
def is_legal(problem: GemmProblem) -> bool:
    """Whether kernels of ours run `problem` the way round that it is."""
    return not problem_violations(problem)


def pairing_violations(problem: GemmProblem, spec: GemmSpec) -> list[str]:
    """Returns why the kernel of `spec` cannot run `problem`; each is taken to be legal alone."""
    return [*_type_differences(problem, spec), *extent_violations(problem, spec)]


def _type_differences(problem: GemmProblem, spec: GemmSpec) -> list[str]:
    p, reasons = problem.as_run_by(spec), []
    compiled, needed = ProblemType.of_spec(spec), ProblemType.of(p)
    if compiled == needed:
        return []
    for field in (f.name for f in fields(ProblemType) if f.name != "epilogue"):
        has, needs = getattr(compiled, field), getattr(needed, field)
        if has != needs:
            reasons.append(f"the kernel has {field} {has!r}, the problem {needs!r}")
    if spec.epilogue != p.epilogue:
        reasons.append(
            f"the kernel's epilogue is {spec.graph.label}, the problem's {p.graph.label}"
        )
    return reasons


def extent_violations(problem: GemmProblem, spec: GemmSpec) -> list[str]:
    """Returns why a kernel for problems of this type cannot run `problem`."""
    p, reasons = problem.as_stored(spec.d_major), []
    if spec.graph.needs_whole_rows and p.n > spec.d_tile_n:
        reasons.append(f"rows of {p.n} columns do not fit the kernel's tile of {spec.d_tile_n}")
    if spec.tile_m < spec.d_tile_m and p.m > spec.tile_m:
        reasons.append(f"{p.m} rows do not fit the kernel's tile of {spec.tile_m}")
    cluster_tiles, limit = num_cluster_tiles(p, spec), MAX_GROUPED_TILES if p.groups else MAX_TILES
    if cluster_tiles >= limit:
        reasons.append(f"{cluster_tiles} clusters of tiles, not under {limit}: split the product")
    if (k_tiles := num_k_tiles(p, spec)) < spec.cluster_k:
        reasons.append(f"{k_tiles} k-tiles are not one for each of {spec.cluster_k} thread blocks")
    if spec.split_k and (tape := cluster_tiles * num_k_tiles(p, spec)) >= MAX_TAPE:
        reasons.append(f"{tape} k-tiles of all tiles, not under {MAX_TAPE}: split the product")
    if p.groups_k and spec.zero_fill_warp:
        reasons += _zero_violations(p, spec)
    return reasons


def _zero_violations(problem: GemmProblem, spec: GemmSpec) -> Iterator[str]:
    """Yields why a kernel cannot count what it fills with zeros for empty groups."""
    zeros = zero_rows(problem)
    counts = {
        "parts": problem.l * zeros.rows * zeros.parts_of_row(spec.zero_part),
        "vectors of 16 bytes without a gap": zeros.vectors,
        "vectors of 16 bytes from a row to the next": zeros.row_stride,
        "vectors of 16 bytes from a matrix to the next": zeros.matrix_stride,
    }
    for counted, count in counts.items():
        if count > MAX_EXTENT:
            yield (
                f"D, where it is zeros for empty groups, has {count} {counted}, over {MAX_EXTENT}: "
                "split the product"
            )


def _shape_violations(problem: GemmProblem) -> Iterator[str]:
    p = problem
    for name, extent in {"M": p.m, "N": p.n, "K": p.k, "L": p.l}.items():
        if extent < 1:
            yield f"{name} is {extent}: an empty product needs no kernel"
        elif extent > MAX_EXTENT:
            yield f"{name} is {extent}, over {MAX_EXTENT}: split the product"
    if p.a_dtype == "int8" and p.k >= MAX_INT8_K:
        yield (
            f"K is {p.k}: sums of int8 may leave int32 from K={MAX_INT8_K}, where tensor cores "
            "saturate: split the product"
        )


def _stack_violations(problem: GemmProblem) -> Iterator[str]:
    """Yields why no kernel can find an operand in a stack of matrices."""
    p = problem
    if p.indexed not in ("a", "b"):
        return
    if p.l != 1 and not p.groups:
        yield (
            f"{p.indexed.upper()} is one matrix of a stack, and the product has {p.l} matrices: "
            "copy it out of the stack"
        )
    if p.outer:
        yield f"{p.indexed.upper()} is one matrix of a stack, and the product has a nested batch"
    if not 1 <= p.stack <= MAX_INT32:
        yield f"the stack has {p.stack} matrices, not 1 to {MAX_INT32}: split it"


def _size_violations(problem: GemmProblem, groups: GroupedAxis) -> Iterator[str]:
    p, g = problem, groups
    length = p.m if g.axis == "m" else p.k
    if length > MAX_LENGTH:
        axis = g.axis.upper()
        yield f"{axis}, which is cut into groups, is {length}, over {MAX_LENGTH}: split it"
    if not 1 <= g.num_sizes <= MAX_LENGTH:
        yield f"{g.num_sizes} sizes of groups, not 1 to {MAX_LENGTH}: split the product"
    rule = g.rule
    if rule.count < 1 or rule.first < 0 or rule.first + rule.count > rule.period:
        yield (
            f"groups are {rule.count} runs of every {rule.period}, the first of them number "
            f"{rule.first}: there are no such runs"
        )
    if rule.step not in (0, rule.count):
        yield f"from a period to the next are {rule.step} matrices, not 0 or {rule.count}"
    if g.gathered and not 1 <= g.source_rows <= MAX_INT32:
        yield f"indices pick among {g.source_rows} rows, not 1 to {MAX_INT32}"
    if rule.period > MAX_INT32:
        yield f"runs repeat every {rule.period}, over {MAX_INT32}: split the product"


def _matrix_violations(problem: GemmProblem, groups: GroupedAxis) -> Iterator[str]:
    p, g = problem, groups
    if g.axis == "m" and g.matrices > p.l:
        yield f"groups need {g.matrices} matrices of B, there are {p.l}"
    if g.axis == "m" and p.l > MAX_LENGTH:  # rows of no group read one that lies behind them all
        yield f"B has {p.l} matrices, over {MAX_LENGTH}: split it"
    if g.axis == "k" and (g.total, g.matrices) != (p.l, p.l):
        yield (
            f"D has {p.l} matrices, but {g.total} groups write {g.matrices}: each must be written "
            "once"
        )


def _epilogue_violations(problem: GemmProblem) -> Iterator[str]:
    p = problem
    columns = MAX_TILE_N // p.graph.accumulators
    if p.graph.needs_whole_rows and p.n > columns:
        yield (
            f"N is {p.n}, but the epilogue needs whole rows, which fit a tile up to {columns} "
            "columns: leave it to XLA"
        )
    selected = max((result.k for result in p.graph.results), default=0)
    if selected > p.n:
        yield f"the epilogue selects {selected} of rows of {p.n}: ask for {p.n} at most"
