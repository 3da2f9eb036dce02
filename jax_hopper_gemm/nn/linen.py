"""The same layers for linen: `Dense` (Flax's name for `Linear`), `GatedDense`, `MLP`, `GatedMLP`.

Names of parameters are those of the nnx layers, so `up` and `down` take the parameters of two
`flax.linen.Dense`; for `gate_up` see `jax_hopper_gemm.nn.from_pair`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from .. import ops
from .layers import Activation, Implementation, Preactivation, refuse_dot_general
from .pairs import from_pair


class Dense(nn.Dense):
    """`flax.linen.Dense` with an activation; bias and activation are part of the product.

    Parameters and their initial values are Flax's own: `kernel` (in, features) and `bias`
    (features,). `dot_general` and `dot_general_cls` must be None.

    Attributes:
      activation, preactivation, implementation: as in `jax_hopper_gemm.nn.Linear`.
    """

    activation: Activation = None
    preactivation: Preactivation = "save"
    implementation: Implementation = None

    @nn.compact
    def __call__(self, inputs: Any, *, residual: Any = None) -> jax.Array:
        """Returns activation(inputs @ kernel + bias) + residual, (..., features)."""
        refuse_dot_general("Dense", "flax.linen.Dense", vars(self))
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape[1:], self.param_dtype)
        promoted: Any = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        x, kernel, bias = promoted
        return ops.matmul(
            x, kernel, bias=bias, activation=self.activation, residual=residual,
            preactivation=self.preactivation, precision=self.precision,
            implementation=self.implementation,
        )  # fmt: skip


class GatedDense(nn.Dense):
    """activation(x @ gate + bias[0]) * (x @ up + bias[1]), both products in one kernel.

    Parameters are those of two `flax.linen.Dense`, stacked: `kernel` (in, 2, features) and `bias`
    (2, features). See `jax_hopper_gemm.nn.from_pair`.

    Attributes:
      activation, preactivation, implementation: as in `jax_hopper_gemm.nn.GatedLinear`.
    """

    activation: Activation = "silu"
    preactivation: Preactivation = "save"
    implementation: Implementation = None

    @nn.compact
    def __call__(self, inputs: Any) -> jax.Array:
        """Maps (..., in) to (..., features)."""
        refuse_dot_general("GatedDense", "flax.linen.Dense", vars(self))
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", _pair_of(self.kernel_init), shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", _pair_of(self.bias_init), shape[1:], self.param_dtype)
        promoted: Any = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        x, kernel, bias = promoted
        return ops.gated_linear_unit(
            x, kernel, activation=self.activation, bias=bias, preactivation=self.preactivation,
            precision=self.precision, implementation=self.implementation,
        )  # fmt: skip


class MLP(nn.Module):
    """down(activation(up(x))): see `jax_hopper_gemm.nn.MLP`.

    Attributes:
      hidden_features: extent between the layers.
      out_features: extent of the result; that of the input if None.
      activation, preactivation, implementation: as in `Dense`.
      The others: as in `flax.linen.Dense`, for both layers; `down_kernel_init` is `kernel_init`
        if None.
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
    down_kernel_init: Any = None
    preactivation: Preactivation = "save"
    implementation: Implementation = None

    _first_layer: ClassVar[Any] = Dense
    _first_name: ClassVar[str] = "up"

    @nn.compact
    def __call__(self, inputs: Any, *, residual: Any = None) -> jax.Array:
        """Maps (..., in) to (..., out_features); adds `residual` of that shape."""
        names = ("use_bias", "dtype", "param_dtype", "precision", "bias_init", "implementation")
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        hidden = self._first_layer(
            self.hidden_features, activation=self.activation, preactivation=self.preactivation,
            kernel_init=self.kernel_init, **shared, name=self._first_name,
        )(inputs)  # fmt: skip
        return Dense(
            jnp.shape(inputs)[-1] if self.out_features is None else self.out_features,
            kernel_init=self.down_kernel_init or self.kernel_init, **shared, name="down",
        )(hidden, residual=residual)  # fmt: skip


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)): see `jax_hopper_gemm.nn.GatedMLP`.

    Attributes: as in `MLP`, but for the activation and that there is no bias by default.
    """

    activation: Activation = "silu"
    use_bias: bool = False

    _first_layer: ClassVar[Any] = GatedDense
    _first_name: ClassVar[str] = "gate_up"


def _pair_of(init: Any) -> Any:
    """Returns an initialiser of gate and up, each as `init` would make it, stacked."""

    def stacked(key: Any, shape: Any, dtype: Any) -> Any:
        gate, up = (init(k, shape, dtype) for k in jax.random.split(key))
        return from_pair(gate, up)

    return stacked
