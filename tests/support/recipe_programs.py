"""Products by recipes with their gradients, as users write them: what a GPU run checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.testing.lowered import all_specs_of


def _delayed() -> recipes.DelayedScaling:
    return recipes.DelayedScaling(jnp.full(3, 2.0**-7), jnp.full((3, 2), 3.0).at[1].set(0.25))


RECIPES: dict[str, Any] = {
    "current": recipes.CurrentScaling(grouped_weights=True),
    "current e4m3": recipes.CurrentScaling("float8_e4m3fn"),
    "blocks": recipes.BlockScaling(grouped_weights=True),
    "columns": recipes.BlockScaling(grouped_weights=True, gradient_columns=128),
    "int8": recipes.Int8Forward(),
    "delayed": _delayed,
}
SIZES = np.array([300, 0, 1, 517, 130], np.int32)  # of 1000 rows, the last ones of no group
SCAN = 3
PLAIN = 2.0**-8  # of products of equal numbers of 8 bits, into bfloat16


@dataclass(frozen=True)
class Program:
    """A function of `options` and arrays; the first array's rows are the result's.

    Attributes:
      shapes: of the arrays, `jnp.bfloat16` but for float32 of one axis.
      rough: how much gradients may differ in norm, of kernels and XLA; None: by less than
        quantization itself changes them. What is quantized anew after a difference of bfloat16 may
        get the next number of 8 bits. Of a gated unit kernels multiply gate and up in one array,
        with scales in common, XLA in two.
      delayed: whether it takes a recipe with a state.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    rough: float | None = 2.0**-5
    delayed: bool = False

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        made = []
        for shape in self.shapes:
            x = rng.standard_normal(shape) * np.exp(np.linspace(-1, 1, shape[-1]))
            x = x / np.sqrt(shape[-2]) if len(shape) > 1 and len(made) else x
            made.append(jax.device_put(x.astype(jnp.bfloat16 if len(shape) > 1 else jnp.float32)))
        return tuple(made)

    def run(self, name: str | None, implementation: Any, *arrays: Any) -> Any:
        """Returns the result and, for a cotangent that does not depend on it, the gradients.

        Args:
          name: of a recipe; None: nothing is quantized.
        """
        recipe = RECIPES[name] if name else None
        recipe = recipe() if callable(recipe) else recipe
        options = {"recipe": recipe, "implementation": implementation}
        result, pull = jax.vjp(partial(self.function, options), *arrays)
        cotangent = jnp.asarray(np.random.default_rng(9).standard_normal(result.shape))
        return result, pull(cotangent.astype(result.dtype))

    def leaves(self, name: str | None, implementation: Any) -> list[Any]:
        """Returns the arrays that `run` makes of `arguments`."""
        run = jax.jit(partial(self.run, name, implementation))
        return jax.tree.leaves(run(*self.arguments()))

    def specs(self, name: str) -> list[KernelSpec]:
        return all_specs_of(partial(self.run, name, "hopper"), *self.arguments())

    def takes(self, name: str) -> bool:
        return self.delayed or name != "delayed"


def _product(options: Any, x: Any, w: Any) -> Any:
    return jhg.matmul(x, w, **options)


def _batched(options: Any, x: Any, w: Any) -> Any:
    return jhg.dot_general(x, w, (((2,), (2,)), ((1,), (0,))), **options)


def _mapped(options: Any, x: Any, w: Any) -> Any:
    return jax.vmap(lambda x: jhg.matmul(x, w, **options), 1, 1)(x)


def _steps(options: Any, x: Any, w: Any, residual: Any, bias: Any) -> Any:
    return jhg.matmul(x, w, bias=bias, residual=residual, activation="gelu", **options)


def _scanned(options: Any, x: Any, w: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        return x + jhg.matmul(x, w, activation="silu", **options), None

    return lax.scan(jax.checkpoint(body), x, w)[0]


def _ragged(options: Any, x: Any, w: Any) -> Any:
    return jhg.ragged_dot(x, w, SIZES, **options)


def _ragged_steps(options: Any, x: Any, w: Any) -> Any:
    return jhg.ragged_dot(x, w, SIZES, bias=w[:, 0], activation="silu", **options)


def _gated(options: Any, x: Any, w: Any) -> Any:
    return jhg.gated_linear_unit(x, w, **options)


def _gated_ragged(options: Any, x: Any, w: Any) -> Any:
    return jhg.gated_linear_unit(x, w, group_sizes=SIZES, **options)


PROGRAMS: dict[str, Program] = {
    "product": Program(_product, ((1000, 400), (400, 336)), PLAIN, True),
    "batches": Program(_batched, ((264, 3, 272), (3, 144, 272)), PLAIN, True),
    "vmap": Program(_mapped, ((264, 3, 272), (272, 144)), PLAIN),
    "steps": Program(_steps, ((1000, 400), (400, 336), (1000, 336), (336,))),
    "scan": Program(_scanned, ((520, 256), (SCAN, 256, 256)), None),
    "ragged": Program(_ragged, ((1000, 272), (5, 272, 144)), PLAIN),
    "ragged steps": Program(_ragged_steps, ((1000, 272), (5, 272, 144))),
    "gated": Program(_gated, ((1000, 272), (272, 2, 144)), None),
    "gated ragged": Program(_gated_ragged, ((1000, 272), (5, 272, 2, 144)), None),
}
CASES = [(a, b) for a, program in PROGRAMS.items() for b in RECIPES if program.takes(b)]


def _layer(x: Any, w: Any) -> Any:
    return x + jax.nn.silu(x @ w[0]) @ w[1]


def loss(params: Any, x: Any) -> Any:
    y, _ = lax.scan(lambda x, w: (_layer(x, w), None), x, params)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def step_arguments() -> Any:
    program = Program(_product, ((1024, 512), (SCAN, 512, 1024), (SCAN, 1024, 512)))
    x, *params = program.arguments()
    return tuple(params), x


def accelerated(name: str, inside: bool) -> Any:
    """Returns loss and gradients of a model, differentiated within `accelerate` or around it."""
    wrap = partial(jhg.accelerate, recipe=RECIPES[name], implementation="hopper")
    return wrap(jax.value_and_grad(loss)) if inside else jax.value_and_grad(wrap(loss))


STEPS = [(name, inside) for name in ("current", "blocks") for inside in (True, False)]


def specs() -> list[KernelSpec]:
    """Returns every kernel of this module."""
    found = [spec for program, recipe in CASES for spec in PROGRAMS[program].specs(recipe)]
    for case in STEPS:
        found += all_specs_of(accelerated(*case), *step_arguments())
    return found + scaled_specs()


def scaled(a: jhg.Quantized, b: jhg.Quantized) -> jax.Array:
    return jhg.matmul(a, b, implementation="hopper")


def scaled_arguments(kind: str, special: float) -> tuple[jhg.Quantized, jhg.Quantized]:
    """Returns operands by XLA; scales of rows 0 to 3 are special, of blocks of the last K."""
    rng = np.random.default_rng(0)
    blocks = {"blocks": ((1, 128), (128, 128)), "rows": ((1, None), (None, 1))}[kind]
    with jax.default_device(jax.devices("cpu")[0]):
        a, b = (
            jhg.quantize(rng.standard_normal(shape).astype(np.float32), block=block)
            for shape, block in zip(((144, 400), (400, 272)), blocks, strict=True)
        )
        return jhg.Quantized(a.values, a.scale.at[:4, -1].set(special)), b


def scaled_specs() -> list[KernelSpec]:
    return [
        s for kind in ("blocks", "rows") for s in all_specs_of(scaled, *scaled_arguments(kind, 0))
    ]
