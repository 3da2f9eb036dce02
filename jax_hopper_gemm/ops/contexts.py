"""Contexts of products, taken when they are traced: an SM limit, rows of the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax

from ..gemm.product import Options
from . import checks

P = ParamSpec("P")
R = TypeVar("R")

# JAX traces anew where a context has another value: no program is taken for one with a limit.
_limit = jax.make_user_context(None)
_asked = jax.make_user_context(False)


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


@contextmanager
def batch_invariant(asked: bool = True) -> Iterator[None]:
    """Asks for rows of the same bits in every batch, of products traced inside the context.

    On a Hopper GPU the bits of a row then depend neither on the number of rows nor on the others,
    nor on the devices that share the rows. Each product runs on a kernel of this library, which
    adds up all of K in one order; what feeds a sum along a row is cut by N and K alone. Splitting K
    over SMs is out, so a long K over few tiles takes more time.

        with jhg.batch_invariant():
            logits = model(tokens)

    It belongs to the products: their derivatives have it as well. XLA's own operations, and
    products that `accelerate` leaves to JAX, are as they are. The argument `batch_invariant` of a
    product does the same; False there, or here, lifts an outer context. On other platforms XLA
    computes the product and promises nothing.

    While lowering for a GPU, NotImplementedError says which product no kernel can run: of dtypes
    that kernels do not multiply, as the gradients of float32 results are without `cotangent_dtype`,
    or with an epilogue of which XLA would compute a part.

    Raises:
      TypeError: `asked` is no bool.
      ValueError: a product inside has `implementation="xla"`.
      NotImplementedError: a collective product is inside: sums that travel a ring are added in an
        order that depends on the row.
    """
    _check(asked)
    with _asked(asked):
        yield


def _check(asked: Any, op: str = "") -> None:
    if not isinstance(asked, bool):
        raise TypeError(f"{op}batch_invariant is {asked!r}, expected True or False")


def takes_batch_invariant(function: Callable[P, R]) -> Callable[P, R]:
    """Runs a product inside the context that its argument `batch_invariant` asks for."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        asked = kwargs.get("batch_invariant")
        if asked is None:
            return function(*args, **kwargs)
        _check(asked, f"{function.__name__}: ")
        with _asked(asked):  # pyright: ignore[reportArgumentType]
            return function(*args, **kwargs)

    return run


def is_batch_invariant() -> bool:
    """Whether a product that is traced now has rows of the same bits in every batch."""
    return _asked.value


def in_contexts(options: Options) -> Options:
    """Returns the options of a product that is traced now: with those of the contexts it is in."""
    if (max_sms := current_max_sms()) != options.max_sms:
        options = replace(options, max_sms=max_sms)
    if not is_batch_invariant():
        return options
    if options.implementation == "xla":
        raise ValueError(
            "implementation is 'xla' where batch_invariant asks for rows of the same bits, which "
            "XLA does not promise: leave implementation as None"
        )
    return replace(options, batch_invariant=True)


def refuse_batch_invariance(op: str) -> None:
    """Raises where rows of the same bits are asked of a product that has none."""
    if is_batch_invariant():
        raise NotImplementedError(
            f"{op}: batch_invariant is asked for, but sums that travel a ring of devices are added "
            "in an order that depends on the row: use jax.lax.all_gather or jax.lax.psum and matmul"
        )
