"""Times kernels that split K beside those that do not, and XLA, on products of uneven waves.

    python benchmarks/split_k.py --build FOLDER      # anywhere: compiles the kernels
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/split_k.py --json split_k.json

Candidates take turns on the same random inputs, in one process; medians of kernel times
(CUPTI). Each split product is compared with XLA's before it is timed, and must have the same bits
20 times.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import command_line

from jax_hopper_gemm.dispatch import H200, choose
from jax_hopper_gemm.dispatch.candidates import filled_spec
from jax_hopper_gemm.dispatch.configs import Config
from jax_hopper_gemm.dispatch.cost import estimate
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

# M, N, K, L and how A is stored.
SHAPES = (
    (512, 512, 16384, 1, "k"),
    (1024, 1024, 65536, 1, "m"),
    (128, 4096, 16384, 1, "k"),
    (128, 7168, 18432, 1, "k"),
    (256, 1536, 7168, 1, "k"),
    (4096, 128, 8192, 1, "k"),
    (256, 256, 32768, 1, "m"),
    (512, 2048, 4096, 4, "k"),
    (2048, 128, 8192, 1, "m"),
    (1000, 1000, 4096, 1, "k"),
    (1024, 1536, 4096, 1, "k"),
    (2048, 1408, 4096, 1, "k"),
    (3000, 5000, 4104, 1, "k"),
    (4096, 11008, 4096, 1, "k"),
    (4096, 14336, 4096, 1, "k"),
    (2560, 5120, 5120, 1, "k"),
    (8192, 8192, 8192, 1, "k"),
)
CONFIGS = (
    Config(128, 128, split_k=True),
    Config(128, 128, cluster_m=2, split_k=True),
    Config(128, 128, cluster_n=2, split_k=True),
    Config(128, 128, cluster_m=2, warp_schedule="pingpong", split_k=True),
    Config(128, 256, cluster_m=2, split_k=True),
    Config(128, 256, cluster_n=2, split_k=True),
    Config(256, 128, cluster_n=2, split_k=True),
    Config(128, 192, cluster_m=2, split_k=True),
    Config(256, 160, cluster_n=2, split_k=True),
    Config(128, 64, split_k=True),
    Config(128, 64, cluster_n=2, split_k=True),
    Config(64, 128, split_k=True),
    Config(64, 256, split_k=True),
    Config(256, 64, split_k=True),
    Config(64, 64, split_k=True),
)
BEST = 5  # split kernels of least expected cost that are timed

Candidate = tuple[GemmSpec, RasterOrder]


def problem_of(shape: tuple[int, int, int, int, str]) -> GemmProblem:
    m, n, k, batches, a_major = shape
    return GemmProblem.dense(m, n, k, batches, a_major="m" if a_major == "m" else "k")


def candidates(problem: GemmProblem) -> dict[str, Candidate]:
    """Returns kernels by a short name: the one that dispatch takes, its split twin, split ones."""
    chosen = choose(problem, H200, kernel_only=True)
    assert chosen.spec and chosen.raster_order
    found = {"chosen " + label(chosen.spec): (chosen.spec, chosen.raster_order)}
    specs = {}
    if chosen.spec.tile_scheduler == "static" and not chosen.spec.split_k:
        specs[replace(chosen.spec, split_k=True)] = None
    filled = [filled_spec(config, ProblemType.of(problem)) for config in CONFIGS]
    priced = [(spec, best_raster_order(problem, spec, H200)) for spec in filled if spec]
    priced.sort(key=lambda pair: estimate(problem, *pair, H200).ns)
    specs |= dict.fromkeys(spec for spec, _ in priced[:BEST])
    for spec in specs:
        found[label(spec)] = (spec, best_raster_order(problem, spec, H200))
    return found


def label(spec: GemmSpec) -> str:
    s = spec
    return (
        f"{s.tile_m}x{s.tile_n} {s.cluster_m}x{s.cluster_n} {s.warp_schedule[:4]} "
        f"{'split' if s.split_k else s.tile_scheduler}"
    )


def run(rounds: int) -> list[dict]:
    import numpy as np

    from jax_hopper_gemm.testing import benchmark, timing

    device = benchmark.this_device()
    rows = []
    for shape in SHAPES:
        problem = problem_of(shape)
        found = candidates(problem)
        input_sets = benchmark.random_inputs(problem)
        xla = benchmark.MAKERS["xla"](problem, input_sets)
        assert xla
        functions = {"xla": xla}
        expected = np.asarray(xla(*input_sets[0]), np.float32)
        scale = np.sqrt(problem.k)
        for name, (spec, order) in found.items():
            function = benchmark.one_kernel(problem, spec, order, device.num_sms)
            first = function(*input_sets[0])
            result = np.asarray(first).reshape(expected.shape)
            error = np.abs(result.astype(np.float32) - expected).max() / scale
            assert error < 0.05, f"{name} on {shape}: off by {error} standard deviations"
            for _ in range(20 if spec.split_k else 0):
                again = np.asarray(function(*input_sets[0])).reshape(expected.shape)
                assert (again.view(np.uint16) == result.view(np.uint16)).all(), (name, shape)
            functions[name] = function
        measures = {
            name: timing.burst(function, input_sets) for name, function in functions.items()
        }
        timings = timing.alternate(measures, rounds)
        xla_us = timings["xla"].median
        print(f"{'x'.join(map(str, shape))}: XLA {xla_us:.2f} us", flush=True)
        for name, (spec, order) in found.items():
            median = timings[name].median
            expected_us = estimate(problem, spec, order, device).ns / 1e3
            rows.append({"shape": shape, "kernel": name, "us": median, "xla_us": xla_us,
                         "expected_us": expected_us})  # fmt: skip
            speed = f"{median:9.2f} us  {xla_us / median:.3f}  expected {expected_us:9.2f}"
            print(f"  {name:32} {speed}", flush=True)
    return rows


def main() -> int:
    parser = command_line.parser(__doc__, rounds=5)
    arguments = parser.parse_args()
    if arguments.build:
        specs = (spec for shape in SHAPES for spec, _ in candidates(problem_of(shape)).values())
        return command_line.build(specs, arguments.build)
    return command_line.write(arguments.json, run(arguments.rounds))


if __name__ == "__main__":
    sys.exit(main())
