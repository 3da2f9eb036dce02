"""Registration of a primitive's lowering, one rule for all platforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir


def register_lowering(
    primitive: Primitive,
    abstract_eval: Callable[..., Any],
    reference: Any,
    for_cuda: Any,
    implementation: Callable[[dict[str, Any]], str | None] = lambda params: None,
    partitioned: Callable[..., Any] = lambda ctx, *values, **params: None,
) -> None:
    """Registers one rule for all platforms.

    The rule is not cacheable: a cached lowering becomes a function of its own, whose arguments
    hide the operations that they come from.

    Args:
      primitive: the primitive.
      abstract_eval: its rule of that name.
      reference: the JAX function of the operands and parameters that it stands for.
      for_cuda: the rule where the program is for CUDA alone: `for_cuda(ctx, *values, **params)`.
      implementation: gives from the parameters what the user asked for.
      partitioned: the rule where XLA partitions the program over devices; may give None.
    """
    # The branch for CUDA of a program for several platforms; it exists while that is lowered.
    on_cuda_p = Primitive(f"{primitive.name}_on_cuda")
    on_cuda_p.multiple_results = primitive.multiple_results
    on_cuda_p.def_abstract_eval(abstract_eval)
    mlir.register_lowering(on_cuda_p, for_cuda, cacheable=False)

    def for_each(*operands: jax.Array, **params: Any) -> Any:
        on_cuda, elsewhere = partial(on_cuda_p.bind, **params), partial(reference, **params)
        return lax.platform_dependent(*operands, cuda=on_cuda, default=elsewhere)

    to_xla = mlir.lower_fun(reference, multiple_results=primitive.multiple_results)
    to_each = mlir.lower_fun(for_each, multiple_results=primitive.multiple_results)

    def lower(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
        platforms = tuple(ctx.platforms or ctx.module_context.platforms)
        on_host = getattr(ctx.jaxpr_eqn_ctx, "compute_type", None) == "device_host"
        if not on_host and (emitted := partitioned(ctx, *values, **params)):
            return emitted
        if platforms == ("cuda",) and not on_host:
            return for_cuda(ctx, *values, **params)
        if implementation(params) == "hopper":
            raise NotImplementedError(
                "implementation='hopper': the kernels run on CUDA, and this program is lowered for "
                "another platform. With implementation=None it runs on either."
            )
        return (to_each if "cuda" in platforms and not on_host else to_xla)(ctx, *values, **params)

    mlir.register_lowering(primitive, lower, cacheable=False)
