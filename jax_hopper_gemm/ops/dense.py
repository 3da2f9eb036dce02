"""Dense products: `matmul`, `dot_general` and `einsum`, with epilogues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..gemm.product import Implementation, Options
from ..gemm.subscripts import DotGeneral
from ..lowering.devices import permuted_sharding
from . import checks
from .activations import Activation, activation_function
from .contexts import takes_batch_invariant
from .delayed import DelayedScaling, run_delayed
from .dense_run import JaxProduct, run
from .quantized import QArray, Quantized, as_quantized, is_quantized
from .quantized_products import run_quantized
from .recipes import Recipe, as_recipe, delayed
from .steps import OFFSET, Results, Steps, named_in
from .weights import weights_apart, weights_of_dot


@takes_batch_invariant
def matmul(
    a: ArrayLike | Quantized | QArray,
    b: ArrayLike | Quantized | QArray,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: str | Activation | None = None,
    alpha: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    c: ArrayLike | None = None,
    epilogue: Callable[..., Results] | None = None,
    epilogue_operands: Sequence[ArrayLike] = (),
    save_preactivation: bool = True,
    precision: Any = None,
    preferred_element_type: DTypeLike | Sequence[DTypeLike | None] | None = None,
    cotangent_dtype: DTypeLike | None = None,
    out_sharding: Any = None,
    recipe: Recipe | DelayedScaling | None = None,
    implementation: Implementation = None,
    batch_invariant: bool | None = None,
) -> Results:
    """Multiplies two arrays by the rules of `jax.numpy.matmul`, with an optional epilogue.

    On a Hopper GPU a product of bfloat16, float16 or 8-bit arrays runs on a kernel of this library
    where that is faster (`explain` says which), everything else on XLA. Kernels accumulate in
    float32, int8 in int32.
    dgrad and wgrad are GEMMs of the same kind and read the operands in place. A product of two
    dtypes runs on XLA. So do the gradients of a float32 result of 16-bit operands, because their
    cotangent is float32, in JAX as here; `cotangent_dtype` puts them on kernels.

    With any argument from `bias` to `epilogue` the result is

        y = activation(alpha * (a @ b) + beta * c + bias) + residual
        epilogue(y, *epilogue_operands)

    in float32 from the kernel's accumulators, so that `a @ b` is never rounded or stored (float64,
    complex and integer products keep their dtype). Gradients are fused as well: the activation's
    gradient is the epilogue of the GEMM before it. For example

        matmul(a, b, bias=b1, activation="gelu")
        matmul(a, b, c=gradients)  # adds to an accumulator; in its memory, if donated
        matmul(a, b, epilogue=lambda y, s: (y, jnp.max(jnp.abs(y * s))), epilogue_operands=(s,))

    Args:
      a: (..., M, K) or (K,). Leading axes broadcast against those of `b`. Or both are `Quantized`:
        (..., M, K) by (K, N), or matrices in equal batches; or `QArray`s of Qwix. Or one is, as
        weights, beside an array of bfloat16 or float16.
      b: (..., K, N) or (K,).
      bias, residual, c: broadcast to the result's shape: (N,), (M, 1), (B, 1, N), ...
      activation: a function of one array, elementwise, or a name: "relu", "gelu" (by tanh),
        "gelu_exact", "silu", ...; an unknown one lists them all.
      alpha, beta: numbers or scalar arrays. `beta` is 1 if None.
      epilogue: a JAX function of `y`, which has the result's shape, and of `epilogue_operands`.
        It returns an array or a tuple of arrays. Elementwise operations and the common reductions
        (sums, maxima, softmax, top-k) run in the kernel, everything else after it.
      epilogue_operands: arrays. Arrays that `epilogue` closes over are treated like them.
      save_preactivation: whether the forward pass stores the activation's argument where gradients
        need it: in the operands' dtype, or in float32 (or a mask of it) if the derivative jumps
        elsewhere than at zero. False multiplies again. Either way gradients jump where the
        function that ran does; but in float16 arguments under 2**-25 count as 0.
      precision: as in `jax.numpy.matmul`. Products of 16-bit floats are exact in float32, so a
        `Precision` changes nothing on our kernels; of 8-bit floats any but the default adds up in
        float32 each 128 of K. An algorithm that does not accumulate in float32 goes to XLA.
      preferred_element_type: dtype of the result; if None that of `c`, else the promoted dtype of
        the operands; of two `Quantized` ones float32. An epilogue with several results takes a
        tuple, too, of one dtype each, or None for what it has.
      cotangent_dtype: dtype that cotangents of the product are rounded to before they are
        multiplied, whatever multiplies them, in derivatives of any order. With the operands' dtype
        the gradients of a float32 result run on kernels, and are rounded once. None leaves them as
        they are; with anything from `bias` to `epilogue` they have the dtype of 16-bit operands.
      out_sharding: sharding of the product, for explicit mesh axes.
      recipe: one of `jax_hopper_gemm.recipes`: the product and its gradients run in 8 bits, of
        quantized operands; `b` is the weights.
      implementation: None takes a kernel where it is faster; "hopper" insists on a kernel; "xla" is
        `jax.numpy.matmul` itself, with `jax.numpy` for the epilogue.
      batch_invariant: whether a row has the same bits in every batch, on a kernel or with an error
        (see the context `batch_invariant`); None: as the context says.

    Returns:
      (..., M, N); without M or N where that operand has one axis. With an epilogue, its results:
      those of the product's shape and of `y`'s dtype are converted to `preferred_element_type`,
      the others are unchanged.

    Raises:
      ValueError: K differs between the operands, leading axes do not broadcast, or another
        argument does not fit. For shapes of the operands it is a TypeError as well, as in JAX.
      TypeError: an operand is not an array, or a function is not callable.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product; or two
        `Quantized` have zero points, or scales along K of other blocks than 128 or all.
    """
    terms = {"alpha": alpha, "c": c, "beta": beta, "bias": bias, "residual": residual}
    given = as_quantized("matmul", "a", a), as_quantized("matmul", "b", b)
    named = ("a", given[0]), ("b", given[1])
    pair, scales, zeros = weights_apart("matmul", named, (-1, -2))
    a, b = (x.values if isinstance(x, Quantized) else x for x in pair)
    a, b, *arrays = checks.as_arrays("matmul", terms, a=a, b=b)
    terms = {name: x for name, x in zip(terms, arrays, strict=True) if x is not None}
    preferred_element_type = checks.as_result_dtype("matmul", preferred_element_type)
    checks.check_matmul(a, b, terms, activation, preferred_element_type)
    for vector, axis in ((b, -1), (a, -2)):  # whose result has no such axis
        if jnp.ndim(cast(Any, vector)) == 1:
            scales = {
                name: lax.squeeze(x, (axis,)) if x.ndim >= -axis else x
                for name, x in scales.items()
            }
    if zeros:
        scales[OFFSET] = jnp.matmul(
            *zeros, precision=lax.Precision.HIGHEST, out_sharding=out_sharding
        )
    multiplied = () if scales or is_quantized(*pair) else (a, b)
    terms |= scales
    steps = Steps("matmul", named_in(terms, *multiplied), activation_function(activation), epilogue)
    product = JaxProduct(
        jnp.matmul, (("out_sharding", out_sharding),), checks.strong_dtype(terms.get("c"))
    )
    options = Options(
        implementation, precision, preferred_element_type, save_preactivation, cotangent_dtype
    )
    factors = _Factors(("a", "b"), given, pair, (a, b), lambda: checks.matmul_axes(a, b))
    return _run(product, factors, steps, terms, epilogue_operands, options, recipe)


@takes_batch_invariant
def dot_general(
    lhs: ArrayLike | Quantized | QArray,
    rhs: ArrayLike | Quantized | QArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | Sequence[DTypeLike | None] | None = None,
    *,
    epilogue: Callable[..., Results] | None = None,
    epilogue_operands: Sequence[ArrayLike] = (),
    save_preactivation: bool = True,
    cotangent_dtype: DTypeLike | None = None,
    out_sharding: Any = None,
    recipe: Recipe | DelayedScaling | None = None,
    implementation: Implementation = None,
    batch_invariant: bool | None = None,
) -> Results:
    """Contracts two arrays by the rules of `jax.lax.dot_general`.

    Kernels read either operand with any axis contiguous: nothing is transposed in memory. Flax's
    layers accept it as their `dot_general`.

    Args:
      lhs, rhs: the operands, arrays or both `Quantized`, or `QArray`s of Qwix; or one is, beside an
        array of 16 bits.
      dimension_numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)).
      precision, preferred_element_type, cotangent_dtype, out_sharding, implementation,
        batch_invariant: as in `matmul`.
      recipe: as in `matmul`; `rhs` is the weights.
      epilogue, epilogue_operands, save_preactivation: as in `matmul`; `epilogue` receives the
        result with its axes in the order below.

    Returns:
      The batch axes, then the other axes of `lhs`, then those of `rhs`; or the results of
      `epilogue`.

    Raises:
      ValueError: paired axes differ in extent, repeat or do not exist; a TypeError as well.
      TypeError: an operand is not an array, or `dimension_numbers` has another structure.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product; or two
        `Quantized` have zero points, or scales along K of other blocks than 128 or all.
    """
    steps = Steps("dot_general", epilogue=epilogue)
    options = Options(
        implementation, precision, preferred_element_type, save_preactivation, cotangent_dtype
    )
    pair = lhs, rhs
    return _dot(pair, dimension_numbers, steps, epilogue_operands, options, recipe, out_sharding)


def _dot(
    operands: tuple[Any, Any],
    dimension_numbers: Any,
    steps: Steps,
    epilogue_operands: Any,
    options: Options,
    recipe: Any,
    out_sharding: Any,
) -> Any:
    """Returns a `dot_general` and what follows it, of arguments as the user gave them."""
    op, names = steps.op, ("lhs", "rhs")
    given = as_quantized(op, "lhs", operands[0]), as_quantized(op, "rhs", operands[1])
    pair, scales = weights_of_dot(op, *given, dimension_numbers, out_sharding)
    lhs, rhs = (x.values if isinstance(x, Quantized) else x for x in pair)
    lhs, rhs = checks.as_arrays(op, lhs=lhs, rhs=rhs)
    dimension_numbers = checks.checked_axes(op, lhs, rhs, dimension_numbers)
    steps = replace(steps, named=named_in(scales))
    dtype = checks.as_result_dtype(op, options.preferred_element_type)
    options = replace(options, preferred_element_type=dtype)
    named = ("dimension_numbers", dimension_numbers), ("out_sharding", out_sharding)
    product = JaxProduct(lax.dot_general, named)
    factors = _Factors(names, given, pair, (lhs, rhs), lambda: dimension_numbers)
    return _run(product, factors, steps, scales, epilogue_operands, options, recipe)


@takes_batch_invariant
def einsum(
    subscripts: str,
    /,
    *operands: ArrayLike | Quantized,
    epilogue: Callable[..., Results] | None = None,
    epilogue_operands: Sequence[ArrayLike] = (),
    save_preactivation: bool = True,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: DTypeLike | Sequence[DTypeLike | None] | None = None,
    cotangent_dtype: DTypeLike | None = None,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    implementation: Implementation = None,
    batch_invariant: bool | None = None,
) -> Results:
    """Contracts arrays by the rules of `jax.numpy.einsum`.

    The kernel writes the result's axes in the requested order: "bthd,hde->bthe" copies nothing.
    Three and more operands are products of two, in the order that `jax.numpy.einsum` takes.

    Args:
      subscripts: such as "mk,kn->mn".
      *operands: arrays; two with an epilogue. Two may be `Quantized`, or one beside an array of 16
        bits: `dot_general` of them.
      optimize: as in `jax.numpy.einsum`: the order of the products of three and more operands.
      epilogue, epilogue_operands, save_preactivation: as in `matmul`; `epilogue` receives the
        result that `subscripts` name.
      precision, preferred_element_type, cotangent_dtype, out_sharding, implementation,
        batch_invariant: as in `matmul`.
      recipe: as in `matmul`, of two operands, the second of which is the weights.

    Raises:
      ValueError: an index with two extents, or an epilogue and other than two operands.
      TypeError: an operand is not an array, or `subscripts` is not a string.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product;
        subscripts of quantized arrays, or by a recipe, that are not one product's; quantized arrays
        as `matmul` refuses them.
    """
    operands = tuple(as_quantized("einsum", f"operands[{i}]", x) for i, x in enumerate(operands))
    checks.check_einsum(subscripts, operands, epilogue)
    options = Options(
        implementation, precision, preferred_element_type, save_preactivation, cotangent_dtype
    )
    if is_quantized(*operands):
        form = checks.one_product(subscripts, operands).dot_general()
        lhs, rhs = operands[::-1] if form.swap_ab else operands
        steps = Steps("einsum")
        if epilogue:
            steps = replace(steps, epilogue=epilogue, permutation=form.permutation)
        result = _dot(
            (lhs, rhs), form.dimension_numbers, steps, epilogue_operands, options, recipe,
            permuted_sharding(out_sharding, form.order),
        )  # fmt: skip
        return result if epilogue else cast(Any, lax.transpose(result, form.permutation))
    names = ("lhs", "rhs") if len(operands) == 2 else map("operands[{}]".format, count())
    arrays = checks.as_arrays("einsum", None, **dict(zip(names, operands, strict=False)))
    if isinstance(optimize, list):  # a path, as a key
        optimize = tuple(map(tuple, optimize))
    named = ("subscripts", subscripts), ("optimize", optimize), ("out_sharding", out_sharding)
    steps = Steps("einsum", epilogue=epilogue)
    options = replace(
        options, preferred_element_type=checks.as_result_dtype("einsum", preferred_element_type),
        cotangent_dtype=checks.as_cotangent_dtype("einsum", cotangent_dtype),
        recipe=as_recipe("einsum", recipe, arrays, cotangent_dtype),
    )  # fmt: skip
    product = JaxProduct(_einsum, named)
    if recipe is not None:
        form = checks.one_product(subscripts, arrays).dot_general(may_swap=False)
        product = JaxProduct(_in_order, (("form", form), named[-1]))
    following = checks.check_steps("einsum", epilogue, epilogue_operands, steps.plain, options)
    return run(product, tuple(arrays), steps, following, options)


def _in_order(
    lhs: jax.Array, rhs: jax.Array, *, form: DotGeneral, out_sharding: Any, **options: Any
) -> jax.Array:
    """Returns an einsum whose product has the operands in the user's order."""
    out_sharding = permuted_sharding(out_sharding, form.order)
    y = lax.dot_general(lhs, rhs, form.dimension_numbers, out_sharding=out_sharding, **options)
    return lax.transpose(y, form.permutation)


def _einsum(*operands: jax.Array, subscripts: str, **options: Any) -> jax.Array:
    return jnp.einsum(subscripts, *operands, **options)


class _Factors(NamedTuple):
    """The operands of a product of two."""

    names: tuple[str, str]  # for messages
    given: tuple[Any, Any]  # by the user
    read: tuple[Any, Any]  # the same, weights beside 16 bits as arrays
    arrays: tuple[Any, Any]  # the same, of others that are quantized the values
    axes: Callable[[], Any]  # returns the dimension numbers of their `dot_general`


def _run(
    product: JaxProduct,
    factors: _Factors,
    steps: Steps,
    terms: Mapping[str, Any],
    epilogue_operands: Any,
    options: Options,
    recipe: Any,
) -> Any:
    """Returns a product by a recipe, of quantized arrays or of others, and what follows it.

    Args:
      steps: what follows; its operands are those `terms` that it names, then `epilogue_operands`.
      options: as the user gave them.
    """
    op, cotangents = steps.op, options.cotangent_dtype
    state = delayed(op, recipe, factors.given, cotangents)
    options = replace(
        options, cotangent_dtype=checks.as_cotangent_dtype(op, cotangents),
        recipe=None if state else as_recipe(op, recipe, factors.given, cotangents),
    )  # fmt: skip
    following = checks.check_steps(op, steps.epilogue, epilogue_operands, steps.plain, options)
    operands = (*(terms[x] for x in steps.named), *following)
    out_sharding = dict(product.named)["out_sharding"]
    if state:
        dtype = options.preferred_element_type or product.dtype
        options = replace(options, preferred_element_type=dtype)
        pair = factors.arrays
        return run_delayed(state, pair, factors.axes(), steps, operands, options, out_sharding)
    if is_quantized(*factors.read):
        pair = tuple(zip(factors.names, factors.read, strict=True))
        return run_quantized(pair, factors.axes(), steps, operands, options, out_sharding)
    return run(product, factors.arrays, steps, operands, options)
