"""Layers for linen: `Dense` (Flax's name for `Linear`), `GatedDense`, `MLP`, `GatedMLP`, `MoE`.

Parameters have the names of the nnx layers, so `up` and `down` accept the parameters of two
`flax.linen.Dense`; for `gate_up` see `jax_hopper_gemm.nn.from_pair`. `DelayedDotGeneral` is a
product for Flax's own layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.linen import fp8_ops

from .. import ops
from ..moe import Exchange, Score
from ..ops.dense import Implementation
from ..ops.recipes import DelayedScaling, Recipe, as_recipe
from .gate_up import from_pair
from .layers import ARGUMENTS, Activation, refuse_dot_general
from .moe import initial_experts
from .moe import run as run_moe


class Dense(nn.Dense):
    """`flax.linen.Dense` with an activation; bias and activation are fused into the GEMM.

    Parameters and their initial values are Flax's own: `kernel` (in, features) and `bias`
    (features,). `dot_general` and `dot_general_cls` must be None.

    Attributes:
      activation, save_preactivation, cotangent_dtype, recipe, implementation: as in
        `jax_hopper_gemm.nn.Linear`.
      preferred_element_type: dtype of the result, as in `flax.nnx.Linear`.
    """

    activation: Activation = None
    save_preactivation: bool = True
    preferred_element_type: Any = None
    cotangent_dtype: Any = None
    recipe: Recipe | None = None
    implementation: Implementation = None

    @nn.compact
    def __call__(self, inputs: Any, *, residual: Any = None) -> jax.Array:
        """Returns activation(inputs @ kernel + bias) + residual, (..., features)."""
        return self._run(ops.matmul, inputs, lambda init: init, residual=residual)

    def _run(
        self, product: Any, inputs: Any, made_by: Callable[[Any], Any], **options: Any
    ) -> jax.Array:
        """Multiplies by parameters whose initialisers `made_by` returns of Flax's."""
        refuse_dot_general(type(self).__name__, "flax.linen.Dense", vars(self))
        as_recipe(type(self).__name__, self.recipe)
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", made_by(self.kernel_init), shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", made_by(self.bias_init), shape[1:], self.param_dtype)
        promoted: Any = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        x, kernel, bias = promoted
        named: dict[str, Any] = {name: getattr(self, name) for name in ARGUMENTS}
        return product(x, kernel, bias=bias, **named, **options)


class GatedDense(Dense):
    """activation(x @ gate + bias[0]) * (x @ up + bias[1]), both products in one kernel.

    Parameters are those of two `flax.linen.Dense`, stacked: `kernel` (in, 2, features) and `bias`
    (2, features). See `jax_hopper_gemm.nn.from_pair`.

    Attributes:
      activation, save_preactivation, cotangent_dtype, recipe, implementation: as in
        `jax_hopper_gemm.nn.GatedLinear`.
      preferred_element_type: dtype of the result, as in `Dense`.
    """

    activation: Activation = "silu"

    @nn.compact
    def __call__(self, inputs: Any) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Maps (..., in) to (..., features)."""
        return self._run(ops.gated_linear_unit, inputs, _pair_of)


class DelayedDotGeneral(fp8_ops.Fp8DirectDotGeneralOp):
    """Delayed scaling on our kernels, in place of Flax's `Fp8DirectDotGeneralOp`.

        nn.Dense(features, dot_general_cls=DelayedDotGeneral)

    Its variables are Flax's: scales and histories in the collection `_overwrite_with_gradient`,
    whose gradients are their next values. See `jax_hopper_gemm.recipes.DelayedScaling`.

    Attributes:
      amax_history_length: steps that a scale looks back.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Multiplies as `jax.lax.dot_general(lhs, rhs, dimension_numbers)`, `rhs` the weights.

        As Flax's, it has the dtype of `rhs` and takes no precision.
        """
        lhs, rhs, numbers = args
        scales = self.input_scale, self.kernel_scale, self.output_grad_scale
        histories = (
            self.input_amax_history, self.kernel_amax_history, self.output_grad_amax_history
        )  # fmt: skip
        state = DelayedScaling(
            jnp.concatenate([x.value for x in scales]), jnp.stack([x.value for x in histories]),
            self.e5m2_dtype.dtype.name,
        )  # fmt: skip
        return ops.dot_general(jnp.asarray(lhs, rhs.dtype), rhs, numbers, recipe=state)


class MLP(nn.Module):
    """down(activation(up(x))): see `jax_hopper_gemm.nn.MLP`.

    Attributes:
      hidden_features: extent between the layers.
      out_features: extent of the result; that of the input if None.
      activation, save_preactivation: as in `Dense`, of the first layer.
      down_kernel_init: of the second layer; `kernel_init` if None.
      Other attributes: as in `Dense`, for both layers.
    """

    hidden_features: int
    out_features: int | None = None
    activation: Activation = "gelu"
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = nn.Dense.kernel_init
    bias_init: Any = nn.Dense.bias_init
    promote_dtype: Any = nn.Dense.promote_dtype
    down_kernel_init: Any = None
    save_preactivation: bool = True
    preferred_element_type: Any = None
    cotangent_dtype: Any = None
    recipe: Recipe | None = None
    implementation: Implementation = None

    _first_layer: ClassVar[Any] = Dense
    _first_name: ClassVar[str] = "up"

    @nn.compact
    def __call__(self, inputs: Any, *, residual: Any = None) -> jax.Array:
        """Maps (..., in) to (..., out_features); adds `residual` of that shape."""
        names = (
            "use_bias", "dtype", "param_dtype", "precision", "bias_init", "promote_dtype",
            "preferred_element_type", "cotangent_dtype", "recipe", "implementation",
        )  # fmt: skip
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        hidden = self._first_layer(
            self.hidden_features, activation=self.activation,
            save_preactivation=self.save_preactivation,
            kernel_init=self.kernel_init, **shared, name=self._first_name,
        )(inputs)  # fmt: skip
        return Dense(
            jnp.shape(inputs)[-1] if self.out_features is None else self.out_features,
            kernel_init=self.down_kernel_init or self.kernel_init, **shared, name="down",
        )(hidden, residual=residual)  # fmt: skip


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)): see `jax_hopper_gemm.nn.GatedMLP`.

    Attributes: as in `MLP`, with another default activation, and no bias by default.
    """

    activation: Activation = "silu"
    use_bias: bool = False

    _first_layer: ClassVar[Any] = GatedDense
    _first_name: ClassVar[str] = "gate_up"


class MoE(nn.Module):
    """A mixture of experts with the parameters of `jax_hopper_gemm.nn.MoE`.

    The selection bias, if used, is a variable of the collection "moe". Each call sows its
    `jax_hopper_gemm.moe.Statistics` as `statistics` in the collection "intermediates".

    Attributes: as the arguments of `jax_hopper_gemm.nn.MoE`; `kernel_init` may annotate the axes of
      one matrix, to which `expert_axis` is added for the experts.
    """

    hidden_features: int
    num_experts: int
    experts_per_token: int
    activation: Activation = "silu"
    score: Score = "softmax"
    normalize: bool = True
    scale: float | None = None
    use_selection_bias: bool = False
    stacked: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    router_dtype: Any = None
    kernel_init: Any = nn.Dense.kernel_init
    router_init: Any = None
    down_kernel_init: Any = None
    expert_axis: str | None = None
    token_axes: str | tuple[str, ...] | None = None
    mesh: Any = None
    exchange: Exchange = "gather"
    save_preactivation: bool = True
    precision: Any = None
    recipe: Recipe | None = None
    implementation: Implementation = None

    @nn.compact
    def __call__(self, inputs: Any, *, return_statistics: bool = False) -> Any:
        """Maps (..., features) to (..., features): see `jax_hopper_gemm.nn.MoE`."""
        into = (jnp.shape(inputs)[-1], self.hidden_features)
        router = self.param(
            "router", self.router_init or self.kernel_init, (into[0], self.num_experts),
            self.param_dtype,
        )  # fmt: skip
        of_experts = partial(_of_experts, self.num_experts, self.expert_axis)
        init = partial(of_experts, self.kernel_init)
        down_init = partial(of_experts, self.down_kernel_init or self.kernel_init)
        inits = {"gate_up": _pair_of(init)} if self.stacked else {"gate": init, "up": init}
        gate_up = tuple(self.param(x, inits[x], into, self.param_dtype) for x in inits)
        down = self.param("down", down_init, into[::-1], self.param_dtype)
        bias = None
        if self.use_selection_bias:
            zeros = partial(jnp.zeros, self.num_experts, jnp.float32)
            bias = self.variable("moe", "selection_bias", zeros).value
        y, statistics = run_moe(self, inputs, router, gate_up, down, bias)
        self.sow("intermediates", "statistics", statistics)
        return (y, statistics) if return_statistics else y


def _of_experts(
    experts: int, expert_axis: str | None, init: Any, key: Any, shape: Any, dtype: Any
) -> Any:
    parameter = initial_experts(init, experts, key, shape=shape, dtype=dtype)
    if isinstance(parameter, meta.AxisMetadata):
        return parameter.add_axis(0, {nn.PARTITION_NAME: expert_axis})
    return parameter


def _pair_of(init: Any) -> Any:
    """Returns an initialiser of stacked gate and up, each made by `init`."""

    def stacked(key: Any, shape: Any, dtype: Any) -> Any:
        gate, up = (init(k, shape, dtype) for k in jax.random.split(key))
        return from_pair(gate, up)

    return stacked
