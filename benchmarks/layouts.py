"""Times einsums in the layouts that models have against `jnp.einsum`, in turns on the same inputs.

    python benchmarks/layouts.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/layouts.py --json layouts.json

Scores and values of attention, with heads of their own and with shared ones, and experts of equal
capacity. Their batch axes do not lie evenly one inside the other: XLA copies operands into order.
With `--loose` products of which some rows are no multiples of 16 bytes: vocabularies of published
models, images of 197 patches; with `--random` so many of random extents. Burst regime, CUPTI; a
call's time is that of all its kernels.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from random import Random

import command_line
import jax
import jax.numpy as jnp

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch
from jax_hopper_gemm.dispatch.canonical import ShapedProduct, as_gemm, with_whole_lines
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.lowering.devices import current_device
from jax_hopper_gemm.testing import benchmark, timing

Case = tuple[str, dict[str, int]]
LARGEST = 2**39  # m * n * k of random products


def cases() -> Iterator[Case]:
    for length in (2048, 4096):
        for width in (64, 128):
            heads = {"b": 2, "t": length, "s": length, "h": 2048 // width, "d": width}
            yield "bthd,bshd->bhts", heads
            yield "bhts,bshd->bthd", heads
            shared = {"b": 2, "t": length, "s": length, "k": 512 // width, "g": 4, "d": width}
            yield "btkgd,bskd->bkgts", shared
            yield "bkgts,bskd->btkgd", shared
    yield "becd,edf->becf", {"b": 4, "e": 8, "c": 512, "d": 2048, "f": 8192}
    yield "becf,efd->becd", {"b": 4, "e": 8, "c": 512, "d": 2048, "f": 8192}
    yield "bhtd,hds->bhts", {"b": 4, "h": 16, "t": 2048, "d": 128, "s": 512}


def loose_cases() -> Iterator[Case]:
    logits, head = "td,vd->tv", "td,dv->tv"
    for tokens, width, words in ((8192, 768, 50257), (4096, 1024, 30522), (1500, 1280, 51865)):
        extents = {"t": tokens, "d": width, "v": words}
        yield logits, extents
        yield head, extents
        yield "tv,vd->td", extents  # gradients of what `logits` reads
        yield "tv,td->vd", extents
    yield logits, {"t": 16, "d": 1600, "v": 50257}
    yield "mk,kn->mn", {"m": 2048, "k": 4097, "n": 4096}
    yield "mk,nk->mn", {"m": 2048, "k": 4096, "n": 4097}
    patches = {"b": 384, "q": 197, "k": 197, "d": 64}
    yield "bqd,bkd->bqk", patches
    yield "bqk,bkd->bqd", patches


def random_loose_cases(count: int, seed: int) -> Iterator[Case]:
    """Yields matrix products of which a row of some operand is no multiple of 16 bytes."""
    rng = Random(seed)

    def extent(least: int, most: int) -> int:
        """Returns one that is a multiple of 1, 2, 4 or 8 elements, and of no higher power of 2."""
        unit = 2 ** rng.randrange(4)
        x = round(math.exp(rng.uniform(math.log(least), math.log(most))))
        return x // unit // 2 * 2 * unit + unit

    while count:
        m, n, k = extent(128, 16384), extent(128, 65536), extent(128, 8192)
        a, b = rng.choice(("mk", "km")), rng.choice(("kn", "nk"))
        extents = {"m": m, "n": n, "k": k}
        if all(extents[labels[-1]] % 8 == 0 for labels in (a, b)) or m * n * k > LARGEST:
            continue
        yield f"{a},{b}->mn", extents
        count -= 1


def shapes_of(case: Case) -> list[tuple[int, ...]]:
    subscripts, extents = case
    operands = subscripts.split("->")[0].split(",")
    return [tuple(extents[letter] for letter in labels) for labels in operands]


def decision_of(case: Case, *, kernel_only: bool = True) -> dispatch.Decision:
    lhs, rhs = shapes_of(case)
    subscripts = Subscripts.parse(case[0])
    product = ShapedProduct(subscripts, lhs, "bfloat16", rhs, "bfloat16", "bfloat16")
    gemm = with_whole_lines(as_gemm(product), product)
    return dispatch.choose(gemm.problem, current_device(), kernel_only=kernel_only)


def main() -> int:
    parser = command_line.parser(__doc__, rounds=3)
    parser.add_argument("--loose", action="store_true", help="rows that end anywhere")
    parser.add_argument("--random", type=int, help="so many random products of that kind instead")
    parser.add_argument("--seed", type=int, default=0, help="that draws them [0]")
    arguments = parser.parse_args()
    chosen = list(loose_cases() if arguments.loose else cases())
    if arguments.random:
        chosen = list(random_loose_cases(arguments.random, arguments.seed))
    if arguments.build:
        return command_line.build((decision_of(case).spec for case in chosen), arguments.build)
    benchmark.this_device()
    return command_line.write(arguments.json, [measure(case, arguments.rounds) for case in chosen])


def measure(case: Case, rounds: int) -> dict:
    """Times one product, checks ours against XLA's, and prints both."""
    subscripts, extents = case
    shapes = shapes_of(case)
    keys = jax.random.split(jax.random.key(0), 2)
    arrays = tuple(
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    sets = timing.sets_to_rotate(sum(array.nbytes for array in arrays))
    inputs = [tuple(array + i for array in arrays) for i in range(sets)]
    functions = {
        "xla": jax.jit(partial(jnp.einsum, subscripts)),
        "hopper": jax.jit(partial(jhg.einsum, subscripts, implementation="hopper")),
        "auto": jax.jit(partial(jhg.einsum, subscripts)),
    }
    expected, found = (functions[name](*inputs[0]) for name in ("xla", "hopper"))
    difference = jnp.max(jnp.abs(expected.astype("float32") - found.astype("float32")))
    largest = jnp.max(jnp.abs(expected.astype("float32")))
    jax.block_until_ready(functions["auto"](*inputs[0]))
    bursts = {name: timing.burst(function, inputs) for name, function in functions.items()}
    timings = timing.alternate(bursts, rounds, rest=lambda: time.sleep(0.05))
    xla, hopper, auto = (timings[name].median for name in ("xla", "hopper", "auto"))
    spec = decision_of(case).spec
    sizes = " ".join(f"{letter}={extent}" for letter, extent in extents.items())
    print(
        f"{subscripts:20} {sizes:36} xla {xla:8.1f}  hopper {hopper:8.1f} ({xla / hopper:.3f})  "
        f"auto {auto:8.1f} ({xla / auto:.3f})  differs by {difference / largest:.1e} of the "
        f"largest  {spec.name if spec else ''}",
        flush=True,
    )
    return {
        "subscripts": subscripts, "extents": extents, "differs": float(difference / largest),
        **{f"{name}_us": timing_.median for name, timing_ in timings.items()},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
