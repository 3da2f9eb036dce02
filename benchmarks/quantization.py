"""Times quantization as products by recipes ask XLA for it, against the bytes that it must move.

    python benchmarks/quantization.py --json quantization.json --hlo FOLDER

An array (M, K) of bfloat16 becomes values of 8 bits with scales: along K, as a forward product
reads it; along M and transposed, as the gradient of weights does; or both, from one read. "bytes"
are an element's least: one read, and the results. "rate" is these over the time, "of copy" that
over the rate of a copy of the array. Median of the burst regime, by CUPTI; "kernels" are XLA's.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp

import jax_hopper_gemm as jhg
from jax_hopper_gemm.primitives.quantize import rounded
from jax_hopper_gemm.testing import benchmark, timing

E4M3 = jnp.float8_e4m3fn
SHAPES = ((8192, 4096), (8192, 14336), (4096, 4096))


def along_k(x: Any) -> Any:
    return jhg.quantize(x, E4M3, (1, 128))


def along_m(x: Any) -> Any:
    return jax.tree.map(jnp.transpose, jhg.quantize(x, E4M3, (128, 1)))


def transposed(x: jhg.Quantized) -> Any:
    return x, x.values.T


def given(x: Any) -> Any:
    return rounded(x.astype(jnp.float32) / 0.01, E4M3)


CASES: dict[str, tuple[Callable[[Any], Any], float]] = {  # and the least bytes of an element
    "copy": (lambda x: x + 1, 4),
    "given scale": (given, 3),
    "given scale, also transposed": (lambda x: (given(x), given(x).T), 4),
    "tensor": (partial(jhg.quantize, dtype=E4M3), 3),
    "tensor, also transposed": (lambda x: transposed(jhg.quantize(x, E4M3)), 4),
    "1x128 along K": (along_k, 3 + 4 / 128),
    "1x128 along M, transposed": (along_m, 3 + 4 / 128),
    "1x128 both ways": (lambda x: (along_k(x), along_m(x)), 4 + 8 / 128),
    "128x128": (lambda x: jhg.quantize(x, E4M3, (128, 128)), 3),
    "128x128, also transposed": (lambda x: transposed(jhg.quantize(x, E4M3, (128, 128))), 4),
}


def kernels(text: str) -> int:
    """Returns how many kernels a compiled program launches: what its entry computes."""
    entry = text[text.index("\nENTRY ") :]
    launched = r"= \S+ (fusion|custom-call|reduce|transpose|copy|convert)\("
    return len(re.findall(launched, entry))


def main() -> int:
    parser = command_line.parser(__doc__, rounds=5, builds=False)
    parser.add_argument("--hlo", type=Path, help="write the compiled programs to this folder")
    arguments = parser.parse_args()
    header = f"{'':<40} {'us':>9} {'kernels':>8} {'bytes':>6} {'rate TB/s':>10} {'of copy':>8}"
    benchmark.begin("burst", header)
    rows: list[dict[str, Any]] = []
    for m, k in SHAPES:
        sets = [
            (jax.random.normal(jax.random.key(i), (m, k), jnp.bfloat16),)
            for i in range(timing.sets_to_rotate(2 * m * k))
        ]
        functions = {name: jax.jit(function) for name, (function, _) in CASES.items()}
        texts = {name: f.lower(*sets[0]).compile().as_text() for name, f in functions.items()}
        if arguments.hlo:
            arguments.hlo.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                path = arguments.hlo / f"{m}x{k} {name}.txt".replace(" ", "_").replace(",", "")
                path.write_text(text or "")
        turns = {name: timing.burst(f, sets) for name, f in functions.items()}
        times = timing.alternate(turns, arguments.rounds, partial(time.sleep, 0.2))
        rates = {name: CASES[name][1] * m * k / t.median / 1e6 for name, t in times.items()}
        for name, t in times.items():
            count = kernels(texts[name] or "")
            row = {
                "shape": [m, k], "case": name, "us": t.median, "kernels": count,
                "bytes": CASES[name][1], "rate": rates[name],
            }  # fmt: skip
            rows.append(row)
            print(
                f"{f'{m}x{k} {name}':<40} {t.median:>9.1f} {count:>8} {row['bytes']:>6.2f} "
                f"{rates[name]:>10.2f} {rates[name] / rates['copy']:>8.2f}", flush=True,
            )  # fmt: skip
    return command_line.write(arguments.json, rows)


if __name__ == "__main__":
    sys.exit(main())
