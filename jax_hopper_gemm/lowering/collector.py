"""Python's garbage collector, while a whole program is traced or lowered."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses Python's garbage collector, if it runs.

    Tracing, rewriting and lowering make many objects that stay, and few cycles of them; each pass
    of the collector would look through all that was made before. Threads may pause it at the
    same time: the one that found it running starts it again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
