"""Ragged products as users write them, with their exact results: what GPU tests and builds run.

Each is a `GroupedProgram`: a function of arrays, and for each of its results the products of which
it consists. References are loops over groups in float64, nothing of JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import group_sizes
import jax
import jax.numpy as jnp
import numpy as np
from support import bounds, reference, tolerance

from jax_hopper_gemm import ops
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

ROWS_CONTRACTED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def ragged_dot(*args: Any, **options: Any) -> jax.Array:
    """Our `ragged_dot`, on a kernel."""
    return ops.ragged_dot(*args, implementation="hopper", **options)


@dataclass(frozen=True)
class Exact:
    """A result in float64.

    Attributes:
      value: what it is.
      magnitude: the same of absolute values: what rounding errors are proportional to.
      terms: products that are added up for an element, at most.
    """

    value: np.ndarray
    magnitude: np.ndarray
    terms: int


@dataclass(frozen=True)
class GroupedProgram:
    """A function and what is known of it.

    Attributes:
      run: function of the arrays that `arguments` returns; it gives an array or a tuple of them.
      shapes: of its arrays of floats, by name.
      exact: function of (arrays, sizes): an `Exact` for each result.
      sizes: function of a seed: the sizes, int32.
      dtype: of the floats.
    """

    run: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    exact: Callable[[dict[str, np.ndarray], np.ndarray], Sequence[Exact]]
    sizes: Callable[[int], np.ndarray]
    dtype: str = "bfloat16"

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Returns normal random numbers, and the sizes last."""
        rng = np.random.default_rng(seed)
        floats = [rng.standard_normal(shape, np.float32) for shape in self.shapes.values()]
        return [*(x.astype(jnp.dtype(self.dtype)) for x in floats), self.sizes(seed)]

    def specs(self) -> list[GemmSpec]:
        floats = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.shapes.values()]
        return specs_of(self.run, *floats, self.sizes(0))

    def check(
        self,
        results: Any,
        arguments: Sequence[np.ndarray],
        what: str,
        summation: tolerance.Summation = "wgmma",
    ) -> None:
        """Checks what `run` returns for `arguments`.

        Args:
          summation: what added the products up.

        Raises:
          AssertionError: an element is farther from the exact one than the kernels may be.
        """
        *floats, sizes = map(np.asarray, arguments)
        named = dict(zip(self.shapes, floats, strict=True))
        got = jax.tree.leaves(results)
        for i, (array, exact) in enumerate(zip(got, self.exact(named, sizes), strict=True)):
            bounds.assert_within_bound(
                np.asarray(array), exact.value, exact.magnitude, exact.terms,
                f"{what}, result {i}", summation,
            )  # fmt: skip


def bounds_of(sizes: np.ndarray, length: int, offset: int = 0) -> list[tuple[int, int]]:
    """Returns where each group's rows begin and end; groups before `offset` are left out."""
    ends = np.minimum(np.cumsum(np.clip(sizes.astype(np.int64), 0, length)), length)
    edges = [0, *map(int, ends)]
    return list(zip(edges, edges[1:], strict=False))[offset:]


def rows_product(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray, offset: int = 0) -> Exact:
    """Returns each row of (T, K) times its group's matrix of (G, K, N); 0 in rows of no group."""

    def multiplied(multiply: Callable) -> np.ndarray:
        found = np.zeros((lhs.shape[0], rhs.shape[2]))
        bounds = bounds_of(sizes, lhs.shape[0], offset)
        for (start, end), matrix in zip(bounds, rhs, strict=False):
            found[start:end] = multiply(lhs[start:end], matrix)
        return found

    return Exact(multiplied(reference.product), multiplied(reference.magnitude), lhs.shape[1])


def contraction(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> Exact:
    """Returns (G, K, N): of each group the rows of (T, K), transposed, times those of (T, N)."""
    bounds = bounds_of(sizes, lhs.shape[0])

    def multiplied(multiply: Callable) -> np.ndarray:
        return np.stack([multiply(lhs[start:end].T, rhs[start:end]) for start, end in bounds])

    terms = max(1, *(end - start for start, end in bounds))
    return Exact(multiplied(reference.product), multiplied(reference.magnitude), terms)


def gradients(x: dict[str, np.ndarray], sizes: np.ndarray) -> tuple[Exact, Exact, Exact]:
    """Returns the product of lhs and rhs, and what the cotangent makes their gradients."""
    return (
        rows_product(x["lhs"], x["rhs"], sizes),
        rows_product(x["cotangent"], x["rhs"].swapaxes(1, 2), sizes),
        contraction(x["lhs"], x["cotangent"], sizes),
    )


def training(tokens: int, k: int, n: int, groups: int, sizes: Callable, **fields) -> GroupedProgram:
    """Returns the program of a product and both gradients.

    Args:
      sizes: of `group_sizes`.
    """

    def run(lhs, rhs, cotangent, sizes):
        product, pull = jax.vjp(lambda lhs, rhs: ragged_dot(lhs, rhs, sizes), lhs, rhs)
        return product, *pull(cotangent)

    shapes = {"lhs": (tokens, k), "rhs": (groups, k, n), "cotangent": (tokens, n)}
    return GroupedProgram(
        run, shapes, gradients, lambda seed: sizes(tokens, groups, seed), **fields
    )


def _mapped(axes: tuple, gradient: bool) -> GroupedProgram:
    """Returns the program that maps lhs, rhs and sizes along axes, None where they are shared."""
    batch, tokens, k, n, groups = 3, 200, 64, 136, 5

    def one(lhs, rhs, cotangent, sizes):
        product, pull = jax.vjp(lambda lhs, rhs: ragged_dot(lhs, rhs, sizes), lhs, rhs)
        return (product, *pull(cotangent)) if gradient else product

    def at(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
        return shape if axis is None else (*shape[:axis], batch, *shape[axis:])

    of_lhs, of_rhs, of_sizes = axes
    shapes = {
        "lhs": at((tokens, k), of_lhs),
        "rhs": at((groups, k, n), of_rhs),
        "cotangent": (batch, tokens, n),
    }

    def run(lhs, rhs, cotangent, sizes):
        return jax.vmap(one, (of_lhs, of_rhs, 0, of_sizes))(lhs, rhs, cotangent, sizes)

    def exact(x: dict[str, np.ndarray], sizes: np.ndarray) -> list[Exact]:
        found = []
        for i in range(batch):
            axis_of = {"lhs": of_lhs, "rhs": of_rhs, "cotangent": 0}
            part = {
                name: array if axis_of[name] is None else np.take(array, i, axis_of[name])
                for name, array in x.items()
            }
            found.append(gradients(part, sizes if of_sizes is None else sizes[i]))
        stacked = [
            Exact(
                np.stack([e.value for e in each]),
                np.stack([e.magnitude for e in each]),
                max(e.terms for e in each),
            )
            for each in zip(*found, strict=True)
        ]
        return stacked if gradient else stacked[:1]

    def sizes(seed: int) -> np.ndarray:
        if of_sizes is None:
            return group_sizes.under(tokens, groups, seed)
        kinds = (group_sizes.under, group_sizes.over, group_sizes.negative)
        return np.stack([kind(tokens, groups, seed + i) for i, kind in enumerate(kinds)])

    return GroupedProgram(run, shapes, exact, sizes)


def _float32_result() -> GroupedProgram:
    tokens, k, n, groups = 320, 136, 72, 6
    return GroupedProgram(
        lambda lhs, rhs, sizes: ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32),
        {"lhs": (tokens, k), "rhs": (groups, k, n)},
        lambda x, sizes: [rows_product(x["lhs"], x["rhs"], sizes)],
        lambda seed: group_sizes.under(tokens, groups, seed),
    )


def _offset() -> GroupedProgram:
    """Six groups, of which the third to fifth are here."""
    tokens, k, n, groups, here, first = 500, 72, 136, 6, 3, 2

    def run(lhs, rhs, sizes):
        return ragged_dot(lhs, rhs, sizes, group_offset=jnp.int32(first))

    return GroupedProgram(
        run,
        {"lhs": (tokens, k), "rhs": (here, k, n)},
        lambda x, sizes: [rows_product(x["lhs"], x["rhs"], sizes, first)],
        lambda seed: group_sizes.uneven(tokens, groups, seed),
    )


def _transposed() -> GroupedProgram:
    """Weights that are stored (G, N, K)."""
    tokens, k, n, groups = 400, 136, 264, 7
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return GroupedProgram(
        lambda lhs, rhs, sizes: ops.ragged_dot_general(
            lhs, rhs, sizes, numbers, implementation="hopper"
        ),
        {"lhs": (tokens, k), "rhs": (groups, n, k)},
        lambda x, sizes: [rows_product(x["lhs"], x["rhs"].swapaxes(1, 2), sizes)],
        lambda seed: group_sizes.half_empty(tokens, groups, seed),
    )


def _contracted() -> GroupedProgram:
    """The contracted axis is ragged."""
    tokens, k, n, groups = 700, 136, 264, 9
    return GroupedProgram(
        lambda lhs, rhs, sizes: ops.ragged_dot_general(
            lhs, rhs, sizes, ROWS_CONTRACTED, implementation="hopper"
        ),
        {"lhs": (tokens, k), "rhs": (tokens, n)},
        lambda x, sizes: [contraction(x["lhs"], x["rhs"], sizes)],
        lambda seed: group_sizes.half_empty(tokens, groups, seed),
    )


def _added(dtype: str, batch: int = 0) -> GroupedProgram:
    """Twice a contraction, less half of an array of this dtype; with `batch` so many, mapped."""
    tokens, k, n, groups = 700, 136, 264, 9

    def one(lhs, rhs, c, sizes):
        return ops.ragged_dot_general(
            lhs, rhs, sizes, ROWS_CONTRACTED, c=c.astype(dtype), alpha=2.0, beta=-0.5,
            implementation="hopper",
        )  # fmt: skip

    def exact_one(lhs: np.ndarray, rhs: np.ndarray, c: np.ndarray, sizes: np.ndarray) -> Exact:
        product = contraction(lhs, rhs, sizes)
        c = c.astype(np.float64)
        return Exact(
            2 * product.value - c / 2, 2 * product.magnitude + np.abs(c) / 2, product.terms + 1
        )

    def exact(x: dict[str, np.ndarray], sizes: np.ndarray) -> list[Exact]:
        if not batch:
            return [exact_one(**x, sizes=sizes)]
        parts = [exact_one(x["lhs"][i], x["rhs"], x["c"][i], sizes[i]) for i in range(batch)]
        return [
            Exact(
                np.stack([part.value for part in parts]),
                np.stack([part.magnitude for part in parts]),
                max(part.terms for part in parts),
            )
        ]

    def sizes(seed: int) -> np.ndarray:
        kinds = (group_sizes.half_empty, group_sizes.over, group_sizes.negative)
        found = [kind(tokens, groups, seed + i) for i, kind in enumerate(kinds)]
        return np.stack(found[:batch]) if batch else found[0]

    several = (batch,) if batch else ()
    shapes = {"lhs": (*several, tokens, k), "rhs": (tokens, n), "c": (*several, groups, k, n)}
    return GroupedProgram(jax.vmap(one, (0, None, 0, 0)) if batch else one, shapes, exact, sizes)


def _gathered(stored: int, repeated: bool) -> GroupedProgram:
    """Rows gathered by index: the product and gradients; without lhs's where rows are `repeated`.

    Args:
      stored: how many rows there are to gather from.
    """
    tokens, k, n, groups = 600, 136, 264, 9
    rng = np.random.default_rng(0)
    rows = rng.integers(0, stored, tokens) if repeated else rng.permutation(stored)[:tokens]

    def run(lhs, rhs, cotangent, sizes):
        product, pull = jax.vjp(
            lambda lhs, rhs: ragged_dot(lhs, rhs, sizes, row_indices=rows), lhs, rhs
        )
        of_lhs, of_rhs = pull(cotangent)
        return (product, of_rhs) if repeated else (product, of_lhs, of_rhs)

    def exact(x: dict[str, np.ndarray], sizes: np.ndarray) -> Sequence[Exact]:
        product, of_rows, of_rhs = gradients({**x, "lhs": x["lhs"][rows]}, sizes)
        if repeated:
            return product, of_rhs
        value, magnitude = np.zeros((2, stored, k))
        value[rows], magnitude[rows] = of_rows.value, of_rows.magnitude
        return product, Exact(value, magnitude, of_rows.terms), of_rhs

    return GroupedProgram(
        run,
        {"lhs": (stored, k), "rhs": (groups, k, n), "cotangent": (tokens, n)},
        exact,
        lambda seed: group_sizes.under(tokens, groups, seed),
    )


def _second_derivative() -> GroupedProgram:
    """Derivatives of lhs's gradient, g @ rhs^T by groups, with respect to rhs and g."""
    tokens, k, n, groups = 264, 72, 88, 4

    def run(lhs, rhs, cotangent, tangent, sizes):
        def gradient(rhs, cotangent):
            return jax.vjp(lambda lhs: ragged_dot(lhs, rhs, sizes), lhs)[1](cotangent)[0]

        return jax.vjp(gradient, rhs, cotangent)[1](tangent)

    return GroupedProgram(
        run,
        {
            "lhs": (tokens, k), "rhs": (groups, k, n), "cotangent": (tokens, n),
            "tangent": (tokens, k),
        },
        lambda x, sizes: [
            contraction(x["tangent"], x["cotangent"], sizes),
            rows_product(x["tangent"], x["rhs"], sizes),
        ],
        lambda seed: group_sizes.under(tokens, groups, seed),
    )  # fmt: skip


MAPPED_AXES = [
    (0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, None, 0), (None, 0, 0),
    (0, 0, 0), (1, 1, 0), (0, 2, None),
]  # fmt: skip

# Mixtral, Qwen3-30B, DeepSeek-V3 and a step of decoding, scaled down.
GROUPED_PROGRAMS: dict[str, GroupedProgram] = {
    "mixtral": training(2048, 512, 1792, 8, group_sizes.uneven),
    "qwen3": training(8192, 256, 192, 128, group_sizes.zipf),
    "deepseek": training(4096, 896, 512, 32, group_sizes.half_empty),
    "decode": training(256, 512, 384, 64, group_sizes.uneven),
    "float16": training(1000, 264, 328, 12, group_sizes.uneven, dtype="float16"),
    "thousands of groups": training(3000, 64, 64, 2500, group_sizes.zipf),
    **{f"{name} sizes": training(600, 136, 200, 40, make)
       for name, make in {**group_sizes.KINDS, **group_sizes.HOSTILE}.items()},
    "float32 result": _float32_result(),
    "group offset": _offset(),
    "transposed weights": _transposed(),
    "ragged contraction": _contracted(),
    "added to float32": _added("float32"),
    "added to bfloat16": _added("bfloat16"),
    "vmap of a sum": _added("float32", batch=3),
    "gathered rows": _gathered(170, repeated=True),
    "permuted rows": _gathered(700, repeated=False),
    "second derivative": _second_derivative(),
    **{f"vmap {axes}": _mapped(axes, gradient=False) for axes in MAPPED_AXES},
    **{f"vmap of gradients {axes}": _mapped(axes, gradient=True) for axes in MAPPED_AXES},
}  # fmt: skip
