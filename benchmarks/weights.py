"""Times products with weights of 8 and 4 bits, in turns with those of bfloat16 and with XLA's.

    python benchmarks/weights.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/weights.py --json weights.json

Of each product: our kernel of bfloat16 weights; for each kind of weights what a user's
`jhg.matmul` runs, with its scales, and XLA's product of the dequantized ones; with --kernels also
other kernels that dispatch considers, without scales of columns, and what it expects of them.
Burst regime, CUPTI.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import command_line
import jax
import jax.numpy as jnp
from survey import ranked

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch
from jax_hopper_gemm.dispatch.candidates import considered_specs
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing import benchmark, timing
from jax_hopper_gemm.testing.lowered import specs_of

ROWS = (1, 16, 64, 4096)
WEIGHTS = ((8192, 8192), (28672, 8192), (8192, 28672))  # N, K
KINDS = {"int8": ("int8", 0), "int4": ("int4", 0), "int8 g128": ("int8", 128),
         "int4 g128": ("int4", 128), "int4 g32": ("int4", 32)}  # fmt: skip


def ours(x: jax.Array, w: Any) -> jax.Array:
    return jhg.matmul(x, w, implementation="hopper")


def theirs(x: jax.Array, w: Any) -> jax.Array:
    return jnp.matmul(x, w.dequantize(x.dtype))


def activations(m: int, k: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)


def weights(n: int, k: int, kind: str, seed: int) -> jhg.Quantized:
    """Returns random weights (K, N), those of 4 bits packed; drawn as they are stored."""
    dtype, group = KINDS[kind]
    key = jax.random.key(seed, impl="rbg")
    packed = dtype == "int4"
    bits = jax.random.bits(key, (k, n // 2 if packed else n), jnp.uint8)
    values = bits if packed else jax.lax.bitcast_convert_type(bits, jnp.int8)
    shape = (k // group if group else 1, n)
    scale = jax.random.uniform(key, shape, minval=2.0**-7, maxval=2.0**-6)
    return jhg.Quantized(values, scale, packed=packed)


def shapes_of(m: int, n: int, k: int, kind: str) -> tuple[Any, Any]:
    return jax.eval_shape(lambda: (activations(m, k), weights(n, k, kind, 0)))


def problem_of(m: int, n: int, k: int, kind: str) -> GemmProblem:
    dtype, group = KINDS[kind]
    return replace(GemmProblem.dense(m, n, k), b_dtype=dtype, k_group=group)


def candidates(problem: GemmProblem, count: int) -> Iterator[tuple[GemmSpec, float]]:
    """Yields the kernels of least expected cost, of each tile at most two, and their costs, us."""
    tiles: dict[tuple[int, ...], int] = {}
    for ns, spec in ranked(problem, dispatch.H200, considered_specs(problem))[: 4 * count]:
        tile = spec.tile_m, spec.tile_n, spec.tile_k
        tiles[tile] = tiles.get(tile, 0) + 1
        if tiles[tile] <= 2 and count > 0:
            count -= 1
            yield spec, ns / 1e3


def kernel_of(problem: GemmProblem, spec: GemmSpec, device: Any) -> Callable[..., Any]:
    order = best_raster_order(problem, spec, device)
    run = benchmark.one_kernel(problem, spec, order, device.num_sms)
    if problem.k_group:
        return jax.jit(lambda x, w: run(x, w.values, w.scale[None]))
    return jax.jit(lambda x, w: run(x, w.values))


def all_specs(arguments: argparse.Namespace) -> list[GemmSpec]:
    specs: list[GemmSpec] = []
    for n, k in arguments.weights:
        for m in arguments.rows:
            dense = jax.eval_shape(lambda: (activations(m, k), activations(k, n)))  # noqa: B023
            specs += specs_of(ours, *dense)
            for kind in arguments.kinds:
                specs += specs_of(ours, *shapes_of(m, n, k, kind))
                others = candidates(problem_of(m, n, k, kind), arguments.kernels)
                specs += [spec for spec, _ in others]
    return list(dict.fromkeys(specs))


def extents(text: str) -> tuple[int, int]:
    n, k = map(int, text.split("x"))
    return n, k


def main() -> int:
    parser = command_line.parser(__doc__, rounds=2)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--weights", type=extents, nargs="+", metavar="NxK", default=WEIGHTS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kernels", type=int, default=0, help="others, of each product [0]")
    arguments = parser.parse_args()
    if arguments.build:
        return command_line.build(all_specs(arguments), arguments.build)
    return measure(arguments)


def measure(arguments: argparse.Namespace) -> int:
    device = benchmark.this_device()
    rows = []
    for n, k in arguments.weights:
        bfloat16 = jax.block_until_ready(activations(k, n))
        drawn = {
            kind: [jax.block_until_ready(weights(n, k, kind, seed)) for seed in range(2)]
            for kind in arguments.kinds
        }
        for m in arguments.rows:
            x = activations(m, k)
            bursts = {"bf16": timing.burst(jax.jit(ours), [(x, bfloat16)])}
            for kind, sets in drawn.items():
                inputs = [(x, w) for w in sets]
                bursts[kind] = timing.burst(jax.jit(ours), inputs)
                bursts[f"{kind} xla"] = timing.burst(jax.jit(theirs), inputs)
                problem = problem_of(m, n, k, kind)
                for spec, expected in candidates(problem, arguments.kernels):
                    name = f"{kind} {spec.name}, {expected:.1f} expected"
                    bursts[name] = timing.burst(kernel_of(problem, spec, device), inputs)
            rest = partial(time.sleep, 0.01)
            timings = timing.alternate(bursts, arguments.rounds, rest=rest)
            base = timings["bf16"].median
            print(f"{m}x{n}x{k}  bf16 {base:.1f} us", flush=True)
            for name, timed in timings.items():
                us = timed.median
                print(f"    {us:8.1f} us  {base / us:6.3f} of bf16  {name}", flush=True)
            rows.append({"problem": [m, n, k], **{x: t.to_dict() for x, t in timings.items()}})
    return command_line.write(arguments.json, rows)


if __name__ == "__main__":
    sys.exit(main())
