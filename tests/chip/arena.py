"""Memory of products that are filled, run and checked together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from chip.problems import Trial
from chip.structs import ARRAY, CHECK, CHUNK, FILL, PHASES, REFERENCE, ROLES
from jax_hopper_gemm.launch.plan import LaunchPlan

_CHUNK = {FILL: 8192, REFERENCE: 256, CHECK: 4096}  # elements of a thread block


class Full(Exception):
    """The arena or the scratch memory has no room for another product."""


class Room:
    """Memory handed out from its start."""

    def __init__(self, address: int, nbytes: int):
        self.start = self.next = address
        self.end = address + nbytes

    def take(self, nbytes: int, aligned: int = 256, guard: int = 0) -> int:
        """Returns the address of so many bytes; Full: there are not as many."""
        address = -(-(self.next + guard) // aligned) * aligned
        if address + nbytes + guard > self.end:
            raise Full
        self.next = address + nbytes + guard
        return address


@dataclass
class Placed:
    """A product in memory.

    Attributes:
      plan: its launch.
      addresses, nbytes: of each buffer of the call, workspaces too; operands first.
      operands: how many of them.
      start, end: of all of them in the arena.
    """

    trial: Trial
    plan: LaunchPlan
    addresses: list[int]
    nbytes: list[int]
    operands: int
    start: int = 0
    end: int = 0


class Batch:
    """Products that are filled, run and checked together.

    Args:
      arena: memory of the products' arrays.
      scratch: memory of what the checker computes besides.
      tables: memory of what it is told.
    """

    def __init__(self, arena: Room, scratch: Room, tables: Room):
        self.arena, self.scratch, self.tables = arena, scratch, tables
        self.products: list[Placed] = []
        self.arrays: list[tuple] = []
        self.problems: list[tuple] = []
        self._staged: list[tuple[int, np.ndarray]] = []

    @contextmanager
    def unless_full(self) -> Iterator[None]:
        """Takes back what a product got within, where it raises Full."""
        rooms, lists = (self.arena, self.scratch, self.tables), (self.arrays, self._staged)
        nexts, lengths = [room.next for room in rooms], [len(items) for items in lists]
        try:
            yield
        except Full:
            for room, before in zip(rooms, nexts, strict=True):
                room.next = before
            for items, length in zip(lists, lengths, strict=True):
                del items[length:]
            raise

    def stage(self, table: np.ndarray) -> int:
        """Returns the address that a table will have."""
        table = np.ascontiguousarray(table)
        address = self.tables.take(table.nbytes, 16)
        self._staged.append((address, table))
        return address

    def staged(self) -> np.ndarray:
        """Returns the bytes of all tables, from the start of their memory."""
        start = self.tables.start
        found = np.zeros(self.tables.next - start, np.uint8)
        for address, table in self._staged:
            found[address - start : address - start + table.nbytes] = table.reshape(-1).view("u1")
        return found

    def chunks(self) -> list[np.ndarray]:
        """Returns what the thread blocks of each phase work on."""
        arrays = np.array(self.arrays, ARRAY)
        counts = arrays["extent"].prod(axis=1)
        chunks = []
        for phase in (FILL, REFERENCE, CHECK):
            roles = [i for i, role in enumerate(ROLES) if phase in PHASES[role]]
            chosen = np.flatnonzero(np.isin(arrays["role"], roles))
            size = _CHUNK[phase]
            pieces = -(-counts[chosen] // size)
            found = np.zeros(int(pieces.sum()), CHUNK)
            found["array"] = np.repeat(chosen, pieces)
            first = np.repeat(np.cumsum(pieces) - pieces, pieces)
            found["begin"] = (np.arange(len(found)) - first) * size
            found["end"] = np.minimum(found["begin"] + size, counts[found["array"]])
            chunks.append(found)
        return chunks
