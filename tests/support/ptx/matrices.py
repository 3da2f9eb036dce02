"""Instructions of a warp or a warpgroup on matrices: `wgmma`, `ldmatrix`, `stmatrix`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from support.ptx.lanes import WARP, Lanes, reader
from support.ptx.memory import SharedMemory
from support.ptx.parse import Address, Instruction, PtxError, Reg, Vector
from support.ptx.tensor import swizzled

WARPGROUP = 4 * WARP
_SWIZZLES = (0, 128, 64, 32)  # by the two highest bits of a descriptor
_LANE = np.arange(WARP)


def multiply(instruction: Instruction) -> Callable[[Lanes], None]:
    """Returns what a `wgmma.mma_async` does. It is done at once, not when it is waited for."""
    shape = re.search(r"m64n(\d+)k(\d+)\.(?:satfinite\.)?(f32|s32)\.(\w+)\.(\w+)$", instruction.op)
    sums, a, b, scale, *flags = instruction.operands
    if not shape or not isinstance(sums, Vector):
        raise PtxError(f"unknown instruction {instruction.op}")
    n, dtype, of_a, of_b = int(shape[1]), shape[3], shape[4], shape[5]
    registers = np.array([x.row for x in sums.items if isinstance(x, Reg)])
    assert registers.size == n // 2, instruction.text
    numbers = [getattr(flag, "bits", None) for flag in flags]
    negate, majors = numbers[:2], numbers[2:]
    if negate not in ([], [1, 1]):
        raise PtxError(f"a negated operand: {instruction.text}")
    across_b = bool(majors[-1]) if majors else False
    across_a = len(majors) == 2 and bool(majors[0])
    added = reader(scale, "pred")
    of_registers = isinstance(a, Vector)
    left_of = [reader(x, "u32") for x in a.items] if of_registers else [reader(a, "u64")]
    read_b = reader(b, "u64")

    def run(g: Lanes) -> None:
        file = g.views[dtype]
        for first in range(0, g.hi - g.lo, WARPGROUP):
            lanes = slice(first, first + WARPGROUP)
            if first + WARPGROUP > g.hi - g.lo:
                raise PtxError("part of a warpgroup runs wgmma")

            def uniform(read: Any, lanes: slice = lanes) -> int:
                values = np.broadcast_to(read(g), g.hi - g.lo)[lanes]
                if (values != values[0]).any():
                    raise PtxError("lanes of a warpgroup give wgmma different operands")
                return int(values[0])

            shared = g.block.shared
            if of_registers:
                left = _of_registers([read(g)[lanes] for read in left_of])
            else:
                left = _operand(shared, uniform(left_of[0]), 64, across_a)
            right = _operand(shared, uniform(read_b), n, across_b)
            product = _numbers(left, of_a) @ _numbers(right, of_b).T
            if uniform(added):
                old = _matrix(file[registers, lanes])
                product = _sum(old, product)
            file[registers, lanes] = _fragments(product.astype(file.dtype))

    return run


def _sum(old: np.ndarray, product: np.ndarray) -> np.ndarray:
    if old.dtype.kind == "f":
        return old + product
    limits = np.iinfo(np.int32)
    return np.clip(old.astype(np.int64) + product.astype(np.int64), limits.min, limits.max)


def _matrix(fragments: np.ndarray) -> np.ndarray:
    """Returns the (64, N) sums that (N / 2, 128) registers of lanes hold."""
    parts = fragments.reshape(-1, 2, 2, 4, 8, 4)  # columns / 8, half of rows, pair; warp, row, pair
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(64, -1)


def _fragments(matrix: np.ndarray) -> np.ndarray:
    parts = matrix.reshape(4, 2, 8, -1, 4, 2)
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(-1, WARPGROUP)


def _of_registers(registers: list[np.ndarray]) -> np.ndarray:
    """Returns the 64 rows of 32 bytes of A that four registers of lanes hold."""
    parts = np.stack(registers).reshape(2, 2, 4, 8, 4)  # half of K, of rows; warp, row, four bytes
    rows = parts.transpose(2, 1, 3, 0, 4).reshape(64, 8)
    return np.ascontiguousarray(rows).view(np.uint8)


def _operand(shared: SharedMemory, descriptor: int, rows: int, across: bool) -> np.ndarray:
    """Returns `rows` rows of 32 bytes along K, as a descriptor says where they are.

    Args:
      across: whether neighbours in memory are neighbours along the rows, of 16 bits.
    """
    start = (descriptor & 0x3FFF) << 4
    leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (16, 32))
    if descriptor >> 49 & 7:
        raise PtxError("a descriptor with a base offset")
    places = swizzled(start + _chunks(rows, across, leading, stride, descriptor >> 62),
                      _SWIZZLES[descriptor >> 62])  # fmt: skip
    shared.check(places.reshape(-1) + shared.base, 16)
    chunks = shared.chunks[places >> 4]  # (.., 2) words of 8 bytes
    if not across:
        return chunks.reshape(rows, 4).view(np.uint8)
    halves = chunks.view(np.uint16)  # (K, rows / 8, 8)
    return np.ascontiguousarray(halves.reshape(16, rows).T).view(np.uint8)


@lru_cache
def _chunks(rows: int, across: bool, leading: int, stride: int, swizzle: int) -> np.ndarray:
    """Returns where each 16 bytes of an operand lie before swizzling.

    CuTe's canonical layouts (cute/arch/mma_sm90_desc.hpp): (rows, 2) along K, else (K, rows / 8).
    """
    width = (_SWIZZLES[swizzle] or 16) // 16  # chunks of a swizzled line
    if not across:
        row, k = np.arange(rows)[:, None], np.arange(2)
        return row % 8 * 16 * width + row // 8 * stride + k * (leading if width == 1 else 16)
    k, chunk = np.arange(16)[:, None], np.arange(rows // 8)
    if width == 1:
        return k % 8 * 16 + k // 8 * leading + chunk * stride
    along = chunk % width * 16 + chunk // width * leading
    return along + k % 8 * 16 * width + k // 8 * stride


def _numbers(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the numbers in rows of 32 bytes as float32; products of integers are exact in it."""
    if dtype == "bf16":
        return (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "tf32":  # the tensor cores do not read the other bits
        return (rows.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return rows.view(_DTYPES[dtype]).astype(np.float32)


_DTYPES: dict[str, Any] = {
    "f16": np.float16, "s8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def move_matrices(instruction: Instruction) -> Callable[[Lanes], None]:
    """Returns what an `ldmatrix` or `stmatrix` of 8 x 8 matrices of 16 bits does."""
    kind, _, _, shape, *rest = instruction.op.split(".")
    loads = kind == "ldmatrix"
    registers, address = instruction.operands if loads else instruction.operands[::-1]
    if shape != "m8n8" or not isinstance(registers, Vector) or not isinstance(address, Address):
        raise PtxError(f"unknown instruction {instruction.text}")
    indices = [x.row for x in registers.items if isinstance(x, Reg)]
    read, transposed, offset = reader(address.base, "u32"), "trans" in rest, address.offset

    def run(g: Lanes) -> None:
        shared, values = g.block.shared, g.views["u32"]
        warps = (read(g) + np.uint32(offset)).reshape(-1, WARP)
        for matrix, register in enumerate(indices):
            rows = warps[:, 8 * matrix : 8 * matrix + 8]  # addresses of 16 bytes
            shared.offsets(rows.reshape(-1), 16, 16)
            if transposed:
                places = rows[:, _LANE % 4 * 2 + np.arange(2)[:, None]] + (_LANE // 4 * 2)
            else:
                pair = np.arange(2)[:, None] * 2
                places = rows[:, _LANE // 4][:, None] + (_LANE % 4 * 4 + pair)
            places = places.astype(np.uint32)  # (warps, 2, lanes)
            own = values[register].reshape(-1, 1, WARP)
            if loads:
                (halves,) = shared.load(places, 2, 1)
                wide = halves.astype(np.uint32)
                values[register] = (wide[:, 0] | wide[:, 1] << np.uint32(16)).reshape(-1)
            else:
                halves = own >> np.array([[0], [16]], np.uint32)
                shared.store(places, [halves.astype(np.uint16)])

    return run
