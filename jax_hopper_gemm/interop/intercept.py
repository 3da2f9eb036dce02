"""`intercept_ragged_dot`: code that calls `jax.lax.ragged_dot` runs on ours for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps

from jax import lax

from ..ops.dense import Implementation
from ..ops.ragged import ragged_dot, ragged_dot_general


@contextmanager
def intercept_ragged_dot(*, implementation: Implementation = None) -> Iterator[None]:
    """Puts `ragged_dot` and `ragged_dot_general` of this library in the place of `jax.lax`'s.

        with jhg.intercept_ragged_dot():
            state = train_step(state, batch)  # calls jax.lax.ragged_dot somewhere

    It sets the attributes `jax.lax.ragged_dot` and `jax.lax.ragged_dot_general`, and sets them
    back on exit. So it reaches code that looks them up there when it is traced, in every thread of
    the process, not only in this one. It does not reach code that took the functions out of
    `jax.lax` before, nor programs that `jax.jit` traced before; what is traced inside stays on ours
    after exit. Do not leave it in one thread while another has entered it.

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
