"""`gated_linear_unit`: two GEMMs and the gate between them."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..gemm.product import Implementation, Options
from . import checks
from .activations import Activation, activation_function
from .batch_invariance import in_contexts, takes_batch_invariant
from .dense_run import JaxProduct, run_steps
from .quantized import Quantized, as_quantized
from .ragged_run import RaggedArrays, run_with_epilogue
from .recipes import Recipe, as_recipe
from .steps import Gate, result_dtypes
from .weights import is_weights, widened


@takes_batch_invariant
def gated_linear_unit(
    x: ArrayLike,
    weights: ArrayLike | Quantized | tuple[ArrayLike | Quantized, ArrayLike | Quantized],
    *,
    activation: str | Activation | None = "silu",
    bias: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    row_scale: ArrayLike | None = None,
    group_sizes: ArrayLike | None = None,
    group_offset: ArrayLike | None = None,
    row_indices: ArrayLike | None = None,
    save_preactivation: bool = True,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    cotangent_dtype: DTypeLike | None = None,
    recipe: Recipe | None = None,
    implementation: Implementation = None,
    batch_invariant: bool | None = None,
) -> jax.Array:
    """Returns `activation(x @ gate) * (x @ up)`, both products in one kernel.

    It is SwiGLU with "silu", GEGLU with "gelu", ReGLU with "relu", the first GLU with "sigmoid",
    and bilinear with None. The products are combined in float32, and neither is stored unless a
    gradient needs it. Weights have the form of `tokamax.gated_linear_unit`.

    With `group_sizes` each run of rows of `x` has its own weights, as in `ragged_dot`: for (M, K)
    rows, weights are (G, K, 2, N) or a pair of (G, K, N), biases (G, 2, N) or a pair of (G, N), and
    rows of no group come back as zeros.

    Args:
      x: (..., K).
      weights: (K, 2, N), gate `weights[:, 0]` and up `weights[:, 1]`; or a pair (gate, up) of
        arrays (K, N). Or `Quantized`, beside `x` of 16 bits.
      activation: a function of one array, elementwise, a name as in `matmul`, or None.
      bias: (2, N), or a pair of (N,): added to the products.
      row_scale: (...,), a factor of each row of the result before it is rounded, such as an
        expert's weight for a token.
      group_sizes, group_offset: as in `ragged_dot`.
      row_indices: (M,), with `group_sizes`: as in `ragged_dot`; `x` is then (S, K) and `row_scale`
        (M,).
      save_preactivation: whether the forward pass stores the two products, with their biases, for
        gradients; False multiplies again. The dtypes are as in `matmul`.
      precision: as in `matmul`.
      preferred_element_type: dtype of the result; the promoted dtype of `x` and `weights` if None.
      cotangent_dtype, implementation: as in `matmul`.
      recipe: as in `matmul`. With block scales the products are two kernels, and the first one's
        result is stored, in 16 bits for operands of 16 bits.
      batch_invariant: as in `matmul`.

    Returns:
      (..., N).

    Raises:
      ValueError: a shape does not fit, or gate and up differ.
      TypeError: an operand is not an array, or `activation` is not callable.
      NotImplementedError: `implementation="hopper"` and no kernel can run the products.

    References: Shazeer, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202
    """
    op = "gated_linear_unit"
    groups = {
        "group_sizes": group_sizes, "group_offset": group_offset, "row_indices": row_indices,
    }  # fmt: skip
    sizes, offset, rows = checks.as_arrays(op, groups)
    given, pair = _given(op, weights)
    weights, factors = _widened(op, x, given, pair=pair, grouped=sizes is not None)
    x, rights, biases, scale = checks.check_gated(
        x, weights, bias, row_scale, activation, save_preactivation, implementation,
        checks.GroupArguments(sizes, offset, rows),
    )  # fmt: skip
    checks.as_result_dtype(op, preferred_element_type, several=False)
    gate = Gate(activation_function(activation), bool(scale), bool(factors))
    scale = tuple(jnp.expand_dims(s, -1) for s in scale)
    options = Options(
        implementation, precision, preferred_element_type, save_preactivation,
        cotangent_dtype=checks.as_cotangent_dtype(op, cotangent_dtype),
        recipe=as_recipe(op, recipe, (x, *given), cotangent_dtype),
    )  # fmt: skip
    options = in_contexts(options)
    if sizes is not None:
        operands = (*(jnp.expand_dims(b, 1) for b in (*factors, *biases)), *scale)
        arrays = RaggedArrays(x, rights, sizes, offset, rows)
        return run_with_epilogue(op, arrays, operands, gate, options)
    operands = (*factors, *biases, *scale)
    numbers = ((jnp.ndim(x) - 1,), (0,)), ((), ())
    named = (("dimension_numbers", numbers),)
    product = JaxProduct(lax.dot_general, named, stacked=len(rights) == 1)
    dtypes = result_dtypes(gate, preferred_element_type)
    return run_steps(product, x, rights, gate, operands, options, dtypes)


def _given(op: str, weights: Any) -> tuple[tuple[Any, ...], bool]:
    """Returns the weights as the user gave them, in a tuple, and whether they are a pair."""
    weights = as_quantized(op, "weights", weights)
    pair = isinstance(weights, tuple | list)
    return tuple(as_quantized(op, "weights", w) for w in (weights if pair else (weights,))), pair


def _widened(
    op: str, x: Any, given: tuple[Any, ...], *, pair: bool, grouped: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the weights as arrays, and factors of gate and of up: one for each column, or none.

    Factors have the shape of biases.
    """
    if not given or not all(is_weights(w, x) for w in given):
        return given if pair else given[0], ()
    found = [widened(op, "weights", w, int(grouped), x.dtype) for w in given]
    arrays, scales = zip(*found, strict=True)
    if any(scale is None for scale in scales):
        if not all(scale is None for scale in scales):
            raise NotImplementedError(f"{op}: gate and up have scales of different blocks")
        return arrays if pair else arrays[0], ()
    factors = [jnp.squeeze(scale, int(grouped)) for scale in scales]
    if pair:
        return arrays, tuple(factors)
    (both,) = factors
    both = jnp.broadcast_to(both, (*both.shape[:-2], 2, both.shape[-1]))
    return arrays[0], (both[..., 0, :], both[..., 1, :])
