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


def divisor(a: Any, b: Any) -> Any:
    """Returns the greatest common divisor of two numbers, of arrays for each of their elements."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.gcd(a, b)
    return gcd(a, b)


def where(condition: Any, then: Any, other: Any) -> Any:
    """Returns one of two numbers, of arrays for each of their elements."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, then, other)
    return then if condition else other


def least(a: Any, b: Any) -> Any:
    """Returns the smaller of two numbers, of arrays for each of their elements."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return min(a, b)


def most(a: Any, b: Any) -> Any:
    """Returns the larger of two numbers, of arrays for each of their elements."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)
