"""`gated_linear_unit`: two products and the gate between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax, typeof
from jax import numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from ..fusion.jaxprs import abstract
from ..fusion.memo import memoised
from ..gemm.subscripts import split
from ..primitives.fused_dot import accumulator_dtype, fused_dot
from . import checks
from .activations import Activation, activation_function
from .dense import INLINE, Implementation, Preactivation
from .ragged_run import run_grouped
from .replaced import check_kernel_unasked, is_replaced
from .settled import Settled, settled
from .sm_limit import current_max_sms
from .steps import Gate, traced
from .substitute import final_product


def gated_linear_unit(
    x: ArrayLike,
    weights: ArrayLike | tuple[ArrayLike, ArrayLike],
    *,
    activation: str | Activation | None = "silu",
    bias: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    row_scale: ArrayLike | None = None,
    group_sizes: ArrayLike | None = None,
    group_offset: ArrayLike | None = None,
    row_indices: ArrayLike | None = None,
    preactivation: Preactivation = "save",
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Returns `activation(x @ gate) * (x @ up)`, both products in one kernel.

    It is SwiGLU with "silu", GEGLU with "gelu", ReGLU with "relu", the first GLU with "sigmoid",
    and bilinear with None. The products meet in float32, and neither is stored unless a gradient
    wants it. Weights are taken as by `tokamax.gated_linear_unit`.

    With `group_sizes` each run of rows of `x` has weights of its own, as in `ragged_dot`: of (M, K)
    rows, weights are (G, K, 2, N) or twice (G, K, N), biases (G, 2, N) or twice (G, N), and rows of
    no group come back as zeros.

    Args:
      x: (..., K).
      weights: (K, 2, N), gate `weights[:, 0]` and up `weights[:, 1]`; or the pair of them, each
        (K, N).
      activation: a function of one array, elementwise, a name as in `matmul`, or None.
      bias: (2, N), or a pair of (N,): added to the products.
      row_scale: (...,), a factor of each row of the result before it is rounded, such as a token's
        weight of its expert.
      group_sizes, group_offset: as in `ragged_dot`.
      row_indices: (M,), with `group_sizes`: as in `ragged_dot`, `x` then being (S, K), and
        `row_scale` (M,).
      preactivation: what gradients find of the two products: "save" stores them, in the operands'
        dtype, in the forward pass; "recompute" multiplies again.
      precision: as in `matmul`.
      preferred_element_type: dtype of the result; the promoted dtype of `x` and `weights` if None.
      implementation: as in `matmul`.

    Returns:
      (..., N).

    Raises:
      ValueError: a shape does not fit, or gate and up differ.
      TypeError: an operand is not an array, or `activation` is not callable.
      NotImplementedError: `implementation="hopper"` and no kernel can run the products.

    References: Shazeer, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202
    """
    op = "gated_linear_unit"
    sizes, offset, rows = (
        None if given is None else checks.as_arrays(op, **{name: given})[0]
        for name, given in (
            ("group_sizes", group_sizes), ("group_offset", group_offset),
            ("row_indices", row_indices),
        )
    )  # fmt: skip
    x, rights, biases, scale = checks.check_gated(
        x, weights, bias, row_scale, activation, preactivation, implementation, sizes, offset, rows
    )
    gate = Gate(activation_function(activation), scaled=bool(scale))
    scale = tuple(jnp.expand_dims(s, -1) for s in scale)
    if sizes is not None:
        operands = (*(jnp.expand_dims(b, 1) for b in biases), *scale)
        return run_grouped(
            op, x, rights, sizes, offset, operands, gate, precision, preferred_element_type,
            preactivation, implementation, rows=rows,
        )  # fmt: skip
    if isinstance(precision, list):
        precision = tuple(precision)
    operands = (*biases, *scale)
    if is_replaced():
        check_kernel_unasked(op, implementation)
        dot = _dot(x, precision, preferred_element_type)
        products = _products(dot, x, rights)
        return traced(op, gate, products, operands, products[0].dtype, None).apply(*products)
    types = typeof(x), tuple(map(typeof, rights))
    own, operands = settled(
        op, gate, lambda: _wide_products(*types, precision, preferred_element_type), operands,
        eager=not isinstance(x, Tracer),
    )  # fmt: skip
    return _traced_gate(
        x, rights, operands, own, precision,
        preferred_element_type, preactivation, implementation,
    )  # fmt: skip


@partial(jax.jit, static_argnums=range(3, 8), inline=INLINE)
def _traced_gate(
    x: Any,
    rights: tuple[Any, ...],
    operands: tuple[Any, ...],
    gate: Gate | Settled,
    precision: Any,
    preferred_element_type: Any,
    preactivation: Preactivation,
    implementation: Implementation,
) -> jax.Array:
    dot = _dot(x, precision, preferred_element_type)
    dtype = jax.eval_shape(dot, x, rights[0]).dtype
    types = typeof(x), tuple(map(typeof, rights))
    products = _wide_products(*types, precision, preferred_element_type)
    dot = partial(dot, preferred_element_type=products[0].dtype)
    what = traced("gated_linear_unit", gate, products, operands, dtype, None)
    if implementation == "xla":
        return what.apply(*_products(dot, x, rights))
    final = final_product(dot, x, rights[0])
    assert final is not None
    lhs, rhs, out = split(final.subscripts)
    if len(rights) == 1:  # no axis of the result stands for gate and up
        out = out.replace(rhs[1], "")
    return fused_dot(
        what.function, x, rights, what.operands, subscripts=f"{lhs},{rhs}->{out}",
        precision=final.precision, product_dtype=dtype, out_dtypes=what.dtypes,
        preactivation=preactivation, implementation=implementation, max_sms=current_max_sms(),
    )  # fmt: skip


@memoised
def _wide_products(x: Any, rights: tuple[Any, ...], precision: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns the abstract values of both products as the gate sees them."""
    dot = _dot(x, precision, dtype)
    dtype = accumulator_dtype(abstract(dot, x, rights[0]).dtype)
    return abstract(partial(_products, partial(dot, preferred_element_type=dtype)), x, rights)


def _dot(x: Any, precision: Any, dtype: Any) -> Any:
    """Returns JAX's product of the last axis of `x` and the first one of a matrix."""
    numbers = ((x.ndim - 1,), (0,)), ((), ())
    return partial(
        lax.dot_general, dimension_numbers=numbers, precision=precision,
        preferred_element_type=dtype,
    )  # fmt: skip


def _products(dot: Any, x: Any, rights: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns both products, as JAX multiplies."""
    if len(rights) == 2:
        return dot(x, rights[0]), dot(x, rights[1])
    both = dot(x, rights[0])
    return both[..., 0, :], both[..., 1, :]
