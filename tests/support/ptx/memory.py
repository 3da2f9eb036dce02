"""Global and shared memory, in which every access out of place is an error."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from support.ptx.parse import PtxError

_SIZES = (1, 2, 4, 8)


class Memory:
    """Bytes from an address on.

    Attributes:
      base: address of the first byte.
      data: the bytes, a multiple of 16.
    """

    def __init__(self, what: str, base: int, data: np.ndarray):
        self.what, self.base, self.data = what, base, data
        self._views = {size: data.view(f"u{size}") for size in _SIZES}

    def check(self, addresses: np.ndarray, nbytes: int) -> None:
        """Raises a PtxError where one of `nbytes` from any of the addresses on is not there."""
        raise NotImplementedError

    def offsets(self, addresses: np.ndarray, nbytes: int, alignment: int) -> np.ndarray:
        """Returns the offsets into `data` of addresses that may be accessed."""
        self.check(addresses, nbytes)
        offsets = (addresses - addresses.dtype.type(self.base)).astype(np.int64)
        if (offsets & (alignment - 1)).any():
            at = addresses[(offsets & (alignment - 1)) != 0][0]
            raise PtxError(f"{self.what} at {int(at):#x} is no multiple of {alignment}")
        return offsets

    def load(self, addresses: np.ndarray, size: int, count: int) -> list[np.ndarray]:
        """Returns `count` arrays of the bits of neighbours of `size` bytes."""
        at = self.offsets(addresses, size * count, size * count) // size
        return [self._views[size][at + i] for i in range(count)]

    def store(self, addresses: np.ndarray, values: list[Any]) -> None:
        size = values[0].dtype.itemsize
        at = self.offsets(addresses, size * len(values), size * len(values)) // size
        for i, value in enumerate(values):
            self._views[size][at + i] = value.view(f"u{size}")

    def rows(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Returns where the bytes of rows are in `data`: (rows, nbytes)."""
        return self.offsets(addresses, nbytes, 1)[:, None] + np.arange(nbytes)


class GlobalMemory(Memory):
    """The GPU's memory: buffers far apart."""

    GAP = 1 << 12

    def __init__(self, nbytes: int = 1 << 30):
        super().__init__("global memory", 0x7F00_0000_0000, np.zeros(nbytes, np.uint8))
        self._starts: list[int] = []
        self._ends: list[int] = []

    def allocate(self, nbytes: int) -> int:
        """Returns the address of a new buffer, a multiple of 256."""
        start = (self._ends[-1] if self._ends else self.base) + self.GAP
        start += -start % 256
        if start + nbytes > self.base + self.data.size:
            raise PtxError(f"{nbytes} bytes more do not fit in global memory")
        self._starts.append(start)
        self._ends.append(start + nbytes)
        return start

    def buffer(self, address: int, nbytes: int) -> np.ndarray:
        return self.data[address - self.base :][:nbytes]

    def check(self, addresses: np.ndarray, nbytes: int) -> None:
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        i = bisect_right(self._starts, low) - 1
        if i >= 0 and high <= self._ends[i]:
            return
        starts, ends = np.array(self._starts, np.uint64), np.array(self._ends, np.uint64)
        own = np.searchsorted(starts, addresses.astype(np.uint64), "right") - 1
        outside = (own < 0) | (addresses.astype(np.uint64) + np.uint64(nbytes) > ends[own])
        if outside.any():
            at = int(addresses[outside][0])
            behind = int(own[outside][0])
            where = f"{at - self._ends[behind]} bytes behind buffer {behind}" if behind >= 0 else ""
            raise PtxError(f"{nbytes} bytes at {at:#x} are in no buffer; they are {where}")


class SharedMemory(Memory):
    """One block's shared memory. The highest byte of an address is the block's rank."""

    START = 1024  # what is below belongs to the system

    def __init__(self, rank: int, nbytes: int):
        whole = np.full(self.START + nbytes + -nbytes % 16, 0xFF, np.uint8)
        super().__init__("shared memory", rank << 24, whole)
        self.rank, self.end = rank, self.START + nbytes
        self.chunks = whole[: whole.size // 16 * 16].view(np.uint64).reshape(-1, 2)

    def check(self, addresses: np.ndarray, nbytes: int) -> None:
        low, high = int(addresses.min()) - self.base, int(addresses.max()) - self.base
        if low < self.START or high + nbytes > self.end:
            raise PtxError(
                f"{nbytes} bytes of shared memory from {low} to {high} are not all between "
                f"{self.START} and {self.end} of block {self.rank}"
            )


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were expected came."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def arrive(self, count: int = 1, expected: int = 0, came: int = 0) -> bool:
        """Returns whether the phase has ended."""
        self.pending -= count
        self.bytes += expected - came
        if self.pending < 0:
            raise PtxError(f"more than {self.count} arrived at an mbarrier")
        if self.pending or self.bytes:
            return False
        self.pending, self.phase = self.count, self.phase ^ 1
        return True
