"""Runs every kernel on small problems, for a memory checker to watch.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py --every 8
    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py --grouped --every 4
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py --policies
    compute-sanitizer --tool initcheck python tests/gpu/sanitize.py --policies --unset

It launches directly: no XLA, so all that the checker sees is ours. Exact results are checked, too.
Sizes of grouped products are of every kind, those that make no sense among them. With `--unset`
results and workspaces are not set before a launch, and results not read after it, so initcheck
sees what a kernel reads there; those that split K are left out, since they may read any flag.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `support`
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # `group_sizes`

from support import cases, graphs, grouped, outcome, trial
from support.covering import covering_subset
from support.gpu import Gpu
from support.policies import (
    covering_specs,
    epilogue_covering_specs,
    grouped_covering_specs,
    short_box_specs,
    split_specs,
    traits_of,
    transposed_specs,
)

from jax_hopper_gemm.dispatch import table_specs
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec, RasterOrder

FEW_SMS = 8  # so that a persistent grid wraps around on small problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="run every Nth kernel")
    parser.add_argument("--first", type=int, default=0, help="leave out the kernels before")
    parser.add_argument(
        "--policies", action="store_true", help="as few kernels as have every policy among them"
    )
    parser.add_argument("--unset", action="store_true", help="set and check no results")
    parser.add_argument("--grouped", action="store_true", help="run the grouped kernels instead")
    arguments = parser.parse_args()
    gpu = Gpu()
    if arguments.grouped:
        specs, check = list(grouped_covering_specs()), check_grouped
    else:
        specs = [*epilogue_covering_specs(), *covering_specs(), *table_specs(gpu.device)]
        if arguments.policies:
            specs += [*split_specs(), *short_box_specs(), *transposed_specs()]
        specs = [spec for spec in specs if not spec.grouped]
        check = check_plain
    if arguments.policies:
        specs = covering_subset(specs, lambda spec: set(traits_of(spec)))
    if arguments.unset:
        specs = [spec for spec in specs if not spec.split_k]
        check = check_nothing
    chosen = list(dict.fromkeys(specs))[arguments.first :: arguments.every]
    failures = 0
    for spec in chosen:
        for error in check(gpu, spec):
            failures += 1
            print(f"wrong: {error}")
    print(f"{len(chosen)} kernels, {failures} wrong results")
    return 1 if failures else 0


def problems_of(spec: GemmSpec) -> list[tuple[GemmProblem, RasterOrder]]:
    return (cases.split_problems if spec.split_k else cases.edge_problems)(spec, FEW_SMS)[:3]


def check_plain(gpu: Gpu, spec: GemmSpec) -> Iterator[AssertionError]:
    """Runs the kernel; yields what was wrong."""
    for problem, raster_order in problems_of(spec):
        inputs = cases.integer_inputs(problem, 0)
        results = trial.run_all(gpu, problem, spec, raster_order, inputs, num_sms=FEW_SMS)
        if not graphs.is_exact(spec.graph):
            continue
        what = f"{spec.name} on {problem}"
        try:
            outcome.assert_exact(results, outcome.exact(problem, spec, inputs), what)
        except AssertionError as error:
            yield error


def check_grouped(gpu: Gpu, spec: GemmSpec) -> Iterator[AssertionError]:
    """Runs the kernel of a grouped product; yields what was wrong."""
    exact = graphs.is_exact(spec.graph)
    for case in grouped.edge_cases(spec, FEW_SMS, exact):
        inputs = case.inputs()
        try:
            results = trial.run_all(
                gpu, case.problem, spec, case.raster_order, inputs, num_sms=FEW_SMS
            )
            if exact:
                case.check(inputs, results)
        except AssertionError as error:
            yield error


def check_nothing(gpu: Gpu, spec: GemmSpec) -> Iterator[AssertionError]:
    """Runs the kernel on memory that nothing has set."""
    if spec.grouped:
        for case in grouped.edge_cases(spec, FEW_SMS, exact=True):
            parts = case.problem, spec, case.raster_order, case.inputs()
            trial.uploaded(gpu, *parts, FEW_SMS).launch()
    else:
        for problem, raster_order in problems_of(spec):
            inputs = cases.integer_inputs(problem, 0)
            trial.uploaded(gpu, problem, spec, raster_order, inputs, FEW_SMS).launch()
    gpu.synchronize()
    yield from ()


if __name__ == "__main__":
    sys.exit(main())
