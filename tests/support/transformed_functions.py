"""Public functions on tiny operands, each beside the same in plain jnp: what transformations take.

Operands are sparse integers from -1 to 1, and activations are polynomials. So whatever a program of
them stores in 16 bits is a small integer, which bfloat16 holds exactly, and right means equal: on
kernels, on XLA, whatever the order of a sum. The shapes are such that kernels run them and their
derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_hopper_gemm import ops

M, K, N, GROUPS = 16, 8, 32, 3
SIZES = (5, 0, 7)  # of M rows, so that one group is empty and four rows are of none


@dataclass(frozen=True)
class Function:
    """A function of arrays of floats, and of integers behind them.

    Attributes:
      ours: the public function; takes `implementation`, too.
      plain: the same in jnp.
      shapes: of the floats.
      sizes: the integers, if it takes any.
      mapped: for each operand whether `vmap` maps it.
      split: for each operand, then the result, along which axis two devices have their halves;
        None where each has all of it.
    """

    ours: Callable[..., jax.Array]
    plain: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    mapped: tuple[bool, ...]
    split: tuple[int | None, ...]
    sizes: tuple[int, ...] = ()

    def arguments(self, dtype: Any = "bfloat16", seed: int = 0) -> list[jax.Array]:
        """Returns the operands."""
        rng = np.random.default_rng(seed)
        floats = [
            jax.device_put(rng.choice((-1, 0, 1), shape, p=(0.1, 0.8, 0.1)).astype(dtype))
            for shape in self.shapes
        ]
        return [*floats, *([jax.device_put(np.array(self.sizes, np.int32))] if self.sizes else [])]

    @property
    def floats(self) -> tuple[int, ...]:
        """The numbers of the operands that have derivatives."""
        return tuple(range(len(self.shapes)))

    def specs(self, axis: str) -> tuple[list[P], P]:
        """Returns how the operands and the result lie on two devices of a mesh axis."""
        specs = [P() if i is None else P(*[None] * i, axis) for i in self.split]
        return specs[:-1], specs[-1]


def square(y: jax.Array) -> jax.Array:
    return y * y


def _rows_of_groups(sizes: jax.Array) -> jax.Array:
    """Returns (M, G): 1 where a row belongs to a group."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(M)[:, None]
    return ((rows >= ends - sizes) & (rows < ends)).astype(jnp.float32)


def _plain_epilogue(a: Any, b: Any, bias: Any, residual: Any) -> jax.Array:
    return square(a @ b + bias) + residual


def _plain_gated(x: Any, weights: Any) -> jax.Array:
    return square(x @ weights[:, 0]) * (x @ weights[:, 1])


def _plain_ragged(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
    return jnp.einsum("mk,gkn,mg->mn", lhs, rhs, _rows_of_groups(sizes))


def _plain_contraction(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
    return jnp.einsum("mk,mn,mg->gkn", lhs, rhs, _rows_of_groups(sizes))


def _plain_ragged_epilogue(lhs: Any, rhs: Any, bias: Any, sizes: Any) -> jax.Array:
    rows = _rows_of_groups(sizes)
    return square(_plain_ragged(lhs, rhs, sizes) + rows @ bias)


def _epilogue(a: Any, b: Any, bias: Any, residual: Any, **options: Any) -> jax.Array:
    return ops.matmul(a, b, bias=bias, activation=square, residual=residual, **options)


def _ragged_epilogue(lhs: Any, rhs: Any, bias: Any, sizes: Any, **options: Any) -> jax.Array:
    return ops.ragged_dot(lhs, rhs, sizes, bias=bias, activation=square, **options)


_TRANSPOSED = (((0,), (1,)), ((), ()))
_ROWS_CONTRACTED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
_ROWS_MAPPED = (True, False, False, False)
_WEIGHTS = (GROUPS, K, N)

FUNCTIONS: dict[str, Function] = {
    "matmul": Function(
        ops.matmul, jnp.matmul, ((M, K), (K, N)), (True, False), (0, None, 0),
    ),
    "dot_general": Function(
        partial(ops.dot_general, dimension_numbers=_TRANSPOSED),
        partial(jax.lax.dot_general, dimension_numbers=_TRANSPOSED),
        ((K, M), (N, K)), (True, False), (1, None, 0),
    ),
    "einsum": Function(
        partial(ops.einsum, "lmk,lkn->lnm"), partial(jnp.einsum, "lmk,lkn->lnm"),
        ((2, M, K), (2, K, N)), (True, True), (0, 0, 0),
    ),
    "epilogue": Function(
        _epilogue, _plain_epilogue, ((M, K), (K, N), (N,), (M, N)),
        (True, False, False, True), (0, None, None, 0, 0),
    ),
    "gated": Function(
        partial(ops.gated_linear_unit, activation=square), _plain_gated, ((M, K), (K, 2, N)),
        (True, False), (0, None, 0),
    ),
    "ragged_dot": Function(
        ops.ragged_dot, _plain_ragged, ((M, K), _WEIGHTS), (True, False, False),
        (None, 2, None, 1), SIZES,
    ),
    "ragged_dot, epilogue": Function(
        _ragged_epilogue, _plain_ragged_epilogue, ((M, K), _WEIGHTS, (GROUPS, N)), _ROWS_MAPPED,
        (None, 2, 1, None, 1), SIZES,
    ),
    "ragged_dot_general": Function(
        partial(ops.ragged_dot_general, ragged_dot_dimension_numbers=_ROWS_CONTRACTED),
        _plain_contraction, ((M, K), (M, N)), (True, True, False), (None, 1, None, 2), SIZES,
    ),
}  # fmt: skip
WITH_EPILOGUE = ("epilogue", "gated", "ragged_dot, epilogue")
