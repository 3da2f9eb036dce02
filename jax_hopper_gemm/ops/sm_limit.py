"""The limit of SMs that products take when they are traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from . import checks

# JAX traces anew where a context has another value: no program is taken for one with a limit.
_limit = jax.make_user_context(None)


@contextmanager
def max_sms(limit: int | None) -> Iterator[None]:
    """Products that are traced within use so many SMs of the GPU at most.

    So the others are free for what runs beside them, such as the kernels of collectives:

        with jhg.max_sms(112):  # of an H200's 132
            hidden = jhg.all_gather_matmul(x, up, "tp")

    The limit belongs to the products: their derivatives have it as well, wherever they are traced.
    It holds for our kernels. One is taken that keeps to the limit wherever there is one, by the
    cost model, since tables were measured on whole GPUs; XLA's own products know no limit.

    Args:
      limit: at least 1; more than the GPU has is no limit. None lifts that of a `with` around.

    Raises:
      TypeError, ValueError: `limit` is none.
    """
    checks.check_max_sms(limit)
    with _limit(None if limit is None else int(limit)):
        yield


def current_max_sms() -> int | None:
    """Returns the limit that a product traced now takes."""
    return _limit.value
