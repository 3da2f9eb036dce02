"""Programs for the CPU whose products are partitioned as those for GPUs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from jax_hopper_gemm.sharding import custom_call
from jax_hopper_gemm.sharding.custom_call import Program


@contextmanager
def on_cpu(replace: Callable[[Program, Sequence[Any]], Program] | None = None) -> Iterator[None]:
    """Partitions products in programs for the CPU, too, in all threads.

    Args:
      replace: gets each shard's program, a function of the shards, and their abstract values, and
        returns the program to lower in its place. Then none comes from the cache.
    """
    platforms = patch.object(custom_call, "PLATFORMS", [*custom_call.PLATFORMS, ("cpu",)])
    with platforms, _replaced_by(replace) if replace else nullcontext():
        yield


@contextmanager
def _replaced_by(replace: Callable[[Program, Sequence[Any]], Program]) -> Iterator[None]:
    lower = custom_call._lowered

    def lower_replaced(program: Program, shards: Sequence[Any], *options: Any) -> bytes:
        return lower(lambda *operands: replace(program, shards)(*operands), shards, *options)

    uncached = patch.object(custom_call, "_answer", custom_call._answer.__wrapped__)
    with uncached, patch.object(custom_call, "_lowered", lower_replaced):
        yield
