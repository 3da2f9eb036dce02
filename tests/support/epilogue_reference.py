"""What the arguments of `matmul` mean, in jnp, and how close our results are to that."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.program_inspection import integers

from jax_hopper_gemm.ops.activations import ACTIVATIONS

# The products of these tests are integers that every dtype holds, so what differs is the rounding
# of a few float32 operations, and one unit in the last place of a result that is rounded further.
ALLOWED = {"float32": 2.0**-19, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def assert_close(ours: Any, theirs: Any) -> None:
    def check(x: Any, y: Any) -> None:
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
            return
        x, y, allowed = np.float64(x), np.float64(y), ALLOWED[x.dtype.name]
        np.testing.assert_allclose(x, y, allowed, allowed * np.max(np.abs(y), initial=0))

    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(check, ours, theirs)


def assert_same(ours: Any, theirs: Any) -> None:
    def check(x: Any, y: Any) -> None:
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

    jax.tree.map(check, ours, theirs)


def reference(
    a, b, *, bias=None, residual=None, activation=None, alpha=None, beta=None, c=None,
    epilogue=None, epilogue_operands=(), preferred_element_type=None, **ignored,
):  # fmt: skip
    """What the arguments of `matmul` mean, in float32 by jnp."""
    dtype = preferred_element_type or (jnp.matmul(a, b) if c is None else c).dtype
    y = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    shape = y.shape
    y = y if alpha is None else alpha * y
    if c is not None:
        y = y + (1 if beta is None else beta) * jnp.asarray(c, jnp.float32)
    y = y if bias is None else y + bias
    y = y if activation is None else (ACTIVATIONS.get(activation) or activation)(y)
    y = y if residual is None else y + residual
    out = y if epilogue is None else epilogue(y, *epilogue_operands)
    one = lambda x: x.astype(dtype) if (x.shape, x.dtype) == (shape, y.dtype) else x  # noqa: E731
    return tuple(map(one, out)) if isinstance(out, tuple) else one(out)


M, N, K = 6, 5, 4
A, B = integers((M, K)), integers((K, N), seed=1)
BIAS, RESIDUAL, C = integers((N,), seed=2), integers((M, N), seed=3), integers((M, N), seed=4)
