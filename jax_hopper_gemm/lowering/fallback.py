"""What happens where a product on a GPU has no kernel: a context, or an environment variable."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import jax
from jax.extend.source_info_util import SourceInfo, summarize
from jax.interpreters import mlir

ON_FALLBACK_VARIABLE = "JAX_HOPPER_GEMM_ON_FALLBACK"
ON_FALLBACK_VALUES = ("silent", "warn", "error")
Policy = Literal["silent", "warn", "error"]

# JAX lowers anew where a context has another value.
_asked = jax.make_user_context(None)
_told: dict[Any, int] = {}  # lines that were warned of, as the filter "default" counts them


class FallbackWarning(UserWarning):
    """A product on the GPU goes to XLA because no kernel can run it."""


@contextmanager
def on_fallback(policy: Policy) -> Iterator[None]:
    """Says what happens where a product on a GPU has no kernel, in programs lowered inside.

        with jhg.on_fallback("warn"):
            step(state, batch)  # the first call traces and lowers

    A product that XLA runs because it is faster is no fallback. Outside, the variable
    JAX_HOPPER_GEMM_ON_FALLBACK has the same values.

    Args:
      policy: "silent"; "warn", a `FallbackWarning` at the line that asks for the product; or
        "error", a NotImplementedError with the reason.

    Raises:
      ValueError: `policy` is something else.
    """
    with _asked(_checked("on_fallback: policy", policy)):
        yield


def _checked(name: str, value: str) -> str:
    if value not in ON_FALLBACK_VALUES:
        expected = ", ".join(ON_FALLBACK_VALUES)
        raise ValueError(f"{name} is {value!r}; expected one of {expected}")
    return value


def policy_now() -> str:
    """Returns what a fallback for lack of a kernel does: "silent", "warn" or "error".

    Raises:
      ValueError: JAX_HOPPER_GEMM_ON_FALLBACK is something else.
    """
    if (asked := _asked.value) is not None:
        return asked
    return _checked(ON_FALLBACK_VARIABLE, os.environ.get(ON_FALLBACK_VARIABLE, "silent"))


def report_fallback(ctx: mlir.LoweringRuleContext, message: str) -> None:
    """Does what the user asked for when a product falls back to XLA for lack of a kernel.

    Raises:
      NotImplementedError: with `message`, under the policy "error".
    """
    policy = policy_now()
    if policy == "error":
        asked = "on_fallback('error')" if _asked.value else f"{ON_FALLBACK_VARIABLE}=error"
        raise NotImplementedError(f"{message} ({asked})")
    if policy == "warn":
        line = re.match(r"(.+?):(\d+)", summarize(SourceInfo(ctx.traceback, ctx.name_stack)))
        file, number = (line[1], int(line[2])) if line else ("unknown", 0)
        warnings.warn_explicit(message, FallbackWarning, file, number, registry=_told)
