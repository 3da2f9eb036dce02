"""`MoE` for nnx, and the code shared with its linen twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .. import moe
from ..moe import Exchange, Score, Statistics
from ..ops.dense import Implementation
from ..ops.recipes import Recipe, as_recipe
from .gate_up import from_pair
from .layers import Activation

# Attributes of a layer that are arguments of `mixture_of_experts`.
ARGUMENTS = (
    "experts_per_token", "activation", "score", "normalize", "scale", "exchange",
    "save_preactivation", "precision", "recipe", "implementation",
)  # fmt: skip
NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class MoE(nnx.Module):
    """A mixture of experts, each a gated MLP: dropless, trained by plain gradients.

    Parameters, for E = num_experts, D = features and F = hidden_features:

        router   (D, E)
        gate_up  (E, D, 2, F), gate first; or `gate` and `up`, each (E, D, F), if not `stacked`
        down     (E, F, D)
        selection_bias (E,), only with `use_selection_bias`: an `nnx.Variable`, no `nnx.Param`

    `from_maxtext` and `from_huggingface` convert checkpoints to them. A call copies neither form of
    gate and up.

    Args:
      features, hidden_features: D and F.
      num_experts, experts_per_token: E, and the number of experts of each token.
      activation: of the gate, as in `GatedLinear`.
      score, normalize, scale: how experts are weighed: see `jax_hopper_gemm.moe.route`.
      use_selection_bias: adds a bias, initially zeros, to the scores for the choice only. It has no
        gradient; the training loop updates it.
      stacked: whether gate and up are one parameter.
      dtype: dtype of all products; None for the promoted dtype of inputs and parameters.
      param_dtype: of the parameters.
      router_dtype: of the router's kernel in its product; None for `dtype`. With float32 XLA runs
        the product in float32; logits are in float32 in any case.
      kernel_init: initialiser of one matrix, (D, E), (D, F) or (F, D); each expert has its own
        key.
      router_metadata, gate_up_metadata, down_metadata: of the `nnx.Param`s, such as `out_sharding`,
        with a name for each of their axes; `gate_up_metadata` for gate and for up if not `stacked`.
      expert_axis: mesh axis that shards the experts, or None. With it the layer runs in a
        `jax.shard_map` over all axes of the mesh, unless it is inside of one already; then
        parameters and inputs are this device's.
      token_axes: mesh axes, or one, that shard the first axis of the input, `expert_axis` among
        them; None for (expert_axis,).
      mesh: the mesh; None for the one of `jax.set_mesh`.
      exchange: "gather", "all_to_all" or "ragged_all_to_all":
        see `jax_hopper_gemm.moe.mixture_of_experts`.
      save_preactivation, precision, implementation: as in `Linear`.
      recipe: of the experts' products, as in `Linear`.
      rngs: for the initial values.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        num_experts: int,
        experts_per_token: int,
        activation: Activation = "silu",
        score: Score = "softmax",
        normalize: bool = True,
        scale: float | None = None,
        use_selection_bias: bool = False,
        stacked: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        router_dtype: Any = None,
        kernel_init: Any = nnx.initializers.lecun_normal(),  # noqa: B008
        router_metadata: Mapping[str, Any] = NO_METADATA,
        gate_up_metadata: Mapping[str, Any] = NO_METADATA,
        down_metadata: Mapping[str, Any] = NO_METADATA,
        expert_axis: str | None = None,
        token_axes: Sequence[str] | None = None,
        mesh: Any = None,
        exchange: Exchange = "gather",
        save_preactivation: bool = True,
        precision: Any = None,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        as_recipe("MoE", recipe)
        into = (features, hidden_features)
        init = partial(initial_experts, kernel_init, num_experts, dtype=param_dtype)
        self.router = nnx.Param(
            kernel_init(rngs.params(), (features, num_experts), param_dtype), **router_metadata
        )
        gate, up = (init(rngs.params(), shape=into) for _ in range(2))
        if stacked:
            self.gate_up = nnx.Param(from_pair(gate, up), **gate_up_metadata)
        else:
            self.gate = nnx.Param(gate, **gate_up_metadata)
            self.up = nnx.Param(up, **gate_up_metadata)
        self.down = nnx.Param(init(rngs.params(), shape=into[::-1]), **down_metadata)
        self.selection_bias = nnx.data(None)
        if use_selection_bias:
            self.selection_bias = nnx.Variable(jnp.zeros(num_experts, jnp.float32))
        self.stacked = stacked
        self.dtype = dtype
        self.router_dtype = router_dtype
        self.experts_per_token = experts_per_token
        self.activation = activation
        self.score: Score = score
        self.normalize = normalize
        self.scale = scale
        self.expert_axis = expert_axis
        self.token_axes = token_axes if isinstance(token_axes, str | None) else tuple(token_axes)
        self.mesh = mesh
        self.exchange: Exchange = exchange
        self.save_preactivation = save_preactivation
        self.precision = precision
        self.recipe: Recipe | None = recipe
        self.implementation: Implementation = implementation

    def __call__(self, inputs: Any, *, return_statistics: bool = False) -> Any:
        """Maps (..., features) to (..., features).

        Returns:
          The result; with `return_statistics` also a `jax_hopper_gemm.moe.Statistics`, for
          `load_balancing_loss` and `router_z_loss` of that package.

        Raises:
          ValueError: a shape does not fit; with `expert_axis` there is no mesh, it lacks one of
            the axes, or its devices do not divide the first axis of the input; or `mesh` or
            `token_axes` came without it.
        """
        gate_up = (self.gate_up[...],) if self.stacked else (self.gate[...], self.up[...])
        bias = None if self.selection_bias is None else self.selection_bias[...]
        y, statistics = run(self, inputs, self.router[...], gate_up, self.down[...], bias)
        return (y, statistics) if return_statistics else y


def initial_experts(init: Any, experts: int, key: Any, *, shape: Any, dtype: Any) -> Any:
    """Returns (experts, *shape) made by `init`, with a key for each expert."""
    return jax.vmap(lambda k: init(k, shape, dtype))(jax.random.split(key, experts))


def run(
    layer: Any, x: Any, router: Any, gate_up: tuple[Any, ...], down: Any, selection_bias: Any
) -> tuple[jax.Array, Statistics]:
    """Runs `mixture_of_experts`, in a `jax.shard_map` where it needs one.

    `layer` is an `MoE`, here or in `linen`; the others are its input and its parameters.
    """
    expert_axis, token_axes, mesh = layer.expert_axis, layer.token_axes, layer.mesh
    options: dict[str, Any] = {name: getattr(layer, name) for name in ARGUMENTS}
    dtype = jnp.result_type(x, *gate_up, down) if layer.dtype is None else layer.dtype
    router = router.astype(dtype if layer.router_dtype is None else layer.router_dtype)
    x, down, *hidden_weights = (jnp.asarray(a).astype(dtype) for a in (x, down, *gate_up))
    weights = hidden_weights[0] if len(hidden_weights) == 1 else tuple(hidden_weights)

    def call(x: Any, router: Any, weights: Any, down: Any, bias: Any, axis: Any) -> Any:
        return moe.mixture_of_experts(
            x, router, weights, down, selection_bias=bias, expert_axis=axis, **options
        )

    axes = [name for name, x in (("mesh", mesh), ("token_axes", token_axes)) if x is not None]
    if expert_axis is None and axes:
        raise ValueError(
            f"MoE: {' and '.join(axes)} came without expert_axis, the mesh axis that shards the "
            "experts: name it, or leave out what came"
        )
    around = jax.sharding.get_abstract_mesh().manual_axes
    if expert_axis is None or expert_axis in around:
        return call(x, router, weights, down, selection_bias, expert_axis)
    one = isinstance(token_axes, str | None)
    token_axes = (token_axes or expert_axis,) if one else tuple(token_axes)
    whole = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    _check_axes(expert_axis, token_axes, whole, x, down.shape[0])

    def local(*args: Any) -> Any:
        y, statistics = call(*args, axis=expert_axis)
        others = tuple(axis for axis in token_axes if axis != expert_axis)
        return y, lax.pmean(statistics, others) if others else statistics

    tokens, experts = PartitionSpec(token_axes), PartitionSpec(expert_axis)
    everywhere = PartitionSpec()
    args = x, router, weights, down, selection_bias
    in_specs = tokens, everywhere, experts, experts, everywhere
    if whole.are_all_axes_explicit:  # there `jax.shard_map` moves no array
        args = tuple(
            jax.tree.map(partial(jax.reshard, out_shardings=NamedSharding(whole, spec)), arg)
            for arg, spec in zip(args, in_specs, strict=True)
        )
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(tokens, everywhere))(*args)


def _check_axes(
    expert_axis: str, token_axes: tuple[str, ...], mesh: Any, x: Any, experts: int
) -> None:
    if mesh.empty:
        raise ValueError(
            f"MoE: expert_axis is {expert_axis!r}, but there is no mesh: pass mesh=, or call in "
            "`with jax.set_mesh(mesh)`"
        )
    unknown = [axis for axis in (expert_axis, *token_axes) if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"MoE: {unknown[0]!r} came as an axis, expected the name of one of the mesh: "
            f"{mesh.axis_names}"
        )
    if expert_axis not in token_axes:
        raise ValueError(
            f"MoE: token_axes are {token_axes}, expected {expert_axis!r} among them: its devices "
            "hold different tokens"
        )
    devices = prod(mesh.shape[axis] for axis in token_axes)
    if x.ndim < 2 or x.shape[0] % devices:
        raise ValueError(
            f"MoE: inputs have shape {x.shape}, expected a first axis that {devices} devices on "
            f"{token_axes} divide evenly: pad it"
        )
    if experts % mesh.shape[expert_axis]:
        there = f"the {mesh.shape[expert_axis]} devices on {expert_axis!r}"
        raise ValueError(f"MoE: num_experts is {experts}, expected a multiple of {there}")
