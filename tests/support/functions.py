"""Random epilogues, their gradients, and what a `Fusion` computes, operation by operation."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_hopper_gemm.fusion import Fusion
from jax_hopper_gemm.gemm.epilogue_graph import Node


@dataclass(frozen=True)
class RandomFunction:
    """A function of a product and some operands.

    Attributes:
      function: f(acc, *operands), one to three results; computes in acc's dtype.
      operands: for each operand its letters and its dtype.
      description: the expression, for messages.
    """

    function: Callable[..., tuple[Any, ...]]
    operands: tuple[tuple[str, str], ...]
    description: str

    def random_operands(self, rng: random.Random, extents: Mapping[str, int]) -> list[np.ndarray]:
        """Returns operands of the right shapes, which broadcast against a product "mn" or "bmn"."""
        return [random_operand(rng, labels, dtype, extents) for labels, dtype in self.operands]


def vjp_of(function: RandomFunction) -> Callable[..., tuple[Any, ...]]:
    """Returns h(acc, *operands, *cotangents): gradients of acc, then of each operand of floats."""
    floats = [i for i, (_, dtype) in enumerate(function.operands) if dtype != "bool"]

    def pullback(acc: Any, *rest: Any) -> tuple[Any, ...]:
        operands, cotangents = rest[: len(function.operands)], rest[len(function.operands) :]

        def of_floats(acc: Any, *values: Any) -> tuple[Any, ...]:
            given = list(operands)
            for i, value in zip(floats, values, strict=True):
                given[i] = value
            return function.function(acc, *given)

        results, vjp = jax.vjp(of_floats, acc, *(operands[i] for i in floats))
        return vjp(tuple(c.astype(x.dtype) for c, x in zip(cotangents, results, strict=True)))

    return pullback


def random_operand(
    rng: random.Random, labels: str, dtype: str, extents: Mapping[str, int]
) -> np.ndarray:
    """Returns numbers around 1 in size, or truth values."""
    generator = np.random.default_rng(rng.getrandbits(32))
    first = min((list(extents).index(x) for x in labels), default=len(extents))
    shape = [extents[x] if x in labels else 1 for x in list(extents)[first:]]
    values = generator.normal(size=shape)
    return values > 0 if dtype == "bool" else values.astype(jnp.dtype(dtype))


def random_function(
    rng: random.Random, out: str = "mn", differentiable: bool = False
) -> RandomFunction:
    """Returns a random function of covered operations that keeps its values tame.

    Args:
      out: the letters of the product.
      differentiable: without largest values among the results, whose gradient is not elementwise.
    """
    maker = _Maker(rng, out)
    results = [maker.result(maker.tree(rng.randint(1, 4)))]
    for _ in range(rng.choice((0, 0, 1, 2))):
        tree = maker.tree(rng.randint(0, 3))
        results.append(rng.choice((maker.result, maker.reduction(differentiable)))(tree))

    def function(acc: Any, *operands: Any) -> tuple[Any, ...]:
        return tuple(compute((acc, *operands)) for compute, _ in results)

    description = "; ".join(text for _, text in results)
    return RandomFunction(function, tuple(maker.operands), description)


Tree = tuple[Callable[[tuple[Any, ...]], Any], str]  # a function of (acc, *operands), and its text

# Functions of one argument that stay below some 10 where it does.
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "square": lambda x: jnp.square(jnp.tanh(x)),
    "cube": lambda x: jnp.tanh(x) ** 3,
    "inverse square": lambda x: (jnp.abs(x) + 0.5) ** -2,
    "exp": lambda x: jnp.exp(jnp.tanh(x)),
    "exp2": lambda x: jnp.exp2(jnp.tanh(x)),
    "expm1": lambda x: jnp.expm1(jnp.tanh(x)),
    "log": lambda x: jnp.log(jnp.abs(x) + 0.5),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.5),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 0.5),
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "sign": jnp.sign,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "to bfloat16": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "to float16": lambda x: x.astype(jnp.float16).astype(x.dtype),
    "clip": lambda x: jnp.clip(x, -1.5, 2.0),
    "stop_gradient": lambda x: lax.stop_gradient(x) + x,
    "relu": jax.nn.relu,
    "squared relu": lambda x: jnp.square(jax.nn.relu(jnp.tanh(x))),
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "leaky relu": jax.nn.leaky_relu,
    "elu": lambda x: jax.nn.elu(x),
    "mish": jax.nn.mish,
    "hard swish": jax.nn.hard_swish,
}

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: jnp.tanh(x) * y,
    "div": lambda x, y: x / (jnp.abs(y) + 0.5),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "pow": lambda x, y: (jnp.abs(x) + 0.5) ** jnp.tanh(y),
    "greater": lambda x, y: jnp.where(x > y, x, 0.5 * y),
    "logic": lambda x, y: jnp.where((x < 0.25) & ~(y >= 0.125) | (x == y), x, y),
    "unequal": lambda x, y: jnp.where((x != y) ^ (x <= 0.25) ^ jnp.isfinite(y), x, y),
    "gate": lambda x, y: jax.nn.sigmoid(x) * y,
}


_MAX_OPERANDS = 3  # with as many cotangents, kernels still have room for all


class _Maker:
    def __init__(self, rng: random.Random, out: str):
        self.rng, self.out = rng, out
        self.operands: list[tuple[str, str]] = []

    def tree(self, depth: int) -> Tree:
        """Returns an expression of the product."""
        if depth == 0:
            return (lambda leaves: leaves[0]), "acc"
        x, text = self.tree(depth - 1)
        shape = self.rng.choice(("unary", "unary", "binary", "operand", "operand"))
        if shape == "unary":
            name, f = self.rng.choice(sorted(_UNARY.items(), key=lambda item: item[0]))
            return (lambda leaves: f(x(leaves))), f"{name}({text})"
        y, other = self.tree(self.rng.randint(0, depth - 1)) if shape == "binary" else self.leaf()
        if other.startswith("bool"):
            return (
                lambda leaves: jnp.where(y(leaves), x(leaves), -0.25)
            ), f"where({other}, {text})"
        name, g = self.rng.choice(sorted(_BINARY.items(), key=lambda item: item[0]))
        if self.rng.random() < 0.5:
            return (lambda leaves: g(x(leaves), y(leaves))), f"{name}({text}, {other})"
        return (lambda leaves: g(y(leaves), x(leaves))), f"{name}({other}, {text})"

    def leaf(self) -> Tree:
        """Returns an operand, or an expression of one."""
        if len(self.operands) < _MAX_OPERANDS:
            labels = self.rng.choice(["", "n", "m", "mn", self.out, self.out.replace("m", "")])
            dtypes = ["bfloat16", "float32", *(["bool", "float16"] if labels else [])]
            self.operands.append((labels, self.rng.choice(dtypes)))
            number = len(self.operands)
        else:
            number = self.rng.randint(1, len(self.operands))
        labels, dtype = self.operands[number - 1]
        text = f"{dtype}[{labels}]"
        if dtype == "float32" and self.rng.random() < 0.3:
            name, f = self.rng.choice(sorted(_UNARY.items(), key=lambda item: item[0]))
            return (lambda leaves: f(leaves[number])), f"{name}({text})"
        if dtype in ("bool", "float32"):
            return (lambda leaves: leaves[number]), text
        # Of 16-bit arithmetic, what has one right answer.
        factor = self.rng.choice((1, 1, 3))
        return (
            lambda leaves: (leaves[number] * factor).astype(leaves[0].dtype)
        ), f"{factor} {text}"

    def result(self, tree: Tree) -> Tree:
        x, text = tree
        dtype = self.rng.choice(("bfloat16", "bfloat16", "float16", "float32"))
        if dtype == "float32":
            return x, text
        return (lambda leaves: x(leaves).astype(dtype)), f"{dtype}({text})"

    def reduction(self, differentiable: bool) -> Callable[[Tree], Tree]:
        row = -1
        kinds: dict[str, Callable[[Any], Any]] = {
            "column sums": lambda x: jnp.sum(x, axis=-2),
            "row sums": lambda x: jnp.sum(x, axis=row),
            "sum": jnp.sum,
            "bias gradient": lambda x: jnp.sum(x, axis=tuple(range(x.ndim - 1))),
        }
        if not differentiable:
            kinds |= {
                "row max": lambda x: jnp.max(x, axis=row, keepdims=True),
                "row min": lambda x: jnp.min(x, axis=row),
                "largest": lambda x: jnp.max(jnp.abs(x)),
                "smallest": lambda x: jnp.min(x),
            }
        name = self.rng.choice(sorted(kinds))
        return lambda tree: ((lambda leaves: kinds[name](tree[0](leaves))), f"{name}({tree[1]})")


# What a graph means.


def interpret(
    fusion: Fusion, accumulators: Sequence[Any], operands: Sequence[Any], out: str, m: str, n: str
) -> list[Any]:
    """Returns the function's outputs: the graph in float32, then `Fusion.finish`."""
    with jax.disable_jit():
        leaves = [jnp.asarray(leaf, jnp.float32) for leaf in accumulators]
        for leaf in placed_operands(fusion, operands, out):
            leaves.append(jnp.asarray(leaf) if leaf.dtype == bool else jnp.asarray(leaf, "float32"))
        columns = tuple(out.index(x) for x in n)
        for node in fusion.graph.nodes:
            leaves.append(_in_float32(node, [leaves[i] for i in node.args], columns))
        shape = jnp.shape(accumulators[0])
        finished = _results(fusion, leaves, shape, out, m, n)
        return fusion.finish(*finished, *operands)


def placed_operands(fusion: Fusion, operands: Sequence[Any], out: str) -> list[np.ndarray]:
    """Returns each operand of the graph with an axis for each letter of `out`."""
    placed = []
    read = zip(fusion.operands, fusion.labels, fusion.graph.operands, strict=True)
    for index, labels, operand in read:
        array = np.asarray(operands[index]).astype(jnp.dtype(operand.dtype))
        array = array.reshape([extent for extent in array.shape if extent > 1])
        order = [labels.index(x) for x in out if x in labels]
        array = array.transpose(order)
        extents = iter(array.shape)
        placed.append(array.reshape([next(extents) if x in labels else 1 for x in out]))
    return placed


_JNP: dict[str, Callable[..., Any]] = {
    "and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor, "not": jnp.logical_not,
    "select": jnp.where,
}  # fmt: skip


def _in_float32(node: Node, arguments: list[Any], columns: tuple[int, ...]) -> Any:
    match node.op, node.params:
        case "constant", (value,):
            return jnp.full((), value, jnp.float32)
        case "convert", (dtype,):
            return arguments[0].astype(dtype).astype(jnp.float32)
        case "integer_pow", (exponent,):
            return lax.integer_pow(arguments[0], exponent)
        case "round", _:
            return lax.round(arguments[0], lax.RoundingMethod.TO_NEAREST_EVEN)
        case "row_sum", _:
            return jnp.sum(arguments[0], axis=columns, keepdims=True)
        case "row_max", _:
            return jnp.max(arguments[0], axis=columns, keepdims=True)
    function = _JNP.get(node.op) or getattr(lax, node.op)
    return function(*np.broadcast_arrays(*arguments))


def _results(
    fusion: Fusion, values: list[Any], shape: tuple[int, ...], out: str, m: str, n: str
) -> list[Any]:
    """Returns `finished_results` of `Fusion.finish`."""
    rows, columns = (tuple(out.index(x) for x in letters) for letters in (m, n))
    results, found = fusion.graph.results, []
    for i, result in enumerate(results):
        x = jnp.broadcast_to(values[result.value], shape)
        match result.kind:
            case "matrix":
                x = x.astype(result.dtype)
                if result.planes == 2 and result.plane == 0:
                    other = jnp.broadcast_to(values[results[i + 1].value], shape)
                    planes = [x, other.astype(result.dtype)]
                    found.append(jnp.stack(planes, axis=len(out) - len(n)))
                elif result.planes == 1:
                    found.append(x)
            case "row_sum":
                found.append(jnp.sum(x, axis=columns))
            case "row_max":
                found.append(jnp.max(x, axis=columns))
            case "column_sum":
                found.append(jnp.sum(x, axis=rows))
            case "max":
                found.append(jnp.max(x))
            case "row_sumexp":
                largest = jnp.max(x, axis=columns, keepdims=True)
                found.append(jnp.max(x, axis=columns))
                found.append(jnp.sum(jnp.exp(x - largest), axis=columns))
            case "top_k_values" | "top_k_indices":
                which = result.kind == "top_k_indices"
                found.append(lax.top_k(x, result.k)[which])
    return found
