"""What lanes wait for before an instruction: the rest of their warp, a barrier, an mbarrier."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from support.ptx.lanes import WARP, Lanes, reader
from support.ptx.machine import Gate
from support.ptx.parse import Address, Instruction, PtxError

_OF_WARPS = (
    "elect.", "shfl.", "vote.", "wgmma.", "ldmatrix.", "stmatrix.", "setmaxnreg.", "bar.warp.",
)  # fmt: skip
ONLY_WAIT = (
    "bar.sync", "bar.arrive", "bar.warp.sync", "barrier.sync", "barrier.arrive",
    "barrier.cluster.arrive", "barrier.cluster.arrive.relaxed", "barrier.cluster.wait",
    "barrier.cluster.arrive.aligned", "barrier.cluster.wait.aligned",
    "barrier.cluster.arrive.relaxed.aligned",
)  # fmt: skip


def gate_of(instruction: Instruction, at: int) -> Gate | None:
    """Returns what lanes wait for before the instruction of index `at`; None: nothing."""
    op = instruction.op
    if op.startswith(_OF_WARPS):
        return partial(_converged, at=at)
    if op.startswith("mbarrier.try_wait"):
        if ".parity" not in op:
            raise PtxError(f"unknown instruction {op}")
        return _phase(instruction, at)
    if op.startswith("barrier.cluster.arrive"):
        return partial(_cluster_arrive, at=at)
    if op.startswith("barrier.cluster.wait"):
        return partial(_cluster_wait, at=at)
    if op.startswith(("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive")):
        return _named(instruction, at)
    return None


def _split(lanes: Lanes, running: np.ndarray, passing: np.ndarray, at: int) -> np.ndarray:
    """Returns the lanes that pass; the others wait."""
    lanes.block.wait(running & ~passing, at)
    return passing


def _converged(lanes: Lanes, at: int) -> np.ndarray:
    """Whole warps pass, those that others of their warp have waited for too."""
    running, block = lanes.running, lanes.block
    if lanes.mask is True and lanes.lo % WARP == lanes.hi % WARP == 0:
        return running
    here = running | (block.alive & (block.at == at))
    touched = running.reshape(-1, WARP).any(1)
    whole = touched & ~(block.alive & ~here).reshape(-1, WARP).any(1)
    return _split(lanes, running, here & np.repeat(whole, WARP), at)


def _phase(instruction: Instruction, at: int) -> Gate:
    _, address, parity = instruction.operands[:3]
    assert isinstance(address, Address)
    base, read, offset = reader(address.base, "u32"), reader(parity, "u32"), address.offset

    def gate(lanes: Lanes) -> np.ndarray:
        running = lanes.running
        passing = np.zeros_like(running)
        cluster = lanes.block.cluster
        over: dict[tuple[int, int], bool] = {}
        for lane, place, phase in lanes.each(base(lanes), read(lanes)):
            if (place, phase) not in over:
                over[place, phase] = cluster.barrier(place + offset).phase != phase
            passing[lane] = over[place, phase]
        return _split(lanes, running, passing, at)

    return gate


def _named(instruction: Instruction, at: int) -> Gate:
    number, *count = (reader(operand, "u32") for operand in instruction.operands)
    waits = instruction.op.startswith(("bar.sync", "barrier.sync"))

    def gate(lanes: Lanes) -> np.ndarray:
        passing, block = _converged(lanes, at), lanes.block
        if not passing.any():
            return passing
        lanes = Lanes.of(block, passing)
        expected: Any = count[0](lanes) if count else block.threads
        own = lanes.each(number(lanes), expected)
        for lane, bar, threads in own:
            state = block.named.setdefault(bar, [0, 0])
            if block.ticket[lane] >= 0:
                continue
            block.ticket[lane] = state[1]
            state[0] += 1
            if state[0] == threads:
                block.named[bar] = [0, state[1] + 1]
                block.cluster.events += 1
        over = passing.copy()
        for lane, bar, _ in own:
            over[lane] = not waits or block.ticket[lane] < block.named[bar][1]
        block.ticket[over] = -1
        return _split(lanes, passing, over, at)

    return gate


def _cluster_arrive(lanes: Lanes, at: int) -> np.ndarray:
    passing, block = _converged(lanes, at), lanes.block
    new = passing & (block.cluster_ticket < 0)
    block.cluster_ticket[new] = block.cluster.generation
    block.cluster.arrive(int(new.sum()))
    return passing


def _cluster_wait(lanes: Lanes, at: int) -> np.ndarray:
    passing, block = _converged(lanes, at), lanes.block
    over = passing & (block.cluster_ticket < block.cluster.generation)
    block.cluster_ticket[over] = -1
    return _split(lanes, passing, over, at)
