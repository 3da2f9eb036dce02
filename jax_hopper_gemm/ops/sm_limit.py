"""The SM limit of products, taken when they are traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from . import checks

# JAX traces anew where a context has another value: no program is taken for one with a limit.
_limit = jax.make_user_context(None)


@contextmanager
def max_sms(limit: int | None) -> Iterator[None]:
    """Limits the SMs of the GPU that products traced inside the context use.

    The other SMs are free for concurrent work, such as the kernels of collectives:

        with jhg.max_sms(112):  # of an H200's 132
            hidden = jhg.all_gather_matmul(x, up, "tp")

    The limit belongs to the products: their derivatives have it as well, wherever they are traced.
    The cost model chooses a kernel that keeps to the limit, since tables were measured on whole
    GPUs. XLA's own products ignore the limit.

    Args:
      limit: at least 1; more SMs than the GPU has are no limit. None lifts an outer limit.

    Raises:
      TypeError, ValueError: `limit` is invalid.
    """
    checks.check_max_sms(limit)
    with _limit(None if limit is None else int(limit)):
        yield


def current_max_sms() -> int | None:
    """Returns the limit that a product traced now takes."""
    return _limit.value
