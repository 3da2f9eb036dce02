"""Copies of boxes between global and shared memory, as tensor maps describe them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from support.ptx.memory import Memory, SharedMemory
from support.ptx.parse import PtxError

from jax_hopper_gemm.gemm.dtypes import DTYPES
from jax_hopper_gemm.launch.plan import TensorMap


@dataclass(frozen=True)
class Box:
    """What one copy moves: the part of a box that lies inside its tensor.

    Attributes:
      addresses: of the parts' rows in global memory.
      rows: which rows of the box they are.
      first: the byte of a row of the box at which each part begins.
      nbytes: of each part.
    """

    addresses: np.ndarray
    rows: np.ndarray
    first: int
    nbytes: int


class Map:
    """A tensor map over a buffer.

    Raises:
      PtxError: the CUDA driver would refuse it.
    """

    def __init__(self, param: TensorMap, address: int):
        row = DTYPES[param.dtype]
        self.param, self.start, self.itemsize = param, address + param.offset, row.itemsize
        self.strides = (row.itemsize, *param.strides)
        self.row_bytes = param.box[0] * row.itemsize
        self.nbytes = self.row_bytes * int(np.prod(param.box[1:]))
        reasons = {
            "its address": self.start % 16, "a stride": any(s % 16 for s in param.strides),
            "the box's rows": self.row_bytes % 16, "a box": max(param.box) > 256,
            "an extent": min(param.dims) < 1 or max(param.dims) > 1 << 32,
            "the swizzle": param.swizzle and self.row_bytes > param.swizzle,
        }  # fmt: skip
        if wrong := [name for name, reason in reasons.items() if reason]:
            raise PtxError(f"{param}: {', '.join(wrong)} cannot be encoded")

    def box(self, coords: list[int]) -> Box | None:
        """Returns what there is of the box at `coords`; None if all of it is outside."""
        p = self.param
        if len(coords) != len(p.dims):
            raise PtxError(f"{len(coords)} coordinates for {p}")
        lows = [max(0, -c) for c in coords]
        highs = [min(b, d - c) for b, d, c in zip(p.box, p.dims, coords, strict=True)]
        if any(low >= high for low, high in zip(lows, highs, strict=True)):
            return None
        rows, pitch = np.zeros(1, np.int64), 1
        addresses = np.full(1, self.start, np.uint64)  # sums are modulo 2**64
        for c, low, high, stride, extent in zip(
            coords[1:], lows[1:], highs[1:], self.strides[1:], p.box[1:], strict=True
        ):
            within = np.arange(low, high)
            steps = (within + c).astype(np.uint64) * np.uint64(stride)
            addresses = (steps[:, None] + addresses).reshape(-1)
            rows = (within[:, None] * pitch + rows).reshape(-1)
            pitch *= extent
        first = (coords[0] + lows[0]) * self.itemsize
        return Box(
            addresses + np.uint64(first % (1 << 64)),
            rows,
            lows[0] * self.itemsize,
            (highs[0] - lows[0]) * self.itemsize,
        )

    def places(self, shared: SharedMemory, address: int) -> np.ndarray:
        """Returns where the box's bytes are in shared memory: (rows, bytes of a row)."""
        shared.check(np.array([address]), self.nbytes)
        swizzle = self.param.swizzle
        if address % (8 * swizzle or 128) and self.row_bytes == swizzle:
            raise PtxError(f"a box swizzled by {swizzle} bytes begins at {address:#x}")
        if swizzle and self.row_bytes != swizzle:
            raise PtxError(f"rows of {self.row_bytes} bytes are swizzled by {swizzle}")
        linear = address - shared.base + np.arange(self.nbytes)
        return swizzled(linear, swizzle).reshape(-1, self.row_bytes)


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """Returns addresses in shared memory with the bits exchanged that a swizzle exchanges."""
    return addresses ^ ((addresses >> 3) & (max(swizzle, 16) - 16))


def load(tensor: Map, coords: list[int], source: Memory, to: SharedMemory, address: int) -> None:
    """Copies a box into shared memory, zeros where it is outside of the tensor."""
    places = tensor.places(to, address)
    to.data[places] = 0
    if box := tensor.box(coords):
        values = source.data[source.rows(box.addresses, box.nbytes)]
        if tensor.param.rounds:
            values = _rounded_to_tf32(values)
        to.data[places[box.rows, box.first : box.first + box.nbytes]] = values


def store(tensor: Map, coords: list[int], source: SharedMemory, address: int, to: Memory) -> None:
    """Copies what is inside the tensor of a box from shared memory."""
    places = tensor.places(source, address)
    if box := tensor.box(coords):
        if box.nbytes % 16:
            raise PtxError(
                f"TMA stores rows of {box.nbytes} bytes and what follows, up to a multiple of 16"
            )
        values = source.data[places[box.rows, box.first : box.first + box.nbytes]]
        to.data[to.rows(box.addresses, box.nbytes)] = values


def _rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """Returns bytes of float32 numbers with 10 bits behind the point, half of one rounded up."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    finite = (bits & 0x7F800000) != 0x7F800000
    return np.where(finite, (bits + 0x1000) & 0xFFFFE000, bits).astype(np.uint32).view(np.uint8)
