"""The router: the choice of experts for each token, and the order of rows by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .. import ops
from ..ops.checks import as_arrays, layers, names_itself
from ..ops.dense import Implementation
from ..primitives.auto_axes import in_auto_axes, kept_sharding
from ..primitives.define import promoted
from ..primitives.group_sizes import as_int32
from ..primitives.rows import in_order, sum_rows

Score = Literal["softmax", "sigmoid"]

MOST_COLUMNS_OF_A_ROW_IN_A_TILE = 256  # XLA selects among more experts
MOST_FUSED_EXPERTS_PER_TOKEN = 32

FROM_ROUTER = "pass what route or route_tokens returns"
FROM_ROUTING = "pass the statistics of a Routing, or those that the layer returns"


class Statistics(NamedTuple):
    """Statistics of a router for auxiliary losses and logs: means over its tokens.

    Attributes:
      load: (E,) float32, the share of the tokens' choices that fell on each expert; sums to 1, less
        the share of choices of no expert. It has no gradient.
      probability: (E,) float32, the mean of the tokens' probabilities of each expert; sums to 1.
        With sigmoid scores, a token's probabilities are its scores divided by their sum.
      z: () float32, the mean of logsumexp(logits) ** 2.
    """

    load: jax.Array
    probability: jax.Array
    z: jax.Array


class Routing(NamedTuple):
    """A routing: T tokens choose k of E experts each, which gives R = T * k rows, sorted by expert.

    Attributes:
      weights: (T, k) float32, the weight of each chosen expert.
      experts: (T, k) int32, the chosen experts, the best first; E for a choice of no expert.
      group_sizes: (E,) int32, the number of rows of each expert.
      order: (R,) int32, for each sorted row its token * k + slot. Rows of one expert are in the
        order of their tokens; those of no expert come last.
      positions: (T, k) int32, the sorted row of each choice: the inverse of `order`.
      statistics: see `Statistics`.
    """

    weights: jax.Array
    experts: jax.Array
    group_sizes: jax.Array
    order: jax.Array
    positions: jax.Array
    statistics: Statistics


for cls in (Statistics, Routing):
    export.register_namedtuple_serialization(cls, serialized_name=f"jax_hopper_gemm.{cls.__name__}")


def load_balancing_loss(statistics: Statistics) -> jax.Array:
    """Returns E * sum(load * probability), () float32: 1 for an even load, at most E.

    Where a framework's load sums to k (one for each choice), its loss is k times this one.

    References: Fedus et al., Switch Transformers, https://arxiv.org/abs/2101.03961
    """
    layers.check_named("load_balancing_loss", "statistics", statistics, Statistics, FROM_ROUTING)
    load, probability, _ = statistics
    return load.shape[-1] * jnp.sum(load * probability, axis=-1)


def router_z_loss(statistics: Statistics) -> jax.Array:
    """Returns the mean of logsumexp(logits) ** 2, () float32, which keeps logits small.

    References: Zoph et al., ST-MoE, https://arxiv.org/abs/2202.08906
    """
    layers.check_named("router_z_loss", "statistics", statistics, Statistics, FROM_ROUTING)
    return statistics.z


def route(
    logits: ArrayLike,
    experts_per_token: int,
    *,
    score: Score = "softmax",
    normalize: bool = True,
    scale: ArrayLike | None = None,
    selection_bias: ArrayLike | None = None,
    experts: ArrayLike | None = None,
) -> Routing:
    """Chooses experts by their logits and sorts the choices by expert.

    Ties go to the lower expert, and the order of rows is stable: equal logits, equal routing.
    Gradients reach `logits` through `weights` and `statistics`; no step of them is a scatter.

    Args:
      logits: (T, E); computed on in float32.
      experts_per_token: k.
      score: "softmax" (Mixtral, Qwen3), or "sigmoid", each expert by itself (DeepSeek-V3).
      normalize: whether a token's k weights are divided by their sum. For "softmax" this is
        also the softmax of the k chosen logits, whichever comes first.
      scale: a factor of all weights, or None.
      selection_bias: (E,), added to the scores for the choice only; without gradient. It balances
        the load without an auxiliary loss.
      experts: (T, k) integers from 0 to E - 1, choices made elsewhere, distinct for each token, or
        None. Any other number chooses no expert: it has weight 0, and no part in the normalization
        of the token's weights. With `experts`, `selection_bias` must be None.

    Returns:
      Weights, choices, the order of rows and statistics: see `Routing`. With Explicit mesh axes
      what has an entry for each token or row is sharded as rows of `logits` are, and the rest is
      replicated.

    Raises:
      ValueError: a shape does not fit, k is not in 1..E, `experts` are no integers, logits are
        complex, or `score` is unknown.
      TypeError: an operand is not an array.
    """
    given = {"selection_bias": selection_bias, "experts": experts}
    logits, selection_bias, experts = as_jax("route", given, logits=logits)
    choosing = experts_per_token, score, normalize, scale, selection_bias
    layers.check_route(logits, choosing, experts)
    selection = Selection(experts_per_token, score, normalize)

    def routed(logits: Any, experts: Any, scale: Any, bias: Any) -> Routing:
        logits = logits.astype(jnp.float32)
        if experts is None:
            return arrange(logits, selection.experts(logits, bias), selection, scale)
        experts, count = as_int32(experts, least=-1), logits.shape[1]
        chooses = (experts >= 0) & (experts < count)
        return arrange(logits, jnp.where(chooses, experts, count), selection, scale, chooses)

    return in_auto_axes(routed, _shardings(logits), logits, experts, scale, selection_bias)


@names_itself
def route_tokens(
    x: ArrayLike,
    kernel: ArrayLike,
    experts_per_token: int,
    *,
    score: Score = "softmax",
    normalize: bool = True,
    scale: ArrayLike | None = None,
    selection_bias: ArrayLike | None = None,
    precision: Any = None,
    implementation: Implementation = None,
) -> Routing:
    """Returns `route(x @ kernel, ...)`; the GEMM's kernel chooses the experts.

    Logits are accumulated and kept in float32. For up to 256 experts, of which a token has up to
    32, a tile holds a whole row of logits, and the choice is part of the GEMM's epilogue; for more,
    XLA chooses.

    Args:
      x: (T, D).
      kernel: (D, E).
      precision, implementation: as in `jax_hopper_gemm.matmul`.
      Other arguments: as in `route`.

    Raises:
      ValueError: D differs, or as `route`.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product.
    """
    given = {"selection_bias": selection_bias}
    x, kernel, selection_bias = as_jax("route_tokens", given, x=x, kernel=kernel)
    choosing = experts_per_token, score, normalize, scale, selection_bias
    layers.check_route_tokens(x, kernel, choosing)
    selection = Selection(experts_per_token, score, normalize)
    options: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": promoted(jnp.result_type(x, kernel), jnp.float32),
        "implementation": implementation,
    }
    fits = kernel.shape[1] <= MOST_COLUMNS_OF_A_ROW_IN_A_TILE
    fits = fits and experts_per_token <= MOST_FUSED_EXPERTS_PER_TOKEN

    def routed(x: jax.Array, kernel: jax.Array, scale: Any, bias: Any) -> Routing:
        if fits:
            biases = () if bias is None else (bias,)
            logits, experts = ops.matmul(
                x, kernel, epilogue=selection.with_logits, epilogue_operands=biases, **options
            )
        else:
            logits = ops.matmul(x, kernel, **options)
            experts = selection.experts(logits, bias)
        return arrange(logits, experts, selection, scale)

    return in_auto_axes(routed, _shardings(x), x, kernel, scale, selection_bias)


def as_jax(op: str, optional: dict[str, Any] | None = None, **arrays: Any) -> list[jax.Array]:
    """Returns the arrays, checked, as those of JAX; then `optional` ones, of which None stays."""
    found = as_arrays(op, optional, **arrays)
    return [jnp.asarray(x) if x is not None else cast(Any, None) for x in found]


def rows_sharding(x: jax.Array, rows: int, ndim: int) -> Any:
    """Returns the sharding of an array with so many rows, split as those of `x` and not else."""
    split, *_ = kept_sharding(x, (rows, *x.shape[1:]))
    return PartitionSpec(split, *[None] * (ndim - 1))


def _shardings(x: jax.Array) -> Any:
    """Returns the shardings of a routing: what belongs to tokens is split as they are."""
    whole: Any = PartitionSpec()
    vector, matrix = (rows_sharding(x, x.shape[0], ndim) for ndim in (1, 2))
    return Routing(matrix, matrix, whole, vector, matrix, whole)


@dataclass(frozen=True)
class Selection:
    """The rule that chooses and weighs experts; plain data, so that equal rules share a trace."""

    experts_per_token: int
    score: Score
    normalize: bool

    def scores(self, logits: jax.Array) -> jax.Array:
        return (jax.nn.softmax if self.score == "softmax" else jax.nn.sigmoid)(logits)

    def experts(self, logits: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """Returns (T, k) int32. Scores rise with logits, so only a bias needs the scores."""
        keys = lax.stop_gradient(logits)
        if bias is not None:
            keys = self.scores(keys) + lax.stop_gradient(bias).astype(keys.dtype)[None]
        return lax.top_k(keys, self.experts_per_token)[1]

    def with_logits(self, logits: jax.Array, *bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The logits are a result too: derivatives start from them and never choose again from
        # rounded ones.
        return logits, self.experts(logits, *bias)

    def weights(
        self, logits: jax.Array, experts: jax.Array, chooses: jax.Array | None
    ) -> jax.Array:
        """Returns (T, k) float32; `chooses` as in `arrange`."""
        if self.score == "softmax" and not self.normalize:
            return chosen(jax.nn.softmax(logits), experts)
        keys = chosen(logits, experts)
        if chooses is not None:  # of the lowest key the score is 0
            keys = jnp.where(chooses, keys, jnp.finfo(keys.dtype).min)
        weights = self.scores(keys)
        if self.score == "sigmoid" and self.normalize:
            total = weights.sum(-1, keepdims=True)
            if chooses is not None:
                total = jnp.where(chooses.any(-1, keepdims=True), total, 1)
            weights = weights / total
        # Of a token without any expert they are 0.
        return weights if chooses is None else jnp.where(chooses, weights, 0)

    def probabilities(self, logits: jax.Array) -> jax.Array:
        scores = self.scores(logits)
        return scores if self.score == "softmax" else scores / scores.sum(-1, keepdims=True)


def chosen(values: jax.Array, experts: jax.Array) -> jax.Array:
    """Returns values[t, experts[t, j]], (T, k), 0 where there is no such expert.

    By selects, whose transpose is no scatter.
    """
    hit = experts[:, :, None] == jnp.arange(values.shape[1], dtype=experts.dtype)[None, None]
    return jnp.sum(jnp.where(hit, values[:, None, :], 0), axis=-1)


def arrange(
    logits: jax.Array,
    experts: jax.Array,
    selection: Selection,
    scale: Any,
    chooses: jax.Array | None = None,
) -> Routing:
    """Returns the routing of given choices.

    Args:
      experts: (T, k) int32, of the E columns of `logits`; E for none.
      scale: as in `route`.
      chooses: (T, k), whether `experts` has one; None where all have.
    """
    tokens, num_experts = logits.shape
    sizes, order, positions = sort_by_group(experts, num_experts)
    statistics = Statistics(
        sizes.astype(jnp.float32) / max(experts.size, 1),
        selection.probabilities(logits).sum(0) / max(tokens, 1),
        jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum() / max(tokens, 1),
    )
    weights = selection.weights(logits, experts, chooses)
    weights = weights if scale is None else scale * weights
    return Routing(weights, experts, sizes, order, positions, statistics)


def sort_by_group(groups: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts choices by group, stably.

    Args:
      groups: (T, k) int32 from 0 to `count`; `count` itself is no group and comes last.

    Returns:
      Sizes (count,), order (T * k,) and positions (T, k), int32, as in `Routing`.
    """
    flat = groups.reshape(-1)
    rows = jnp.arange(flat.size, dtype=jnp.int32)
    hit = flat[:, None] == jnp.arange(count, dtype=flat.dtype)[None]
    sizes = jnp.sum(hit, axis=0, dtype=jnp.int32)
    _, order = in_order(flat, count)
    positions = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)
    return sizes, order, positions.reshape(groups.shape)


def dispatch_rows(x: ArrayLike, routing: Routing) -> jax.Array:
    """Returns the tokens (T, ...) in the order of their experts, (R, ...), k copies of each.

    Its transpose is `combine_rows`: a sum over each token's rows, in the order of its slots.

    Args:
      x: (T, ...), of any dtype.
      routing: what `route` or `route_tokens` returned for these tokens.
    """
    layers.check_named("dispatch_rows", "routing", routing, Routing, FROM_ROUTER)
    tokens = layers.check_rows("dispatch_rows", "x", x, routing.positions.shape[0], "token")
    return _moved(tokens, _tokens(routing)[:, None], routing.positions)


def combine_rows(rows: ArrayLike, routing: Routing) -> jax.Array:
    """Returns the sum of each token's rows: (R, ...) to (T, ...), added in float32 by slot.

    Rows are not weighted here: `grouped_mlp` does it, otherwise multiply by `row_weights`.

    Args:
      rows: (R, ...), sorted by expert, as `dispatch_rows` gives them.
      routing: as in `dispatch_rows`.
    """
    layers.check_named("combine_rows", "routing", routing, Routing, FROM_ROUTER)
    each = layers.check_rows("combine_rows", "rows", rows, routing.order.shape[0], "sorted row")
    return _moved(each, routing.positions, _tokens(routing)[:, None])


def row_weights(routing: Routing) -> jax.Array:
    """Returns the weight of each sorted row, (R,) float32; those of no expert have weight 0."""
    layers.check_named("row_weights", "routing", routing, Routing, FROM_ROUTER)
    weights, _, _, order, positions, _ = routing

    def by_row(weights: jax.Array, order: jax.Array, positions: jax.Array) -> jax.Array:
        return sum_rows(weights.reshape(-1), order[:, None], positions.reshape(-1, 1))

    return in_auto_axes(
        by_row, rows_sharding(weights, order.shape[0], 1), weights, order, positions
    )


def _moved(x: jax.Array, sources: jax.Array, users: jax.Array) -> jax.Array:
    sharding = kept_sharding(x, (sources.shape[0], *x.shape[1:]))
    return in_auto_axes(sum_rows, sharding, x, sources, users)


def _tokens(routing: Routing) -> jax.Array:
    return routing.order // routing.positions.shape[1]
