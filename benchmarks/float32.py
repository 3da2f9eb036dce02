"""Times products of float32 in every precision against XLA's, in turns on the same random inputs.

    python benchmarks/float32.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/float32.py --json float32.json
    ... --precisions HIGHEST --xla highest             SGEMM alone

Of each product, for each precision: XLA, and the kernels to choose among; at HIGHEST also the whole
product as users get it ("chosen"), beside its kernel alone ("as it lies"). Layouts are those of A
and B: a product stored (N, M) is that of the transposed operands, so these are all eight. Errors
are those of the first kernel and of XLA, in norm, relative to float64 of some rows. Burst regime,
CUPTI.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import command_line
import jax
import numpy as np
from jax import lax

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch
from jax_hopper_gemm.dispatch.candidates import considered_specs
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.gemm import simt
from jax_hopper_gemm.gemm.bf16_parts import PRESETS
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.gemm.problem import GemmProblem, Major
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing import benchmark, shapes, timing
from jax_hopper_gemm.testing.lowered import all_specs_of

SIZES = (2048, 4096, 8192)
MAJORS: tuple[tuple[Major, Major], ...] = (("k", "n"), ("k", "k"), ("m", "n"), ("m", "k"))
PRECISIONS = ("TF32", "X3", "X6", "X9", "HIGHEST")  # the last one by FMA units
CHECKED_ROWS = 64
XLA = ("default", "highest", *PRESETS.values())


def problems(sizes: list[int], majors: list[str]) -> Iterator[GemmProblem]:
    for size in sizes:
        for a_major, b_major in MAJORS:
            if a_major + b_major in majors:
                yield GemmProblem.dense(
                    size, size, size, a_major=a_major, b_major=b_major, dtype="float32"
                )


def asked(problem: GemmProblem, precision: str) -> GemmProblem:
    """Returns the problem in a precision."""
    if precision == "HIGHEST":
        return replace(problem, simt=True)
    terms = 0 if precision == "TF32" else int(precision.removeprefix("X"))
    return replace(problem, bf16_terms=terms)


def launched(problem: GemmProblem, spec: GemmSpec) -> list[KernelSpec]:
    """Returns the kernels of the program that is timed: one that reads parts needs them cut."""
    function = benchmark.one_kernel(problem, spec, RasterOrder(), dispatch.H200.num_sms)
    return all_specs_of(function, *benchmark.input_shapes(problem))


def whole_product(problem: GemmProblem) -> Callable:
    """Returns the product by FMA units as users get it, which may transpose operands first."""
    dims = shapes.dimension_numbers(problem)
    how: Any = {"precision": "highest", "implementation": "hopper"}
    return jax.jit(lambda a, b: jhg.dot_general(a, b, dims, **how))


def kernels(problem: GemmProblem, precision: str, everything: bool) -> dict[str, GemmSpec]:
    """Returns the kernels of a problem `asked` for to time, that of dispatch first."""
    chosen = dispatch.choose(problem, dispatch.H200, kernel_only=True).spec
    name = "as it lies" if problem.simt else "chosen"
    found = {} if chosen is None else {f"{precision} {name}": chosen}
    if everything:
        for spec in considered_specs(problem):
            large = spec.tile_m * spec.tile_n >= 128 * 64
            if large and spec not in found.values() and not pairing_violations(problem, spec):
                tile = f"{spec.tile_m}x{spec.d_tile_n} {spec.cluster_m}x{spec.cluster_n}"
                way = "".join((" transposed" * (spec.d_major == "m"), " cut" * spec.reads_parts))
                found[f"{precision} {tile}{way}"] = spec
        if chosen and problem.simt:
            for tile_m, tile_k in ((128, 16), (256, 32)):
                stages = simt.NUM_STAGES[tile_k]
                spec = replace(chosen, tile_m=tile_m, tile_k=tile_k, num_stages=stages)
                found[f"{precision} {tile_m}x{spec.tile_n}x{tile_k} {stages} stages"] = spec
    return found


def xla(problem: GemmProblem, precision: str) -> Callable:
    dims = shapes.dimension_numbers(problem)
    named: Any = precision
    if precision in lax.DotAlgorithmPreset.__members__:
        named = lax.DotAlgorithmPreset[precision]
    return jax.jit(lambda a, b: lax.dot_general(a, b, dims, precision=named))


def error_of(function: Callable, problem: GemmProblem, inputs: tuple) -> float:
    a, b = (np.asarray(x, np.float64) for x in inputs)
    a = a if problem.a.major == "k" else a.T
    b = b if problem.b.major == "n" else b.T
    rows = np.linspace(0, problem.m - 1, CHECKED_ROWS).astype(int)
    exact = a[rows] @ b
    got = np.asarray(function(*inputs)).reshape(problem.m, problem.n)[rows]
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def main() -> int:
    parser = command_line.parser(__doc__, rounds=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--majors", nargs="+", default=["".join(pair) for pair in MAJORS])
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--xla", nargs="*", default=list(XLA), help="precisions of XLA's products")
    parser.add_argument("--all", action="store_true", help="also kernels that are not chosen")
    arguments = parser.parse_args()
    found = list(problems(arguments.sizes, arguments.majors))
    if arguments.build:
        specs = [
            each
            for problem in found
            for precision in arguments.precisions
            for spec in kernels(asked(problem, precision), precision, arguments.all).values()
            for each in launched(asked(problem, precision), spec)
        ]
        if "HIGHEST" in arguments.precisions:
            for problem in found:
                inputs = benchmark.input_shapes(problem)
                specs += all_specs_of(whole_product(problem), *inputs)
        return command_line.build(specs, arguments.build)
    return measure(found, arguments)


def measure(found: list[GemmProblem], arguments: argparse.Namespace) -> int:
    device = benchmark.this_device()
    rows = []
    for problem in found:
        inputs = benchmark.random_inputs(problem)
        functions: dict[str, Callable] = {}
        for precision in arguments.xla:
            function = xla(problem, precision)
            try:
                jax.block_until_ready(function(*inputs[0]))
            except Exception as error:  # XLA has no such product
                print(f"XLA {precision}: {type(error).__name__}", flush=True)
            else:
                functions[f"XLA {precision}"] = function
        for precision in arguments.precisions:
            if precision == "HIGHEST":
                functions["HIGHEST chosen"] = whole_product(problem)
            of_kernel = asked(problem, precision)
            for name, spec in kernels(of_kernel, precision, arguments.all).items():
                order = best_raster_order(of_kernel, spec, device)
                functions[name] = benchmark.one_kernel(of_kernel, spec, order, device.num_sms)
        errors = {name: error_of(f, problem, inputs[0]) for name, f in functions.items()}
        bursts = {name: timing.burst(f, inputs) for name, f in functions.items()}
        pause = min(1.0, 100 * problem.flops / 5e14)
        timings = timing.alternate(bursts, arguments.rounds, rest=lambda p=pause: time.sleep(p))
        what = f"{problem.m}x{problem.n}x{problem.k} {shapes.layout_name(problem)}"
        print(what)
        for name, timed in timings.items():
            us = timed.median
            rate = problem.flops / us / 1e6
            print(
                f"  {name:28} {us:9.1f} us {rate:7.1f} TFLOP/s  error {errors[name]:.2e}",
                flush=True,
            )
        timed = {name: t.to_dict() | {"error": errors[name]} for name, t in timings.items()}
        rows.append({"problem": what, **timed})
    return command_line.write(arguments.json, rows)


if __name__ == "__main__":
    sys.exit(main())
