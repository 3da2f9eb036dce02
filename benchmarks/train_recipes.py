"""Trains a small character-level transformer in bfloat16 and by each recipe, side by side.

    python benchmarks/train_recipes.py --json train.json
    python benchmarks/train_recipes.py --recipes bfloat16 blocks --steps 4000
    python benchmarks/train_recipes.py --build-only FOLDER   # on a machine with a compiler, no GPU

The text is this repository's docs and sources, byte by byte, file by file in a random order; the
last tenth of it is held out. All runs have the same initial parameters and batches. Linear layers
run by the recipe; attention, embedding and the layer that reads out stay in bfloat16, as in
DeepSeek-V3. Parameters, Adam's moments and the update are float32. Prints for each run the mean
loss of its last steps and that of the held out text, in nats a character, and how much they differ
from bfloat16's; exits with 1 if the training loss of `BARRED` recipes does by more than 1 %.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
from model_programs import rms_norm, rotary_attend

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.testing.lowered import all_specs_of

ROOT = Path(__file__).parents[1]
FILES = "docs/*.md", "jax_hopper_gemm/**/*.py", "ffi/src/*"
BYTES = 128  # characters of other codes become one
PLAIN = "bfloat16"
RECIPES: dict[str, Any] = {
    PLAIN: None, "current": recipes.CurrentScaling(), "blocks": recipes.BlockScaling(),
    "columns": recipes.BlockScaling(gradient_columns=128),
    "delayed": recipes.DelayedScaling.initial, "int8": recipes.Int8Forward(),
}  # fmt: skip
BARRED = ("current", "blocks", "columns")
LARGEST_DIFFERENCE = 0.01  # of a barred recipe's training loss
norm = partial(rms_norm, {"scale": 1.0})
LINEAR = ("qkv", "out", "up", "down")  # of a layer

Tree = Any  # a pytree of arrays
Multiply = Callable[[str, jax.Array, jax.Array], jax.Array]  # of a layer's product: its name, x, w
Loss = Callable[[Tree, Tree, jax.Array], jax.Array]  # of parameters, states and tokens


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained."""

    width: int = 512
    layers: int = 4
    heads: int = 8
    length: int = 256  # of a sequence
    batch: int = 8  # sequences in a step
    steps: int = 2000
    rate: float = 1e-3  # the highest; warmed up in a twentieth of the steps, then a cosine to 0
    averaged: int = 100  # of the last steps, whose mean loss is compared
    history: int = 16  # steps that delayed scales look back
    seed: int = 0  # of the parameters and the batches


def text() -> np.ndarray:
    """Returns the docs and sources as bytes under `BYTES`."""
    paths = sorted(path for files in FILES for path in ROOT.glob(files))
    Random(0).shuffle(paths)
    whole = b"".join(path.read_bytes() for path in paths)
    codes = np.frombuffer(whole, np.uint8)
    return np.where(codes < BYTES, codes, 0).astype(np.int32)


def initial(setting: Setting, key: Any) -> Tree:
    """Returns parameters, float32."""
    d = setting.width
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}

    def matrix(key: Any, shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(key, shape) * shape[0] ** -0.5

    def layer(key: Any) -> Tree:
        keys = jax.random.split(key, len(shapes))
        pairs = zip(shapes.items(), keys, strict=True)
        return {name: matrix(k, shape) for (name, shape), k in pairs}

    first, last, *others = jax.random.split(key, 2 + setting.layers)
    return {
        "embedding": jax.random.normal(first, (BYTES, d)),
        "readout": matrix(last, (d, BYTES)), "layers": [layer(k) for k in others],
    }  # fmt: skip


def block(setting: Setting, p: Tree, x: jax.Array, multiply: Multiply) -> jax.Array:
    """One layer: attention, then an MLP."""
    qkv = multiply("qkv", norm(x), p["qkv"])
    q, k, v = jnp.split(qkv.reshape(*x.shape[:2], setting.heads, -1), 3, axis=-1)
    attended = rotary_attend(q, k, v)
    x = x + multiply("out", attended.reshape(x.shape), p["out"])
    hidden = jax.nn.gelu(multiply("up", norm(x), p["up"]))
    return x + multiply("down", hidden, p["down"])


def loss_by(
    setting: Setting, layers: Sequence[Multiply], matmul: Any, parameters: Tree, tokens: jax.Array
) -> jax.Array:
    """The mean loss of predicting each character of (batch, length + 1).

    Args:
      layers: multiplies what each layer does.
      matmul: multiplies what reads out, like `jnp.matmul`.
    """
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), parameters)
    x = p["embedding"][tokens[:, :-1]]
    for weights, multiply in zip(p["layers"], layers, strict=True):
        x = block(setting, weights, x, multiply)
    logits = matmul(norm(x), p["readout"], preferred_element_type=jnp.float32)
    logits = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))


def loss_of(
    setting: Setting, recipe: Any, parameters: Tree, states: Tree, tokens: jax.Array
) -> jax.Array:
    """The loss with all linear layers by a recipe.

    Args:
      recipe: of all linear layers; a function stands for one with `states` of its own.
    """

    def multiply(own: Tree, name: str, x: jax.Array, w: jax.Array) -> jax.Array:
        return jhg.matmul(x, w, recipe=own[name] if callable(recipe) else recipe)

    layers = [partial(multiply, own) for own in states]
    return loss_by(setting, layers, jhg.matmul, parameters, tokens)


def initial_states(setting: Setting, recipe: Any) -> Tree:
    """Returns the states of a recipe that has one for each product; else none."""
    if not callable(recipe):
        return [()] * setting.layers
    return [{name: recipe(setting.history) for name in LINEAR} for _ in range(setting.layers)]


def batch_at(setting: Setting, source: jax.Array, key: Any) -> jax.Array:
    """Returns random pieces of a text, (batch, length + 1)."""
    starts = jax.random.randint(key, (setting.batch, 1), 0, source.size - setting.length)
    return source[starts + jnp.arange(setting.length + 1)]


def step(setting: Setting, loss_of: Loss, source: jax.Array, state: Tree) -> tuple[Tree, jax.Array]:
    """Returns the state after a step of Adam, and the loss before it."""
    parameters, moments, states, number = state
    tokens = batch_at(setting, source, jax.random.fold_in(jax.random.key(setting.seed + 1), number))
    loss, (gradients, states) = jax.value_and_grad(loss_of, argnums=(0, 1))(
        parameters, states, tokens
    )
    number = number + 1
    warm = jnp.minimum(1.0, number / max(1.0, setting.steps / 20))
    rate = setting.rate * warm * 0.5 * (1 + jnp.cos(jnp.pi * number / setting.steps))

    def updated(p: Any, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g**2
        away = m / (1 - 0.9**number) / (jnp.sqrt(v / (1 - 0.98**number)) + 1e-8)
        return p - rate * away, m, v

    leaves, tree = jax.tree.flatten(parameters)
    new = zip(
        *map(updated, leaves, jax.tree.leaves(gradients), *map(jax.tree.leaves, moments)),
        strict=True,
    )
    parameters, *moments = (jax.tree.unflatten(tree, x) for x in new)
    return (parameters, tuple(moments), states, number), loss


def first_state(setting: Setting, recipe: Any) -> Tree:
    parameters = initial(setting, jax.random.key(setting.seed))
    moments = tuple(jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
    return parameters, moments, initial_states(setting, recipe), jnp.int32(0)


@dataclass(frozen=True)
class Outcome:
    """How a training run ended.

    Attributes:
      training: the mean loss of the last steps.
      held_out: the loss of the text that was held out.
      ms: of a step, by the host's clock, the first tenth left out.
      losses: of every step.
    """

    training: float
    held_out: float
    ms: float
    losses: list[float]


def trained(setting: Setting, recipe: Any) -> Outcome:
    whole = text()
    cut = len(whole) * 9 // 10
    source, rest = jnp.asarray(whole[:cut]), jnp.asarray(whole[cut:])
    run = jax.jit(partial(step, setting, partial(loss_of, setting, recipe)), donate_argnums=1)
    state = jax.jit(partial(first_state, setting, recipe))()
    losses, started, timed = [], 0.0, setting.steps // 10
    for number in range(setting.steps):
        if number == timed:
            jax.block_until_ready(state)
            started = time.perf_counter()
        state, loss = run(source, state)
        losses.append(loss)
    jax.block_until_ready(state)
    ms = (time.perf_counter() - started) / (setting.steps - timed) * 1e3
    held_out = jax.jit(partial(loss_of, setting, recipe))
    others = [
        held_out(state[0], state[2], batch_at(setting, rest, jax.random.key(i))) for i in range(20)
    ]
    values = [float(x) for x in losses]
    last = values[-setting.averaged :]
    return Outcome(sum(last) / len(last), float(sum(others)) / len(others), ms, values)


def specs(setting: Setting, names: Sequence[str]) -> list[KernelSpec]:
    """Returns the kernels of training and of the held out loss; no GPU is needed."""
    source = jax.ShapeDtypeStruct((len(text()),), jnp.int32)
    tokens = jax.ShapeDtypeStruct((setting.batch, setting.length + 1), jnp.int32)
    found: list[KernelSpec] = []
    for name in names:
        recipe = RECIPES[name]
        state = jax.eval_shape(partial(first_state, setting, recipe))
        found += all_specs_of(
            partial(step, setting, partial(loss_of, setting, recipe)), source, state
        )
        found += all_specs_of(partial(loss_of, setting, recipe), state[0], state[2], tokens)
    return list(dict.fromkeys(found))


def differences(outcomes: dict[str, Outcome]) -> dict[str, float]:
    """Returns by how much training losses differ from bfloat16's, relative to it."""
    plain = outcomes[PLAIN].training
    return {name: x.training / plain - 1 for name, x in outcomes.items() if name != PLAIN}


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    for name in ("steps", "width", "layers", "heads", "length", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setting, name))
    arguments = parser.parse_args()
    setting = Setting(
        arguments.width, arguments.layers, arguments.heads, arguments.length, arguments.batch,
        arguments.steps,
    )  # fmt: skip
    names = list(dict.fromkeys([PLAIN, *arguments.recipes]))
    if arguments.build:
        return command_line.build(specs(setting, names), arguments.build)
    print(f"{setting}, {len(text())} characters, on {jax.devices()[0].device_kind}")
    print(f"{'run':<10} {'training':>9} {'':>8} {'held out':>9} {'':>8} {'ms a step':>10}")
    outcomes: dict[str, Outcome] = {}
    for name in names:
        outcomes[name] = found = trained(setting, RECIPES[name])
        plain = outcomes[PLAIN]
        print(
            f"{name:<10} {found.training:>9.4f} {found.training / plain.training - 1:>+8.2%} "
            f"{found.held_out:>9.4f} {found.held_out / plain.held_out - 1:>+8.2%} "
            f"{found.ms:>10.2f}", flush=True,
        )  # fmt: skip
    if arguments.json:
        figures = {name: vars(outcome) for name, outcome in outcomes.items()}
        arguments.json.write_text(json.dumps(figures) + "\n")
    found = differences(outcomes)
    return int(any(abs(found.get(name, 0.0)) > LARGEST_DIFFERENCE for name in BARRED))


if __name__ == "__main__":
    sys.exit(main())
