"""Trains a small character-level transformer in plain JAX, as it is and by `accelerate`.

    python benchmarks/train_accelerated.py --json losses.json
    python benchmarks/train_accelerated.py --build-only FOLDER  # on a machine without a GPU

The model, its text and its optimizer are those of `train_recipes.py`, in `jax.numpy`. Three runs:
XLA's with two seeds, of parameters and batches, and the accelerated one with the first. Exits with
1 if the accelerated run is farther from XLA's of the same seed than XLA's two runs are from each
other: in the largest difference of mean losses over `WINDOW` steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import train_recipes as model
from train_recipes import Setting, Tree

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

STEPS, WINDOW = 200, 20
EXTENTS = ("width", "layers", "heads", "length", "batch", "steps")


def plain_loss(setting: Setting, parameters: Tree, states: Tree, tokens: jax.Array) -> jax.Array:
    """The loss in `jax.numpy`; there are no states."""
    del states
    layers = [lambda name, x, w: x @ w] * setting.layers
    return model.loss_by(setting, layers, jnp.matmul, parameters, tokens)


def step(setting: Setting, source: jax.Array, state: Tree) -> tuple[Tree, jax.Array]:
    """A step of training as a user writes it."""
    return model.step(setting, partial(plain_loss, setting), source, state)


def losses(setting: Setting, wrap: Callable[[Any], Any] = lambda step: step) -> np.ndarray:
    """Returns the loss before each step.

    Args:
      wrap: makes of the step what is trained by, as `jhg.accelerate` does.
    """
    source = jnp.asarray(model.text())
    run = jax.jit(wrap(partial(step, setting)), donate_argnums=1)
    state, found = jax.jit(partial(model.first_state, setting, None))(), []
    for _ in range(setting.steps):
        state, loss = run(source, state)
        found.append(loss)
    return np.array(jax.device_get(found), np.float64)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest difference of two runs' means over `WINDOW` steps."""
    window = np.full(WINDOW, 1 / WINDOW)
    return float(np.abs(np.convolve(one - other, window, "valid")).max())


def specs(setting: Setting) -> list[GemmSpec]:
    """Returns the kernels of the accelerated step; no GPU is needed."""
    source = jax.ShapeDtypeStruct((len(model.text()),), jnp.int32)
    state = jax.eval_shape(partial(model.first_state, setting, None))
    return list(dict.fromkeys(specs_of(jhg.accelerate(partial(step, setting)), source, state)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__)
    standard = {field.name: field.default for field in fields(Setting)} | {"steps": STEPS}
    for name in EXTENTS:
        parser.add_argument(f"--{name}", type=int, default=standard[name])
    options = parser.parse_args(arguments)
    setting = Setting(**{name: getattr(options, name) for name in EXTENTS})
    if options.build:
        return command_line.build(specs(setting), options.build)
    print(f"{setting}, on {jax.devices()[0].device_kind}, {len(specs(setting))} kernels")
    runs: dict[str, np.ndarray] = {}
    for name, seed, wrap in (
        ("XLA", 0, []), ("XLA, another seed", 1, []), ("accelerate", 0, [jhg.accelerate])
    ):  # fmt: skip
        runs[name] = found = losses(replace(setting, seed=seed), *wrap)
        every = ", ".join(f"{x:.4f}" for x in found[:: max(1, len(found) // 8)])
        print(f"{name:<18} {every}, last {found[-WINDOW:].mean():.4f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({k: list(v) for k, v in runs.items()}) + "\n")
    plain, other, ours = runs.values()
    found, spread = distance(ours, plain), distance(other, plain)
    print(f"means of {WINDOW} steps differ by {found:.4f}; those of two seeds by {spread:.4f}")
    return int(not found <= spread)


if __name__ == "__main__":
    sys.exit(main())
