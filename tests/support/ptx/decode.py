"""Instructions as Python functions: each is decoded once and run often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.ptx import accesses, gates
from support.ptx.arithmetic import function_of
from support.ptx.lanes import DTYPE, WARP, Lanes, Read, reader, writer
from support.ptx.machine import Kernel, Run, Section
from support.ptx.matrices import move_matrices, multiply
from support.ptx.parse import Imm, Instruction, Program, PtxError, Vector

# What orders memory or asks for registers does nothing here: memory is sequential. So does what
# waits for wgmma, which is done at once.
_NOTHING = (
    "fence.", "membar.", "prefetch.", "setmaxnreg.", "wgmma.fence", "wgmma.commit_group",
    "wgmma.wait_group", "cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all",
    "griddepcontrol.",
)  # fmt: skip


def decode(program: Program) -> Kernel:
    """Returns a kernel ready to run.

    Raises:
      PtxError: an instruction is unknown; it says which.
    """
    sections: dict[int, Section] = {}
    instructions = program.instructions
    start, section = 0, Section()
    for i, instruction in enumerate(instructions):
        gate = gates.gate_of(instruction, i)
        if i in program.labels or gate:
            if i > start:
                section.end = i
                sections[start] = section
            start, section = i, Section(gate=gate)
        if instruction.op in ("bra", "ret", "exit"):
            section.end = i
            section.leaves = instruction.op != "bra"
            section.target = None if section.leaves else instruction.target
            section.condition = _guard(instruction)
            sections[start] = section
            start, section = i + 1, Section()
            continue
        try:
            run = _guarded(instruction, gate is not None)
        except (PtxError, ValueError, TypeError, AssertionError) as error:
            raise PtxError(f"cannot decode {instruction.text}: {error}") from error
        if run:
            section.body.append((i, run))
    return Kernel(program, sections)


def _guard(instruction: Instruction) -> Read | None:
    if instruction.guard is None:
        return None
    read = reader(instruction.guard, "pred")
    return (lambda g: ~read(g)) if instruction.negated else read


def _guarded(instruction: Instruction, gated: bool) -> Run | None:
    run, condition = _run_of(instruction), _guard(instruction)
    if condition is None or run is None:
        return run
    if gated:
        raise PtxError("some lanes of a warp are to run what all must")

    def guarded(g: Lanes) -> None:
        if some := g.where(condition(g)):
            run(some)

    return guarded


def _run_of(instruction: Instruction) -> Run | None:
    op, operands = instruction.op, instruction.operands
    if op.startswith(_NOTHING) or op in gates.ONLY_WAIT:
        return None
    if found := function_of(op):
        return _computed(found[0], found[1], operands)
    stem = op.partition(".")[0]
    if op.startswith("wgmma.mma_async."):
        return multiply(instruction)
    if op.startswith("cp.async.bulk"):
        return accesses.bulk(instruction)
    if op.startswith("cp.async."):
        return accesses.copy_16(instruction)
    if stem not in _OTHERS:
        raise PtxError(f"unknown instruction {op}")
    return _OTHERS[stem](instruction)


def _computed(function: Callable[..., Any], types: list[str], operands: tuple) -> Run:
    write = writer(operands[0])
    types = types + [types[-1]] * (len(operands) - 1 - len(types))
    reads = [reader(x, t) for x, t in zip(operands[1:], types, strict=False)]
    if len(reads) == 1:
        (one,) = reads
        return lambda g: write(g, function(one(g)))
    if len(reads) == 2:
        a, b = reads
        return lambda g: write(g, function(a(g), b(g)))
    return lambda g: write(g, function(*(read(g) for read in reads)))


def _mov(instruction: Instruction) -> Run:
    to, source = instruction.operands
    if isinstance(to, Vector):
        return _unpack(to, source, instruction.dtype)
    write = writer(to)
    if not isinstance(source, Vector):
        read = reader(source, instruction.dtype)
        return lambda g: write(g, read(g))
    wide = DTYPE[instruction.dtype]
    part = 8 * wide.itemsize // len(source.items)
    reads = [reader(x, f"b{part}") for x in source.items]

    def pack(g: Lanes) -> None:
        value = 0
        for i, read in enumerate(reads):
            value = value | read(g).astype(wide) << wide.type(part * i)
        write(g, value)

    return pack


def _unpack(to: Vector, source: Any, dtype: str) -> Run:
    bits = 8 * DTYPE[dtype].itemsize // len(to.items)
    read, writes = reader(source, f"b{8 * DTYPE[dtype].itemsize}"), [writer(x) for x in to.items]

    def unpack(g: Lanes) -> None:
        value = read(g)
        for i, write in enumerate(writes):
            write(g, (value >> value.dtype.type(bits * i)).astype(f"u{bits // 8}"))

    return unpack


def _selp(instruction: Instruction) -> Run:
    to, *others = instruction.operands
    write, dtype = writer(to), instruction.dtype
    a, b, p = (reader(x, t) for x, t in zip(others, (dtype, dtype, "pred"), strict=True))
    return lambda g: write(g, np.where(p(g), a(g), b(g)))


def _same_address(instruction: Instruction) -> Run:
    """`cvta`: addresses of all spaces are the same here."""
    write, read = writer(instruction.operands[0]), reader(instruction.operands[1], "u64")
    return lambda g: write(g, read(g))


def _mapa(instruction: Instruction) -> Run:
    to, address, rank = instruction.operands
    write, read, block = writer(to), reader(address, "u32"), reader(rank, "u32")
    return lambda g: write(g, read(g) & np.uint32(0xFFFFFF) | block(g) << np.uint32(24))


def _elect(instruction: Instruction) -> Run:
    (both, _) = instruction.operands
    assert isinstance(both, Vector)
    to, elected = (writer(x) for x in both.items)

    def run(g: Lanes) -> None:
        lane = np.arange(g.lo, g.hi) % WARP
        to(g, np.zeros(lane.size, np.uint32))
        elected(g, lane == 0)

    return run


def _shfl(instruction: Instruction) -> Run:
    mode, dtype = instruction.op.split(".")[2:]
    to, value, by, clamp, _ = instruction.operands
    if not isinstance(clamp, Imm) or clamp.bits != (0 if mode == "up" else 31):
        raise PtxError("only whole warps are shuffled")
    write, read, step = writer(to), reader(value, dtype), reader(by, "u32")

    def run(g: Lanes) -> None:
        lane = np.arange(g.hi - g.lo)
        own, by = lane % WARP, np.broadcast_to(step(g), lane.size).astype(np.int64)
        source = {"idx": by % WARP, "bfly": own ^ by, "up": own - by, "down": own + by}[mode]
        source = np.where((source < 0) | (source >= WARP), own, source)
        write(g, np.broadcast_to(read(g), lane.size)[lane - own + source])

    return run


def _vote(instruction: Instruction) -> Run:
    mode = instruction.op.split(".")[2]
    write, read = writer(instruction.operands[0]), reader(instruction.operands[1], "pred")

    def run(g: Lanes) -> None:
        votes = np.broadcast_to(read(g), g.hi - g.lo).reshape(-1, WARP)
        if mode == "ballot":
            found = (votes.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
            found = found.astype(np.uint32)
        else:
            found = {"any": votes.any, "all": votes.all}[mode](1)
        write(g, np.repeat(found, WARP))

    return run


_OTHERS: dict[str, Callable[[Instruction], Run | None]] = {
    "mov": _mov, "selp": _selp, "cvta": _same_address, "mapa": _mapa, "elect": _elect,
    "shfl": _shfl, "vote": _vote, "ld": accesses.ld, "st": accesses.st,
    "atom": accesses.atom, "red": accesses.atom, "mbarrier": accesses.mbarrier,
    "ldmatrix": move_matrices, "stmatrix": move_matrices,
}  # fmt: skip
