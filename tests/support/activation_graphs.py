"""Graphs of well-known epilogues, node by node as JAX traces them, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import special
from support.operations import Builder

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph

SQRT_2_PI, SQRT_HALF = float(np.float32((2 / np.pi) ** 0.5)), float(np.float32(0.5**0.5))
CUBE = float(np.float32(0.044715))


def gelu_tanh(b: Builder, x: int) -> int:
    inner = b.add(x, b.mul(CUBE, b.integer_pow(x, params=(3,))))
    return b.mul(x, b.mul(0.5, b.add(1.0, b.tanh(b.mul(SQRT_2_PI, inner)))))


def gelu(b: Builder, x: int) -> int:
    return b.mul(b.mul(0.5, x), b.erfc(b.mul(b.neg(x), SQRT_HALF)))


def silu(b: Builder, x: int) -> int:
    return b.mul(x, b.logistic(x))


def softplus(b: Builder, x: int) -> int:
    difference = b.sub(x, 0.0)
    added = b.add(b.max(x, 0.0), b.log1p(b.exp(b.neg(b.abs(difference)))))
    return b.select(b.ne(difference, difference), b.add(x, 0.0), added)


def mish(b: Builder, x: int) -> int:
    return b.mul(x, b.tanh(softplus(b, x)))


def elu(b: Builder, x: int) -> int:
    positive = b.gt(x, 0.0)
    return b.select(positive, x, b.mul(1.0, b.expm1(b.select(positive, 0.0, x))))


def hard_swish(b: Builder, x: int) -> int:
    return b.mul(x, b.div(b.min(b.max(b.add(x, 3.0), 0.0), 6.0), 6.0))


def relu(b: Builder, x: int) -> int:
    return b.max(x, 0.0)


def silu_gradient(b: Builder, x: int, g: int) -> int:
    s = b.logistic(x)
    return b.add(b.mul(g, s), b.mul(b.mul(x, g), b.mul(s, b.sub(1.0, s))))


def gelu_tanh_gradient(b: Builder, x: int, g: int) -> int:
    square = b.mul(3.0, b.integer_pow(x, params=(2,)))
    inner = b.mul(SQRT_2_PI, b.add(x, b.mul(CUBE, b.integer_pow(x, params=(3,)))))
    t = b.tanh(inner)
    one_minus_square = b.mul(b.sub(1.0, t), b.add(1.0, t))
    half = b.mul(0.5, b.add(1.0, t))
    slope = b.mul(SQRT_2_PI, b.mul(b.mul(0.5, b.mul(x, g)), one_minus_square))
    first = b.add(b.mul(g, half), slope)
    return b.add(first, b.mul(b.mul(CUBE, slope), square))


def gelu_gradient(b: Builder, x: int, g: int) -> int:
    z = b.mul(b.neg(x), SQRT_HALF)
    density = b.exp(b.neg(b.square(z)))
    slope = b.mul(b.mul(b.mul(-1.1283792, b.mul(b.mul(0.5, x), g)), density), SQRT_HALF)
    return b.add(b.neg(slope), b.mul(0.5, b.mul(g, b.erfc(z))))


def _gelu_tanh64(x):
    return 0.5 * x * (1 + np.tanh(SQRT_2_PI * (x + CUBE * x**3)))


def _gelu64(x):
    return 0.5 * x * special.erfc(-x * SQRT_HALF)


# name: (function of a builder and the accumulator, the same in float64)
ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    "gelu_tanh": (gelu_tanh, _gelu_tanh64),
    "gelu": (gelu, _gelu64),
    "silu": (silu, lambda x: x * special.expit(x)),
    "softplus": (softplus, lambda x: np.logaddexp(x, 0)),
    "mish": (mish, lambda x: x * np.tanh(np.logaddexp(x, 0))),
    "elu": (elu, lambda x: np.where(x > 0, x, np.expm1(x))),
    "hard_swish": (hard_swish, lambda x: x * np.clip(x + 3, 0, 6) / 6),
    "relu": (relu, lambda x: np.maximum(x, 0)),
    "tanh": (lambda b, x: b.tanh(x), np.tanh),
    "exp": (lambda b, x: b.exp(x), np.exp),
}
GRADIENTS: dict[str, Callable] = {
    "gelu_tanh": gelu_tanh_gradient,
    "gelu": gelu_gradient,
    "silu": silu_gradient,
}


def activation_graph(name: str, dtype: str) -> EpilogueGraph:
    """Returns the graph of an activation of the accumulator."""
    b = Builder()
    return b.graph(ACTIVATIONS[name][0](b, 0), dtype=dtype)


def gradient_graph(name: str, dtype: str) -> EpilogueGraph:
    """Returns the graph of its gradient: of the accumulator, times an operand."""
    b = Builder(operands=1)
    return b.graph(GRADIENTS[name](b, 0, 1), dtype=dtype)
