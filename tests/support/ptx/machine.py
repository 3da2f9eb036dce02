"""Thread blocks that run a kernel: lanes, barriers, and who runs next.

All lanes of a block that stand at the lowest instruction run it together, up to the next branch or
label. So lanes of a warp that took different ways meet again, and warps that do the same cost as
much as one. Lanes that wait at a barrier are passed over. Blocks of a cluster take turns, each for
as long as it can; clusters run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.ptx.lanes import DTYPE, WARP, Lanes
from support.ptx.memory import Barrier, GlobalMemory, SharedMemory
from support.ptx.parse import REGISTER_FILES, Program, PtxError

Run = Callable[[Lanes], None]
Gate = Callable[[Lanes], np.ndarray]  # which lanes, of all of the block, may pass

STEPS = 3_000_000  # of a block; after so many it is taken for a loop without end


@dataclass
class Section:
    """Instructions that run one after the other.

    Attributes:
      gate: what lanes wait for before it.
      end: index of the instruction after `body`, or of the branch or exit that ends it.
      target: of the branch; None where none ends it.
      leaves: whether lanes exit at the end.
      condition: which lanes do either; None for all.
    """

    body: list[tuple[int, Run]] = field(default_factory=list)
    gate: Gate | None = None
    end: int = 0
    target: int | None = None
    leaves: bool = False
    condition: Callable[[Lanes], Any] | None = None


@dataclass
class Kernel:
    """A kernel ready to run: sections by their first instruction."""

    program: Program
    sections: dict[int, Section]


class Cluster:
    """Blocks that see each other's shared memory.

    Attributes:
      events: counts whatever may let waiting lanes go on.
    """

    def __init__(self, launch: Launch, first: tuple[int, int, int]):
        self.launch, self.events = launch, 1
        x, y, z = launch.cluster
        self.arrived = self.generation = 0
        self.blocks = [
            Block(self, rank, (first[0] + i, first[1] + j, first[2] + k))
            for rank, (k, j, i) in enumerate(np.ndindex(z, y, x))
        ]

    def run(self) -> None:
        """Runs all blocks to their end.

        Raises:
          PtxError: lanes wait for what will never come, or did what they must not.
        """
        while True:
            moved = [block.run() for block in self.blocks]
            if not any(block.alive.any() for block in self.blocks):
                break
            if not any(moved):
                where = "; ".join(filter(None, (block.waiting() for block in self.blocks)))
                raise PtxError(f"nothing can go on: {where}")
        for block in self.blocks:
            if left := [barrier for barrier in block.barriers.values() if barrier.bytes]:
                raise PtxError(f"a block ended while bytes were under way to {len(left)} mbarriers")

    def arrive(self, lanes: int) -> None:
        """Counts lanes that have come to the cluster's barrier, or have left."""
        self.arrived += lanes
        if self.arrived >= sum(int(block.alive.sum()) for block in self.blocks):
            self.arrived, self.generation, self.events = 0, self.generation + 1, self.events + 1

    def shared(self, address: int) -> SharedMemory:
        """Returns the shared memory that an address is in."""
        rank = address >> 24
        if rank >= len(self.blocks):
            raise PtxError(f"shared memory at {address:#x} is of no block of the cluster")
        return self.blocks[rank].shared

    def barrier(self, address: int) -> Barrier:
        block = self.blocks[self.shared(address).rank]
        if address not in block.barriers:
            raise PtxError(f"no mbarrier was made at {address:#x}")
        return block.barriers[address]

    def arrive_at(self, address: int, count: int = 1, expected: int = 0, came: int = 0) -> None:
        """Arrives at an mbarrier, or reports bytes."""
        self.events += self.barrier(address).arrive(count, expected, came)


class Block:
    """One thread block."""

    def __init__(self, cluster: Cluster, rank: int, index: tuple[int, int, int]):
        launch = cluster.launch
        self.cluster, self.launch, self.rank, self.index = cluster, launch, rank, index
        self.threads = launch.threads
        self.shared = SharedMemory(rank, launch.smem_bytes)
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, list[int]] = {}  # of a named barrier: lanes that came, its generation
        self.stores: dict[int, list[list[Callable[[], None]]]] = {}  # a lane's groups, last is open
        self.alive = np.ones(self.threads, bool)
        self.at = np.zeros(self.threads, np.int64)  # each lane's next instruction
        self.seen = np.zeros(self.threads, np.int64)  # events when it began to wait
        self.ticket = np.full(self.threads, -1)  # of the generation of the barrier it came to
        self.cluster_ticket = np.full(self.threads, -1)
        self._files = {
            file: np.zeros((launch.kernel.program.registers[file], self.threads), DTYPE[file])
            for file in REGISTER_FILES
        }
        self._views: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._specials = self._special_registers()

    def views(self, lo: int, hi: int) -> dict[str, np.ndarray]:
        """Returns the registers of lanes by type: (registers, lanes) each."""
        if (lo, hi) not in self._views:
            by_size = {size: file for file, size in REGISTER_FILES.items()}
            views = {"pred": self._files["pred"][:, lo:hi]}
            for name, dtype in DTYPE.items():
                if name != "pred" and dtype.itemsize > 1:
                    views[name] = self._files[by_size[dtype.itemsize]].view(dtype)[:, lo:hi]
            self._views[lo, hi] = views
        return self._views[lo, hi]

    def value_of(self, name: str, lo: int, hi: int, cast: Any) -> Any:
        """Returns a special register of lanes, or the address that a name stands for."""
        if name in self._specials:
            value = self._specials[name]
            return value[lo:hi].astype(cast) if isinstance(value, np.ndarray) else cast(value)
        if name in self.launch.addresses:
            return cast(self.launch.addresses[name])
        if name.startswith("__dynamic_shmem__"):
            return cast(self.shared.base + SharedMemory.START)
        raise PtxError(f"unknown name {name}")

    def _special_registers(self) -> dict[str, Any]:
        tid, launch = np.arange(self.threads), self.launch
        values: dict[str, Any] = {
            "%tid.x": tid, "%laneid": tid % WARP, "%warpid": tid // WARP, "%tid.y": 0, "%tid.z": 0,
            "%ntid.x": self.threads, "%ntid.y": 1, "%ntid.z": 1, "%cluster_ctarank": self.rank,
        }  # fmt: skip
        for axis, i, n, c in zip("xyz", self.index, launch.grid, launch.cluster, strict=True):
            values |= {
                f"%ctaid.{axis}": i, f"%nctaid.{axis}": n, f"%cluster_ctaid.{axis}": i % c,
                f"%cluster_nctaid.{axis}": c, f"%clusterid.{axis}": i // c,
                f"%nclusterid.{axis}": n // c,
            }  # fmt: skip
        return values

    def run(self) -> bool:
        """Runs lanes until all wait or have left; returns whether any did something."""
        moved = False
        while True:
            ready = self.alive & (self.seen < self.cluster.events)
            if not ready.any():
                return moved
            at = int(self.at[ready].min())
            moved |= self._run_from(at, Lanes.of(self, ready & (self.at == at)))

    def _run_from(self, at: int, lanes: Lanes) -> bool:
        """Runs lanes up to a label, a branch or where they wait."""
        instructions = self.launch.kernel.program.instructions
        labels, moved, now = self.launch.kernel.program.labels, False, at
        while True:
            self.launch.steps += 1
            if self.launch.steps > STEPS:
                raise PtxError(f"no end after {STEPS} steps; {self.waiting()}")
            section = self.launch.kernel.sections[at]
            try:
                now = at
                if section.gate:
                    passing = section.gate(lanes)
                    if not passing.any():
                        return moved
                    lanes = Lanes.of(self, passing)
                moved = True
                for step in section.body:
                    now, run = step
                    run(lanes)
                now = section.end
                if section.leaves or section.target is not None:
                    self._leave(section, lanes)
                    return True
            except PtxError as error:
                raise PtxError(
                    f"block {self.index}, threads {lanes.lo} to {lanes.hi - 1}, at "
                    f"{instructions[now].text[:120]}: {error}"
                ) from error
            at = section.end
            if at in labels:
                self.at[lanes.running] = at
                return True

    def _leave(self, section: Section, lanes: Lanes) -> None:
        running = lanes.running
        self.at[running] = section.end + 1
        if section.condition:
            running[lanes.lo : lanes.hi] &= section.condition(lanes)
        if section.target is not None:
            self.at[running] = section.target
            return
        self.alive &= ~running
        self.cluster.events += 1
        self.cluster.arrive(0)
        for lane in np.flatnonzero(running):
            if any(self.stores.pop(int(lane), [])):
                raise PtxError(f"thread {lane} left before its stores had read shared memory")

    def wait(self, lanes: np.ndarray, at: int) -> None:
        """Passes over lanes until the next event."""
        self.at[lanes] = at
        self.seen[lanes] = self.cluster.events

    def waiting(self) -> str:
        """Says where lanes stand."""
        texts = []
        for at in np.unique(self.at[self.alive]):
            lanes = np.flatnonzero(self.alive & (self.at == at))
            text = self.launch.kernel.program.instructions[at].text[:70]
            texts.append(f"threads {lanes[0]} to {lanes[-1]} ({lanes.size}) at {text}")
        return f"block {self.index}: " + ", ".join(texts) if texts else ""


@dataclass
class Launch:
    """A launch of a kernel.

    Attributes:
      addresses: of parameters by name: what `ld.param` and `mov` find there.
      values: of parameters, by name; tensor maps by their address.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    threads: int
    smem_bytes: int
    memory: GlobalMemory
    addresses: dict[str, int]
    values: dict[str, int]
    maps: dict[int, Any]
    steps: int = 0

    def run(self) -> None:
        """Runs all clusters.

        Raises:
          PtxError: the kernel did what it must not.
        """
        x, y, z = self.cluster
        counts = [g // c for g, c in zip(self.grid[::-1], (z, y, x), strict=True)]
        with np.errstate(all="ignore"):
            for k, j, i in np.ndindex(*counts):
                self.steps = 0
                Cluster(self, (i * x, j * y, k * z)).run()
