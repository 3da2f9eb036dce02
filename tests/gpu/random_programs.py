"""Random programs under `accelerate` on a GPU, several at a time.

    python tests/gpu/random_programs.py FOLDER --seeds 1000 --build       # anywhere: their kernels
    JAX_HOPPER_GEMM_CUBINS=FOLDER/cubins python tests/gpu/random_programs.py FOLDER --seeds 1000

The programs are those of `test_accelerate_random.py`. Every region is one kernel, and every product
one of ours, but in programs with a product that no kernel runs. Results and derivatives are
compared with those of the program itself, run on the CPU an operation at a time. Kernels that are
built already are not built again; what has run is not kept: `--seeds FIRST:END` takes a range.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests"):
    sys.path.append(str(folder))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from support.random_programs import writer_of  # noqa: E402
from support.stepwise import Run, run_stepwise  # noqa: E402
from test_accelerate_random import assert_alike, leaves_of  # noqa: E402

import jax_hopper_gemm as jhg  # noqa: E402
from jax_hopper_gemm import cubin  # noqa: E402
from jax_hopper_gemm.interop import fuse_jaxpr  # noqa: E402
from jax_hopper_gemm.testing.lowered import specs_of  # noqa: E402

PORTION = 20  # programs of which kernels are built at once
CACHED = 100  # seeds between two that clear a process's caches


def accelerated(program: Any, arguments: Any) -> tuple[Any, list[Any]]:
    """Returns value and gradients under `accelerate`, a function, and the kernels it launches."""
    step = jax.value_and_grad(program)
    try:
        ours = jhg.accelerate(step, implementation="hopper")
        return ours, specs_of(ours, arguments)
    except NotImplementedError:  # of some product: others still run on kernels
        ours = jhg.accelerate(step)
        return ours, specs_of(ours, arguments)


def outcome(seed: int) -> tuple[int, int, str]:
    """Returns a seed, how many kernels its program launches, and what is wrong with it."""
    if seed % CACHED == 0:
        jax.clear_caches()
    program, arguments = writer_of(seed)
    step = jax.value_and_grad(program)
    ours, launched = accelerated(program, arguments(jnp.bfloat16))
    try:
        found = leaves_of(jax.jit(ours)(arguments(jnp.bfloat16)))
        with jax.default_device(jax.devices("cpu")[0]):
            run = Run(step, arguments(jnp.float32), measured=True)
            plain = leaves_of(run_stepwise(step, arguments(jnp.bfloat16)))
        assert_alike(found, plain, leaves_of(run.results), run.largest)
    except Exception as error:  # whatever it is, the seed is what to look at
        return seed, len(launched), f"{type(error).__name__}: {str(error)[:300]}"
    return seed, len(launched), ""


def build(folder: Path, seeds: Sequence[int], jobs: int | None) -> int:
    """Compiles kernels of programs; no GPU is needed."""
    for first in range(0, len(seeds), PORTION):
        portion = seeds[first : first + PORTION]
        specs: dict[Any, None] = {}
        for program, arguments in map(writer_of, portion):
            specs |= dict.fromkeys(accelerated(program, arguments(jnp.bfloat16))[1])
        jax.clear_caches()
        report = cubin.build(list(specs), jobs, folder=folder / "cubins", progress=False)
        print(f"programs to {portion[-1]}: {report}", flush=True)
        if report.failures:
            return 1
    return 0


def run(seeds: Sequence[int], jobs: int | None, seconds: float) -> int:
    """Runs programs until all are done or time is up."""
    count = launched = wrong = 0
    end = time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(jobs, every_region_is_one_kernel) as pool:
        for seed, kernels, what in pool.imap_unordered(outcome, seeds):
            count, launched, wrong = count + 1, launched + kernels, wrong + bool(what)
            if what:
                print(f"program {seed}: {what}", flush=True)
            if time.monotonic() > end:
                break
        pool.terminate()
    print(f"{count} programs of {len(seeds)}, {launched} kernels launched, {wrong} programs wrong")
    return 1 if wrong else 0


def every_region_is_one_kernel() -> None:
    fuse_jaxpr._refusal = lambda *_: None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", default="1000", help="END or FIRST:END [1000]")
    parser.add_argument("--build", action="store_true", help="build kernels, run nothing")
    parser.add_argument("--jobs", type=int, default=None, help="processes [one a core]")
    parser.add_argument("--seconds", type=float, default=600, help="time limit of a run [600]")
    arguments = parser.parse_args()
    first, _, end = ("0:" + arguments.seeds).rpartition(":")
    seeds = range(int(first.split(":")[-1]), int(end))
    every_region_is_one_kernel()
    if arguments.build:
        return build(arguments.folder, seeds, arguments.jobs)
    return run(seeds, arguments.jobs, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
