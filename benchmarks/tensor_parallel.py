"""Times a tensor-parallel MLP on all GPUs of the machine, forwards and backwards.

    python benchmarks/tensor_parallel.py
    python benchmarks/tensor_parallel.py --gpus 2 --candidates jnp overlapped --json FILE
    python benchmarks/tensor_parallel.py --build-only FOLDER      # on a machine with a compiler

Candidates take turns in one process; a turn is some steps back to back, by the host's clock.

    jnp          jnp.matmul, sharded by annotation; XLA partitions it
    automatic    jhg.matmul, likewise
    gathered     jhg.matmul in shard_map, between jax.lax.all_gather and psum_scatter
    overlapped   jhg.all_gather_matmul and jhg.matmul_reduce_scatter in shard_map

Behind a name, each after a colon: `peer` lets XLA copy between GPUs by their copy engines instead
of NCCL's kernels, a number is a limit of SMs for our kernels, `default` leaves out the
latency-hiding scheduler, which all others have: `overlapped:peer:128`, `jnp:default`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from tensor_parallel_programs import ACTIVATIONS, IN_SPECS, Mlp, mesh_of

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing import timing

CANDIDATES = (
    "jnp", "jnp:default", "automatic", "gathered", "overlapped", "overlapped:128",
    "overlapped:112", "overlapped:peer",
)  # fmt: skip
NAMES = ("y", "of x", "of up", "of down")


@dataclass(frozen=True)
class Candidate:
    """A form of the layer and how it is compiled.

    Attributes:
      form: a name in `tensor_parallel.FORMS`.
      max_sms: of our kernels, or None.
      options: of XLA.
    """

    form: str
    max_sms: int | None
    options: dict[str, Any]

    @classmethod
    def parse(cls, name: str) -> Candidate:
        form, *rest = name.split(":")
        options: dict[str, Any] = {}
        if "default" not in rest:
            options["xla_gpu_enable_latency_hiding_scheduler"] = True
        if "peer" in rest:
            options["xla_gpu_collective_permute_mode"] = "COLLECTIVES_PEER_MEMORY"
        numbers = [int(word) for word in rest if word not in ("default", "peer")]
        return cls(form, numbers[0] if numbers else None, options)

    def limit(self) -> Any:
        return jhg.max_sms(self.max_sms) if self.max_sms else contextlib.nullcontext()

    def compiled(self, mlp: Mlp, mesh: Any, arguments: Sequence[Any]) -> Any:
        with self.limit():
            step = mlp.step(self.form, mesh, compiler_options=self.options)
            return step.lower(*arguments).compile()

    def specs(self, mlp: Mlp, gpus: int) -> list[GemmSpec]:
        with self.limit():
            return [] if self.form == "jnp" else mlp.specs(self.form, gpus)


def random_inputs(mlp: Mlp, mesh: Any) -> list[jax.Array]:
    """Returns x, up, down and the cotangent, drawn where they lie."""
    scales = 1.0, mlp.features**-0.5, mlp.hidden**-0.5, 1.0

    def draw() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
        return [
            jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)
            for key, shape, scale in zip(keys, mlp.shapes, scales, strict=True)
        ]

    shardings = [NamedSharding(mesh, spec) for spec in IN_SPECS]
    return jax.block_until_ready(jax.jit(draw, out_shardings=shardings)())


def turn(step: Callable, arguments: Sequence[Any], steps: int) -> list[float]:
    """Returns the microseconds of a step."""
    results = jax.block_until_ready(step(*arguments))
    start = time.perf_counter()
    for _ in range(steps):
        results = step(*arguments)
    jax.block_until_ready(results)
    return [(time.perf_counter() - start) / steps * 1e6]


def differences(found: Sequence[Any], wanted: Sequence[Any]) -> dict[str, float]:
    """Returns the largest difference of each result, relative to its largest element."""

    @jax.jit
    def relative(a: Any, b: Any) -> Any:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))

    return {name: float(relative(a, b)) for name, a, b in zip(NAMES, found, wanted, strict=True)}


def collectives(text: str) -> dict[str, int]:
    kinds = "all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all"
    found = {kind: text.count(f" {kind}-start(") + text.count(f" {kind}(") for kind in kinds}
    return {kind: count for kind, count in found.items() if count}


def run(arguments: argparse.Namespace, mlp: Mlp) -> list[dict[str, Any]]:
    gpus = arguments.gpus or len(jax.devices())
    mesh = mesh_of(gpus)
    inputs = random_inputs(mlp, mesh)
    programs: dict[str, Any] = {}
    notes: dict[str, dict[str, Any]] = {}
    first = None
    for name in arguments.candidates:
        candidate = Candidate.parse(name)
        try:
            program = candidate.compiled(mlp, mesh, inputs)
            results = jax.block_until_ready(program(*inputs))
        except Exception as error:  # whatever XLA raises: the others are still of interest
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        text = program.as_text() or ""
        if arguments.hlo:
            arguments.hlo.mkdir(parents=True, exist_ok=True)
            (arguments.hlo / f"{name.replace(':', '_')}.{gpus}.txt").write_text(text)
        first = results if first is None else first
        notes[name] = {
            "launches": text.count('custom_call_target="jax_hopper_gemm'),
            "collectives": collectives(text),
            "differences": differences(results, first),
        }
        programs[name] = program
        del results
    turns = {name: partial(turn, p, inputs, arguments.steps) for name, p in programs.items()}
    timings = timing.alternate(turns, arguments.rounds)
    base = timings.get("jnp")
    print(
        f"{gpus} GPUs, {mlp.tokens} tokens, {mlp.features} -> {mlp.hidden} -> {mlp.features}, "
        f"{mlp.activation}, forward and backward"
    )
    print(f"{'candidate':<18} {'ms':>8} {'q1-q3':>17} {'TF/GPU':>7} {'jnp/this':>8} {'error':>8}")
    rows = []
    for name, found in timings.items():
        low, high = found.quartiles
        rate = mlp.flops / gpus / found.median / 1e6
        ratio = base.median / found.median if base else float("nan")
        error = max(notes[name]["differences"].values())
        print(
            f"{name:<18} {found.median / 1e3:8.3f} {low / 1e3:8.3f}-{high / 1e3:8.3f} {rate:7.0f} "
            f"{ratio:8.3f} {error:8.4f}  {notes[name]['launches']} launches, "
            f"{notes[name]['collectives']}",
            flush=True,
        )
        rows.append({"candidate": name, "gpus": gpus, "ratio": ratio, **found.to_dict(),
                     "samples_us": list(found.samples), **notes[name]})  # fmt: skip
    if arguments.trace:
        for name, program in programs.items():
            with jax.profiler.trace(str(arguments.trace / name.replace(":", "_"))):
                for _ in range(3):
                    jax.block_until_ready(program(*inputs))
    return rows


def all_specs(arguments: argparse.Namespace, mlp: Mlp) -> Iterator[GemmSpec]:
    """Yields every kernel that the benchmark runs."""
    for gpus in (arguments.gpus,) if arguments.gpus else (2, 4):
        for name in arguments.candidates:
            yield from Candidate.parse(name).specs(mlp, gpus)


def main() -> int:
    parser = command_line.parser(__doc__, rounds=9)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--features", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=28672)
    parser.add_argument("--activation", choices=ACTIVATIONS, default="relu")
    parser.add_argument("--gpus", type=int, help="[all; 2 and 4 with --build-only]")
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=20, help="in a turn")
    parser.add_argument("--hlo", type=Path, help="write the compiled programs to this folder")
    parser.add_argument("--trace", type=Path, help="write profiles of 3 steps to this folder")
    arguments = parser.parse_args()
    mlp = Mlp(arguments.tokens, arguments.features, arguments.hidden, arguments.activation)
    if arguments.build:
        return command_line.build(all_specs(arguments, mlp), arguments.build)
    rows = run(arguments, mlp)
    return command_line.write(arguments.json, rows)


if __name__ == "__main__":
    sys.exit(main())
