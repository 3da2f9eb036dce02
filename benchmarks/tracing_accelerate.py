"""Times tracing and lowering of a Llama's training step by `accelerate` beside the step itself.

    python benchmarks/tracing_accelerate.py
    python benchmarks/tracing_accelerate.py --layers 8 --warm

Its layers are a scan, or unrolled. As in `tracing.py`, programs take turns and CPU time counts;
`--warm` keeps the decisions of `dispatch`, as for another step of a process. Neither a GPU nor
XLA's compiler is needed.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from model_programs import FAMILIES, Model
from tracing import clear_caches

import jax_hopper_gemm as jhg

CANDIDATES: dict[str, Callable[..., Any]] = {
    "jnp": lambda step: step,
    "fuse=False": partial(jhg.accelerate, fuse=False),
    "accelerate": jhg.accelerate,
}


def lower(candidate: str, layers: int, scanned: bool) -> tuple[float, float]:
    """Traces and lowers a step for CUDA; returns CPU and wall time in seconds."""
    model = Model("llama", replace(FAMILIES["llama"].sizes["small"], layers=layers), scanned)
    state, batch = jax.eval_shape(model.state), jax.eval_shape(model.batch)
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    step = jax.jit(CANDIDATES[candidate](model.step))
    step.trace(state, batch).lower(lowering_platforms=("cuda",))
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm", action="store_true", help="keep the caches of this library")
    args = parser.parse_args()
    caches = "JAX's caches cleared" if args.warm else "all caches cleared"
    print(f"jax {jax.__version__}, {args.layers} layers, {args.rounds} rounds, {caches}")
    print("| layers | program | CPU min, s | over jnp | wall min, s |\n|---|---|---|---|---|")
    for scanned in (True, False):
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in CANDIDATES}
        for name in CANDIDATES:  # what a process does once
            lower(name, args.layers if args.warm else 1, scanned)
        for _ in range(args.rounds):
            for name, found in times.items():
                (jax.clear_caches if args.warm else clear_caches)()
                found.append(lower(name, args.layers, scanned))
        least = min(cpu for cpu, _ in times["jnp"])
        for name, found in times.items():
            cpu, wall = (min(column) for column in zip(*found, strict=True))
            kind = "scanned" if scanned else "unrolled"
            print(f"| {kind} | {name} | {cpu:.2f} | {cpu / least:.2f} | {wall:.2f} |")


if __name__ == "__main__":
    main()
