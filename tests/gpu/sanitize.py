"""Runs every kernel on small problems, for a memory checker to watch.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py --every 8
    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py --grouped --every 4

It launches directly: no XLA, so all that the checker sees is ours. Exact results are checked, too.
Sizes of grouped products are of every kind, those that make no sense among them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `support`
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # `group_sizes`

from support import cases, graphs, grouped, outcome, trial
from support.gpu import Gpu
from support.policies import covering_specs, epilogue_covering_specs, grouped_covering_specs

from jax_hopper_gemm.dispatch import table_specs
from jax_hopper_gemm.gemm.spec import GemmSpec

FEW_SMS = 8  # so that a persistent grid wraps around on small problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="run every Nth kernel")
    parser.add_argument("--first", type=int, default=0, help="leave out the kernels before")
    parser.add_argument("--grouped", action="store_true", help="run the grouped kernels instead")
    arguments = parser.parse_args()
    gpu = Gpu()
    if arguments.grouped:
        specs, check = list(grouped_covering_specs()), check_grouped
    else:
        specs = [*epilogue_covering_specs(), *covering_specs(), *table_specs(gpu.device)]
        specs = [spec for spec in specs if not spec.grouped]
        check = check_plain
    chosen = list(dict.fromkeys(specs))[arguments.first :: arguments.every]
    failures = 0
    for spec in chosen:
        for error in check(gpu, spec):
            failures += 1
            print(f"wrong: {error}")
    print(f"{len(chosen)} kernels, {failures} wrong results")
    return 1 if failures else 0


def check_plain(gpu: Gpu, spec: GemmSpec) -> Iterator[AssertionError]:
    """Runs the kernel; yields what was wrong."""
    for problem, raster_order in cases.edge_problems(spec, FEW_SMS)[:3]:
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


if __name__ == "__main__":
    sys.exit(main())
