"""Times float32 programs without a precision, which run in TF32, against XLA's, in turns.

    python benchmarks/tf32.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/tf32.py --json tf32.json

`products`: random ones, each in the four layouts of its operands: what the default runs, and a
kernel with the transposes that it needs. `--survey FILE` writes XLA's times of these, to which
`fit_xla.py` fits what the default expects. `groups`: products of groups of rows, beside
`lax.ragged_dot`. `steps`: training steps of perceptrons in plain jnp, by `accelerate`. Times are of
all kernels of a program; burst regime, CUPTI.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import command_line
import group_sizes
import jax
import jax.numpy as jnp

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing import timing
from jax_hopper_gemm.testing.lowered import all_specs_of

LAYOUTS = ("mk,kn->mn", "mk,nk->mn", "km,kn->mn", "km,nk->mn")
EXTENTS = (256, 384, 512, 640, 768, 1000, 1024, 1152, 1280, 1408, 1536, 1920, 2048, 2304, 2560,
           2816, 3072, 3584, 4096, 4608, 5120, 5632, 6144, 8192, 10240, 11008, 12288)  # fmt: skip
ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 200, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 16384, 32768)  # fmt: skip
LISTED = 0.5  # of extents, the others are log-uniform
CONTRACTED_ROWS = 0.25  # of the products: gradients of weights
LARGEST_FLOPS, LARGEST_BYTES = 2e12, 2.5e9
GROUPS = ((8, 4096, 2048, 2048), (8, 8192, 4096, 1024), (64, 8192, 1024, 768),
          (16, 512, 2048, 4096), (32, 32768, 1024, 4096))  # fmt: skip  # groups, rows, K, N
STEPS = ((8192, 4096, 4096), (16384, 1024, 4096), (4096, 2048, 8192))  # rows, width, hidden width
SETS = 3  # of inputs, at most


class Case(NamedTuple):
    name: str
    programs: dict[str, Callable[..., Any]]
    arguments: Callable[[int], tuple[Any, ...]]  # of a seed


def normal(seed: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    return tuple(jax.random.normal(x, shape) for x, shape in zip(keys, shapes, strict=True))


def products(count: int, seed: int) -> Iterator[Case]:
    """Yields products of random extents in each layout."""
    draw = random.Random(seed)

    def drawn(listed: tuple[int, ...]) -> int:
        if draw.random() < LISTED:
            return draw.choice(listed)
        # Lines of an operand are multiples of 16 bytes.
        return 4 * round(math.exp(draw.uniform(math.log(4), math.log(listed[-1]))) / 4)

    while count:
        m, n, k = drawn(ROWS), drawn(EXTENTS), drawn(EXTENTS)
        if draw.random() < CONTRACTED_ROWS:
            m, k = k, max(m, 64)
        if 2 * m * n * k > LARGEST_FLOPS or 4 * (m * k + k * n + m * n) > LARGEST_BYTES:
            continue
        count -= 1
        extents = {"m": m, "n": n, "k": k}
        for layout in LAYOUTS:
            shapes = (tuple(extents[x] for x in s) for s in layout.split("->")[0].split(","))
            programs = {
                "xla": partial(jnp.einsum, layout),
                "default": partial(jhg.einsum, layout),
                "kernel": partial(jhg.einsum, layout, implementation="hopper"),
            }
            yield Case(f"{m}x{n}x{k} {layout}", programs, _drawn(*shapes))


def _drawn(*shapes: tuple[int, ...]) -> Callable[[int], tuple[Any, ...]]:
    return lambda seed: normal(seed, *shapes)


def groups() -> Iterator[Case]:
    for count, rows, k, n in GROUPS:
        sizes = group_sizes.uneven(rows, count, 0)
        yield Case(
            f"{count} groups, {rows}x{n}x{k}",
            {"xla": jax.lax.ragged_dot, "default": jhg.ragged_dot},
            lambda seed, s=((rows, k), (count, k, n)), sizes=sizes: (
                *normal(seed, *s), jnp.asarray(sizes, jnp.int32),
            ),
        )  # fmt: skip


def steps() -> Iterator[Case]:
    for rows, width, hidden in STEPS:
        widths = (width, hidden, hidden, width)
        weights = [*zip(widths, widths[1:], strict=False)]
        shapes = [*weights, *((n,) for n in widths[1:]), (rows, width), (rows, width)]
        yield Case(
            f"step of {rows} rows, widths {widths}",
            {"xla": step, "default": jhg.accelerate(step)},
            _drawn(*shapes),
        )


def step(*arrays: jax.Array) -> list[jax.Array]:
    """Returns what gradient descent makes of a perceptron's weights and biases."""
    *parameters, x, y = arrays
    gradients = jax.grad(_loss)(parameters, x, y)
    return [p - 1e-3 * g for p, g in zip(parameters, gradients, strict=True)]


def _loss(parameters: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    layers = len(parameters) // 2
    for i, (w, bias) in enumerate(zip(parameters[:layers], parameters[layers:], strict=True)):
        x = x @ w * w.shape[0] ** -0.5 + bias
        x = jax.nn.gelu(x) if i + 1 < layers else x
    return jnp.mean((x - y) ** 2)


def main() -> int:
    parser = command_line.parser(__doc__, rounds=2)
    parser.add_argument("--count", type=int, default=40, help="random products [40]")
    parser.add_argument("--seed", type=int, default=1, help="of these [1]")
    parser.add_argument("--survey", type=Path, help="write XLA's times of products to this file")
    parser.add_argument("--kinds", nargs="+", default=["products", "groups", "steps"])
    arguments = parser.parse_args()
    drawn = {"products": lambda: products(arguments.count, arguments.seed), "groups": groups,
             "steps": steps}  # fmt: skip
    cases = [case for kind in arguments.kinds for case in drawn[kind]()]
    if arguments.build:
        specs = [
            spec
            for case in cases
            for name, program in case.programs.items() if name != "xla"
            for spec in all_specs_of(program, *jax.eval_shape(partial(case.arguments, 0)))
        ]  # fmt: skip
        return command_line.build(specs, arguments.build)
    rows, surveyed, of_layout = [], [], {}
    for case in cases:
        inputs = [case.arguments(0)]
        sets = timing.sets_to_rotate(sum(x.nbytes for x in inputs[0]))
        inputs += [case.arguments(seed) for seed in range(1, min(SETS, sets))]
        bursts = {
            name: timing.burst(jax.jit(program).lower(*inputs[0]).compile(), inputs)
            for name, program in case.programs.items()
        }
        timings = timing.alternate(bursts, arguments.rounds, rest=partial(time.sleep, 0.003))
        us = {name: timed.median for name, timed in timings.items()}
        ratios = {name: us["xla"] / x for name, x in us.items()}
        print(case.name, *(f"{x} {us[x]:.1f} us {ratios[x]:.3f}" for x in us), sep="  ", flush=True)
        extents, _, layout = case.name.partition(" ")
        kind = layout if "kernel" in us else "others"
        of_layout.setdefault(kind, []).append(ratios["default"])
        if "kernel" in us:
            m, n, k = map(int, extents.split("x"))
            majors = {
                "a_major": layout[1],
                "b_major": layout[4],
            }  # letters of operands that lie last
            surveyed.append({"m": m, "n": n, "k": k, **majors, "xla_us": round(us["xla"], 2)})
        rows.append({"name": case.name, **{x: t.to_dict() for x, t in timings.items()}})
    for kind, found in of_layout.items():
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(f"{kind}: XLA takes {mean:.3f} times as long, {min(found):.3f} at least")
    command_line.write(arguments.survey, surveyed)
    return command_line.write(arguments.json, rows)


if __name__ == "__main__":
    sys.exit(main())
