"""The layer: `mixture_of_experts`, from the router to the combined results, and its experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .. import ops
from ..ops.checks import layers, names_itself
from ..ops.dense import Implementation
from ..ops.quantized import Quantized, as_quantized, is_quantized
from ..ops.recipes import Recipe
from ..primitives.auto_axes import in_auto_axes, kept_sharding
from .expert_parallel import EXCHANGES, Exchange
from .router import (
    Score,
    Statistics,
    as_jax,
    combine_rows,
    dispatch_rows,
    route_tokens,
    row_weights,
)

Activation = str | Callable[[jax.Array], jax.Array] | None
Weights = ArrayLike | Quantized


@names_itself
def mixture_of_experts(
    x: ArrayLike,
    router_kernel: ArrayLike,
    gate_up: Weights | tuple[Weights, Weights],
    down: Weights,
    *,
    experts_per_token: int,
    activation: Activation = "silu",
    score: Score = "softmax",
    normalize: bool = True,
    scale: ArrayLike | None = None,
    selection_bias: ArrayLike | None = None,
    expert_axis: str | Sequence[str] | None = None,
    exchange: Exchange = "gather",
    save_preactivation: bool = True,
    precision: Any = None,
    recipe: Recipe | None = None,
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
      activation, save_preactivation: as in `grouped_mlp`.
      score, normalize, scale, selection_bias: as in `route`.
      expert_axis: inside `jax.shard_map`, the mesh axis, or a tuple of several, that shards the
        experts, evenly and in order; its devices hold different tokens, equally many. None: this
        device has all experts.
      exchange: how tokens reach the experts of other devices: "gather" brings all tokens of the
        axis to each device, "all_to_all" sends each choice to its expert's device in blocks padded
        to the worst case, "ragged_all_to_all" without padding (by XLA only on GPUs and TPUs).
      precision, implementation: of all products, as in `jax_hopper_gemm.matmul`.
      recipe: of the experts' products, as in `jax_hopper_gemm.ragged_dot`.

    Returns:
      (..., D), in the promoted dtype of `x` and the experts' weights, and the statistics; with
      `expert_axis` they cover all tokens on it. With Explicit mesh axes the result is sharded as
      `x` is, and statistics are replicated.

    Raises:
      ValueError: a shape does not fit, or another argument is not one of those above.
      TypeError: an operand is not an array.
      NotImplementedError: `implementation="hopper"` and no kernel can run a product.
    """
    op = "mixture_of_experts"
    given = {"selection_bias": selection_bias}
    x, kernel, selection_bias = as_jax(op, given, x=x, router_kernel=router_kernel)
    rights, down = _weights(op, gate_up, down)
    devices = 1
    if expert_axis is not None:
        devices = layers.count_devices(op, "expert_axis", expert_axis)
        expert_axis = tuple(expert_axis) if isinstance(expert_axis, list) else expert_axis
    choosing = experts_per_token, score, normalize, scale, selection_bias
    layers.check_mixture(x, kernel, rights, down, devices, exchange, choosing)

    def layer(x: Any, kernel: Any, rights: Any, down: Any, scale: Any, bias: Any) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        routing = route_tokens(
            tokens, kernel, experts_per_token, score=score, normalize=normalize, scale=scale,
            selection_bias=bias, precision=precision, implementation=implementation,
        )  # fmt: skip

        def experts(rows: jax.Array, sizes: jax.Array, weights: jax.Array) -> jax.Array:
            return grouped_mlp(
                rows, rights, down, sizes, row_weights=weights, activation=activation,
                save_preactivation=save_preactivation, precision=precision, recipe=recipe,
                implementation=implementation,
            )  # fmt: skip

        if expert_axis is None:
            rows = dispatch_rows(tokens, routing)
            y = combine_rows(experts(rows, routing.group_sizes, row_weights(routing)), routing)
            statistics = routing.statistics
        else:
            y = EXCHANGES[exchange](tokens, routing, experts, expert_axis, down.shape[0])
            statistics = lax.pmean(routing.statistics, expert_axis)
        return y.reshape(x.shape), statistics

    shardings = kept_sharding(x, x.shape), PartitionSpec()
    return in_auto_axes(layer, shardings, x, kernel, rights, down, scale, selection_bias)


@names_itself
def grouped_mlp(
    x: ArrayLike,
    gate_up: Weights | tuple[Weights, Weights],
    down: Weights,
    group_sizes: ArrayLike,
    *,
    row_weights: ArrayLike | None = None,
    activation: Activation = "silu",
    save_preactivation: bool = True,
    precision: Any = None,
    recipe: Recipe | None = None,
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
      down: (E, F, D). It, and gate and up, may be `Quantized` beside `x` of 16 bits.
      group_sizes: (E,) int32, the number of rows of each expert.
      row_weights: (R,), or None for ones.
      activation: of the gate: a name as in `jax_hopper_gemm.matmul`, a function, or None.
      save_preactivation, precision, recipe, implementation: as in
        `jax_hopper_gemm.gated_linear_unit`.

    Returns:
      (R, D), in the promoted dtype of `x` and the weights. With Explicit mesh axes it is sharded
      as `x` is.

    Raises:
      ValueError: shapes do not fit.
      TypeError: an operand is not an array.
      NotImplementedError: `implementation="hopper"` and no kernel can run the products.
    """
    op = "grouped_mlp"
    given = {"row_weights": row_weights}
    x, sizes, scale = as_jax(op, given, x=x, group_sizes=group_sizes)
    rights, down = _weights(op, gate_up, down)
    layers.check_grouped_mlp(x, rights, down, sizes, scale, activation)

    def mlp(x: Any, rights: Any, down: Any, sizes: Any, scale: Any) -> jax.Array:
        hidden = ops.gated_linear_unit(
            x, rights if len(rights) == 2 else rights[0], activation=activation,
            row_scale=scale, group_sizes=sizes, save_preactivation=save_preactivation,
            precision=precision, recipe=recipe, implementation=implementation,
        )  # fmt: skip
        return ops.ragged_dot(
            hidden, down, sizes, precision, recipe=recipe, implementation=implementation
        )

    return in_auto_axes(mlp, kept_sharding(x, x.shape), x, rights, down, sizes, scale)


def _weights(op: str, gate_up: Any, down: Any) -> tuple[tuple[Any, ...], Any]:
    """Returns gate and up, or what holds both, in a tuple, and down; all checked."""
    pair = isinstance(gate_up, tuple | list)
    named = {f"gate_up[{i}]": x for i, x in enumerate(gate_up)} if pair else {"gate_up": gate_up}
    named = {name: as_quantized(op, name, x) for name, x in (named | {"down": down}).items()}
    arrays = as_jax(op, **{name: x for name, x in named.items() if not is_quantized(x)})
    *rights, down = (x if is_quantized(x) else arrays.pop(0) for x in named.values())
    return tuple(rights), down
