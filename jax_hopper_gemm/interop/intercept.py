"""`intercept_ragged_dot`: a context in which `jax.lax.ragged_dot` is ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps

from jax import lax

from ..ops.dense import Implementation
from ..ops.ragged import ragged_dot, ragged_dot_general


@contextmanager
def intercept_ragged_dot(*, implementation: Implementation = None) -> Iterator[None]:
    """Replaces `jax.lax.ragged_dot` and `ragged_dot_general` by those of this library.

        with jhg.intercept_ragged_dot():
            state = train_step(state, batch)  # calls jax.lax.ragged_dot somewhere

    It sets the attributes `jax.lax.ragged_dot` and `jax.lax.ragged_dot_general` and restores them
    on exit. So it affects code that looks them up while it is traced, in every thread of the
    process. It does not affect code that imported the functions from `jax.lax` before, nor programs
    that `jax.jit` traced before. Programs traced inside keep our products after exit. Do not leave
    the context in one thread while another is inside.

    Args:
      implementation: as in `ragged_dot`.
    """
    theirs = lax.ragged_dot, lax.ragged_dot_general
    ours = (
        wraps(ragged_dot)(partial(ragged_dot, implementation=implementation)),
        wraps(ragged_dot_general)(partial(ragged_dot_general, implementation=implementation)),
    )
    lax.ragged_dot, lax.ragged_dot_general = ours
    try:
        yield
    finally:
        lax.ragged_dot, lax.ragged_dot_general = theirs
