"""Products under another library's replacement of `jax.lax.dot_general`.

Qwix replaces the function's code in the methods of a model that it quantizes, so every call reaches
Qwix. Our products then call the replacement, on the arrays themselves and outside of any trace that
JAX would keep, because Qwix identifies weights by their identity.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_DOT_GENERAL: Any = lax.dot_general
_CODE = _DOT_GENERAL.__code__


def is_replaced() -> bool:
    return lax.dot_general is not _DOT_GENERAL or _DOT_GENERAL.__code__ is not _CODE


def check_kernel_unasked(op: str, insists: str | None) -> None:
    """Raises NotImplementedError where the user insists on a kernel by an argument."""
    if insists:
        raise NotImplementedError(
            f"{op}: {insists}, but jax.lax.dot_general is replaced here, as Qwix "
            "does in a model that it quantizes. Exempt this product by Qwix's rules and take "
            "it by jax_hopper_gemm.accelerate around the model, or leave the argument out"
        )


def replaced_product(function: partial[jax.Array], lhs: Any, *others: Any) -> jax.Array:
    """Returns `function(lhs, *others)`, where function is one of JAX's with its options.

    Rows times a matrix call `dot_general` directly, as Flax's layers do: inside the trace of
    `jax.numpy.matmul` Qwix does not find the weights.
    """
    if function.func is jnp.matmul and lhs.ndim > 0:
        (rhs,) = others
        if rhs.ndim == 2 and lhs.dtype == rhs.dtype:
            contracted = ((lhs.ndim - 1,), (0,))
            return lax.dot_general(lhs, rhs, (contracted, ((), ())), **function.keywords)
    return function(lhs, *others)
