"""Settings that users make through environment variables."""

from __future__ import annotations

import os
import warnings

ON_FALLBACK_VARIABLE = "JAX_HOPPER_GEMM_ON_FALLBACK"
ON_FALLBACK_VALUES = ("silent", "warn", "error")


class FallbackWarning(UserWarning):
    """A product on the GPU goes to XLA because no kernel can run it."""


def on_fallback() -> str:
    """Returns what a fallback for lack of a kernel does: "silent", "warn" or "error".

    Raises:
      ValueError: JAX_HOPPER_GEMM_ON_FALLBACK is something else.
    """
    value = os.environ.get(ON_FALLBACK_VARIABLE, "silent")
    if value not in ON_FALLBACK_VALUES:
        raise ValueError(
            f"{ON_FALLBACK_VARIABLE} is {value!r}; expected one of {', '.join(ON_FALLBACK_VALUES)}"
        )
    return value


def report_fallback(message: str) -> None:
    """Does what the user asked for when a product falls back to XLA for lack of a kernel.

    Raises:
      NotImplementedError: with `message`, under the policy "error".
    """
    policy = on_fallback()
    if policy == "error":
        raise NotImplementedError(f"{message} ({ON_FALLBACK_VARIABLE}=error)")
    if policy == "warn":
        warnings.warn(message, FallbackWarning, stacklevel=2)
