"""`tune`: measures candidates on this GPU and writes a table of the fastest."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from .. import cubin, dispatch
from ..dispatch import table, tuner
from ..gemm.problem import GemmProblem
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from ..launch import ffi_library
from . import products
from .report import CommandError, built, check_file, json_option, make_folder, say


@click.command("tune")
@click.argument(
    "wanted", nargs=-1, required=True, type=products.ProductsType(), metavar="MxNxK|SUITE..."
)
@products.options
@click.option(
    "--count", type=products.POSITIVE, default=32,
    help="Candidates a product, of the fastest of which variants are timed, too [32].",
)  # fmt: skip
@click.option(
    "--out",
    type=Path,
    default=Path("jax_hopper_gemm_table.json"),
    metavar="FILE",
    help="The table; entries for other products are kept [jax_hopper_gemm_table.json].",
)
@click.option(
    "--build-only",
    type=Path,
    metavar="FOLDER",
    help="Compile what may be timed, all variants, into FOLDER, and stop: needs no GPU.",
)
@json_option
def command(
    wanted: tuple[Any, ...], count: int, out: Path, build_only: Path | None, **described: Any
) -> dict[str, Any]:
    """Measure kernels for products, and write a table of the fastest.

    Times candidates, then the best of them in turns with XLA; the table is for
    JAX_HOPPER_GEMM_TABLE. Needs a Hopper GPU. Where that has no compiler, build the candidates
    elsewhere with --build-only; what is not in JAX_HOPPER_GEMM_CUBINS is then left out.
    """
    problems = products.problems(wanted, **described)
    if build_only:
        return build_candidates(problems, count, build_only)
    from ..testing import benchmark

    check_file(out)
    device = benchmark.this_device()
    ffi_library.library()  # launches the candidates
    tuned, entries = table.read_or_start(out, device, "--out"), []
    for problem in problems:
        candidates = tuner.ranked_candidates(problem, device, count)
        cubin.build([spec for spec, _ in candidates])
        time_kernel, time_xla = timers(device, problem)
        entry = tuner.tuned_entry(
            problem, device, candidates, time_kernel, time_xla, progress=show_progress
        )
        tuned = tuner.merged_table(tuned, [entry])
        table.write_table(tuned, out)
        entries.append(described_entry(entry))
        say(entries[-1])
    say(f"{len(tuned.entries)} entries in {out}; JAX_HOPPER_GEMM_TABLE={out} uses them")
    return {"table": str(out), "entries": len(tuned.entries), "tuned": entries}


def build_candidates(problems: list[GemmProblem], count: int, folder: Path) -> dict[str, Any]:
    device = dispatch.absent_device()
    specs = [s for p in problems for s in tuner.specs_to_try(p, device, count)]
    if not specs:
        reason = dispatch.choose(problems[0], device, kernel_only=True).reason
        raise CommandError(f"there is no candidate to build: {reason}")
    make_folder(folder, "--build-only")
    return built(cubin.build(specs, folder=folder))


def timers(
    device: dispatch.Device, problem: GemmProblem
) -> tuple[Callable[..., float], Callable[[], float]]:
    """Returns functions that time one kernel and XLA's product, in microseconds.

    The time of a kernel that cannot be built is infinite. The GPU rests after each measurement.
    """
    from ..testing import benchmark

    arrays = benchmark.random_inputs(problem)
    product = benchmark.MAKERS["xla"](problem, arrays)
    assert product

    def time_of(function: Callable[..., Any]) -> float:
        found = benchmark.timed({"": function}, arrays, "burst", 1, problem.flops)
        return found[""].median

    def time_kernel(spec: GemmSpec, raster_order: RasterOrder) -> float:
        try:
            cubin.get(spec)
        except cubin.CubinError as error:
            print(f"left out: {error}", file=sys.stderr)
            return math.inf
        return time_of(benchmark.one_kernel(problem, spec, raster_order, device.num_sms))

    return time_kernel, partial(time_of, product)


def show_progress(candidate: tuner.Candidate, microseconds: float) -> None:
    spec, raster_order = candidate
    order = f"along {raster_order.along} swizzle {raster_order.swizzle}"
    print(f"{microseconds:10.1f} us  {spec.name} {order}", file=sys.stderr, flush=True)


def described_entry(entry: table.Entry) -> str:
    key = entry.key
    layout = f"A {key.a_major}-major, B {key.b_major}-major"
    return (
        f"{key.m}x{key.n}x{key.k} {layout}: {entry.kernel_us:.1f} us, XLA {entry.xla_us:.1f} us, "
        f"{entry.spec.name} along {entry.raster_order.along} swizzle {entry.raster_order.swizzle}"
    )
