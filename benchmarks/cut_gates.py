"""Times gated MLPs whose gate and up are halves of one product, as fused weights give them.

    python benchmarks/cut_gates.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/cut_gates.py --json cut_gates.json

`gate, up = jnp.split(x @ weights, 2, -1)`, also with a bias, as an einsum with an axis of 2, and by
`lax.ragged_dot`: the MLP, and its gradients by all arrays. XLA's program and `accelerate`'s take
turns on the same random inputs, in bfloat16. Burst regime, CUPTI: the sum of kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import command_line
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing import timing
from jax_hopper_gemm.testing.lowered import all_specs_of

HEADER = f"{'MLP, tokens, width, hidden':38} {'XLA':>9} {'ours':>9} (us)  XLA / ours  difference"


def split(x: Any, weights: Any, down: Any) -> Any:
    gate, up = jnp.split(x @ weights, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


def biased(x: Any, weights: Any, down: Any, bias: Any, down_bias: Any) -> Any:
    gate, up = jnp.split(x @ weights + bias, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down + down_bias


def stacked(x: Any, weights: Any, down: Any) -> Any:
    """As Gemma writes it."""
    both = jnp.einsum("td,ndf->tnf", x, weights)
    return (jax.nn.gelu(both[:, 0]) * both[:, 1]) @ down


def experts(x: Any, weights: Any, down: Any, sizes: Any) -> Any:
    gate, up = jnp.split(lax.ragged_dot(x, weights, sizes), 2, axis=-1)
    return lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)


class Mlp(NamedTuple):
    """A gated MLP on `tokens` rows of `width`; with groups, a mixture of so many experts."""

    function: Callable[..., Any]
    tokens: int
    width: int
    hidden: int
    groups: int = 0

    def __str__(self) -> str:
        extents = " ".join(str(x) for x in self[1:] if x)
        return f"{self.function.__name__} {extents}"

    def draw(self, seed: int) -> tuple[Any, ...]:
        """Returns the arguments: rows, weights, then biases or sizes of groups."""
        d, f, groups = self.width, self.hidden, (self.groups,) if self.groups else ()
        both = (2, d, f) if self.function is stacked else (*groups, d, 2 * f)
        shapes = [(self.tokens, d), both, (*groups, f, d)]
        shapes += [(2 * f,), (d,)] if self.function is biased else []
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
        scales = [1.0, d**-0.5, f**-0.5, 1.0, 1.0]
        drawn = [
            (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16)
            for key, shape, scale in zip(keys, shapes, scales, strict=False)
        ]
        if self.groups:
            rng = np.random.default_rng(seed)
            shares = rng.dirichlet([2.0] * self.groups)
            drawn.append(jnp.asarray(rng.multinomial(self.tokens, shares), jnp.int32))
        return tuple(drawn)

    def gradients(self, *arguments: Any) -> Any:
        floats = arguments[: len(arguments) - bool(self.groups)]

        def loss(floats: Any) -> Any:
            y = self.function(*floats, *arguments[len(floats) :])
            return jnp.vdot(y.astype(jnp.float32), arguments[0].astype(jnp.float32))

        return jax.grad(loss)(floats)


MLPS = [
    *(
        Mlp(split, *extents)
        for extents in (
            (8192, 4096, 14336),
            (512, 4096, 14336),
            (64, 4096, 14336),
            (4096, 2048, 5632),
        )
    ),
    Mlp(stacked, 4096, 3072, 24576),
    Mlp(stacked, 4096, 2048, 16384),
    Mlp(biased, 16448, 1536, 4096),
    Mlp(experts, 16384, 4096, 14336, 8),
]


def programs() -> Iterator[tuple[str, Mlp, Callable[..., Any]]]:
    for mlp in MLPS:
        yield str(mlp), mlp, mlp.function
        yield f"{mlp}, gradients", mlp, mlp.gradients


def difference(x: Any, y: Any) -> float:
    """Returns the largest relative difference, in norm, of two programs' results."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    arrays = ([np.asarray(each, np.float32) for each in pair] for pair in pairs)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in arrays)


def measure(rounds: int) -> Sequence[dict[str, Any]]:
    rows = []
    for name, mlp, function in programs():
        inputs = [mlp.draw(seed) for seed in (1, 2)]
        functions = {"XLA": jax.jit(function), "ours": jax.jit(jhg.accelerate(function))}
        apart = difference(*(f(*inputs[0]) for f in functions.values()))
        bursts = {key: timing.burst(f, inputs) for key, f in functions.items()}
        us = {key: x.median for key, x in timing.alternate(bursts, rounds).items()}
        ratio = us["XLA"] / us["ours"]
        print(f"{name:38} {us['XLA']:9.1f} {us['ours']:9.1f}       {ratio:.3f}       {apart:.1e}")
        rows.append({"mlp": name, "us": us, "difference": apart})
        jax.clear_caches()
    return rows


def main() -> int:
    arguments = command_line.parser(__doc__, rounds=6).parse_args()
    if arguments.build:
        specs = (
            spec
            for _, mlp, function in programs()
            for spec in all_specs_of(
                jhg.accelerate(function), *jax.eval_shape(partial(mlp.draw, 0))
            )
        )
        return command_line.build(specs, arguments.build)
    command_line.begin("burst", HEADER)
    return command_line.write(arguments.json, measure(arguments.rounds))


if __name__ == "__main__":
    sys.exit(main())
