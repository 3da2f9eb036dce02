"""Times grouped products by recipes of 8 bits beside our bfloat16 kernels, and both gradients.

    python benchmarks/grouped_eight_bit.py --build FOLDER      # anywhere: compiles what is timed
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/grouped_eight_bit.py --json grouped8.json

"kernel" is the time of the product's kernel alone, "all" that of every kernel of the call, with
quantization; "x" how many times as fast as bfloat16's kernel. "error" is the largest difference
from bfloat16's result, relative to its largest element, "norm" that in norm. Burst, by CUPTI.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import command_line
import grouped_products as grouped
import jax
import jax.numpy as jnp
import numpy as np

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes
from jax_hopper_gemm.testing.lowered import all_specs_of

SHAPES = ("deepseek", "qwen3")
PLAIN = "bfloat16"
RECIPES = {
    PLAIN: None, "tensor": recipes.CurrentScaling(grouped_weights=True),
    "blocks": recipes.BlockScaling(grouped_weights=True),
    "columns": recipes.BlockScaling(grouped_weights=True, gradient_columns=128),
}  # fmt: skip


def functions(what: str) -> dict[str, Callable[..., Any]]:
    """Returns what is timed of one direction, by recipe."""

    def by(recipe: Any) -> Callable[..., Any]:
        def product(x: Any, w: Any, sizes: Any) -> Any:
            return jhg.ragged_dot(x, w, sizes, recipe=recipe, implementation="hopper")

        return grouped.by_ragged_dot(product)[what]

    return {name: by(recipe) for name, recipe in RECIPES.items()}


def kernels_of(function: Any, inputs: Sequence[Any], calls: int) -> tuple[float, float]:
    """Returns median microseconds of a call: of the product's kernel, and of all."""
    from jax.experimental.mosaic.gpu import profiler

    _, measured = profiler.measure(function, aggregate=False, iterations=calls)(*inputs)
    own, whole = [], []
    for kernels in measured or []:
        whole.append(1e3 * sum(ms for _, ms in kernels))
        own.append(1e3 * sum(ms for name, ms in kernels if name.startswith("jhg_grouped_")))
    return statistics.median(own), statistics.median(whole)


def main() -> int:
    parser = command_line.parser(__doc__, rounds=3)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sizes", nargs="+", choices=grouped.SIZES, default=["even", "uneven"])
    parser.add_argument("--what", nargs="+", choices=grouped.WHAT, default=list(grouped.WHAT))
    arguments = parser.parse_args()
    if arguments.build:
        shapes = [grouped.abstract(grouped.SHAPES[name]) for name in arguments.shapes]
        found = [
            spec
            for shape in shapes
            for what in arguments.what
            for function in functions(what).values()
            for spec in all_specs_of(function, *shape)
        ]
        return command_line.build(found, arguments.build)
    head = f"{'':<36} {'kernel us':>10} {'TFLOP/s':>8} {'x':>5} {'all us':>9} {'error':>8}"
    command_line.begin("burst", f"{head} {'norm':>7}")
    rows = []
    for name in arguments.shapes:
        shape = grouped.SHAPES[name]
        inputs = grouped.random_inputs(shape)[0]
        for what in arguments.what:
            jitted = {recipe: jax.jit(f) for recipe, f in functions(what).items()}
            for kind in arguments.sizes:
                sizes = jnp.asarray(grouped.SIZES[kind](shape.tokens, shape.experts, 0))
                for row in timed(shape, jitted, (*inputs, sizes), arguments.rounds):
                    title = f"{name} {kind} {what} {row['recipe']}"
                    print(
                        f"{title:<36} {row['kernel_us']:>10.1f} {row['rate']:>8.0f} "
                        f"{row['faster']:>5.2f} {row['us']:>9.1f} {row['error']:>8.4f} "
                        f"{row['norm']:>7.4f}", flush=True,
                    )  # fmt: skip
                    rows.append({"shape": name, "sizes": kind, "what": what, **row})
    return command_line.write(arguments.json, rows)


def timed(
    shape: grouped.Shape, jitted: dict[str, Any], inputs: Sequence[Any], rounds: int
) -> list[dict[str, Any]]:
    """Returns the figures of each recipe; they take turns."""
    results = {name: np.asarray(f(*inputs)[:1], np.float32) for name, f in jitted.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in jitted}
    for _ in range(rounds):
        for name, function in jitted.items():
            samples[name].append(kernels_of(function, inputs, 5))
            time.sleep(0.05)
    rows, exact = [], results[PLAIN]
    for name, times in samples.items():
        own, whole = (statistics.median(x) for x in zip(*times, strict=True))
        plain = statistics.median(x for x, _ in samples[PLAIN])
        difference = results[name] - exact
        rows.append({
            "recipe": name, "kernel_us": own, "us": whole, "rate": shape.flops / own / 1e6,
            "faster": plain / own,
            "error": float(np.abs(difference).max() / np.abs(exact).max()),
            "norm": float(np.linalg.norm(difference) / np.linalg.norm(exact)),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
