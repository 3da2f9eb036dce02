"""Dense products as they run: arguments checked, and all operands of what follows in one tuple."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
from jax import typeof

from ..fusion.jaxprs import abstract
from ..fusion.memo import memoised
from ..gemm.product import Options
from ..lowering.devices import permuted_sharding
from ..primitives.auto_axes import kept_sharding
from ..primitives.complex_products import by_parts
from ..primitives.define import accumulator_dtype
from ..primitives.fused_dot import fused_dot
from .contexts import in_contexts
from .replaced import check_kernel_unasked, is_replaced, replaced_product
from .settled import Settled, settled
from .steps import SCALES, Gate, Steps, result_dtypes, traced, with_range
from .substitute import final_product, with_hopper_dot


@dataclass(frozen=True)
class JaxProduct:
    """A product of JAX with its own arguments. Equal ones are one key of a cache."""

    # Of arrays, these arguments, `precision` and `preferred_element_type`.
    function: Callable[..., jax.Array]
    named: tuple[tuple[str, Any], ...]  # pairs of a name and an argument
    dtype: Any = None  # of the product, where the options name no single one
    stacked: bool = False  # whether the right operand holds gate and up, along its second axis

    def with_options(self, options: Options) -> partial[jax.Array]:
        """Returns the function of the arrays."""
        config: Any = jax.config
        precision = options.precision or config.jax_default_matmul_precision
        function = by_parts(self.function, precision)
        return partial(function, **options.of_dot(), **dict(self.named))

    def results(
        self, function: Callable[..., jax.Array], lhs: Any, rights: tuple[Any, ...]
    ) -> tuple[jax.Array, ...]:
        """Returns what `function` makes of a left operand and each right one, or half of one."""
        found = tuple(function(lhs, rhs) for rhs in rights)
        if not self.stacked:
            return found
        (both,) = found
        return both[..., 0, :], both[..., 1, :]


def run(
    product: JaxProduct,
    arrays: tuple[Any, ...],
    steps: Steps,
    operands: tuple[Any, ...],
    options: Options,
) -> Any:
    """Returns a dense product and what follows it.

    Args:
      product: JAX's own, of `arrays`, which are two if anything follows.
      options: as the user gave them.
    """
    preferred = options.preferred_element_type
    dtype = product.dtype if preferred is None or isinstance(preferred, tuple) else preferred
    dtypes = result_dtypes(steps, dtype if preferred is None else preferred)
    options = in_contexts(replace(options, preferred_element_type=dtype))
    if not steps.plain:
        lhs, rhs = arrays
        if dict(product.named).get("out_sharding") is not None:
            (like,) = _wide_products(product, options, typeof(lhs), (typeof(rhs),))
            operands = tuple(
                jax.reshard(x, kept_sharding(like, x.shape)) if name in SCALES and x.ndim else x
                for name, x in zip_longest(steps.named, operands)
            )
        return run_steps(product, lhs, (rhs,), steps, operands, options, dtypes)
    if is_replaced():
        check_kernel_unasked(steps.op, options.insists)
        return replaced_product(product.with_options(options), *arrays)
    return _traced(product, arrays, options)


def run_steps(
    product: JaxProduct,
    lhs: Any,
    rights: tuple[Any, ...],
    steps: Steps | Gate,
    operands: tuple[Any, ...],
    options: Options,
    dtypes: tuple[Any, ...] | None,
) -> Any:
    """Returns what follows a dense product, or those with gate and with up.

    Args:
      rights: the right operand; or gate and up; or one array that stacks them.
      options: with those of the contexts.
      dtypes: of the results, if the user named them.
    """
    if is_replaced():
        check_kernel_unasked(steps.op, options.insists)
        function = partial(replaced_product, product.with_options(options))
        products = product.results(function, lhs, rights)
        follow = traced(steps, products, operands, products[0].dtype, dtypes)
        return follow.apply(*products)
    options = with_range(options, steps, lhs)
    types = typeof(lhs), tuple(map(typeof, rights))
    products = partial(_wide_products, product, options, *types)
    own, operands = settled(steps, products, operands, lhs, options)
    return _traced_steps(product, lhs, rights, operands, own, options, dtypes)


# One trace for equal arguments. Inlined at once, so that the caller's program holds the bare
# product and lowering sees its operands; from JAX 0.12 on `inline=True` means later.
_Inline = getattr(jax, "Inline", None)
INLINE: Any = _Inline.JAX_EARLY if _Inline else True


@partial(jax.jit, static_argnums=(0, 2), inline=INLINE)
def _traced(product: JaxProduct, arrays: tuple[Any, ...], options: Options) -> jax.Array:
    function = product.with_options(options)
    return function(*arrays) if options.by_jax else with_hopper_dot(function, options, *arrays)


@memoised
def _wide_products(
    product: JaxProduct, options: Options, lhs: Any, rights: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Returns the abstract values of products as what follows them sees them."""
    function = product.with_options(options)
    dtype = accumulator_dtype(abstract(function, lhs, rights[0]).dtype)
    wide = partial(function, preferred_element_type=dtype)
    return abstract(partial(product.results, wide), lhs, rights)


@partial(jax.jit, static_argnums=(0, 4, 5, 6), inline=INLINE)
def _traced_steps(
    product: JaxProduct,
    lhs: Any,
    rights: tuple[Any, ...],
    operands: tuple[Any, ...],
    steps: Steps | Gate | Settled,
    options: Options,
    dtypes: tuple[Any, ...] | None,
) -> Any:
    function = product.with_options(options)
    likes = _wide_products(product, options, typeof(lhs), tuple(map(typeof, rights)))
    dtype = abstract(function, lhs, rights[0]).dtype
    wide = partial(function, preferred_element_type=likes[0].dtype)
    follow = traced(steps, likes, operands, dtype, dtypes)
    if options.by_jax:
        return follow.apply(*product.results(wide, lhs, rights))
    final = final_product(function, options, lhs, rights[0])
    if final is None:
        ours = partial(with_hopper_dot, wide, options)
        return follow.apply(*product.results(ours, lhs, rights))
    left, right, whole = final
    if product.stacked:  # no axis of the result stands for gate and up
        of = whole.subscripts
        kept = tuple(i for i, x in enumerate(of.out) if x != of.rhs[1])
        subscripts = replace(of, out="".join(of.out[i] for i in kept))
        sharding = permuted_sharding(whole.out_sharding, kept)
        whole = replace(whole, subscripts=subscripts, out_sharding=sharding)
    results = fused_dot(
        follow.function, (left, right, *rights[1:]), follow.operands,
        whole.with_options(preferred_element_type=dtype),
        out_dtypes=follow.dtypes, in_place=follow.in_place(steps.named, likes[0]),
    )  # fmt: skip
    return follow.structured(results)
