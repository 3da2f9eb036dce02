"""`gated_linear_unit`: two GEMMs and the gate between them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax, typeof
from jax import numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from ..fusion.jaxprs import abstract
from ..fusion.memo import memoised
from ..gemm.product import Implementation, Options, Product
from ..primitives.fused_dot import accumulator_dtype, fused_dot
from . import checks
from .activations import Activation, activation_function
from .batch_invariance import in_contexts, takes_batch_invariant
from .dense_run import INLINE
from .quantized import Quantized, as_quantized
from .ragged_run import RaggedArrays, run_with_epilogue
from .recipes import Recipe, as_recipe
from .replaced import check_kernel_unasked, is_replaced
from .settled import Settled, settled
from .steps import Gate, result_dtypes, traced
from .substitute import final_product
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
    if is_replaced():
        check_kernel_unasked(op, options.insists)
        products = _products(_dot(x, options), x, rights)
        dtypes = result_dtypes(gate, preferred_element_type)
        return traced(op, gate, products, operands, products[0].dtype, dtypes).apply(*products)
    types = typeof(x), tuple(map(typeof, rights))
    own, operands = settled(
        op, gate, lambda: _wide_products(*types, options), operands,
        eager=not isinstance(x, Tracer),
    )  # fmt: skip
    dtypes = result_dtypes(gate, preferred_element_type)
    return _traced_gate(x, rights, operands, own, options, dtypes)


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


@partial(jax.jit, static_argnums=(3, 4, 5), inline=INLINE)
def _traced_gate(
    x: Any,
    rights: tuple[Any, ...],
    operands: tuple[Any, ...],
    gate: Gate | Settled,
    options: Options,
    dtypes: tuple[Any, ...] | None,
) -> jax.Array:
    dot = _dot(x, options)
    dtype = abstract(dot, x, rights[0]).dtype
    products = _wide_products(typeof(x), tuple(map(typeof, rights)), options)
    dot = partial(dot, preferred_element_type=products[0].dtype)
    follow = traced("gated_linear_unit", gate, products, operands, dtype, dtypes)
    if options.by_jax:
        return follow.apply(*_products(dot, x, rights))
    final = final_product(dot, x, rights[0])
    assert final is not None
    subscripts = final.subscripts
    if len(rights) == 1:  # no axis of the result stands for gate and up
        subscripts = replace(subscripts, out=subscripts.out.replace(subscripts.rhs[1], ""))
    options = replace(options, precision=final.precision, preferred_element_type=dtype)
    return fused_dot(
        follow.function, x, rights, follow.operands, Product(subscripts, options),
        out_dtypes=follow.dtypes,
    )  # fmt: skip


@memoised
def _wide_products(x: Any, rights: tuple[Any, ...], options: Options) -> tuple[Any, Any]:
    """Returns the abstract values of both products as the gate sees them."""
    dot = _dot(x, options)
    dtype = accumulator_dtype(abstract(dot, x, rights[0]).dtype)
    return abstract(partial(_products, partial(dot, preferred_element_type=dtype)), x, rights)


def _dot(x: Any, options: Options) -> Any:
    """Returns JAX's product of the last axis of `x` and the first one of a matrix."""
    numbers = ((x.ndim - 1,), (0,)), ((), ())
    return partial(lax.dot_general, dimension_numbers=numbers, **options.of_dot())


def _products(dot: Any, x: Any, rights: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns both products by JAX's own multiplication."""
    if len(rights) == 2:
        return dot(x, rights[0]), dot(x, rights[1])
    both = dot(x, rights[0])
    return both[..., 0, :], both[..., 1, :]
