"""The experts: one gated MLP each, computed by grouped GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import ops
from ..ops.checks import layers
from ..ops.dense import Implementation, Preactivation

Activation = str | Callable[[jax.Array], jax.Array] | None


def grouped_mlp(
    x: ArrayLike,
    gate_up: ArrayLike | tuple[ArrayLike, ArrayLike],
    down: ArrayLike,
    group_sizes: ArrayLike,
    *,
    row_weights: ArrayLike | None = None,
    activation: Activation = "silu",
    preactivation: Preactivation = "save",
    precision: Any = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Returns (row_weights * activation(x @ gate) * (x @ up)) @ down, by each row's expert.

    Rows past the last group come back as zeros. A row's weight multiplies the hidden values before
    they are rounded. So the results need no further product, and the weight's gradient is a sum
    over a row.

    Args:
      x: (R, D), rows sorted by expert.
      gate_up: (E, D, 2, F), gate `gate_up[:, :, 0]` and up `gate_up[:, :, 1]`; or a pair (gate, up)
        of arrays (E, D, F). Neither form is copied.
      down: (E, F, D).
      group_sizes: (E,) int32, the number of rows of each expert.
      row_weights: (R,), or None for ones.
      activation: of the gate: a name as in `jax_hopper_gemm.matmul`, a function, or None.
      preactivation, precision, implementation: as in `jax_hopper_gemm.gated_linear_unit`.

    Returns:
      (R, D), in the promoted dtype of `x` and the weights.

    Raises:
      ValueError: shapes do not fit.
    """
    x, down, sizes = jnp.asarray(x), jnp.asarray(down), jnp.asarray(group_sizes)
    pair = isinstance(gate_up, tuple | list)
    rights: tuple[Any, ...] = tuple(map(jnp.asarray, gate_up if pair else (gate_up,)))
    scale = None if row_weights is None else jnp.asarray(row_weights)
    layers.check_grouped_mlp(x, rights, down, sizes, scale, activation)
    hidden = ops.gated_linear_unit(
        x, (rights[0], rights[1]) if pair else rights[0], activation=activation, row_scale=scale,
        group_sizes=sizes, preactivation=preactivation, precision=precision,
        implementation=implementation,
    )  # fmt: skip
    return ops.ragged_dot(hidden, down, sizes, precision, implementation=implementation)
