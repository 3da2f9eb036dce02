"""Layers for nnx.

`Linear` is `nnx.Linear` with another call. `MLP` consists of the layers `up` and `down`, `GatedMLP`
of `gate_up` (a `GatedLinear`) and `down`. So `mlp.up` and `mlp.down` accept the states of two
`nnx.Linear`; for `gate_up` see `from_pair`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from .. import ops
from ..moe.layer import Activation
from ..ops.dense import Implementation
from ..ops.recipes import Recipe, as_recipe
from .gate_up import from_pair

# Attributes of a layer, here and in `linen`, that are arguments of its product.
ARGUMENTS = (
    "activation", "save_preactivation", "precision", "preferred_element_type", "cotangent_dtype",
    "recipe", "implementation",
)  # fmt: skip


class Linear(nnx.Linear):
    """`nnx.Linear` with an activation; bias, activation and residual are fused into the GEMM.

    Parameters, their initial values and their metadata are Flax's own: `kernel` (in_features,
    out_features) and `bias` (out_features,) or None. A 16-bit result is rounded once, after the
    activation; Flax rounds the product and again each sum.

    Args:
      in_features, out_features, rngs: as in `nnx.Linear`.
      activation: as in `jax_hopper_gemm.matmul`: a name such as "gelu", a function, or None.
      save_preactivation: whether the gradient finds it stored: see `jax_hopper_gemm.matmul`.
      cotangent_dtype, recipe, implementation: as in `jax_hopper_gemm.matmul`.
      **options: the other arguments of `nnx.Linear`, except `dot_general`.

    Raises:
      TypeError: `dot_general` was passed.
      NotImplementedError: the recipe is a `DelayedScaling`, whose state is no part of a layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = None,
        save_preactivation: bool = True,
        cotangent_dtype: Any = None,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        refuse_dot_general("Linear", "nnx.Linear", options)
        as_recipe("Linear", recipe)
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.activation = activation
        self.save_preactivation = save_preactivation
        self.cotangent_dtype = cotangent_dtype
        self.recipe: Recipe | None = recipe
        self.implementation: Implementation = implementation

    def __call__(self, inputs: Any, out_sharding: Any = None, *, residual: Any = None) -> jax.Array:
        """Returns activation(inputs @ kernel + bias) + residual.

        Args:
          inputs: (..., in_features).
          out_sharding: sharding of the result, for explicit mesh axes.
          residual: (..., out_features), added to the result, or None.

        Returns:
          (..., out_features).
        """
        return _run(self, ops.matmul, inputs, residual=residual, out_sharding=out_sharding)


class GatedLinear(nnx.Module):
    """activation(x @ gate + bias[0]) * (x @ up + bias[1]), both products in one kernel.

    Its parameters are those of two `nnx.Linear`, gate and up, stacked: `kernel` (in_features, 2,
    out_features) and `bias` (2, out_features) or None. So dgrad and wgrad are one GEMM each.
    Initial values are those of two layers made one after the other from the same `rngs`.
    `from_pair` and `to_pair` convert between the layers' parameters and the stack.

    Args:
      in_features, out_features: extents of each of the two layers.
      activation: of the gate: "silu" makes SwiGLU, "gelu" GEGLU, "sigmoid" GLU; or a function.
      save_preactivation, cotangent_dtype, recipe, implementation, rngs, **options: as in `Linear`.
        Options apply to each of the two layers; names of mesh axes, too, are of (in_features,
        out_features).

    Raises:
      TypeError: `dot_general` was passed.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = "silu",
        save_preactivation: bool = True,
        cotangent_dtype: Any = None,
        recipe: Recipe | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        refuse_dot_general("GatedLinear", "nnx.Linear", options)
        as_recipe("GatedLinear", recipe)
        gate, up = (nnx.Linear(in_features, out_features, rngs=rngs, **options) for _ in range(2))
        self.kernel = from_pair(gate.kernel, up.kernel)
        self.bias = nnx.data(None) if gate.bias is None else from_pair(gate.bias, up.bias)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = gate.use_bias
        self.dtype = gate.dtype
        self.param_dtype = gate.param_dtype
        self.precision = gate.precision
        self.promote_dtype = gate.promote_dtype
        self.preferred_element_type = gate.preferred_element_type
        self.activation = activation
        self.save_preactivation = save_preactivation
        self.cotangent_dtype = cotangent_dtype
        self.recipe: Recipe | None = recipe
        self.implementation: Implementation = implementation

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        """Maps (..., in_features) to (..., out_features); `out_sharding` as in `Linear`."""
        return _run(self, ops.gated_linear_unit, inputs, out_sharding=out_sharding)


def _run(layer: Linear | GatedLinear, product: Any, inputs: Any, **options: Any) -> jax.Array:
    """Returns a product with a layer's parameters, by the layer's options and further ones."""
    bias = None if layer.bias is None else layer.bias[...]
    x, kernel, bias = layer.promote_dtype((inputs, layer.kernel[...], bias), dtype=layer.dtype)
    named = {name: getattr(layer, name) for name in ARGUMENTS}
    return product(x, kernel, bias=bias, **named, **options)


class MLP(nnx.Module):
    """down(activation(up(x))): two layers, with the activation fused into the first.

    Attributes:
      up: `Linear` with the activation, (in_features, hidden_features).
      down: `Linear`, (hidden_features, out_features).

    Args:
      in_features, hidden_features: extents.
      out_features: `in_features` if None.
      activation, rngs, **options: as in `Linear`, for both layers.
      down_options: options of `down` that differ, such as its `kernel_metadata`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "gelu",
        down_options: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.up = Linear(in_features, hidden_features, activation=activation, rngs=rngs, **options)
        features = in_features if out_features is None else out_features
        options |= down_options or {}
        self.down = Linear(hidden_features, features, rngs=rngs, **options)

    def __call__(self, inputs: Any, out_sharding: Any = None, *, residual: Any = None) -> jax.Array:
        """Maps (..., in_features) to (..., out_features); `out_sharding`, `residual` of `down`."""
        return self.down(self.up(inputs), out_sharding, residual=residual)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), as in Llama ("silu") and Gemma ("gelu").

    Attributes:
      gate_up: `GatedLinear`, whose kernel is (in_features, 2, hidden_features).
      down: `Linear`, (hidden_features, out_features).

    Args:
      in_features, hidden_features: extents.
      out_features: `in_features` if None.
      activation, rngs, **options: as in `GatedLinear`, for both layers.
      use_bias: whether the layers have a bias; Llama and Gemma have none.
      down_options: options of `down` that differ, such as its `kernel_metadata`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "silu",
        use_bias: bool = False,
        down_options: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        options["use_bias"] = use_bias
        self.gate_up = GatedLinear(
            in_features, hidden_features, activation=activation, rngs=rngs, **options
        )
        features = in_features if out_features is None else out_features
        options |= down_options or {}
        self.down = Linear(hidden_features, features, rngs=rngs, **options)

    def __call__(self, inputs: Any, out_sharding: Any = None, *, residual: Any = None) -> jax.Array:
        """Maps (..., in_features) to (..., out_features); `out_sharding`, `residual` of `down`."""
        return self.down(self.gate_up(inputs), out_sharding, residual=residual)


def refuse_dot_general(layer: str, theirs: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError if the options contain a product."""
    names = [name for name in ("dot_general", "dot_general_cls") if options.get(name) is not None]
    if names:
        raise TypeError(
            f"{layer}: {names[0]} came, but this layer's product is jax_hopper_gemm.matmul: "
            f"use {theirs}({names[0]}=...)"
        )
