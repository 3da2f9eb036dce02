"""Lowering rules: those of JAX functions, traced once for equal calls, and their registration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from ..fusion.jaxprs import ClosedJaxpr, traced_once
from ..gemm.groups import is_varlen_k
from .devices import devices_of, platforms_of

Rule = Callable[..., Any]  # (ctx, *values, **params)

# What products by a recipe stand for: by primitive, a function of its operands and parameters.
EXPANDED: dict[Primitive, Rule] = {}


@dataclass(frozen=True)
class Lowering:
    """How a primitive is lowered, beyond the JAX function that it stands for."""

    cuda: Rule | None = None  # where the program is for CUDA alone; gives None: the function
    partitioned: Rule | None = None  # where XLA partitions it over devices; as `cuda`, before it
    # Whether equal equations of a program may become calls of one function. The arguments of such a
    # function hide the operations that they come from. With `cuda` none are shared.
    shared: bool = True


def register_lowering(
    primitive: Primitive, abstract_eval: Rule, reference: Rule, lowering: Lowering, partitions: Rule
) -> None:
    """Registers one rule for all platforms; the arguments are those of `define_primitive`.

    `partitions(ctx)` says whether XLA partitions a program, and asks for the shards.
    """
    to_xla = lower_fun_once(reference)
    if (for_cuda := lowering.cuda) is None:
        mlir.register_lowering(primitive, to_xla, cacheable=lowering.shared)
        return
    # The branch for CUDA of a program for several platforms; it exists while that is lowered.
    on_cuda_p = Primitive(f"{primitive.name}_on_cuda")
    on_cuda_p.multiple_results = primitive.multiple_results
    on_cuda_p.def_abstract_eval(abstract_eval)

    def for_cuda_or_xla(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
        return for_cuda(ctx, *values, **params) or to_xla(ctx, *values, **params)

    mlir.register_lowering(on_cuda_p, for_cuda_or_xla, cacheable=False)

    def for_each(*operands: jax.Array, **params: Any) -> Any:
        on_cuda, elsewhere = partial(on_cuda_p.bind, **params), partial(reference, **params)
        return lax.platform_dependent(*operands, cuda=on_cuda, default=elsewhere)

    to_each = mlir.lower_fun(for_each, multiple_results=primitive.multiple_results)

    def lower(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
        product = params.get("product")
        if product and product.options.recipe:
            # XLA may cut contracted rows for its devices within blocks that share a scale.
            rows = product.groups is not None and is_varlen_k(product.subscripts)
            if not (rows and devices_of(ctx) > 1):
                return lower_fun_once(EXPANDED[primitive])(ctx, *values, **params)
            params["product"] = product = product.with_options(recipe=None)
        if product and product.options.implementation == "xla":
            return to_xla(ctx, *values, **params)
        platforms = platforms_of(ctx)
        on_host = getattr(ctx.jaxpr_eqn_ctx, "compute_type", None) == "device_host"
        if not on_host and (rule := lowering.partitioned) and partitions(ctx):
            if emitted := rule(ctx, *values, **params):
                return emitted
        if platforms == ("cuda",) and not on_host:
            return for_cuda_or_xla(ctx, *values, **params)
        if product and product.options.implementation == "hopper":
            raise NotImplementedError(
                "implementation='hopper': the kernels run on CUDA, and this program is lowered for "
                "another platform. With implementation=None it runs on either."
            )
        return (to_each if "cuda" in platforms and not on_host else to_xla)(ctx, *values, **params)

    mlir.register_lowering(primitive, lower, cacheable=False)


def lower_fun_once(function: Callable[..., Any]) -> Any:
    """Returns the rule that `mlir.lower_fun` returns; layers of a model share a trace."""

    def lower(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
        return lower_jaxpr(ctx, traced_once(function, *ctx.avals_in, **params), *values)

    return lower


def lower_jaxpr(
    ctx: mlir.LoweringRuleContext, closed: ClosedJaxpr, *values: Any, lines: Any = None
) -> Any:
    """Emits the operations of a jaxpr where the program stands.

    Args:
      lines: of source, a traceback, around those of the jaxpr.
    """
    jaxpr: Any = closed.jaxpr
    if closed.consts or jaxpr.effects or getattr(jaxpr, "is_high", False):
        return mlir.lower_fun(jaxpr_as_fun(closed))(ctx, *values)
    given = dict(zip(jaxpr.invars, values, strict=True))
    if all(not isinstance(x, Literal) and x in given for x in jaxpr.outvars):
        return [given[x] for x in jaxpr.outvars]  # without effects, the equations are for nothing
    module = ctx.module_context
    results, tokens = mlir.jaxpr_subcomp(
        module if ctx.platforms is None else module.replace(platforms=ctx.platforms),
        jaxpr, ctx.name_stack, ctx.tokens_in, (), *values, dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering, outer_traceback=lines,
    )  # fmt: skip
    ctx.set_tokens_out(tokens)
    return results
