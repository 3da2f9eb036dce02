"""`gated_linear_unit`: two GEMMs and the gate between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ..gemm.product import Implementation, Options
from ..lowering.devices import padded_partitions, with_partitions
from . import checks
from .activations import Activation, activation_function
from .contexts import in_contexts, takes_batch_invariant
from .dense import dot_general
from .dense_run import JaxProduct, run_steps
from .quantized import Quantized, as_quantized, is_quantized
from .quantized_products import check_quantized, constant_scale
from .ragged import ragged_dot
from .ragged_run import RaggedArrays, run_with_epilogue
from .recipes import Recipe, as_recipe
from .steps import Gate, result_dtypes
from .weights import is_weights, widened


@takes_batch_invariant
@checks.names_itself
def gated_linear_unit(
    x: ArrayLike | Quantized,
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
    out_sharding: Any = None,
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
        arrays (K, N). Or `Quantized`, beside `x` of 16 bits or a `Quantized` one. With two of them
        and scales in blocks of K gate and up are two products, of which the gate is stored.
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
      preferred_element_type: dtype of the result; if None the promoted dtype of `x` and `weights`,
        float32 where both are `Quantized`.
      cotangent_dtype, out_sharding, implementation, batch_invariant: as in `matmul`.
      recipe: as in `matmul`. With block scales the products are two kernels, and the first one's
        result is stored, in 16 bits for operands of 16 bits.

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
    weights, grouped = as_quantized(op, "weights", weights), sizes is not None
    pair = isinstance(weights, tuple | list)
    given = tuple(as_quantized(op, "weights", w) for w in (weights if pair else (weights,)))
    operands: tuple[Any, ...] = as_quantized(op, "x", x), *given
    x, weights, factors = _as_arrays(op, operands[0], given, pair=pair, grouped=grouped)
    x, rights, biases, scale = checks.check_gated(
        x, weights, bias, row_scale, activation, save_preactivation, implementation,
        checks.GroupArguments(sizes, offset, rows),
    )  # fmt: skip
    checks.as_result_dtype(op, preferred_element_type, several=False)
    if preferred_element_type is None:
        both = is_quantized(operands[0]) and is_quantized(*given)
        preferred_element_type = jnp.dtype(jnp.float32) if both else jnp.result_type(x, *rights)
    gate = Gate(activation_function(activation), bool(scale), len(factors or ()))
    scale = tuple(jnp.expand_dims(s, -1) for s in scale)
    options = Options(
        implementation, precision, preferred_element_type, save_preactivation,
        cotangent_dtype=checks.as_cotangent_dtype(op, cotangent_dtype),
        recipe=as_recipe(op, recipe, operands, cotangent_dtype),
    )  # fmt: skip
    options = in_contexts(options)
    numbers = ((jnp.ndim(x) - 1,), (0,)), ((), ())
    of_group = partial(jnp.expand_dims, axis=1)
    biases = tuple(map(of_group, biases)) if grouped else biases
    if factors is None:
        dot = partial(dot_general, dimension_numbers=numbers)
        if grouped:
            dot = partial(ragged_dot, group_sizes=sizes, group_offset=offset, row_indices=rows)
        dot = partial(
            dot, precision=precision, preferred_element_type=preferred_element_type,
            save_preactivation=save_preactivation, cotangent_dtype=cotangent_dtype,
            out_sharding=out_sharding, implementation=implementation,
        )  # fmt: skip
        return _by_two_products(dot, *operands, gate=gate, operands=(*biases, *scale))
    if grouped:
        arrays = RaggedArrays(x, rights, sizes, offset, rows)
        columns = (x if x.shape[0] == 1 else of_group(x) for x in factors[:2])  # 1: of all groups
        operands = *columns, *map(arrays.gathered, factors[2:]), *biases, *scale
        return run_with_epilogue(arrays, operands, gate, options, out_sharding)
    operands = (*factors, *biases, *scale)
    if isinstance(out_sharding, NamedSharding | PartitionSpec) and len(rights) == 1:
        parts = padded_partitions(out_sharding, jnp.ndim(x))
        out_sharding = with_partitions(out_sharding, (*parts[:-1], None, parts[-1]))
    named = ("dimension_numbers", numbers), ("out_sharding", out_sharding)
    product = JaxProduct(lax.dot_general, named, stacked=len(rights) == 1)
    dtypes = result_dtypes(gate, preferred_element_type)
    return run_steps(product, x, rights, gate, operands, options, dtypes)


@dataclass(frozen=True)
class _Gated:
    """A gate as a function of up, and of a stored product. Equal ones are one key of a cache."""

    gate: Gate

    def __call__(self, up: jax.Array, gate: jax.Array, *operands: jax.Array) -> jax.Array:
        return self.gate(gate.astype(up.dtype), up, *operands)


def _by_two_products(
    dot: Callable[..., Any], x: Quantized, *weights: Quantized, gate: Gate, operands: Any
) -> Any:
    """Returns what a gate makes of two products, of which the first one is stored."""
    if len(weights) == 1:
        axis = weights[0].ndim - 2

        def half(i: int, array: jax.Array) -> jax.Array:
            return jnp.take(array, min(i, array.shape[axis] - 1), axis)

        weights = tuple(jax.tree.map(partial(half, i), weights[0]) for i in (0, 1))
    stored = dot(x, weights[0])
    return dot(x, weights[1], epilogue=_Gated(gate), epilogue_operands=(stored, *operands))


def _as_arrays(
    op: str, x: Any, given: tuple[Any, ...], *, pair: bool, grouped: bool
) -> tuple[Any, Any, tuple[Any, ...] | None]:
    """Returns x and the weights as arrays, and factors of the products, as `Gate` has them.

    Those of gate and of up are one for each column, in the shape of biases. None: scales of x or
    of quantized weights beside it change along K.
    """
    arrays, of_rows = given, ()
    scales: tuple[Any, ...] = ()
    if is_quantized(x) and is_quantized(*given):
        names = (f"weights[{i}]" if pair else "weights" for i in range(len(given)))
        check_quantized(op, (("x", x), *zip(names, given, strict=True)))
        of_rows = (constant_scale(op, "x", x, x.ndim - 1),)
        scales = tuple(constant_scale(op, "weights", w, int(grouped)) for w in given)
        arrays, x = tuple(w.values for w in given), x.values
    elif given and all(is_weights(w, x) for w in given):
        found = [widened(op, "weights", w, int(grouped), x.dtype) for w in given]
        arrays, scales = zip(*found, strict=True)
    weights = arrays if pair else arrays[0]
    changing = [scale is None for scale in (*of_rows, *scales)]
    if any(changing) and not (of_rows or all(changing)):
        raise NotImplementedError(f"{op}: gate and up have scales of different blocks")
    if any(changing) or not scales:
        return x, weights, None if of_rows else ()
    factors = tuple(jnp.squeeze(scale, int(grouped)) for scale in scales)
    if not pair:
        (both,) = factors
        both = jnp.broadcast_to(both, (*both.shape[:-2], 2, both.shape[-1]))
        factors = both[..., 0, :], both[..., 1, :]
    return x, weights, (*factors, *of_rows)
