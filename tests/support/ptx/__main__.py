"""Runs one kernel's PTX on one problem and says whether it is right.

    PYTHONPATH=tests:benchmarks python -m support.ptx SPEC M N K

SPEC is a `GemmSpec` as JSON, or part of the name of a kernel of `support.policies`. Extents along
lines are raised to what the kernel needs. A grouped kernel has as many groups as --batch says, of
random sizes. Kernels of stacks, and those whose groups have scales, only tests of `tests/gpu` run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from support import cases, grouped, outcome, policies, trial
from support.ptx.gpu import PtxGpu, ptx_of
from support.ptx.parse import PtxError

from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

FAMILIES = (
    "covering", "stacked", "nested", "short_box", "split", "transposed", "loose",
    "epilogue_covering", "grouped_covering", "eight_bit", "block", "parts", "tf32", "converted",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m support.ptx",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec")
    parser.add_argument("extents", type=int, nargs=3, metavar=("M", "N", "K"))
    parser.add_argument("--batch", type=int, default=1, help="matrices, or groups [1]")
    parser.add_argument("--sms", type=int, default=4, help="SMs of a persistent grid [4]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="only write the kernel's PTX to this file")
    parser.add_argument("--read", type=Path, help="run the PTX of this file in its place")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    spec = find(arguments.spec)
    print(spec.name)
    if arguments.write:
        arguments.write.write_text(ptx_of(spec))
        return 0
    edited = arguments.read and arguments.read.read_text()
    gpu: Any = PtxGpu(lambda text: edited or text)
    try:
        check(gpu, spec, arguments.extents, arguments.batch, arguments.seed, arguments.sms)
    except (AssertionError, PtxError) as error:
        print(f"wrong: {error}")
        return 1
    print("right")
    return 0


def find(text: str) -> GemmSpec:
    """Returns the spec that JSON or part of a name stands for."""
    if text.startswith("{"):
        return GemmSpec.from_json(text)
    found = next((spec for spec in known() if text in spec.name), None)
    if found is None:
        sys.exit(f"no kernel of {', '.join(FAMILIES)} has a name with {text}; give a spec as JSON")
    return found


def known() -> Iterator[GemmSpec]:
    for family in FAMILIES:
        yield from getattr(policies, f"{family}_specs")()


def check(gpu: Any, spec: GemmSpec, extents: list[int], batch: int, seed: int, sms: int) -> None:
    """Runs the kernel on inputs of a seed; raises an AssertionError or PtxError if it is wrong."""
    m, n, k = extents
    order = RasterOrder()
    if spec.k_group or spec.indexed or (spec.a_block and spec.grouped):
        sys.exit("run this kernel with pytest --ptx tests/gpu")
    if not spec.grouped:
        problem = cases.padded(spec, m, n, k, batch)
        wanted = outcome.check_scaled if spec.a_block else outcome.check
        wanted(gpu, spec, problem, order, seed, sms)
        return
    problem = grouped.problem_of(spec, grouped.Layout.plain(batch), m, n, k)
    length = problem.m if spec.grouped == "m" else problem.k
    drawn = np.random.default_rng(seed).multinomial(length, [1 / (batch + 1)] * (batch + 1))
    sizes = grouped.sizes_for(spec, length, drawn[:-1])
    case = grouped.Case(problem, spec, order, sizes, seed)
    inputs = case.inputs()
    case.check(inputs, trial.run_all(gpu, problem, spec, order, inputs, num_sms=sms))


if __name__ == "__main__":
    sys.exit(main())
