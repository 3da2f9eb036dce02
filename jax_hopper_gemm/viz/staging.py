"""The places of an epilogue's elements: registers of a warpgroup, bytes of a staged tile.

The tests compare this arithmetic with the layouts that the kernels' compiler makes.

Sources: PTX ISA, "stmatrix", and "Swizzling modes" of tensor maps; of registers see
`gemm/wgmma_fragment.py`.
"""

from __future__ import annotations

from typing import Any

from ..gemm.wgmma_fragment import column_of, row_of

ROWS = 64  # of a wgmma, and so of a staged tile
CHUNK = 16  # bytes that stay together under a swizzle; also a row of an 8x8 matrix of stmatrix
LINE = 128  # bytes of shared memory that one access can reach: 32 banks of 4 bytes


def fragment_element(thread: Any, value: Any) -> tuple[Any, Any]:
    """Returns (row, column) of a thread's `value`-th accumulator of an m64 wgmma.

    A warp has 16 rows. In each 8x8 matrix of them a thread has two neighbours of one row; four
    of its values, then, fill a block of 16 rows and 8 columns, and the next four the next block.

    Args:
      thread: 0 to 127, in the warpgroup.
      value: 0 to N / 2 - 1.
    """
    return row_of(thread, value), column_of(thread, value)


def stmatrix_row(lane: Any, first_value: Any = 0) -> tuple[Any, Any]:
    """Returns (row, column) of the 8 elements whose address a lane passes to an stmatrix.x4.

    The instruction stores 16x16 elements of 16 bits: from each lane the accumulators `first_value`
    to `first_value + 7`, a pair to each of four 8x8 matrices. Lanes 8i to 8i + 7 pass the
    addresses of matrix i's rows.

    Args:
      lane: 0 to 31.
      first_value: a multiple of 8.

    Returns:
      row of the warp's 16; column of the wgmma, a multiple of 8.
    """
    return lane % 16, first_value * 2 + lane // 16 * 8


def swizzled(offset: Any, swizzle: Any) -> Any:
    """Returns the place of a byte in a buffer that TMA swizzles.

    Chunks of 16 bytes change places within each `swizzle` bytes: bits 4, 5, 6 of the offset (as
    many as the swizzle has, of 32, 64, 128 bytes) are XORed with bits 7, 8, 9.
    """
    return offset ^ (offset >> 3 & (swizzle - CHUNK))


def staged_offset(row: Any, column: Any, itemsize: Any, swizzle: Any) -> Any:
    """Returns the offset in bytes of an element of a staged tile.

    Boxes of `ROWS` rows of `swizzle` bytes follow each other along the columns.
    """
    in_row = column * itemsize
    box, byte = in_row // swizzle, in_row % swizzle
    return swizzled((box * ROWS + row) * swizzle + byte, swizzle)


def bank_conflicts(offsets: list[int], nbytes: int) -> int:
    """Returns how many words one access reads from its busiest bank; 1 is free of conflicts.

    Args:
      offsets: offsets in bytes of the threads' words. Equal words count once.
      nbytes: size of each thread's access.
    """
    words = {word for offset in offsets for word in range(offset // 4, (offset + nbytes) // 4)}
    banks = [word % (LINE // 4) for word in words]
    return max(map(banks.count, banks))
