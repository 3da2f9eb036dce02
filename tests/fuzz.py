"""Fuzzers: each tries random input of a kind until its time is up, or something is wrong.

    python tests/fuzz.py                          # each for a minute
    python tests/fuzz.py elf tables --seconds 3600 --seed 7
    python tests/fuzz.py --list

A trial is one number. A failure names it: `python tests/fuzz.py NAME --seed N --seconds 0` runs it
again, alone. `.ci/run` runs each for a moment, in `test_fuzz.py` and where its trials are tests.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
    os.environ["JAX_PLATFORMS"] = "cpu"

import fuzz_files  # noqa: E402
import group_sizes  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from fake_driver import harness  # noqa: E402
from support.cubin_samples import SPEC  # noqa: E402
from support.launches_on_cpu import parameter_bytes  # noqa: E402

# The addresses that TSan wants for itself may be taken, where the kernel draws those of a process.
NO_START = r"ThreadSanitizer( failed to allocate .* at address|: unexpected memory mapping)"
STARTS = 20

Trial = Callable[[int], None]
Fuzzer = Callable[[Path, pytest.MonkeyPatch], Trial]


def run(name: str, seconds: float, seed: int = 0) -> int:
    """Runs trials from a seed on, one at least; returns how many.

    Raises:
      AssertionError: one found something wrong; its message names the seed.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_HOPPER_GEMM_CACHE", f"{folder}/cache")
        patch.setenv("JAX_HOPPER_GEMM_LIBCUDA", "")  # to be put back
        logging.disable(logging.WARNING)
        try:
            trial, count = FUZZERS[name](Path(folder), patch), 0
            end = time.monotonic() + seconds
            while count == 0 or time.monotonic() < end:
                try:
                    trial(seed + count)
                except Exception as error:
                    raise AssertionError(f"{name} fails at --seed {seed + count}") from error
                count += 1
        finally:
            logging.disable(logging.NOTSET)
    return count


def sanitized(folder: Path, sanitizer: str, threads: int) -> Trial:
    """The launcher's C++ under a sanitizer; a trial takes a second and makes thousands."""
    from chip.problems import Draw
    from support.plans import clearing

    from jax_hopper_gemm.launch.plan import Int32, Pointer, TensorMap, make_plan

    specs = [
        SPEC, replace(SPEC, tile_scheduler="dynamic"), replace(SPEC, cluster_m=2),
        replace(SPEC, split_k=True), replace(SPEC, nested=True), replace(SPEC, indexed="a"),
        replace(SPEC, grouped="m"), replace(SPEC, grouped="k", a_major="m"),
    ]  # fmt: skip
    draw = Draw(specs, 1 << 40)
    drawn = [
        make_plan(trial.problem, trial.spec, trial.raster_order, trial.num_sms)
        for trial in map(draw, range(60))
    ]
    a_map = TensorMap(0, "float32", (32, 64), (128,), (32, 64), 128)
    past = [count * (param,) for param, most in ((a_map, 16), (Int32(1), 64), (Pointer(255), 64))
            for count in (most, most + 1)]  # fmt: skip
    with open(folder / "plans", "w") as file:
        for plan in (*drawn, *(replace(drawn[0], params=params) for params in past)):
            words = plan.encode()
            buffers = 1 + max(getattr(param, "buffer", 0) for param in plan.params)
            if plan.workspaces:
                words = clearing(words, buffers - len(plan.workspaces), plan.workspaces[0])
            sizes = parameter_bytes(words)
            print(buffers + len(plan.workspaces), len(sizes), *sizes, *words, file=file)
    options = ["-O0", "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources = [*sorted(ROOT.glob("ffi/src/*.cc")), harness.SOURCES / "ffi_host.cc"]
    whole = folder / "fuzz_launcher.cc"  # in one piece, since XLA's headers take the time
    parts = [*sources, harness.SOURCES / "fuzz_launcher.cc"]
    whole.write_text("".join(f'#include "{part}"\n' for part in parts))
    driver = harness.compile_library(folder, harness.SOURCES / "fake_cuda.cc", options)
    program = harness.compile_library(
        folder, whole, [*options, f"-I{harness.SOURCES}"], shared=False
    )

    def trial(seed: int) -> None:
        command = [str(program), str(driver), str(folder / "plans"), "1", str(seed), str(threads)]
        for _ in range(STARTS):
            done = subprocess.run(command, capture_output=True, text=True)
            if not re.search(NO_START, done.stderr):
                assert done.returncode == 0, done.stdout + done.stderr[-6000:]
                return
        raise AssertionError(f"{STARTS} times no start")

    return trial


def launcher(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Damaged plans, odd buffers, a failing driver: ASan and UBSan on decode, load and run."""
    return sanitized(folder, "address,undefined", 1)


def threads(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """The same on several threads, which share programs: TSan."""
    return sanitized(folder, "thread", 4)


def host_in(folder: Path) -> Any:
    """Returns the launcher over the stand-in of the driver, for calls without XLA."""
    from chip.device import build
    from chip.host import Host

    build(folder, "c++")
    harness.build_fakes(folder)
    return Host(folder, folder)


def fakes_in(folder: Path) -> tuple[harness.Launcher, harness.Driver]:
    """Returns the launcher over the stand-in of the driver, for programs on the CPU."""
    harness.build_fakes(folder)
    driver = folder / "fake_cuda.so"
    return harness.Launcher(folder, driver), harness.Driver(driver)


def products(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random products of every kind of kernels, planned, launched on the stand-in, checked."""
    from chip.device import Checker
    from test_chip import SHARES, draw_of
    from test_chip import run as check

    host, checker = host_in(folder), Checker(folder / "checker.so", 1 << 27)
    draws = {share: draw_of(share) for share in SHARES}

    def trial(seed: int) -> None:
        draw = draws[list(SHARES)[seed % len(SHARES)]]
        failures = check(checker, host, draw, range(seed, seed + 4))
        assert not failures, failures

    return trial


def dispatch(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random problems: dispatch chooses, what it chooses is legal, and C++ loads the plan."""
    from support import dense_problems, grouped_problems

    from jax_hopper_gemm.dispatch import H200, choose, problem_violations
    from jax_hopper_gemm.dispatch.legality import pairing_violations
    from jax_hopper_gemm.gemm.legality import violations
    from jax_hopper_gemm.launch.plan import make_plan

    host = host_in(folder)

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        problem = rng.choice((dense_problems, grouped_problems)).random_problem(rng)
        if rng.random() < 0.2:
            named: Any = dict.fromkeys(("a_dtype", "b_dtype", "d_dtype"), "float32")
            problem = replace(problem, bf16_terms=rng.choice((3, 6, 9)), **named)
        decision = choose(problem, H200, kernel_only=rng.random() < 0.5)
        if decision.spec is None:
            assert decision.reason, problem
            return
        assert decision.raster_order
        read = problem.as_run_by(decision.spec)
        wrong = (violations(decision.spec), problem_violations(read),
                 pairing_violations(problem, decision.spec))  # fmt: skip
        assert not any(wrong), (problem, wrong)
        host.plan = make_plan(problem, decision.spec, decision.raster_order, H200.num_sms)
        loaded = host.launcher.load(decision.spec, host.plan, str(seed))
        assert not isinstance(loaded, str), (problem, loaded)
        host.launcher.free(loaded)

    return trial


def calls(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random calls of the public functions, lowered for CUDA; launches keep to their buffers."""
    from support.launches import run_launches
    from support.random_calls import random_calls

    launcher, driver = fakes_in(folder)

    def trial(seed: int) -> None:
        driver.reset()
        for i, call in enumerate(random_calls(10, seed)):
            run_launches(launcher, driver, call, f"{seed} {i}")

    return trial


def groups(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Hostile sizes of groups: the kernels' search for tiles, and the fallback's numbers."""
    import test_group_search as search
    import test_ragged as ragged

    sizes_of = {**group_sizes.KINDS, **group_sizes.HOSTILE}

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        case = search.random_case(rng, rng.choice("mk"))
        assert search.found_tiles(case) == list(search.expected_tiles(case)), case
        subscripts, name = rng.choice(ragged.FORM_CASES)
        layout, like = ragged.CASES[name]
        sizes = sizes_of[rng.choice(list(sizes_of))](ragged.T, max(1, len(like)), seed)
        sizes = rng.choice((sizes, rng.choices(range(-1, 9), k=len(like))))[: len(like)]
        lhs, rhs = ragged.operands(subscripts, layout, sizes)
        found = ragged.compiled(subscripts, layout)(lhs, rhs, np.array(sizes, np.int32))
        right = ragged.by_loop(subscripts, layout, lhs, rhs, sizes)
        np.testing.assert_array_equal(found, right, f"{name}: {sizes}")

    return trial


def epilogues(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random epilogues and their gradients mean the same as the graphs they become."""
    from test_tracing_random import check_random_function

    return check_random_function


def programs(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random programs under `accelerate`, with their gradients."""
    from test_accelerate_random import check_random_program

    from jax_hopper_gemm.interop import fuse_jaxpr

    patch.setattr(fuse_jaxpr, "_refusal", lambda *_: None)  # every region is one kernel
    return check_random_program


def shapes(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Twenty more shapes, lowered and run on the stand-in: memory grows as JAX's own does."""
    patch.syspath_prepend(ROOT / "tests" / "gpu")
    many_shapes: Any = importlib.import_module("many_shapes")
    harness.build_fakes(folder)
    patch.setenv("JAX_HOPPER_GEMM_LIBCUDA", str(folder / "fake_cuda.so"))
    functions = many_shapes.ours, many_shapes.theirs
    runs = [many_shapes.on_the_host(function, folder) for function in functions]
    growth = np.zeros((2, 3))
    for run in runs:
        run(0)  # what the first one imports and loads

    def trial(seed: int) -> None:
        for which, run in enumerate(runs):
            before = many_shapes.left(free=lambda: 0)
            for i in range(20 * seed, 20 * seed + 20):
                run(i)
            growth[which] += many_shapes.left(free=lambda: 0) - before
        assert (growth[0] < growth[1] + many_shapes.SLACK).all(), growth

    return trial


OURS = launcher, threads, products, dispatch, calls, groups, epilogues, programs, shapes
FUZZERS: dict[str, Fuzzer] = {x.__name__: x for x in (*OURS, *fuzz_files.FUZZERS)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    parser.add_argument("--seconds", type=float, default=60, help="time of each [60]")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial [0]")
    parser.add_argument("--list", action="store_true", help="say what there is")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in FUZZERS]:
        parser.error(f"no fuzzer {', '.join(unknown)}; there are {', '.join(FUZZERS)}")
    for name in arguments.names or FUZZERS:
        if arguments.list:
            print(f"{name:10} {FUZZERS[name].__doc__}")
        else:
            count = run(name, arguments.seconds, arguments.seed)
            print(f"{name}: {count} trials from seed {arguments.seed} on: nothing", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
