"""`tune`: measures candidates on this GPU and writes a table of the fastest."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .. import cubin, dispatch
from ..dispatch import table, tuner
from ..gemm.problem import GemmProblem
from ..gemm.spec import GemmSpec, RasterOrder
from ..launch import ffi_library
from . import products
from .report import CommandError, check_built, check_file, make_folder


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = (
        "Times candidate kernels for given products, then the best of them in turns with XLA, and "
        "writes what won to a table for JAX_HOPPER_GEMM_TABLE. Needs a Hopper GPU. Where that has "
        "no compiler, build the candidates elsewhere with --build-only; what is not in "
        "JAX_HOPPER_GEMM_CUBINS is then left out."
    )
    parser = commands.add_parser("tune", help="measure kernels for products", description=text)
    parser.add_argument("shapes", nargs="*", type=products.shape, metavar="MxNxK")
    parser.add_argument("--suite", action="append", default=[], help="a named suite of products")
    products.add_arguments(parser)
    parser.add_argument(
        "--count", type=products.positive, default=32, help="candidates a product [32]"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("jax_hopper_gemm_table.json"),
        help="the table; entries for other products are kept [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--build-only", type=Path, metavar="FOLDER",
        help="compile what would be timed on an H200 into FOLDER, and stop: needs no GPU",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..testing import benchmark

    problems = wanted_problems(args)
    if args.build_only:
        return build_candidates(problems, args)
    check_file(args.out, "--out")
    device = benchmark.this_device()
    ffi_library.library()  # launches the candidates
    tuned = read_or_start(args.out, device)
    for problem in problems:
        candidates = tuner.ranked_candidates(problem, device, args.count)
        cubin.build([spec for spec, _ in candidates])
        time_kernel, time_xla = timers(device, problem)
        entry = tuner.tuned_entry(
            problem, device, candidates, time_kernel, time_xla, progress=show_progress
        )
        tuned = tuner.merged_table(tuned, [entry])
        table.write_table(tuned, args.out)
        print(described(entry), flush=True)
    print(f"{len(tuned.entries)} entries in {args.out}; JAX_HOPPER_GEMM_TABLE={args.out} uses them")
    return 0


def wanted_problems(args: argparse.Namespace) -> list[GemmProblem]:
    """Returns the problems that the arguments name, each once.

    Raises:
      ValueError: there are none, or a suite does not exist.
    """
    from ..testing import shapes

    problems = [products.problem(extents, args) for extents in args.shapes]
    problems += [problem for name in args.suite for problem in shapes.suite(name)]
    if not problems:
        raise ValueError(f"name products, as 4096x4096x4096, or --suite of {[*shapes.SUITES]}")
    return list(dict.fromkeys(problems))


def build_candidates(problems: list[GemmProblem], args: argparse.Namespace) -> int:
    specs = [s for p in problems for s in tuner.specs_to_try(p, dispatch.H200, args.count)]
    if not specs:
        reason = dispatch.choose(problems[0], dispatch.H200, kernel_only=True).reason
        raise CommandError(f"there is no candidate to build: {reason}")
    make_folder(args.build_only, "--build-only")
    report = cubin.build(list(dict.fromkeys(specs)), folder=args.build_only)
    print(report)
    check_built(report)
    return 0


def read_or_start(path: Path, device: dispatch.Device) -> table.Table:
    """Returns the table at `path`, or an empty one.

    Raises:
      ValueError: the table is for another kind of GPU, or damaged.
    """
    if not path.exists():
        return table.Table.of(device, (), str(path))
    existing = table.read_table(path)
    if existing.device != device:
        raise ValueError(
            f"{path} is for {existing.device.key}, this GPU is {device.key}: choose another --out"
        )
    return existing


def timers(
    device: dispatch.Device, problem: GemmProblem
) -> tuple[Callable[..., float], Callable[[], float]]:
    """Returns functions that time one kernel and XLA's product, in microseconds.

    The time of a kernel that cannot be built is infinite. The GPU rests before each measurement.
    """
    from ..testing import benchmark, timing

    arrays = benchmark.random_inputs(problem)
    product = benchmark.MAKERS["xla"](problem, arrays)
    assert product
    burst = timing.burst(product, arrays)
    pause = min(1.0, 20 * problem.flops / 5e14)  # about twice what ten calls take

    def time_kernel(spec: GemmSpec, raster_order: RasterOrder) -> float:
        time.sleep(pause)
        try:
            cubin.get(spec)
        except cubin.CubinError as error:
            print(f"left out: {error}")
            return math.inf
        function = benchmark.one_kernel(problem, spec, raster_order, device.num_sms)
        return statistics.median(timing.burst(function, arrays, timing.clearing(spec))())

    def time_xla() -> float:
        time.sleep(pause)
        return statistics.median(burst())

    return time_kernel, time_xla


def show_progress(candidate: tuner.Candidate, microseconds: float) -> None:
    spec, raster_order = candidate
    order = f"along {raster_order.along} swizzle {raster_order.swizzle}"
    print(f"{microseconds:10.1f} us  {spec.name} {order}", file=sys.stderr, flush=True)


def described(entry: table.Entry) -> str:
    key = entry.key
    layout = f"A {key.a_major}-major, B {key.b_major}-major"
    return (
        f"{key.m}x{key.n}x{key.k} {layout}: {entry.kernel_us:.1f} us, XLA {entry.xla_us:.1f} us, "
        f"{entry.spec.name} along {entry.raster_order.along} swizzle {entry.raster_order.swizzle}"
    )
