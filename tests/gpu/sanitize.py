"""Runs every kernel on small problems, for a memory checker to watch.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py --every 8
    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py --grouped --every 4
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py --policies build/chip
    compute-sanitizer --tool initcheck python tests/gpu/sanitize.py --policies build/chip --unset

It launches directly: no XLA, so all that the checker sees is ours. Exact results are checked, too.
Sizes of grouped products are of every kind, those that make no sense among them.

With `--policies` it runs few of the kernels that `tests/chip/run.py build` has built, plain and
grouped, and prints their names: of every policy, arithmetic, layout and dtype, and of every
arithmetic with every kind of groups one is among them. Each runs on random products; that no memory
around arrays changes is checked, numbers are not.

With `--unset` results and workspaces are not set before a launch, and results not read after it, so
initcheck sees what a kernel reads there; those that split K or have the dynamic scheduler are left
out, since they may read any flag.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `support`
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # `group_sizes`

import numpy as np
from chip.families import arithmetic_of
from chip.problems import Draw
from support import cases, graphs, grouped, outcome, random_operands, trial
from support.covering import covering_subset
from support.gpu import Gpu
from support.policies import (
    cluster_k_specs,
    covering_specs,
    epilogue_covering_specs,
    grouped_covering_specs,
)
from support.traits import traits_of

from jax_hopper_gemm.dispatch import table_specs
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

PRODUCTS, LARGEST = 3, 1 << 21  # of each kernel, and the bytes of all arrays of one
FEW_SMS = 8  # so that a persistent grid wraps around on small problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="run every Nth kernel")
    parser.add_argument("--first", type=int, default=0, help="leave out the kernels before")
    parser.add_argument("--policies", type=Path, help="folder of kernels, of which few are run")
    parser.add_argument("--unset", action="store_true", help="set and check no results")
    parser.add_argument("--grouped", action="store_true", help="run the grouped kernels instead")
    arguments = parser.parse_args()
    gpu = Gpu()
    if arguments.policies:
        built = pickle.loads((arguments.policies / "specs.pickle").read_bytes())
        specs, check = of_every_policy(built), check_random
        print(*(spec.name for spec in specs), sep="\n")
    elif arguments.grouped:
        specs, check = list(grouped_covering_specs()), check_grouped
    else:
        specs = [*cluster_k_specs(), *epilogue_covering_specs(), *covering_specs()]
        specs += table_specs(gpu.device)
        specs = [spec for spec in specs if not spec.grouped]
        check = check_plain
    if arguments.unset:
        specs = [spec for spec in specs if not (spec.split_k or spec.dynamic)]
        check = check_unset if arguments.policies else check_nothing
    chosen = list(dict.fromkeys(specs))[arguments.first :: arguments.every]
    failures = 0
    for spec in chosen:
        for error in check(gpu, spec):
            failures += 1
            print(f"wrong: {error}")
    print(f"{len(chosen)} kernels, {failures} wrong results")
    return 1 if failures else 0


def of_every_policy(specs: Iterable[GemmSpec]) -> list[GemmSpec]:
    """Returns few kernels that have every trait, and every arithmetic with its kinds of groups."""

    def shown(spec: GemmSpec) -> set[Hashable]:
        groups = spec.grouped, spec.gathered is not None
        return {*traits_of(spec), ("arithmetic", arithmetic_of(spec), groups)}

    return covering_subset(specs, shown)


def random_runs(spec: GemmSpec) -> Iterator[tuple[GemmProblem, RasterOrder, trial.Inputs, int]]:
    """Yields random products for a kernel, with inputs and SMs to fill."""
    draw = Draw([spec], LARGEST, huge=0)
    for drawn in map(draw, range(PRODUCTS)):
        problem, seed = drawn.problem, drawn.seed
        if problem.groups:
            inputs = grouped.integer_inputs(problem, np.array(drawn.sizes, np.int32), seed)
        else:
            inputs = random_operands.integer_inputs(problem, seed)
        if problem.k_group or problem.a_scales:
            inputs = random_operands.scale_inputs(problem, inputs, seed)
        if problem.indexed:
            inputs = replace(inputs, index=np.array([seed % problem.stack], np.int32))
        yield problem, drawn.raster_order, inputs, drawn.num_sms


def check_random(gpu: Gpu, spec: GemmSpec) -> Iterator[AssertionError]:
    """Runs the kernel on random products; yields what was written to a wrong place."""
    for problem, raster_order, inputs, num_sms in random_runs(spec):
        try:
            trial.run_all(gpu, problem, spec, raster_order, inputs, num_sms=num_sms)
        except AssertionError as error:
            yield error


def check_unset(gpu: Gpu, spec: GemmSpec) -> Iterator[AssertionError]:
    """Runs the kernel on random products and memory that nothing has set."""
    for problem, raster_order, inputs, num_sms in random_runs(spec):
        trial.uploaded(gpu, problem, spec, raster_order, inputs, num_sms).launch()
    gpu.synchronize()
    yield from ()


def problems_of(spec: GemmSpec) -> list[tuple[GemmProblem, RasterOrder]]:
    return (cases.split_problems if spec.split_k else cases.edge_problems)(spec, FEW_SMS)[:3]


def check_plain(gpu: Gpu, spec: GemmSpec) -> Iterator[AssertionError]:
    """Runs the kernel; yields what was wrong."""
    for problem, raster_order in problems_of(spec):
        inputs = random_operands.integer_inputs(problem, 0)
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
            inputs = random_operands.integer_inputs(problem, 0)
            trial.uploaded(gpu, problem, spec, raster_order, inputs, FEW_SMS).launch()
    gpu.synchronize()
    yield from ()


if __name__ == "__main__":
    sys.exit(main())
