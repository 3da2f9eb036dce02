"""Dense products: `matmul`, `dot_general` and `einsum` of two operands, with epilogues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, typeof
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from ..fusion.jaxprs import abstract
from ..fusion.memo import memoised
from ..gemm.options import Implementation, Options, Preactivation
from ..gemm.product import Product
from ..primitives.fused_dot import accumulator_dtype, fused_dot
from . import checks
from .activations import Activation, activation_function
from .replaced import check_kernel_unasked, is_replaced, replaced_product
from .settled import Settled, settled
from .sm_limit import current_max_sms
from .steps import Steps, named_in, traced
from .substitute import final_product, with_hopper_dot


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: str | Activation | None = None,
    alpha: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    c: ArrayLike | None = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_operands: Sequence[ArrayLike] = (),
    preactivation: Preactivation = "save",
    precision: Any = None,
    preferred_element_type: DTypeLike | Sequence[DTypeLike] | None = None,
    out_sharding: Any = None,
    implementation: Implementation = None,
) -> Any:
    """Multiplies two arrays by the rules of `jax.numpy.matmul`, with an optional epilogue.

    On a Hopper GPU a product of bfloat16 or float16 arrays runs on a kernel of this library where
    that is faster (`explain` says which), everything else on XLA. Kernels accumulate in float32.
    dgrad and wgrad are GEMMs of the same kind and read the operands in place. A product of two
    dtypes runs on XLA. So do the gradients of a float32 result of 16-bit operands, because their
    cotangent is float32, in JAX as here.

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
      a: (..., M, K) or (K,). Leading axes broadcast against those of `b`.
      b: (..., K, N) or (K,).
      bias, residual, c: broadcast to the result's shape: (N,), (M, 1), (B, 1, N), ...
      activation: a function of one array, elementwise, or a name: "relu", "gelu" (by tanh),
        "gelu_exact", "silu", ...; an unknown one lists them all.
      alpha, beta: numbers or scalar arrays. `beta` is 1 if None.
      epilogue: a JAX function of `y`, which has the result's shape, and of `epilogue_operands`.
        It returns an array or a tuple of arrays. Elementwise operations and the common reductions
        (sums, maxima, softmax, top-k) run in the kernel, everything else after it.
      epilogue_operands: arrays. Arrays that `epilogue` closes over are treated like them.
      preactivation: the source of `a @ b` where gradients need it: "save" stores it in the forward
        pass, in the operands' dtype; "recompute" multiplies again.
      precision: as in `jax.numpy.matmul`. Products of 16-bit floats are exact in float32, so a
        `Precision` changes nothing on our kernels; an algorithm that does not accumulate in
        float32 goes to XLA.
      preferred_element_type: dtype of the result; if None that of `c`, else the promoted dtype of
        the operands. An epilogue with several results takes a tuple, too, of one dtype each.
      out_sharding: sharding of the product, for explicit mesh axes.
      implementation: None takes a kernel where it is faster; "hopper" insists on a kernel; "xla" is
        `jax.numpy.matmul` itself, with `jax.numpy` for the epilogue.

    Returns:
      (..., M, N); without M or N where that operand has one axis. With an epilogue, its results:
      those of the product's shape and of `y`'s dtype are converted to `preferred_element_type`,
      the others are unchanged.

    Raises:
      ValueError: K differs between the operands, leading axes do not broadcast, or another
        argument does not fit.
      TypeError: an operand is not an array, or a function is not callable.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product.
    """
    given = {"alpha": alpha, "c": c, "beta": beta, "bias": bias, "residual": residual}
    a, b, *arrays = checks.as_arrays(
        "matmul", a=a, b=b, **{name: x for name, x in given.items() if x is not None}
    )
    given = dict(zip((name for name, x in given.items() if x is not None), arrays, strict=True))
    checks.check_matmul(a, b, given, activation, preferred_element_type)
    named = named_in(given)
    steps = Steps("matmul", named, activation_function(activation), epilogue)
    return _run(
        jnp.matmul, a, b, implementation, steps, tuple(given[x] for x in named),
        epilogue_operands, preactivation, default_dtype=checks.strong_dtype(given.get("c")),
        precision=precision, preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )  # fmt: skip


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | Sequence[DTypeLike] | None = None,
    *,
    epilogue: Callable[..., Any] | None = None,
    epilogue_operands: Sequence[ArrayLike] = (),
    preactivation: Preactivation = "save",
    out_sharding: Any = None,
    implementation: Implementation = None,
) -> Any:
    """Contracts two arrays by the rules of `jax.lax.dot_general`.

    Kernels read either operand with any axis contiguous: nothing is transposed in memory. Flax's
    layers accept it as their `dot_general`.

    Args:
      lhs, rhs: the operands.
      dimension_numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)).
      precision, preferred_element_type, out_sharding, implementation: as in `matmul`.
      epilogue, epilogue_operands, preactivation: as in `matmul`; `epilogue` receives the
        result with its axes in the order below.

    Returns:
      The batch axes, then the other axes of `lhs`, then those of `rhs`; or the results of
      `epilogue`.

    Raises:
      ValueError: paired axes differ in extent, repeat or do not exist.
      TypeError: an operand is not an array, or `dimension_numbers` has another structure.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product.
    """
    lhs, rhs = checks.as_arrays("dot_general", lhs=lhs, rhs=rhs)
    dimension_numbers = checks.check_dot_general(lhs, rhs, dimension_numbers)
    return _run(
        lax.dot_general, lhs, rhs, implementation, Steps("dot_general", epilogue=epilogue), (),
        epilogue_operands, preactivation, dimension_numbers=dimension_numbers,
        precision=precision, preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )  # fmt: skip


def einsum(
    subscripts: str,
    /,
    *operands: ArrayLike,
    epilogue: Callable[..., Any] | None = None,
    epilogue_operands: Sequence[ArrayLike] = (),
    preactivation: Preactivation = "save",
    precision: Any = None,
    preferred_element_type: DTypeLike | Sequence[DTypeLike] | None = None,
    out_sharding: Any = None,
    implementation: Implementation = None,
) -> Any:
    """Contracts two arrays by the rules of `jax.numpy.einsum`.

    The kernel writes the result's axes in the requested order: "bthd,hde->bthe" copies nothing.

    Args:
      subscripts: such as "mk,kn->mn".
      *operands: two arrays.
      epilogue, epilogue_operands, preactivation: as in `matmul`; `epilogue` receives the
        result that `subscripts` name.
      precision, preferred_element_type, out_sharding, implementation: as in `matmul`.

    Raises:
      ValueError: other than two operands, or an index with two extents.
      TypeError: an operand is not an array, or `subscripts` is not a string.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product.
    """
    checks.check_einsum(subscripts, operands)
    lhs, rhs = checks.as_arrays("einsum", lhs=operands[0], rhs=operands[1])
    return _run(
        _einsum, lhs, rhs, implementation, Steps("einsum", epilogue=epilogue), (),
        epilogue_operands, preactivation, subscripts=subscripts, precision=precision,
        preferred_element_type=preferred_element_type, out_sharding=out_sharding,
    )  # fmt: skip


def _einsum(lhs: jax.Array, rhs: jax.Array, *, subscripts: str, **options: Any) -> jax.Array:
    return jnp.einsum(subscripts, lhs, rhs, **options)


def _run(
    function: Any,
    lhs: Any,
    rhs: Any,
    implementation: Implementation,
    steps: Steps,
    named_operands: tuple[Any, ...],
    epilogue_operands: Any,
    preactivation: Preactivation,
    *,
    preferred_element_type: Any,
    default_dtype: Any = None,
    **options: Any,
) -> Any:
    """Checks the arguments that dense products share and runs one.

    Args:
      function: JAX's product; `options` are its own.
      steps: its epilogue; `named_operands`, then `epilogue_operands` are the operands.
      default_dtype: dtype of the product where `preferred_element_type` names no single one.
    """
    plain = not (steps.named or steps.activation or steps.epilogue)
    operands = checks.check_steps(
        steps.op, steps.epilogue, epilogue_operands, plain, preactivation, preferred_element_type,
        implementation,
    )  # fmt: skip
    dtypes, dtype = None, preferred_element_type
    if isinstance(dtype, tuple | list):
        dtypes, dtype = tuple(dtype), None
    options["preferred_element_type"] = default_dtype if dtype is None else dtype
    if isinstance(options["precision"], list):
        options["precision"] = tuple(options["precision"])
    static = tuple(options.items())
    operands = (*named_operands, *operands)
    if is_replaced():
        check_kernel_unasked(steps.op, implementation)
        product = replaced_product(function, lhs, rhs, options)
        if plain:
            return product
        what = traced(steps.op, steps, (product,), operands, product.dtype, dtypes)
        return what.apply(product)
    if plain:
        return _traced(function, lhs, rhs, implementation, static)
    own, operands = settled(
        steps.op, steps, lambda: (_wide_product(function, static, typeof(lhs), typeof(rhs)),),
        operands, eager=not isinstance(lhs, Tracer),
    )  # fmt: skip
    return _traced_steps(
        function, lhs, rhs, operands, implementation, static, own, dtypes, preactivation
    )


# One trace for equal arguments. Inlined at once, so that the caller's program holds the bare
# product and lowering sees its operands; from JAX 0.12 on `inline=True` means later.
_Inline = getattr(jax, "Inline", None)
INLINE: Any = _Inline.JAX_EARLY if _Inline else True


@partial(jax.jit, static_argnums=(0, 3, 4), inline=INLINE)
def _traced(
    function: Any, lhs: Any, rhs: Any, implementation: Implementation, options: tuple[Any, ...]
) -> jax.Array:
    function = partial(function, **dict(options))
    if implementation == "xla":
        return function(lhs, rhs)
    return with_hopper_dot(function, lhs, rhs, implementation)


@memoised
def _wide_product(function: Any, options: tuple[Any, ...], lhs: Any, rhs: Any) -> Any:
    """Returns the abstract value of a product as an epilogue sees it."""
    function = partial(function, **dict(options))
    dtype = accumulator_dtype(abstract(function, lhs, rhs).dtype)
    return abstract(partial(function, preferred_element_type=dtype), lhs, rhs)


@partial(jax.jit, static_argnums=(0, *range(4, 9)), inline=INLINE)
def _traced_steps(
    function: Any,
    lhs: Any,
    rhs: Any,
    operands: tuple[Any, ...],
    implementation: Implementation,
    options: tuple[Any, ...],
    steps: Steps | Settled,
    dtypes: tuple[Any, ...] | None,
    preactivation: Preactivation,
) -> Any:
    product = _wide_product(function, options, typeof(lhs), typeof(rhs))
    function = partial(function, **dict(options))
    dtype = abstract(function, lhs, rhs).dtype
    wide = partial(function, preferred_element_type=product.dtype)
    what = traced(steps.op, steps, (product,), operands, dtype, dtypes)
    if implementation == "xla":
        return what.apply(wide(lhs, rhs))
    final = final_product(function, lhs, rhs)
    if final is None:
        return what.apply(with_hopper_dot(wide, lhs, rhs, implementation))
    chosen = Options(implementation, final.precision, dtype, preactivation, current_max_sms())
    results = fused_dot(
        what.function, final.lhs, (final.rhs,), what.operands,
        Product(final.subscripts, chosen, final.out_sharding),
        out_dtypes=what.dtypes, in_place=what.in_place(steps.named, product),
    )  # fmt: skip
    return what.structured(results)
