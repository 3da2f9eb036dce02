"""The 32 lanes of a warp with the device's integers: `testing.lanes` as tests want them.

Int32 and int64, division rounds towards zero. Where the device would wrap around or divide by zero,
a test should know, so that raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_hopper_gemm.gemm.group_search import LANES
from jax_hopper_gemm.testing.lanes import NumpyLanes

INT32 = np.iinfo(np.int32)
UNASKED = (INT32.max, INT32.min, -1, 1)  # what lanes get that ask for no size


class Int32:
    """An int32 that all lanes share (an int), or one of each lane (an array of 32)."""

    BITS = 32
    __slots__ = ("value",)
    __array_ufunc__ = None  # so that a NumPy array on the left leaves the operation to this class

    def __init__(self, value: int | np.ndarray):
        low, high = (value, value) if isinstance(value, int) else (value.min(), value.max())
        limit = 1 << (self.BITS - 1)
        if low < -limit or high >= limit:
            raise OverflowError(f"{value} does not fit int{self.BITS}")
        self.value = value

    def _with(self, other: Any) -> type[Int32]:
        """Returns the type of what comes of this and another number: the wider."""
        return Int64 if isinstance(other, Int64) else type(self)

    def __add__(self, other: Any) -> Int32:
        return self._with(other)(self.value + _raw(other))

    def __sub__(self, other: Any) -> Int32:
        return self._with(other)(self.value - _raw(other))

    def __rsub__(self, other: Any) -> Int32:
        return self._with(other)(_raw(other) - self.value)

    def __mul__(self, other: Any) -> Int32:
        return self._with(other)(self.value * _raw(other))

    def __and__(self, other: Any) -> Int32:
        return self._with(other)(self.value & _raw(other))

    def __rshift__(self, other: Any) -> Int32:
        return type(self)(self.value >> _raw(other))

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> Int32:
        dividend, divisor = self.value, _raw(other)
        if np.any(divisor == 0):
            raise ZeroDivisionError(f"{dividend} // {divisor}")
        if isinstance(dividend, int) and isinstance(divisor, int):
            quotient = abs(dividend) // abs(divisor)
            return Int32(quotient if (dividend < 0) == (divisor < 0) else -quotient)
        quotient = np.abs(dividend) // np.abs(divisor)
        return Int32(np.where((dividend < 0) == (divisor < 0), quotient, -quotient))

    def __mod__(self, other: Any) -> Int32:
        return self - self // other * _raw(other)

    def __lt__(self, other: Any) -> Any:
        return self.value < _raw(other)

    def __le__(self, other: Any) -> Any:
        return self.value <= _raw(other)

    def __gt__(self, other: Any) -> Any:
        return self.value > _raw(other)

    def __ge__(self, other: Any) -> Any:
        return self.value >= _raw(other)

    def __eq__(self, other: Any) -> Any:
        return self.value == _raw(other)

    __hash__ = None  # type: ignore[assignment]  # comparisons are of lanes

    def __int__(self) -> int:
        assert isinstance(self.value, int), "lanes differ"
        return self.value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value})"


class Int64(Int32):
    """An int64 that all lanes share, an int; made of an int32, or of what an int64 adds up to."""

    BITS = 64
    __slots__ = ()

    def __init__(self, value: int | Int32):
        super().__init__(_raw(value))


def _raw(value: Any) -> Any:
    return value.value if isinstance(value, Int32) else value


class Int32Lanes(NumpyLanes):
    """`NumpyLanes` of `Int32`; a lane without a size reads whatever stands there."""

    lane = Int32(np.arange(LANES, dtype=np.int64))

    def integer(self, value: int) -> Int32:
        return Int32(value)

    def minimum(self, a: Any, b: Any) -> Int32:
        return self.where(_raw(a) < _raw(b), a, b)

    def maximum(self, a: Any, b: Any) -> Int32:
        return self.where(_raw(a) > _raw(b), a, b)

    def where(self, condition: Any, a: Any, b: Any) -> Int32:
        if isinstance(condition, bool):
            return Int32(_raw(a if condition else b))
        return Int32(super().where(condition, _raw(a), _raw(b)))

    def prefix_sum(self, value: Int32) -> Int32:
        return Int32(super().prefix_sum(value.value))

    def first(self, condition: Any) -> Int32:
        return Int32(super().first(condition))

    def of(self, value: Int32, lane: Int32) -> Int32:
        return Int32(int(super().of(value.value, int(lane))))

    def size_reader(self, sizes: Sequence[int]) -> Any:
        values, unasked = np.asarray(sizes, np.int64), np.resize(UNASKED, LANES)

        def size_at(group: Int32, valid: Any) -> Int32:
            valid = np.broadcast_to(valid, LANES)
            return Int32(np.where(valid, values[np.where(valid, group.value, 0)], unasked))

        return size_at


INT32_LANES = Int32Lanes()
