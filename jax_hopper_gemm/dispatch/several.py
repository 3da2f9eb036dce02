"""Several objects as one: arithmetic that is written for one then runs for all of them at once.

The cost model is written so. It branches on what all kernels of a type have in common; of what
differs it takes `where`, `least`, `most` and `each`, which take numbers and arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from math import gcd
from typing import Any

import numpy as np


class Several:
    """Objects as one: an attribute is theirs where they agree, else the array of theirs."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        found = values = [getattr(thing, name) for thing in self._objects]
        if values.count(first := values[0]) == len(values):
            found = first
        elif hasattr(first, "__dict__"):  # an object or a method
            found = Several(values)
        else:
            found = np.array(values)
        vars(self)[name] = found
        return found

    def __call__(self, *args: Any) -> Several:
        """Calls each, where the objects are methods."""
        return Several([method(*args) for method in self._objects])

    def varied(self, **attributes: Any) -> Several:
        """Returns the same objects with other values of some attributes."""
        varied = Several([self])
        vars(varied).update(vars(self) | attributes, _objects=[self])
        return varied


def each(function: Callable[..., Any], *numbers: Any) -> Any:
    """Returns a function of numbers, or the array of what it is of each; of pairs, a pair."""
    if not any(isinstance(x, np.ndarray) for x in numbers):
        return function(*numbers)
    columns = [x.tolist() if isinstance(x, np.ndarray) else repeat(x) for x in numbers]
    return np.array(list(map(function, *columns))).T


def each_where(
    condition: Any, function: Callable[..., Any], *numbers: Any, other: Sequence[int]
) -> Any:
    """Returns the same of a function of several results where a condition holds, else `other`."""
    if not isinstance(condition, np.ndarray):
        return each(function, *numbers) if condition else other
    (places,) = condition.nonzero()
    found = np.empty((len(condition), len(other)), np.int64)
    found[:] = other
    if places.size:
        picked = (x[places] if isinstance(x, np.ndarray) else x for x in numbers)
        found[places] = np.array(each(function, *picked)).T
    return found.T


def where(condition: Any, then: Any, other: Any) -> Any:
    """Returns one of two numbers, of arrays for each of their elements."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, then, other)
    return then if condition else other


def _of_two(of_numbers: Callable[..., Any], of_arrays: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of two numbers, or of arrays for each of their elements."""

    def function(a: Any, b: Any) -> Any:
        either = isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
        return (of_arrays if either else of_numbers)(a, b)

    return function


divisor = _of_two(gcd, np.gcd)  # the greatest one that both have
least = _of_two(min, np.minimum)
most = _of_two(max, np.maximum)
