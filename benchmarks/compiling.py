"""Compiles the programs of a benchmark at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

COMPILERS = 8  # threads that compile at once


def compiled(calls: Iterable[tuple[Any, tuple]]) -> list[Callable | Exception]:
    """Returns jitted functions compiled for shapes of arguments, or why one cannot be.

    XLA times its own candidates while it compiles, which takes most of a second for a product.
    Several are compiled at once; they take turns at the GPU, where nothing else should run.
    """

    def compile_one(call: tuple[Any, tuple]) -> Callable | Exception:
        function, arguments = call
        try:
            return function.lower(*arguments).compile()
        except Exception as error:  # such as want of memory: the other products remain
            return error

    with ThreadPoolExecutor(COMPILERS) as pool:
        return list(pool.map(compile_one, calls))
