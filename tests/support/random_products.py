"""Random epilogues put to the test in products whose accumulators are exact.

A and B hold small integers, B's times a power of two, so that every partial sum is a float32 and
every element of the product also a bfloat16. What is left to be wrong by is the epilogue's own
arithmetic, which `testing.epilogue` bounds operation by operation, and:

- results that XLA adds up further or rounds, which `Fusion.finish` does to both ends of a range;
- gradients of A and B. The gradient z of the product lies between ends that are rounded to
  bfloat16, so z @ B^T lies within r @ |B|^T of c @ B^T, where c is the middle and r half of the
  distance between the ends, and errs further as any product does (`tolerance`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import epilogue, tolerance
from support.functions import RandomFunction, placed_operands, random_function, vjp_of

from jax_hopper_gemm import ops
from jax_hopper_gemm.fusion import Fusion, NotFusable, fuse
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

EXTENTS = {"m": 320, "n": 384, "k": 128}
COUNT = 200
_LONGEST_SUM = 384  # of numbers that XLA adds up after the kernel


@dataclass(frozen=True)
class Case:
    """A product with an epilogue, and what its results must be.

    Attributes:
      function: the epilogue, f(acc, *operands).
      a, b: (320, 128) and (128, 384), bfloat16.
      operands: of the epilogue.
      description: for messages.
    """

    function: Callable[..., tuple[Any, ...]]
    a: np.ndarray
    b: np.ndarray
    operands: tuple[np.ndarray, ...]
    description: str

    def run(self, a: Any, b: Any, *operands: Any) -> tuple[jax.Array, ...]:
        """Returns the results by `matmul` with a kernel; to be called with `arguments`."""
        return ops.matmul(
            a, b, epilogue=self.function, epilogue_operands=operands,
            preferred_element_type=tuple(result.dtype for result in self.results),
            implementation="hopper",
        )  # fmt: skip

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.a, self.b, *self.operands

    @cached_property
    def results(self) -> Sequence[jax.ShapeDtypeStruct]:
        return jax.eval_shape(self.function, self._product, *self.operands)

    @cached_property
    def fusion(self) -> Fusion:
        jaxpr = jax.make_jaxpr(self.function)(self._product, *self.operands)
        return fuse(jaxpr, 1, "mn", "m", "n")

    @cached_property
    def ranges(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The lowest and highest each result may be.

        XLA computes what depends on the operands alone: any such result will do.

        Raises:
          AssertionError: XLA would compute a part of the function.
        """
        fusion = self.fusion
        assert fusion.uncovered == (), f"{self.description}: XLA computes {fusion.uncovered}"
        operands = [x[None] for x in placed_operands(fusion, self.operands, "mn")]
        found = epilogue.evaluate(fusion.graph, [self.exact_product[None]], operands)
        finished = [
            (np.squeeze(value, 0), np.squeeze(bound, 0)) if np.ndim(value) else (value, bound)
            for value, bound in found
        ]
        low = self._finished([value - bound for value, bound in finished])
        high = self._finished([value + bound for value, bound in finished])
        sizes = self._finished([np.abs(value) + bound for value, bound in finished])
        ranges = []
        for one, other, size, result, ours in zip(
            low, high, sizes, self.results, self.depends, strict=True
        ):
            summed = result.shape != self._product.shape
            slack = summed * _LONGEST_SUM * 2.0**-24 * np.abs(size) if ours else np.inf
            ranges.append((np.minimum(one, other) - slack, np.maximum(one, other) + slack))
        return ranges

    @cached_property
    def depends(self) -> list[bool]:
        """Whether each result depends on the product."""
        fusion, (m, n) = self.fusion, self.exact_product.shape
        shapes = {"matrix": (m, n), "column_sum": (n,), "max": ()}
        nothing = [np.full(shapes.get(r.kind, (m,)), np.nan) for r in fusion.graph.results]
        return [bool(np.isnan(output).any()) for output in self._finished(nothing)]

    def check(self, results: Sequence[Any]) -> None:
        """Checks the results of `run`.

        Raises:
          AssertionError: one is out of its range.
        """
        for i, (result, (low, high)) in enumerate(zip(results, self.ranges, strict=True)):
            assert_between(result, low, high, f"result {i} of {self.description}")

    @cached_property
    def exact_product(self) -> np.ndarray:
        return self.a.astype(np.float64) @ self.b.astype(np.float64)

    @property
    def _product(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.exact_product.shape, np.float32)

    def _finished(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        with jax.enable_x64(True):
            outputs = self.fusion.finish(*arrays, *self.operands)
        return [np.asarray(output).astype(np.float64) for output in outputs]


@dataclass(frozen=True)
class GradientCase:
    """A product with an epilogue, whose gradients are checked.

    Attributes:
      forward: the product.
      function: the epilogue, one for which `functions.vjp_of` has a derivative.
      cotangents: one for each result.
    """

    forward: Case
    function: RandomFunction
    cotangents: tuple[np.ndarray, ...]

    @cached_property
    def pullback(self) -> Case:
        """The gradients of the product and of the operands, as an epilogue of the product."""
        forward = self.forward
        return Case(
            vjp_of(self.function), forward.a, forward.b,
            (*forward.operands, *self.cotangents), f"gradients of {forward.description}",
        )  # fmt: skip

    def run(self, a: Any, b: Any, operands: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        """Returns the results, and the gradients of A, B and the operands of floats.

        To be called with `arguments`.
        """
        floats = [i for i, x in enumerate(operands) if x.dtype != bool]

        def of_floats(a: Any, b: Any, *values: Any) -> tuple[jax.Array, ...]:
            given = list(operands)
            for i, value in zip(floats, values, strict=True):
                given[i] = value
            return self.forward.run(a, b, *given)

        results, vjp = jax.vjp(of_floats, a, b, *(operands[i] for i in floats))
        return results, vjp(tuple(cotangents))

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.forward.a, self.forward.b, self.forward.operands, self.cotangents

    def check(self, results: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Checks what `run` returns.

        Raises:
          AssertionError: a number is out of its range.
        """
        self.forward.check(results)
        what = self.pullback.description
        (low, high), *others = self.pullback.ranges
        ends = [_rounded(end) for end in (low, high)]
        middle, half = (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2
        a, b = (x.astype(np.float64) for x in (self.forward.a, self.forward.b))
        products = (
            ("A", middle @ b.T, half @ np.abs(b.T), np.abs(middle) @ np.abs(b.T), "n"),
            ("B", a.T @ middle, np.abs(a.T) @ half, np.abs(a.T) @ np.abs(middle), "m"),
        )
        for gradient, (name, expected, reach, magnitude, along) in zip(
            gradients, products, strict=False
        ):
            bound = reach + tolerance.error_bound(
                np.abs(expected) + reach, magnitude + reach, EXTENTS[along], "bfloat16"
            )
            assert_between(gradient, expected - bound, expected + bound, f"d{name}: {what}")
        for i, (gradient, (low, high)) in enumerate(zip(gradients[2:], others, strict=True)):
            assert_between(gradient, low, high, f"operand {i}: {what}")


def case(seed: int) -> Case:
    """Returns a product with a random epilogue."""
    rng = random.Random(seed)
    return _case(rng, random_function(rng))


def gradient_case(seed: int) -> GradientCase:
    """Returns a product with a random epilogue whose gradient depends on the product."""
    rng = random.Random(-1 - seed)
    while True:
        function = random_function(rng, differentiable=True)
        forward = _case(rng, function)
        generator = np.random.default_rng(seed)
        cotangents = tuple(
            generator.normal(size=x.shape).astype(np.float32).astype(x.dtype)
            for x in forward.results
        )
        found = GradientCase(forward, function, cotangents)
        with suppress(NotFusable):
            if found.pullback.depends[0]:
                return found


def specs(count: int = COUNT) -> list[GemmSpec]:
    """Returns the kernels of the first cases, for machines that cannot compile them."""
    found: dict[GemmSpec, None] = {}
    for seed in range(count):
        plain, gradient = case(seed), gradient_case(seed)
        for tested in (plain, gradient, gradient.pullback):
            found.update(dict.fromkeys(specs_of(tested.run, *tested.arguments)))
    return list(found)


def assert_between(result: Any, low: np.ndarray, high: np.ndarray, what: str) -> None:
    """Checks that each element lies between two others, rounded to the result's dtype."""
    assert np.shape(result) == np.shape(low), f"{what}: {np.shape(result)} is not {np.shape(low)}"
    dtype = np.asarray(result).dtype
    got = np.asarray(result).astype(np.float64)
    low, high = (
        np.asarray(end.astype(np.float32).astype(dtype), np.float64) for end in (low, high)
    )
    outside = ~((low <= got) & (got <= high))
    if np.any(outside):
        index = tuple(int(i) for i in np.argwhere(outside)[0])
        raise AssertionError(
            f"{what}: {np.count_nonzero(outside)} elements of {got.size} are out of range; "
            f"element {index} is {got[index]!r}, not from {low[index]!r} to {high[index]!r}"
        )


def _case(rng: random.Random, function: RandomFunction) -> Case:
    generator = np.random.default_rng(rng.getrandbits(32))
    shapes = ((EXTENTS["m"], EXTENTS["k"]), (EXTENTS["k"], EXTENTS["n"]))
    a, b = (generator.integers(-1, 2, shape).astype(jnp.bfloat16) for shape in shapes)
    operands = function.random_operands(rng, {x: EXTENTS[x] for x in "mn"})
    b = (b * 2.0**-3).astype(jnp.bfloat16)
    return Case(function.function, a, b, tuple(operands), function.description)


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
