"""Times candidate kernels and XLA over random dense products: the data of `fit_xla.py`.

    python benchmarks/survey.py --build FOLDER --seed 7       # compiles the kernels, needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/survey.py --seed 7 --json survey.json
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/survey.py --suite steps --table table.json

Products are drawn by a seed from extents of published models and log-uniformly, with all layouts.
Two of three are such that a kernel may run by default, as the fit of XLA's time has it: there it
matters how well it knows. Those of the `heldout` suite are left out. `--batches` asks for random
batches, and `--suite` for a suite's products, in their place. `--table` adds the fastest of each
product's kernels to a table, as `tune` does in more time; with `--gain 1.02` only those 2 % faster
than XLA.

Of each product these kernels are timed, in turns with XLA's own product, so that all share clock
and temperature: the one that dispatch would run, those of least expected cost, the best of
each kind, and the best two of `UNTRIED`, which dispatch does not know; with `--tiles` also the best
tiles of these, with K shared and not, each in the best clusters of 1, 2, 4 and 8. Of large results
of short K also those of `DYNAMIC`, of others three of each kind of `SHORT`, and of large products
those of `LARGE`, unless one kernel is asked for. The time of a kernel is CUPTI's,
the median of some launches, each of another set of inputs and among its equals: those of another
policy for L2 would leave it more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice, product
from operator import attrgetter
from pathlib import Path
from typing import Any

import compiling
import jax
from random_batches import random_batches

from jax_hopper_gemm import cubin
from jax_hopper_gemm.dispatch import H200, Device, absent_device, choose, table, tuner
from jax_hopper_gemm.dispatch.candidates import (
    WIDE_EPI_TILE,
    considered_specs,
    filled_spec,
    types_of,
    worthwhile,
)
from jax_hopper_gemm.dispatch.config_sets import has_short_k, is_medium, is_narrow
from jax_hopper_gemm.dispatch.configs import Config
from jax_hopper_gemm.dispatch.cost import estimate
from jax_hopper_gemm.dispatch.legality import pairing_violations, split_violations
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.dispatch.model import best_kernel, xla_time
from jax_hopper_gemm.dispatch.table import Entry
from jax_hopper_gemm.dispatch.tuner import Candidate
from jax_hopper_gemm.gemm.grid import k_split
from jax_hopper_gemm.gemm.legality import CLUSTERS, TILES_M
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.spec import GemmSpec, TileScheduler, WarpSchedule
from jax_hopper_gemm.gemm.tma_box import SWIZZLE_BYTES
from jax_hopper_gemm.testing import benchmark, shapes

OPEN = 1.02  # XLA's expected time over ours, from which more is to be learnt of a product
LEADERS = 2  # kernels of least expected cost, before one of each kind
UNTRIED_COUNT = 2
HOPELESS = 1.5  # times the least expected cost: not timed
BATCH = 64  # products that are compiled at once
UNTRIED = (
    *(
        Config(tile_m, tile_n, cluster_m=m, cluster_n=n, split_k=split_k)
        for tile_m, tile_n, (m, n), split_k in product(
            TILES_M, range(16, 257, 16), CLUSTERS, (False, True)
        )
    ),
    *(
        Config(64, n, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first=operand, split_k=split_k)
        for n, operand, split_k in product((16, 32, 48, 64, 128), ("a", "b"), (False, True))
    ),
)
DYNAMIC = (
    Config(128, 128, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(128, 128, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(128, 160, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(128, 192, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    Config(128, 256, cluster_m=2, tile_scheduler="dynamic"),
    Config(256, 128, cluster_n=2, tile_scheduler="dynamic"),
    Config(256, 192, cluster_n=2, tile_scheduler="dynamic"),
    Config(64, 256, warp_schedule="pingpong", tile_scheduler="dynamic"),
)
# Of large products, with fixed shares of the tiles and without.
LARGE = tuple(
    Config(tile_m, tile_n, cluster_m=m, cluster_n=n, tile_scheduler=scheduler)
    for (tile_m, tile_n, m, n), scheduler in product(
        (
            (128, 256, 2, 1), (256, 128, 1, 2), (256, 160, 1, 2), (256, 176, 1, 2),
            (256, 192, 1, 2), (256, 192, 2, 1),
        ),
        ("static", "dynamic"),
    )
)  # fmt: skip
POLICIES: tuple[tuple[WarpSchedule, TileScheduler], ...] = (
    ("cooperative", "static"), ("cooperative", "single"), ("pingpong", "static"),
)  # fmt: skip
SHORT = tuple(  # of short K
    Config(tile_m, tile_n, warp_schedule=schedule, tile_scheduler=scheduler)
    for tile_m, tile_n, (schedule, scheduler) in product(
        TILES_M, (16, 32, 48, 64, 96, 128, 160, 192, 256), POLICIES
    )
)
FEW = 64  # rows, or columns
SMALL = 20e6  # bytes moved
STORED_ELEMENTS, STORED_K = 2**25, 1024  # of large results of short K: at least, at most
LARGE_FLOPS = 1e11, 1e13  # at least, and at most, which takes about 15 ms
SHORT_COUNT = 3  # of `SHORT`, of each kind


Which = Callable[[GemmProblem], bool]


def products(count: int, seed: int, only: Which | None) -> list[GemmProblem]:
    """Returns random products, two of three of those that more is to be learnt of.

    Or those alone that `only` returns True for.
    """
    held_out = set(shapes.suite("heldout"))
    drawn = shapes.random_products((40 if only else 4) * count, seed)
    drawn = [p for p in drawn if p not in held_out]
    if only:
        return [p for p in drawn if only(p)][:count]
    usual, unsure = iter(drawn), filter(_is_open, drawn[count:])
    turns = chain.from_iterable(zip(usual, unsure, unsure, strict=False))
    return list(islice(dict.fromkeys(turns), count))


def _is_open(problem: GemmProblem) -> bool:
    best, _ = best_kernel(problem, H200)
    xla = xla_time(problem, H200)
    return best is not None and xla is not None and xla.ns >= OPEN * best.cost.ns


def stores(problem: GemmProblem) -> bool:
    """Whether storing D takes about as long as multiplying, or longer."""
    p = problem
    return p.l * p.m * p.n >= STORED_ELEMENTS and p.k <= STORED_K


def large(problem: GemmProblem) -> bool:
    """Whether a product takes 0.13 to 15 ms, by `LARGE_FLOPS`."""
    return LARGE_FLOPS[0] <= problem.flops <= LARGE_FLOPS[1]


def short(problem: GemmProblem) -> bool:
    """Whether K is short and D not large, so that most of the time goes to begins and ends."""
    return has_short_k(problem) and not stores(problem)


def few_rows(problem: GemmProblem) -> bool:
    """Whether D has up to `FEW` rows or columns, so that reading one operand takes the time."""
    return min(problem.m, problem.n) <= FEW


def small(problem: GemmProblem) -> bool:
    """Whether launches and latencies matter, and neither side is short."""
    return problem.bytes < SMALL and not few_rows(problem)


@lru_cache
def filled_specs(problem_type: ProblemType, configs: Sequence[Config]) -> tuple[GemmSpec, ...]:
    specs = (filled_spec(config, problem_type) for config in configs)
    return tuple(spec for spec in specs if spec and worthwhile(spec))


def ranked(
    problem: GemmProblem, device: Device, specs: Iterable[GemmSpec]
) -> list[tuple[float, GemmSpec]]:
    """Returns expected times and kernels, the fastest first."""
    found = []
    for spec in specs:
        against = pairing_violations(problem, spec) + split_violations(problem, spec, device)
        if against or spec.split_k and not k_split(problem, spec, device.num_sms).ranges:
            continue
        order = best_raster_order(problem, spec, device)
        found.append((estimate(problem, spec, order, device).ns, spec))
    return sorted(found, key=lambda pair: pair[0])


def _stores_narrow(spec: GemmSpec) -> bool:
    return spec.d_major == "n" and spec.epi_tile_n < WIDE_EPI_TILE


def candidates(problem: GemmProblem, device: Device, count: int, tiles: int = 0) -> list[Candidate]:
    """Returns the kernels to time; no two have one name, by which a profile tells them apart.

    Args:
      count: kernels, as the file says.
      tiles: more of `UNTRIED`, each in the best cluster of each size.
    """
    chosen = choose(problem, device, kernel_only=True).spec
    known = ranked(problem, device, considered_specs(problem))

    def legal(configs: Sequence[Config]) -> list[tuple[float, GemmSpec]]:
        found = (filled_specs(kind, configs) for kind in types_of(problem))
        return ranked(problem, device, chain.from_iterable(found))

    usual_specs = set(considered_specs(problem))
    untried = (pair for pair in legal(UNTRIED) if pair[1] not in usual_specs)

    leaders = [spec for _, spec in known[:LEADERS]]
    if problem.splits_sectors:
        leaders = [next(spec for _, spec in known if _stores_narrow(spec)), *leaders]
    limit = HOPELESS * known[0][0] if known else 0.0

    def best_of_kinds(pairs: Iterable[tuple[float, GemmSpec]]) -> Iterator[GemmSpec]:
        seen = set()
        for ns, spec in pairs:
            kind = spec.d_major, spec.split_k, spec.tile_m * spec.cluster_m > 64
            if ns <= limit and kind not in seen:
                seen.add(kind)
                yield spec

    usual = dict.fromkeys([*([chosen] if chosen else []), *leaders, *best_of_kinds(known)])
    found = [
        *islice(usual, max(LEADERS, count - UNTRIED_COUNT)),
        *islice(best_of_kinds(untried), UNTRIED_COUNT),
    ][:count]
    of_tiles: dict[Any, dict[int, GemmSpec]] = defaultdict(dict)
    for _, spec in legal(UNTRIED) if tiles else ():
        if not spec.short_boxes:
            by_size = of_tiles[spec.tile_m, spec.tile_n, spec.d_major, spec.split_k]
            by_size.setdefault(spec.cluster_size, spec)
    found += chain.from_iterable(x.values() for x in islice(of_tiles.values(), tiles))
    for serves, configs in ((stores, DYNAMIC), (large, LARGE)):
        if serves(problem) and count > 1:
            found += [spec for _, spec in legal(configs)]
    if short(problem) and count > 1:
        kinds: dict[Any, list[GemmSpec]] = defaultdict(list)
        for _, spec in legal(SHORT):
            kinds[spec.warp_schedule, spec.tile_scheduler, spec.d_major].append(spec)
        found += chain.from_iterable(specs[:SHORT_COUNT] for specs in kinds.values())
    by_name: dict[str, GemmSpec] = {}
    for spec in found:
        by_name.setdefault(spec.name, spec)
    return [(s, best_raster_order(problem, s, device)) for s in by_name.values()]


def functions(problem: GemmProblem, chosen: Sequence[Candidate], num_sms: int) -> dict[str, Any]:
    """Returns jitted functions of A and B: XLA's product, "xla", and the kernels by their names."""
    product = benchmark.MAKERS["xla"](problem, [])
    assert product
    kernels = {x[0].name: benchmark.one_kernel(problem, *x, num_sms) for x in chosen}
    return {"xla": product, **kernels}


def measure(problems: list[GemmProblem], arguments: argparse.Namespace) -> None:
    device, start = benchmark.this_device(), time.monotonic()
    known = arguments.table and table.read_or_start(arguments.table, device, "--table")
    numbers: dict[str, int] = {}  # of kernels, by name
    rows: list[dict[str, Any]] = []
    entries: list[Entry] = []
    for first in range(0, len(problems), BATCH):
        batch = problems[first : first + BATCH]
        if time.monotonic() - start > arguments.seconds:
            break
        counts = arguments.candidates, arguments.tiles
        chosen = [candidates(problem, device, *counts) for problem in batch]
        todo = [functions(*x, device.num_sms) for x in zip(batch, chosen, strict=True)]
        calls: list[tuple[Any, tuple]] = []
        for problem, own in zip(batch, todo, strict=True):
            calls.append((benchmark.drawing(problem), (jax.ShapeDtypeStruct((), "uint32"),)))
            calls += [(f, benchmark.input_shapes(problem)) for f in own.values()]
        ready = iter(compiling.compiled(calls))
        print(f"{len(calls)} programs after {time.monotonic() - start:.0f} s", flush=True)
        for problem, kernels, own in zip(batch, chosen, todo, strict=True):
            if time.monotonic() - start > arguments.seconds:
                break
            row: dict[str, Any] = {x: getattr(problem, x) for x in ("l", "m", "n", "k")}
            what = f"{'x'.join(map(str, row.values()))} {shapes.layout_name(problem)}"
            draw, *run = islice(ready, 1 + len(own))
            try:
                inputs = benchmark.drawn_inputs(problem, compiled(draw))
                own = dict(zip(own, map(compiled, run), strict=True))
                found = benchmark.timed(own, inputs, "burst", arguments.rounds, problem.flops)
                times = {name: timing.median for name, timing in found.items()}
            except Exception as error:
                print(f"{what}: {error}", flush=True)
                continue
            row |= {"a_major": problem.a.major, "b_major": problem.b.major}
            row["xla_us"] = round(times.pop("xla"), 2)
            row["kernels"] = [numbers.setdefault(name, len(numbers)) for name in times]
            row["us"] = [round(us, 2) for us in times.values()]
            rows.append(row)
            fastest = min(kernels, key=lambda kernel: times[kernel[0].name])
            if row["xla_us"] >= arguments.gain * min(row["us"]):
                entries.append(tuner.entry_of(problem, fastest, min(row["us"]), row["xla_us"]))
            ours = times[kernels[0][0].name]
            print(
                f"{what} XLA {row['xla_us']} us, ours {ours:.1f}, best {min(row['us'])}", flush=True
            )
        if arguments.json:
            write(arguments.json, list(numbers), rows)
        if known:
            table.write_table(tuner.merged_table(known, entries), arguments.table)
    print(f"{len(rows)} of {len(problems)} products in {time.monotonic() - start:.0f} s")


def compiled(found: Callable | Exception) -> Callable:
    """Returns what `compiling.compiled` made of a function; raises why it could not."""
    if isinstance(found, Exception):
        raise found
    return found


def write(path: Path, names: list[str], rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    kernels = ",\n".join("  " + json.dumps(name) for name in names)
    facts = json.dumps(benchmark.environment())
    path.write_text(
        f'{{"environment": {facts},\n "names": [\n{kernels}\n ],\n "rows": [\n{lines}\n ]}}\n'
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=400, help="products [400]")
    parser.add_argument("--seed", type=int, default=7, help="that draws them [7]")
    which = parser.add_mutually_exclusive_group()
    for name, only, what in (
        ("--split-sectors", attrgetter("splits_sectors"), "whose rows of D begin within a sector"),
        ("--stores", stores, "with large results of short K"),
        ("--large", large, "that take 0.13 to 15 ms"),
        ("--short", short, "with other results of short K"),
        ("--medium", is_medium, "of about one wave of tiles"),
        ("--narrow", is_narrow, "of few tiles and a long K"),
        ("--small", small, f"that move less than {SMALL / 1e6:.0f} MB, of more rows and columns"),
        ("--few-rows", few_rows, f"of up to {FEW} rows or columns"),
    ):
        which.add_argument(
            name, dest="only", action="store_const", const=only, help=f"only products {what}"
        )
    which.add_argument("--batches", action="store_true", help="batches of matrices instead")
    which.add_argument("--suite", choices=shapes.SUITES, help="its products instead")
    parser.add_argument("--table", type=Path, metavar="FILE", help="add the fastest to this table")
    parser.add_argument(
        "--gain", type=float, default=0.0, help="XLA's time over ours from which they are added [0]"
    )
    parser.add_argument("--candidates", type=int, default=6, help="kernels a product [6]")
    parser.add_argument("--tiles", type=int, default=0, help="tiles in all sizes of clusters [0]")
    parser.add_argument("--rounds", type=int, default=1, help="turns of ten launches [1]")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which it stops [500]")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="build the kernels")
    arguments = parser.parse_args()
    if arguments.batches:
        problems = random_batches(arguments.count, arguments.seed)
    else:
        problems = products(arguments.count, arguments.seed, arguments.only)
    if arguments.suite:
        problems = list(shapes.suite(arguments.suite))
    if arguments.build:
        counts = arguments.candidates, arguments.tiles
        chosen = (x for p in problems for x in candidates(p, absent_device(), *counts))
        report = cubin.build(list(dict.fromkeys(s for s, _ in chosen)), folder=arguments.build)
        print(report)
        return 1 if report.failures else 0
    measure(problems, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
