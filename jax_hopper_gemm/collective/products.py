"""Collective GEMMs for tensor parallelism: products that overlap with their transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..fusion.jaxprs import varying_together
from ..gemm.product import Options
from ..ops.activations import Activation, activation_function
from ..ops.checks import as_arrays, as_cotangent_dtype, as_result_dtype, layers
from ..ops.contexts import current_max_sms, refuse_batch_invariance
from ..ops.dense import Implementation
from ..ops.steps import Steps, named_in
from ..primitives.define import promoted
from .primitives import gathered_dot, scattered_dot


def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: Any,
    *,
    bias: ArrayLike | None = None,
    activation: str | Activation | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    cotangent_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Gathers the rows of all devices along a mesh axis and multiplies by this device's matrix.

    It is `matmul(jax.lax.all_gather(x, axis_name, axis=-2, tiled=True), w)`, for use inside
    `jax.shard_map`, but each device multiplies the rows that it has while those of the next one
    arrive. It serves as the first product of a tensor-parallel layer, whose matrix is sharded by
    columns:

        hidden = jhg.all_gather_matmul(x, up, "tp", activation="gelu")
        y = jhg.matmul_reduce_scatter(hidden, down, "tp")

    dgrad is a `matmul_reduce_scatter`. wgrad contracts the gathered rows, which the forward pass
    then keeps (`jax.checkpoint` gathers them again). Derivatives of any order, forward and
    reverse, overlap as well.

    Args:
      x: (..., m, K), this device's rows.
      w: (K, N), this device's columns.
      axis_name: the mesh axis, or a tuple of several.
      bias: (N,), added to each row.
      activation: elementwise, a function or a name as in `matmul`. Bias and activation are
        computed in float32 from the product, in the pass over it that puts the rows in order.
      precision, cotangent_dtype, implementation: as in `matmul`.
      preferred_element_type: dtype of the result; if None the promoted dtype of `x` and `w`.

    Returns:
      (..., n * m, N) on n devices: the rows in the devices' order.

    Raises:
      ValueError: K differs, another argument does not fit, or `axis_name` is not an axis of the
        mapped program.
      TypeError: an operand is not an array.
      NotImplementedError: `implementation="hopper"` and no kernel can run the products.
    """
    refuse_batch_invariance("all_gather_matmul")
    optional = {} if bias is None else {"bias": bias}
    x, w, *biases = map(jnp.asarray, as_arrays("all_gather_matmul", optional, x=x, w=w))
    layers.check_all_gather_matmul(
        x, w, axis_name, biases[0] if biases else None, activation, implementation
    )
    options = precision, preferred_element_type, cotangent_dtype, implementation
    y = _ring(gathered_dot, "all_gather_matmul", x, w, axis_name, options)
    steps = Steps("all_gather_matmul", named_in(optional), activation_function(activation))
    if steps.plain:
        return y
    wide = y.astype(promoted(y.dtype, jnp.float32))
    return steps(wide, *biases).astype(y.dtype)


def matmul_reduce_scatter(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: Any,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    cotangent_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Adds up the products of all devices along a mesh axis, and keeps this device's rows.

    It is `jax.lax.psum_scatter(matmul(x, w), axis_name, scatter_dimension=-2, tiled=True)`, for use
    inside `jax.shard_map`, but sums move between devices while GEMMs run. Each GEMM's kernel adds
    the sum that has arrived. It serves as the second product of a tensor-parallel layer, whose
    matrix is sharded by rows; see `all_gather_matmul`, which is its dgrad.

    Args:
      x: (..., M, K), this device's part of K; M is a multiple of the number of devices.
      w: (K, N), likewise.
      axis_name: the mesh axis, or a tuple of several.
      precision, cotangent_dtype, implementation: as in `matmul`.
      preferred_element_type: dtype of the result, and of the sums on their way; if None the
        promoted dtype of `x` and `w`.

    Returns:
      (..., M / n, N) on n devices: device i has the i-th part of the rows.

    Raises:
      ValueError: K differs, M cannot be divided, or `axis_name` is not an axis of the mapped
        program.
      TypeError: an operand is not an array.
      NotImplementedError: `implementation="hopper"` and no kernel can run the products.
    """
    refuse_batch_invariance("matmul_reduce_scatter")
    x, w = map(jnp.asarray, as_arrays("matmul_reduce_scatter", x=x, w=w))
    layers.check_matmul_reduce_scatter(x, w, axis_name, implementation)
    options = precision, preferred_element_type, cotangent_dtype, implementation
    return _ring(scattered_dot, "matmul_reduce_scatter", x, w, axis_name, options)


def _ring(
    dot: Callable[..., jax.Array], op: str, x: Any, w: Any, axis_name: Any, options: Any
) -> jax.Array:
    """Returns a product of operands that vary over the same mesh axes, `axis_name` among them."""
    precision, preferred, cotangent_dtype, implementation = options
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    missing = tuple(set(names) - jax.typeof(x).manual_axis_type.varying)
    asked = Options(
        implementation, precision, as_result_dtype(op, preferred, several=False),
        max_sms=current_max_sms(), cotangent_dtype=as_cotangent_dtype(op, cotangent_dtype),
    )  # fmt: skip
    pair = varying_together(lax.pcast(x, missing, to="varying") if missing else x, w)
    return dot(*pair, names if isinstance(axis_name, list) else axis_name, asked)
