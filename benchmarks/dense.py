"""Times dense products: ours, `jnp.matmul`, Pallas, and what else is installed.

    python benchmarks/dense.py bars --regime both --out dense.json

Takes turns on the same random inputs, in one process; median and quartiles. The bars suite in
the burst regime takes about two minutes on an H200. `python -m jax_hopper_gemm bench` is the same
without the other libraries.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence

import jax

from jax_hopper_gemm import cli
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.testing import benchmark, shapes


def transformer_engine(problem: GemmProblem, input_sets: Sequence[tuple]) -> Callable | None:
    """TransformerEngine's `dense`: cuBLASLt through its own FFI call."""
    dense = importlib.import_module("transformer_engine.jax.dense").dense
    if problem.l > 1 or problem.d_dtype != problem.a_dtype:
        return None
    contracting, _ = shapes.dimension_numbers(problem)
    return jax.jit(lambda a, b: dense(a, b, contracting_dims=contracting))


OTHERS = {"transformer_engine": transformer_engine}


def main() -> int:
    for name, maker in OTHERS.items():
        if importlib.util.find_spec(name):
            benchmark.MAKERS[name] = maker
        else:
            print(f"{name} is not installed: left out", file=sys.stderr)
    return cli.main(["bench", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
