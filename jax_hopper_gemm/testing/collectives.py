"""The collectives of a compiled program: how many of each kind, and the bytes that they give."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import numpy as np

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
OPERATION = re.compile(rf"^.*? = (.*?) ({KINDS})(?:-done)?\(", re.MULTILINE)
ITEMSIZES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s32": 4, "u32": 4}


def collectives(program: str) -> dict[str, tuple[int, int]]:
    """Returns count and bytes of the results on a device, by kind, of an HLO program's text.

    An operation with several results, which XLA makes of several operations, counts as one. What a
    `-start` gives holds operands, too: that of its `-done` counts.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for results, kind in OPERATION.findall(program):
        counts[kind] += 1
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            sizes[kind] += ITEMSIZES[dtype] * prod(map(int, filter(None, shape.split(","))))
    return {kind: (counts[kind], sizes[kind]) for kind in sorted(counts)}


def run_counted(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
    """Returns a function's results, as NumPy's, and the collectives of its program."""
    program = jax.jit(lambda *args: function(*args), **options).lower(*args).compile()
    return jax.tree.map(np.asarray, program(*args)), collectives(program.as_text() or "")
