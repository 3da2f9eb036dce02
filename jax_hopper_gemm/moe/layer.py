"""The layer: `mixture_of_experts`, from the router to the combined results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..ops.checks import layers
from ..ops.dense import Implementation, Preactivation
from .expert_parallel import EXCHANGES, Exchange
from .experts import Activation, grouped_mlp
from .router import Routing, Score, Statistics, combine_rows, dispatch_rows, router, row_weights


def mixture_of_experts(
    x: ArrayLike,
    router_kernel: ArrayLike,
    gate_up: ArrayLike | tuple[ArrayLike, ArrayLike],
    down: ArrayLike,
    *,
    experts_per_token: int,
    activation: Activation = "silu",
    score: Score = "softmax",
    normalize: bool = True,
    scale: float | None = None,
    selection_bias: ArrayLike | None = None,
    expert_axis: str | None = None,
    exchange: Exchange = "gather",
    preactivation: Preactivation = "save",
    precision: Any = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, Statistics]:
    """Sends each token through its k best experts and adds up their weighted results.

    No token is dropped, however uneven the experts' load. No step depends on the order in which
    parts of a kernel finish: equal input gives equal bits, in gradients too.

    Args:
      x: (..., D), tokens.
      router_kernel: (D, E).
      gate_up, down: the experts' weights, as in `grouped_mlp`: of all E experts, or with
        `expert_axis` of this device's.
      experts_per_token: k.
      activation, preactivation: as in `grouped_mlp`.
      score, normalize, scale, selection_bias: as in `route`.
      expert_axis: inside `jax.shard_map`, the mesh axis that shards the experts, evenly and in
        order; its devices hold different tokens, equally many. None: this device has all experts.
      exchange: how tokens reach the experts of other devices: "gather" brings all tokens of the
        axis to each device, "all_to_all" sends each choice to its expert's device in blocks padded
        to the worst case, "ragged_all_to_all" without padding (by XLA only on GPUs and TPUs).
      precision, implementation: of all products, as in `jax_hopper_gemm.matmul`.

    Returns:
      (..., D), in the promoted dtype of `x` and the experts' weights, and the statistics; with
      `expert_axis` they cover all tokens on it.

    Raises:
      ValueError: a shape does not fit, or another argument is not one of those above.
    """
    x, kernel, down = jnp.asarray(x), jnp.asarray(router_kernel), jnp.asarray(down)
    rights = gate_up if isinstance(gate_up, tuple | list) else (gate_up,)
    rights = tuple(map(jnp.asarray, rights))
    devices = 1 if expert_axis is None else lax.axis_size(expert_axis)
    layers.check_mixture(x, kernel, rights, down, devices, exchange)
    tokens = x.reshape(-1, x.shape[-1])
    routing = router(
        tokens, kernel, experts_per_token, score=score, normalize=normalize, scale=scale,
        selection_bias=selection_bias, precision=precision, implementation=implementation,
    )  # fmt: skip

    def experts(rows: jax.Array, sizes: jax.Array, weights: jax.Array) -> jax.Array:
        return grouped_mlp(
            rows, rights if len(rights) == 2 else rights[0], down, sizes, row_weights=weights,
            activation=activation, preactivation=preactivation, precision=precision,
            implementation=implementation,
        )  # fmt: skip

    if expert_axis is None:
        y, statistics = _all_here(tokens, routing, experts), routing.statistics
    else:
        y = EXCHANGES[exchange](tokens, routing, experts, expert_axis, down.shape[0])
        statistics = lax.pmean(routing.statistics, expert_axis)
    return y.reshape(x.shape), statistics


def _all_here(x: jax.Array, routing: Routing, experts: Any) -> jax.Array:
    rows = dispatch_rows(x, routing)
    return combine_rows(experts(rows, routing.group_sizes, row_weights(routing)), routing)
