"""Legality: every reason why a `GemmSpec` cannot be compiled, as text."""

from __future__ import annotations

from .dtypes import DTYPES, OPERANDS, RESULTS, one_of
from .epilogue_graph import epilogue_registers, graph_violations
from .spec import (
    GATHERED_MATH_REGISTERS,
    MAILBOX_REGISTERS,
    MATH_REGISTERS,
    MAX_ACC_REGISTERS,
    OTHER_REGISTERS,
    SMEM_BARRIERS,
    SMEM_LIMIT,
    SWIZZLE_BYTES,
    GemmSpec,
)


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

    if spec.a_dtype != spec.b_dtype:
        found.append(f"A is {spec.a_dtype} and B {spec.b_dtype}, not of one dtype")
    need(spec.a_dtype in OPERANDS, f"A and B are {spec.a_dtype}, not {one_of(OPERANDS)}")
    need(spec.d_dtype in RESULTS, f"D is {spec.d_dtype}, not {one_of(RESULTS)}")
    need(spec.a_major in ("k", "m"), f"a_major is {spec.a_major!r}, not 'k' or 'm'")
    need(spec.b_major in ("k", "n"), f"b_major is {spec.b_major!r}, not 'k' or 'n'")
    need(spec.warp_schedule in ("cooperative", "pingpong"), f"no schedule {spec.warp_schedule!r}")
    need(spec.tile_scheduler in ("single", "static", "dynamic"), f"no {spec.tile_scheduler!r}")
    need(spec.tile_m in (64, 128, 192, 256), f"tile_m {spec.tile_m} is not 64, 128, 192 or 256")
    need(
        16 <= spec.tile_n <= 256 and spec.tile_n % 16 == 0,
        f"tile_n {spec.tile_n} is not a multiple of 16 between 16 and 256",
    )
    need(
        (spec.cluster_m, spec.cluster_n) in ((1, 1), (2, 1), (1, 2), (2, 2)),
        f"cluster {spec.cluster_m}x{spec.cluster_n} is not 1x1, 2x1, 1x2 or 2x2",
    )
    if spec.epilogue:
        found += [f"epilogue: {reason}" for reason in graph_violations(spec.epilogue)]
    if {spec.a_dtype, spec.b_dtype} <= set(OPERANDS):
        for operand, dtype, major in (
            ("A", spec.a_dtype, spec.a_major), ("B", spec.b_dtype, spec.b_major),
        ):  # fmt: skip
            need(
                major in DTYPES[dtype].majors,
                f"{operand} is {dtype} and {major!r}-major; wgmma reads it 'k'-major alone",
            )
        row = SWIZZLE_BYTES // spec.a_itemsize
        need(spec.tile_k in (row, 2 * row), f"tile_k {spec.tile_k} is not {row} or {2 * row}")
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
    block = SWIZZLE_BYTES // (spec.a_itemsize if spec.gathered == "a" else spec.b_itemsize)
    if spec.tile_k != block:
        found.append(f"tile_k {spec.tile_k} is not {block}, a block of the rows that are gathered")
    tile, shared = spec.tile_m, spec.cluster_n
    if spec.gathered == "b":
        tile, shared = spec.d_tile_n, spec.cluster_m
        if spec.graph.accumulators > 1:
            found.append("a gated product's B's are not gathered")
    if spec.grouped == "k" and tile % block:
        found.append(f"{tile} gathered columns of a tile are no multiple of {block}")
    if shared > 1:
        found.append("CTAs of a cluster cannot share an operand that is gathered")
    if spec.math_warpgroups > 2:
        found.append("three math warpgroups leave no registers for warps that gather")
    if spec.tile_m > 128 and spec.gathered == "a" and spec.grouped == "m":
        found.append(f"tile_m {spec.tile_m}: a thread has registers for the rows of 128")
    return found
