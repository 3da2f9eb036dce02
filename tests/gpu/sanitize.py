"""Runs every kernel on small problems, for a memory checker to watch.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py --every 8

It launches directly: no XLA, so all that the checker sees is ours. Exact results are checked, too.
"""

from __future__ import annotations

import argparse
import sys

from jax_hopper_gemm.dispatch import table_specs
from jax_hopper_gemm.testing import cases, graphs, outcome, trial
from jax_hopper_gemm.testing.gpu import Gpu
from jax_hopper_gemm.testing.policies import covering_specs, epilogue_covering_specs

FEW_SMS = 8  # so that a persistent grid wraps around on small problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="run every Nth kernel")
    parser.add_argument("--first", type=int, default=0, help="leave out the kernels before")
    arguments = parser.parse_args()
    gpu = Gpu()
    specs = list(
        dict.fromkeys((*epilogue_covering_specs(), *covering_specs(), *table_specs(gpu.device)))
    )
    specs = [spec for spec in specs if not spec.grouped]
    failures = 0
    chosen = specs[arguments.first :: arguments.every]
    for spec in chosen:
        for problem, traversal in cases.edge_problems(spec, FEW_SMS)[:3]:
            inputs = cases.integer_inputs(problem, 0)
            results = trial.run_all(gpu, problem, spec, traversal, inputs, num_sms=FEW_SMS)
            if not graphs.is_exact(spec.graph):
                continue
            try:
                outcome.assert_exact(results, outcome.exact(problem, spec, inputs), spec.name)
            except AssertionError as error:
                failures += 1
                print(f"wrong: {error} on {problem}")
    print(f"{len(chosen)} kernels, {failures} wrong results")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
