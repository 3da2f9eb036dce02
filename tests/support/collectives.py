"""Counts and bytes of the collectives of a compiled program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_hopper_gemm.testing.collectives import collectives_in


def collectives(program: str) -> dict[str, tuple[int, int]]:
    """Returns count and bytes of the results on a device, by kind, of an HLO program's text."""
    found = list(collectives_in(program))
    counts = Counter(x.kind for x in found)
    return {kind: (counts[kind], sum(x.size for x in found if x.kind == kind))
            for kind in sorted(counts)}  # fmt: skip


def run_counted(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
    """Returns a function's results, as NumPy's, and the collectives of its program."""
    program = jax.jit(lambda *args: function(*args), **options).lower(*args).compile()
    return jax.tree.map(np.asarray, program(*args)), collectives(program.as_text() or "")
