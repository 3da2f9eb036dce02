"""Times products of 8-bit operands: ours and XLA's (cuBLASLt), taking turns in one process.

    python benchmarks/eight_bit.py --build FOLDER          # anywhere: compiles what is timed
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/eight_bit.py --quick --json eight_bit.json

Products of two matrices that lie along K, into bfloat16 (int8 also into int32). "scaled" ones are
times a scale for each tensor, row and column, in float32. With `--kernels` the plain products run
on each kernel of a list, whatever dispatch would choose. Median of the burst regime, by CUPTI.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import command_line
import jax
import jax.numpy as jnp
from jax import lax

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch import H200, estimate, legal_specs
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing import benchmark, timing
from jax_hopper_gemm.testing.lowered import specs_of

DIMS: Any = (((1,), (1,)), ((), ()))
E4M3, E5M2, INT8 = "float8_e4m3fn", "float8_e5m2", "int8"


@dataclass(frozen=True)
class Case:
    """A product of (m, k) and (n, k), and what follows."""

    name: str
    m: int
    n: int
    k: int
    dtypes: tuple[str, str] = (E4M3, E4M3)
    out: str = "bfloat16"
    # "tensor", "vector" (of rows and columns), "1x128" and "128x128" (blocks of the right operand;
    # those of the left one are 1x128), or none.
    scales: str = ""
    precision: Any = None

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, columns = ((self.m, 1), (1, self.n)) if self.scales == "vector" else ((), ())
        if self.blocks:
            lines = self.n if self.scales == "1x128" else -(-self.n // 128)
            rows, columns = ((x, -(-self.k // 128)) for x in (self.m, lines))
        return (
            jax.ShapeDtypeStruct((self.m, self.k), self.dtypes[0]),
            jax.ShapeDtypeStruct((self.n, self.k), self.dtypes[1]),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct(columns, jnp.float32),
        )

    @property
    def blocks(self) -> bool:
        return self.scales.endswith("x128")

    def inputs(self) -> list[tuple[jax.Array, ...]]:
        """Returns enough sets of normal random operands to keep them out of L2."""
        nbytes = (self.m + self.n) * self.k

        @jax.jit
        def draw(seed: Any) -> tuple[jax.Array, ...]:
            keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2)
            factors = [40.0 if dtype == INT8 else 1.0 for dtype in self.dtypes]
            a, b, x, y = self.shapes()
            arrays = [
                (factor * jax.random.normal(key, s.shape, jnp.float32)).astype(s.dtype)
                for key, s, factor in zip(keys, (a, b), factors, strict=True)
            ]
            return *arrays, jnp.full(x.shape, 0.5), jnp.full(y.shape, 2.0)

        sets = timing.sets_to_rotate(nbytes)
        return [jax.block_until_ready(draw(jnp.uint32(seed))) for seed in range(sets)]

    def ours(self, a: Any, b: Any, x: Any, y: Any) -> jax.Array:
        epilogue: dict[str, Any] = {}
        if self.blocks:
            pair = jhg.Quantized(a, x), jhg.Quantized(b, y)
            dtype = jnp.dtype(self.out)
            return jhg.dot_general(
                *pair, DIMS, preferred_element_type=dtype, implementation="hopper"
            )
        if self.scales:
            epilogue["epilogue"] = lambda acc, x, y: acc.astype(jnp.float32) * x * y
            epilogue["epilogue_operands"] = (x, y)
        return jhg.dot_general(
            a, b, DIMS, self.precision, jnp.dtype(self.out), implementation="hopper", **epilogue
        )

    def theirs(self, a: Any, b: Any, x: Any, y: Any) -> jax.Array:
        """XLA's product, scales after it: the form that it takes to cuBLASLt.

        It has no product with block scales: there it is that of one scale for each tensor.
        """
        if self.blocks:
            x, y = x[0, 0], y[0, 0]
        acc: Any = self.out
        if self.scales:
            acc = jnp.int32 if self.dtypes[0] == INT8 else jnp.float32
        out = lax.dot_general(a, b, DIMS, self.precision, jnp.dtype(acc))
        return (out.astype(jnp.float32) * x * y).astype(self.out) if self.scales else out

    def specs(self) -> list[GemmSpec]:
        return specs_of(self.ours, *self.shapes())

    def problem(self) -> GemmProblem:
        problem = GemmProblem.dense(
            self.m, self.n, self.k, b_major="k", dtype=self.dtypes[0], d_dtype=self.out
        )
        promoted = self.precision is not None
        return replace(problem, b_dtype=self.dtypes[1], promoted=promoted)


def _cases() -> Iterator[Case]:
    for m, n, k in ((8192,) * 3, (4096,) * 3, (4096, 7168, 2048), (4096, 4096, 7168), (2048,) * 3):
        name = f"{m}x{n}x{k}"
        yield Case(f"{name} e4m3", m, n, k)
        yield Case(f"{name} e4m3, tensor scales", m, n, k, scales="tensor")
        yield Case(f"{name} e4m3, row and column scales", m, n, k, scales="vector")
        yield Case(f"{name} e4m3, promoted", m, n, k, precision=lax.Precision.HIGHEST)
        yield Case(f"{name} e4m3, blocks 1x128, 128x128", m, n, k, scales="128x128")
        yield Case(f"{name} e4m3, blocks 1x128, 1x128", m, n, k, scales="1x128")
        if m == n:
            yield Case(f"{name} e5m2 by e4m3", m, n, k, (E5M2, E4M3))
            yield Case(f"{name} int8 into int32", m, n, k, (INT8, INT8), "int32")
            yield Case(f"{name} int8, tensor scales", m, n, k, (INT8, INT8), scales="tensor")


CASES = {case.name: case for case in _cases()}
QUICK = [
    f"{shape} {what}"
    for shape in ("8192x8192x8192", "4096x4096x4096")
    for what in (
        "e4m3", "e4m3, row and column scales", "e4m3, blocks 1x128, 128x128", "int8 into int32",
        "e4m3, tensor scales", "e4m3, promoted", "int8, tensor scales",
    )
]  # fmt: skip


def kernels_of(case: Case, count: int) -> list[tuple[GemmSpec, RasterOrder]]:
    """Returns the candidates of the tuner that the model expects to be fastest."""
    problem = case.problem()
    ranked = sorted(
        legal_specs(problem, H200), key=lambda candidate: estimate(problem, *candidate, H200).ns
    )
    best: dict[tuple, tuple[GemmSpec, RasterOrder]] = {}
    for spec, order in ranked:
        shape = (
            spec.tile_m, spec.tile_n, spec.tile_k, spec.cluster_m, spec.cluster_n,
            spec.warp_schedule, spec.tile_scheduler,
        )  # fmt: skip
        shared, thin = spec.cluster_size == 2, spec.tile_k == 128
        if spec.tile_scheduler != "single" and spec.epi_tile_n == 32 and shared and thin:
            best.setdefault(shape, (spec, order))
    return list(best.values())[:count]


def of_one_kernel(problem: GemmProblem, spec: GemmSpec, order: RasterOrder) -> Callable[..., Any]:
    launch = benchmark.one_kernel(problem, spec, order, H200.num_sms)
    return jax.jit(lambda a, b, x, y: launch(a, b))


def main() -> int:
    parser = command_line.parser(__doc__, rounds=5)
    parser.add_argument("--cases", default="", help="only cases whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="only what 90 seconds show")
    parser.add_argument("--kernels", type=int, default=0, help="kernels of plain products to time")
    arguments = parser.parse_args()
    named = map(CASES.get, QUICK) if arguments.quick else CASES.values()
    cases = [case for case in named if case and arguments.cases in case.name]
    if arguments.build:
        specs = [spec for case in cases for spec in case.specs()]
        for case in cases:
            if not case.scales:
                specs += [spec for spec, _ in kernels_of(case, arguments.kernels)]
        return command_line.build(specs, arguments.build)
    rows = []
    command_line.begin(
        "burst", f"{'product':42} {'XLA us':>9} {'ours us':>9} {'TFLOP/s':>8} XLA/ours"
    )
    for case in cases:
        input_sets, timings = case.inputs(), {}
        functions: dict[str, Callable] = {"xla": jax.jit(case.theirs), "ours": jax.jit(case.ours)}
        (spec, *_) = case.specs()
        problem = case.problem()
        if not case.scales:
            for chosen, order in kernels_of(case, arguments.kernels):
                name = f"{chosen.name} {order.along}{order.swizzle}"
                functions[name] = of_one_kernel(problem, chosen, order)
        for function in functions.values():
            jax.block_until_ready(function(*input_sets[0]))  # compiles
        measure = {name: timing.burst(f, input_sets) for name, f in functions.items()}
        timings = timing.alternate(measure, arguments.rounds, partial(_rest, problem))
        xla, ours = timings["xla"].median, timings["ours"].median
        rate = problem.flops / ours / 1e6
        print(f"{case.name:42} {xla:9.1f} {ours:9.1f} {rate:8.0f} {xla / ours:.3f}", flush=True)
        for name in list(functions)[2:]:
            print(f"    {timings[name].median:9.1f}  {name}", flush=True)
        found = {name: t.to_dict() for name, t in timings.items()}
        rows.append({"case": case.name, "kernel": spec.name, "timings": found})
    return command_line.write(arguments.json, rows)


def _rest(problem: GemmProblem) -> None:
    time.sleep(min(1.0, 20 * problem.flops / 1e15))  # so that the card is cool


if __name__ == "__main__":
    sys.exit(main())
