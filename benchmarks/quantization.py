"""Times quantization, by kernels and by XLA, against the bytes that it must move.

    python benchmarks/quantization.py --json quantization.json --hlo FOLDER

An array (M, K) of bfloat16 becomes values of 8 bits with scales: along K, as a forward product
reads it; along M and transposed, as the gradient of weights does; or both, from one read. "bytes"
are an element's least: one read, and the results. "rate" is these over the time, "of copy" that
over the rate of a copy of the array. Median of the burst regime, by CUPTI; "kernels" are those of
the program.
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
from jax_hopper_gemm.primitives.quantize import hopper_quantize, rounded
from jax_hopper_gemm.testing import timing
from jax_hopper_gemm.testing.lowered import all_specs_of

E4M3 = jnp.float8_e4m3fn
SHAPES = ((8192, 4096), (8192, 14336), (4096, 4096))


def along_k(x: Any, block: int = 1, by: str | None = None) -> Any:
    return hopper_quantize(x, E4M3, block, transposed=False, by=by)


def along_m(x: Any, block: int = 1, by: str | None = None) -> Any:
    return hopper_quantize(x, E4M3, block, transposed=True, by=by)


def both(x: Any, block: int = 1, by: str | None = None) -> Any:
    return along_k(x, block, by), along_m(x, block, by)


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
}
CASES |= {
    f"{block}x128 {way}{', by XLA' if by else ''}": (
        partial(function, block=block, by=by), nbytes + (nbytes - 2) * 4 / 128 / block
    )
    for way, function, nbytes in (
        ("along K", along_k, 3), ("along M", along_m, 3), ("both", both, 4),
    )
    for block in (1, 128)
    for by in (None, "xla")
}  # fmt: skip


def kernels(text: str) -> int:
    """Returns how many kernels a compiled program launches: what its entry computes."""
    entry = text[text.index("\nENTRY ") :]
    launched = r"= \S+ (fusion|custom-call|reduce|transpose|copy|convert)\("
    return len(re.findall(launched, entry))


def main() -> int:
    parser = command_line.parser(__doc__, rounds=5)
    parser.add_argument("--cases", default="", help="only those whose names hold this")
    parser.add_argument("--hlo", type=Path, help="write the compiled programs to this folder")
    arguments = parser.parse_args()
    chosen = {x: case for x, case in CASES.items() if arguments.cases in x or x == "copy"}
    if arguments.build:
        x = jax.ShapeDtypeStruct(SHAPES[0], jnp.bfloat16)
        specs = [spec for f, _ in chosen.values() for spec in all_specs_of(f, x)]
        return command_line.build(specs, arguments.build)
    header = f"{'':<40} {'us':>9} {'kernels':>8} {'bytes':>6} {'rate TB/s':>10} {'of copy':>8}"
    command_line.begin("burst", header)
    rows: list[dict[str, Any]] = []
    for m, k in SHAPES:
        sets = [
            (jax.random.normal(jax.random.key(i), (m, k), jnp.bfloat16),)
            for i in range(timing.sets_to_rotate(2 * m * k))
        ]
        functions = {name: jax.jit(function) for name, (function, _) in chosen.items()}
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
