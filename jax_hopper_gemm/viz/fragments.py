"""Fragments and staged tiles: the thread and the address of each of an epilogue's elements.

The tests compare this arithmetic with the layouts that the kernels' compiler makes.

Sources: PTX ISA, "stmatrix", and "Swizzling modes" of tensor maps; of registers see
`gemm/wgmma_fragment.py`.
"""

from __future__ import annotations

from typing import Any

from ..gemm.conversion import CHUNK, swizzled
from ..gemm.dtypes import DTYPES
from ..gemm.spec import GemmSpec
from ..gemm.wgmma_fragment import column_of, owner_of, row_of
from .canvas import cell, frame, plain_colour, subplots

WARP_COLOURS = ("#8ecae6", "#ffb703", "#95d5b2", "#e5989b")
ROWS = 64  # of a wgmma, and so of a staged tile
LINE = 128  # bytes of shared memory that one access can reach: 32 banks of 4 bytes


def draw_fragment(columns: int = 32) -> Any:
    """Draws the thread of a warpgroup that holds each element of a wgmma of 64 rows.

    Left: the whole tile with its warps and the values of thread 0. Right: a warp's first 16 rows
    and columns, element by element; T is the thread, v the number of the value.
    """
    figure, (whole, corner) = subplots(1, 2, (13, 7.5), width_ratios=[1, 1.6])
    for row in range(ROWS):
        for column in range(columns):
            thread, value = owner_of(row, column)
            colour = WARP_COLOURS[thread // 32] if thread else "#d62828"
            cell(whole, column, row, colour)
            if row < 16 and column < 16:
                cell(corner, column, row, colour, f"T{thread}\nv{value}")
    for warp in range(4):
        whole.text(columns + 0.5, 16 * warp + 8, f"warp {warp}", va="center")
    whole.set_title(f"64 x {columns}: a warp has 16 rows; red: thread 0")
    corner.set_title("warp 0, the first 16 columns")
    frame(whole, columns, ROWS)
    frame(corner, 16, 16)
    return figure


def draw_stmatrix(lane: int = 5, first_value: int = 0) -> Any:
    """Draws one stmatrix.x4 of warp 0: its 8x8 matrices, addresses, and one lane's values.

    Args:
      lane: the lane whose 8 values are shown in red.
      first_value: number of the first of them, a multiple of 8.
    """
    figure, axis = subplots(1, 1, (8.5, 7.5))
    addresses = [stmatrix_row(i, first_value) for i in range(32)]
    first_column = addresses[0][1]
    for row in range(16):
        for column in range(16):
            matrix = row // 8 + 2 * (column // 8)
            cell(axis, column, row, WARP_COLOURS[matrix])
    for value in range(first_value, first_value + 8):
        row, column = fragment_element(lane, value)
        cell(axis, column - first_column, row, "#d62828", f"v{value}")
    for giver, (row, column) in enumerate(addresses):
        x = -0.3 if column == first_column else 16.3
        side = "right" if x < 0 else "left"
        axis.text(x, row + 0.5, f"lane {giver}", ha=side, va="center", fontsize=8)
    for matrix in range(4):
        x, y = 8 * (matrix // 2) + 4, 8 * (matrix % 2) + 4
        axis.text(x, y, str(matrix), fontsize=40, alpha=0.25, ha="center", va="center")
    axis.set_title(f"four 8x8 matrices; beside each row, who gives its address\nred: lane {lane}")
    frame(axis, 16, 16)
    return figure


def draw_staged_tile(spec: GemmSpec, dtype: str = "bfloat16", rows: int = 16) -> Any:
    """Draws where the first rows of a staged tile lie in shared memory, by banks.

    A cell is 16 bytes of one row, a line 128 bytes: all 32 banks. The cells that the first 8x8
    matrix of an stmatrix writes are outlined. The second drawing is without the swizzle.
    """
    itemsize, swizzle = DTYPES[dtype].itemsize, spec.epi_box(dtype).swizzle
    per_row = min(spec.epi_tile_n * itemsize, swizzle) // CHUNK
    figure, axes = subplots(1, 2, (13, 5))
    for axis, width in zip(axes, (swizzle, CHUNK), strict=True):
        matrix = []
        for row in range(rows):
            for chunk in range(per_row):
                offset = row * swizzle + chunk * CHUNK
                if width == swizzle:
                    offset = staged_offset(row, chunk * CHUNK // itemsize, itemsize, swizzle)
                x, y = offset % LINE // CHUNK, offset // LINE
                in_matrix = row < 8 and chunk == 0
                if in_matrix:
                    matrix.append(offset)
                cell(axis, x, y, plain_colour(chunk), f"r{row} c{chunk}", bold=in_matrix)
        busiest = bank_conflicts(matrix, CHUNK)
        name = f"{swizzle}-byte swizzle" if width == swizzle else "no swizzle"
        axis.set_title(f"{name}: {busiest} access{'es' if busiest > 1 else ''} to the busiest bank")
        frame(axis, LINE // CHUNK, rows * swizzle // LINE, aspect="auto")
        labels = [f"{4 * i}-{4 * i + 3}" for i in range(LINE // CHUNK)]
        axis.set_xticks([i + 0.5 for i in range(LINE // CHUNK)], labels)
        axis.set_xlabel("banks")
    figure.suptitle(f"staged tile of 64 x {spec.epi_tile_n} {dtype}: row r, 16-byte chunk c")
    return figure


def fragment_element(thread: Any, value: Any) -> tuple[Any, Any]:
    """Returns (row, column) of accumulator `value` of `thread` (0 to 127) of an m64 wgmma."""
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
