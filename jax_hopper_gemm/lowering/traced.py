"""Lowering rules of JAX functions that are traced once for equal calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

from ..fusion.jaxprs import ClosedJaxpr, traced_once


def lower_fun_once(function: Callable[..., Any]) -> Any:
    """Returns the rule that `mlir.lower_fun` returns; layers of a model share a trace."""

    def lower(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
        return lower_jaxpr(ctx, traced_once(function, *ctx.avals_in, **params), *values)

    return lower


def lower_jaxpr(ctx: mlir.LoweringRuleContext, closed: ClosedJaxpr, *values: Any) -> Any:
    """Emits the operations of a jaxpr where the program stands."""
    jaxpr: Any = closed.jaxpr
    if closed.consts or jaxpr.effects or getattr(jaxpr, "is_high", False):
        return mlir.lower_fun(jaxpr_as_fun(closed))(ctx, *values)
    module = ctx.module_context
    results, tokens = mlir.jaxpr_subcomp(
        module if ctx.platforms is None else module.replace(platforms=ctx.platforms),
        jaxpr, ctx.name_stack, ctx.tokens_in, (), *values, dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering, outer_traceback=None,
    )  # fmt: skip
    ctx.set_tokens_out(tokens)
    return results
