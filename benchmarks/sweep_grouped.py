"""Times every kernel of a grouped product worth considering, launched directly.

    python benchmarks/sweep_grouped.py --shapes qwen3 --what weight
    python benchmarks/sweep_grouped.py --build-only FOLDER    # on a machine with a compiler

Shapes and sizes are those of `grouped.py`. Kernels run in a process of its own, which is replaced
when one breaks or hangs; the fastest are timed again in every order of tiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from grouped import RATE, SHAPES, SIZES, WHAT, Shape, first_line

from jax_hopper_gemm import cubin
from jax_hopper_gemm.dispatch.candidates import (
    TRAVERSALS,
    Config,
    OperandTypes,
    filled_spec,
    model_specs,
    tuner_specs,
    worthwhile,
)
from jax_hopper_gemm.gemm.groups import GroupedAxis, Groups
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec, RasterOrder, TileScheduler, WarpSchedule
from jax_hopper_gemm.testing import benchmark, timing
from jax_hopper_gemm.testing.gpu import Gpu

_TILES: tuple[tuple[int, int], ...] = (
    (64, 64), (64, 96), (64, 128), (64, 160), (64, 192), (64, 224), (64, 256),
    (128, 64), (128, 96), (128, 128), (128, 160), (128, 176), (128, 192), (128, 208), (128, 224),
    (128, 256), (192, 96), (192, 128), (192, 160), (256, 64), (256, 96), (256, 128), (256, 160),
    (256, 192),
)  # fmt: skip
_CLUSTERS: dict[str, tuple[tuple[int, int], ...]] = {
    "m": ((1, 1), (1, 2)),
    "k": ((1, 1), (2, 1), (1, 2), (2, 2)),
}
_WARPS: tuple[WarpSchedule, ...] = ("cooperative", "pingpong")
_SCHEDULERS: tuple[TileScheduler, ...] = ("static", "dynamic")
_FINALISTS = 6
_DEATHS = 8
_FIRST_ANSWER, _ANSWER = 240, 30  # seconds that a process of the sweep may take


def problem_of(shape: Shape, what: str) -> GemmProblem:
    """Returns what the kernel of a direction is asked."""
    s = shape
    axis = "k" if what == "weight" else "m"
    extents = {
        "forward": (s.tokens, s.n, s.k),
        "data": (s.tokens, s.k, s.n),
        "weight": (s.k, s.n, s.tokens),
    }[what]
    dense = GemmProblem.dense(
        *extents, s.experts,
        a_major="m" if what == "weight" else "k", b_major="k" if what == "data" else "n",
    )  # fmt: skip
    groups = GroupedAxis(axis, s.experts, Groups.plain(s.experts))
    return dataclasses.replace(dense, groups=groups)


def sweep_specs(problem: GemmProblem, pattern: str, wide: bool) -> list[GemmSpec]:
    """Returns the kernels to time whose names match a regular expression."""
    assert problem.groups is not None
    types = OperandTypes.of(problem)
    specs = dict.fromkeys(model_specs(types))
    clusters = _CLUSTERS[problem.groups.axis]
    for tile, cluster in itertools.product(_TILES, clusters):
        for warps, scheduler in itertools.product(_WARPS, _SCHEDULERS):
            spec = filled_spec(Config(*tile, 64, *cluster, warps, scheduler), types)
            if spec is not None and worthwhile(spec):
                specs[spec] = None
    if wide:
        specs |= dict.fromkeys(tuner_specs(types))
    return [spec for spec in specs if re.search(pattern, spec.name)]


def sweep(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times every kernel on each case, prints the best; returns all figures."""
    document = {}
    for name, what, kind in itertools.product(arguments.shapes, arguments.what, arguments.sizes):
        shape = SHAPES[name]
        problem = problem_of(shape, what)
        specs = sweep_specs(problem, arguments.specs, arguments.wide)
        print(f"\n{name} {what} {kind}: {len(specs)} kernels", flush=True)
        report = cubin.build(specs)
        for failed, reason in report.failures.items():
            print(f"  not built: {failed.name}: {first_line(RuntimeError(reason))}")
        built = [spec for spec in specs if spec not in report.failures]
        order = RasterOrder("m", 8)
        times, broken, dense = in_processes(name, what, kind, [(s, order) for s in built])
        ranked = sorted(times, key=times.__getitem__)[:_FINALISTS]
        again = [(spec, t) for spec, _ in ranked for t in TRAVERSALS]
        more, more_broken, more_dense = in_processes(name, what, kind, again)
        times |= more
        broken |= more_broken
        dense += more_dense
        dense_us = float(np.median(dense)) if dense else math.nan
        best = sorted(times, key=times.__getitem__)[: arguments.top]
        print(f"  dense {dense_us:.1f} us, {shape.flops / dense_us / 1e6:.0f} TF")
        for spec, raster_order in best:
            us = times[spec, raster_order]
            print(
                f"  {us:9.1f} us {shape.flops / us / 1e6:5.0f} TF {dense_us / us:6.3f} of dense  "
                f"along {raster_order.along} {raster_order.swizzle:2}  {spec.name}"
            )
        for (spec, _), reason in broken.items():
            print(f"  broken: {spec.name}: {reason}")
        document[f"{name} {what} {kind}"] = {
            "dense_us": dense_us,
            "times": [
                {"us": us, "spec": json.loads(s.to_json()), "raster_order": vars(t)}
                for (s, t), us in sorted(times.items(), key=lambda item: item[1])
            ],
            "broken": {spec.name: reason for (spec, _), reason in broken.items()},
        }
    return document


Kernel = tuple[GemmSpec, RasterOrder]


def in_processes(
    name: str, what: str, kind: str, kernels: Sequence[Kernel]
) -> tuple[dict[Kernel, float], dict[Kernel, str], list[float]]:
    """Returns microseconds of the kernels, what became of those that failed, and dense times."""
    times: dict[Kernel, float] = {}
    broken: dict[Kernel, str] = {}
    dense: list[float] = []
    pending = list(kernels)
    deaths = 0  # of processes that timed nothing, one after the other
    while pending and deaths < _DEATHS:
        worker = Worker(name, what, kind, pending)
        done = 0
        try:
            while done < len(pending):
                answer = worker.answer(_FIRST_ANSWER if done == 0 else _ANSWER)
                if isinstance(answer, str):
                    broken[pending[done]] = answer
                    done += 1
                    break
                if "dense" in answer:
                    dense.append(answer["dense"])
                    continue
                if "us" in answer:
                    times[pending[done]] = answer["us"]
                else:
                    broken[pending[done]] = answer["error"]
                done += 1
        finally:
            worker.end()
        deaths = 0 if any(kernel in times for kernel in pending[:done]) else deaths + 1
        pending = pending[done:]
    return times, broken | dict.fromkeys(pending, "not tried"), dense


class Worker:
    """A process that times kernels in order, one line of JSON each."""

    def __init__(self, name: str, what: str, kind: str, kernels: Sequence[Kernel]):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", name, what, kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout and self.process.stderr
        rows = [{"spec": spec.to_json(), "raster_order": vars(order)} for spec, order in kernels]
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()
        try:
            self.process.stdin.write(json.dumps(rows))
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # what it died of is on stderr

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.errors = [*self.errors[-20:], line]

    def answer(self, seconds: float) -> dict[str, Any] | str:
        """Returns the next answer, or why there is none."""
        while True:
            try:
                line = self.lines.get(timeout=seconds)
            except queue.Empty:
                return f"no answer in {seconds} s: it hangs"
            if line is None:
                said = "".join(self.errors).strip().splitlines()
                return f"the process ended: {said[-1][:200] if said else 'it said nothing'}"
            if line.startswith("{"):
                return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def work(name: str, what: str, kind: str) -> int:
    """Times the kernels on stdin; what fails for good ends the process."""
    shape = SHAPES[name]
    kernels = [
        (GemmSpec.from_json(row["spec"]), RasterOrder(**row["raster_order"]))
        for row in json.load(sys.stdin)
    ]
    problem = problem_of(shape, what)
    sizes = SIZES[kind](shape.tokens, shape.experts, 0)
    a, b = dense_operands(shape, what)
    product = jax.jit(
        {"forward": jnp.matmul, "data": lambda a, b: a @ b.T, "weight": lambda a, b: a.T @ b}[what]
    )
    time_dense = timing.burst(product, [(a, b)])
    time_kernel = timing.KernelTimer(Gpu(), problem, sizes)
    pause = min(0.2, 10 * shape.flops / RATE)

    def say(**answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    for i, (spec, raster_order) in enumerate(kernels):
        if i % 20 == 0:
            time.sleep(pause)
            say(dense=timing.Timing(tuple(time_dense())).median)
        time.sleep(pause)
        try:
            us = time_kernel(spec, raster_order)
        except Exception as error:
            say(error=f"{type(error).__name__}: {first_line(error)}")
            if "CUDA_ERROR" in str(error):  # the context is lost with all that is in it
                return 1
            continue
        say(us=us)
    return 0


def dense_operands(shape: Shape, what: str) -> tuple[jax.Array, jax.Array]:
    """Returns random A and B of the dense product."""
    s = shape
    shapes = {
        "forward": ((s.tokens, s.k), (s.k, s.n)),
        "data": ((s.tokens, s.n), (s.k, s.n)),
        "weight": ((s.tokens, s.k), (s.tokens, s.n)),
    }[what]
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    a, b = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    return a, b


def build(arguments: argparse.Namespace) -> int:
    """Builds every kernel of the sweep; returns the exit status."""
    specs: dict[GemmSpec, None] = {}
    for name, what in itertools.product(arguments.shapes, arguments.what):
        problem = problem_of(SHAPES[name], what)
        specs |= dict.fromkeys(sweep_specs(problem, arguments.specs, arguments.wide))
    report = cubin.build(list(specs), folder=arguments.build_only)
    print(report)
    return 1 if report.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["uneven"])
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--specs", default="", help="only kernels whose names match this regex")
    parser.add_argument("--wide", action="store_true", help="a tuner's kernels, too")
    parser.add_argument("--top", type=int, default=10, help="kernels to print")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--build-only", type=Path, metavar="FOLDER", help="build the kernels")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(*arguments.worker)
    if arguments.build_only:
        return build(arguments)
    figures = sweep(arguments)
    if arguments.json:
        document = {"environment": benchmark.environment(), "sweep": figures}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
