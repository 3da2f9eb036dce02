"""Covering sets: few cases that show whatever any case shows, such as each pair of two choices.

Bugs sit in single choices and in pairs of them, so a set that covers all pairs stands for the whole
(https://doi.org/10.1145/1883612.1883618). With `JAX_HOPPER_GEMM_TEST_ALL=1` all cases run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from heapq import heapify, heapreplace
from typing import TypeVar

ALL = os.environ.get("JAX_HOPPER_GEMM_TEST_ALL") == "1"

Case = TypeVar("Case")


def covering_subset(
    cases: Iterable[Case], shown_by: Callable[[Case], Iterable[Hashable]]
) -> list[Case]:
    """Returns cases that together show all that any case shows. Greedy, the same everywhere.

    Args:
      cases: the whole.
      shown_by: what a case shows, for example the pairs of choices that it holds.
    """
    given = list(cases)
    shown = [frozenset(shown_by(case)) for case in given]
    missing = set().union(*shown)
    queue = [(-len(things), i) for i, things in enumerate(shown)]  # at most so many are missing
    heapify(queue)
    chosen = []
    while missing:
        _, i = queue[0]
        entry = -len(shown[i] & missing), i
        heapreplace(queue, entry)
        if queue[0] == entry:  # no other has more
            chosen.append(given[i])
            missing -= shown[i]
    return chosen
