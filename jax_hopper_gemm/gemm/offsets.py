"""64-bit offsets in device memory, of what a kernel reads or writes without TMA.

The device traces this arithmetic, as it does that of `raster.py`; it also runs on Python's
integers, so tests prove on the CPU that nothing wraps around. Numbers are int32 where nothing else
is said; `widen` converts one to 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


def element_offset(index: Sequence[Any], extents: Sequence[Any], widen: Callable) -> Any:
    """Returns the elements, 64 bits, before `index`; `extents` are of all axes but the first."""
    offset = widen(index[0])
    for i, extent in zip(index[1:], extents, strict=True):
        offset = offset * extent + i
    return offset


def row_address(address: Any, row: Any, row_bytes: Any, widen: Callable) -> Any:
    """Returns the 64-bit address in a row of what lies at `address` in row 0.

    One instruction on the device, which multiplies 32 bits by 32 and adds 64; or two where ptxas
    computes a distance ahead of a loop.
    """
    return address + widen(row) * widen(row_bytes)


class ZeroRows(NamedTuple):
    """A batch of matrices as rows that are filled with zeros, in vectors of 16 bytes."""

    rows: Any  # of each matrix
    vectors: Any  # of each row
    row_stride: Any  # vectors between neighbouring rows
    matrix_stride: Any  # vectors between matrices

    def parts_of_row(self, size: int) -> Any:
        """Returns how many parts of at most `size` vectors a row has."""
        return (self.vectors + (size - 1)) // size


def vectors_of_part(
    zeros: ZeroRows, parts_of_row: Any, size: int, part: Any, widen: Callable, minimum: Callable
) -> tuple[Any, Any, Any]:
    """Returns (start, first, end) of a `group_search.Part`: where its row starts, in vectors of 64
    bits, and which vectors of it, counted from there. `parts_of_row` is `zeros.parts_of_row(size)`.
    """
    row = part.part // parts_of_row
    first = (part.part - row * parts_of_row) * size
    end = minimum(first + size, zeros.vectors)
    start = widen(part.matrix) * zeros.matrix_stride + widen(row) * zeros.row_stride
    return start, first, end
