"""Instructions that read or write memory, one by one or in bulk, and mbarriers."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.ptx import tensor
from support.ptx.lanes import DTYPE, Lanes, Read, reader, writer
from support.ptx.machine import Run
from support.ptx.memory import Barrier
from support.ptx.parse import Address, Imm, Instruction, Name, PtxError, Reg, Vector


def _address(operand: Any, wide: bool) -> Read:
    assert isinstance(operand, Address)
    dtype = "u64" if wide else "u32"
    read, offset = reader(operand.base, dtype), DTYPE[dtype].type(operand.offset & 0xFFFFFFFF)
    if operand.offset < 0:
        offset = np.array(operand.offset, "i8").view("u8").astype(DTYPE[dtype])[()]
    return lambda g: np.broadcast_to(read(g) + offset, g.hi - g.lo)


def _accesses(instruction: Instruction, operand: Any) -> tuple[str, Read]:
    """Returns the space of an access, and the addresses."""
    words = instruction.op.split(".")
    spaces = [w for w in words if w in ("global", "shared", "shared::cta", "shared::cluster")]
    if len(spaces) != 1:
        raise PtxError("an access to an unknown space")
    known = {"acquire", "release", "relaxed", "gpu", "cluster", "cs", "cg", "ca", "nc", "volatile",
             "v2", "v4", "L1::no_allocate", "weak", "sys", "cta"}  # fmt: skip
    if unknown := set(words[1:-1]) - known - set(spaces):
        raise PtxError(f"unknown access: {sorted(unknown)}")
    return spaces[0], _address(operand, spaces[0] == "global")


def _memory(g: Lanes, space: str, addresses: np.ndarray) -> Any:
    """Returns what is accessed: of a cluster's shared memory the block's of the first address."""
    if space == "global":
        return g.block.launch.memory
    if space == "shared::cluster" and addresses.size:
        return g.block.cluster.shared(int(addresses[0]))
    return g.block.shared


def ld(instruction: Instruction) -> Run:
    to, source = instruction.operands
    if ".param" in instruction.op:
        return _ld_param(instruction)
    dtype = DTYPE[instruction.dtype]
    space, address = _accesses(instruction, source)
    writes = [writer(x) for x in (to.items if isinstance(to, Vector) else (to,))]

    def run(g: Lanes) -> None:
        chosen = g.chosen
        places = address(g)[chosen]
        found = _memory(g, space, places).load(places, dtype.itemsize, len(writes))
        for write, bits in zip(writes, found, strict=True):
            value = bits.view(dtype)
            if g.mask is not True:
                whole = np.zeros(g.hi - g.lo, dtype)
                whole[chosen] = value
                value = whole
            write(g, value)

    return run


def _ld_param(instruction: Instruction) -> Run:
    to, source = instruction.operands
    assert isinstance(source, Address) and isinstance(source.base, Name) and not source.offset
    write, name, cast = writer(to), source.base.text, DTYPE[instruction.dtype]

    def run(g: Lanes) -> None:
        bits = g.block.launch.values[name] & (1 << 8 * cast.itemsize) - 1
        write(g, np.array(bits, f"u{cast.itemsize}").view(cast))

    return run


def st(instruction: Instruction) -> Run:
    if instruction.op.startswith("st.async."):
        return _st_async(instruction)
    to, source = instruction.operands
    space, address = _accesses(instruction, to)
    parts = source.items if isinstance(source, Vector) else (source,)
    reads = [reader(x, instruction.dtype) for x in parts]

    def run(g: Lanes) -> None:
        chosen, count = g.chosen, g.hi - g.lo
        values = [np.broadcast_to(read(g), count)[chosen] for read in reads]
        places = address(g)[chosen]
        _memory(g, space, places).store(places, values)

    return run


def _st_async(instruction: Instruction) -> Run:
    to, source, barrier = instruction.operands
    if instruction.dtype not in ("b32", "f32"):
        raise PtxError("st.async of another size")
    address, signal = _address(to, False), _address(barrier, False)
    parts = source.items if isinstance(source, Vector) else (source,)
    reads = [reader(x, instruction.dtype) for x in parts]

    def run(g: Lanes) -> None:
        cluster, count = g.block.cluster, g.hi - g.lo
        values = [np.broadcast_to(read(g), count).view(np.uint32) for read in reads]
        for lane, at, signalled in g.each(address(g), signal(g)):
            bits = [value[lane - g.lo : lane - g.lo + 1] for value in values]
            cluster.shared(at).store(np.array([at]), bits)
            cluster.arrive_at(signalled, 0, came=4 * len(parts))

    return run


def atom(instruction: Instruction) -> Run:
    words = instruction.op.split(".")
    *to, target, value = instruction.operands  # `red` has no result
    if "global" not in words or "add" not in words:
        raise PtxError("unknown atomic operation")
    address, dtype = _address(target, True), DTYPE[instruction.dtype]
    read, write = reader(value, instruction.dtype), writer(to[0] if to else Name("_"))

    def run(g: Lanes) -> None:
        before, memory = np.zeros(g.hi - g.lo, dtype), g.block.launch.memory
        added = np.broadcast_to(read(g), before.size)
        for lane, at in g.each(address(g)):
            place, i = np.array([at], np.uint64), lane - g.lo
            (old,) = memory.load(place, dtype.itemsize, 1)
            before[i] = old.view(dtype)[0]
            memory.store(place, [before[i : i + 1] + added[i]])
        write(g, before)

    return run


def mbarrier(instruction: Instruction) -> Run | None:
    _, kind, *words = instruction.op.split(".")
    if kind == "init":
        address, read = _address(instruction.operands[0], False), reader(
            instruction.operands[1], "u32"
        )  # fmt: skip

        def init(g: Lanes) -> None:
            for _, at, count in g.each(address(g), read(g)):
                g.block.shared.offsets(np.array([at]), 8, 8)
                g.block.barriers[at] = Barrier(count)

        return init
    if kind == "try_wait":
        done = writer(instruction.operands[0])
        return lambda g: done(g, np.ones(g.hi - g.lo, bool))
    if kind != "arrive":
        raise PtxError(f"unknown instruction {instruction.op}")
    address = _address(instruction.operands[1], False)
    amount = reader(instruction.operands[2] if len(instruction.operands) > 2 else Imm(1), "u32")
    expects, state = "expect_tx" in words, next(iter(instruction.operands))
    write = writer(state)

    def arrive(g: Lanes) -> None:
        for _, at, n in g.each(address(g), amount(g)):
            g.block.cluster.arrive_at(at, *((1, n) if expects else (n,)))
        if isinstance(state, Reg):
            write(g, np.zeros(g.hi - g.lo, np.uint64))

    return arrive


def bulk(instruction: Instruction) -> Run:
    op = instruction.op
    if op.startswith("cp.async.bulk.commit_group"):
        return _commit
    if op.startswith("cp.async.bulk.wait_group"):
        (left,) = instruction.operands
        assert isinstance(left, Imm)
        return lambda g: _finish_stores(g, left.bits)
    if ".tensor." not in op:
        return _bulk_rows(instruction)
    if "global.shared::cta.tile.bulk_group" in op:
        to, source = instruction.operands[:2]
        return _tensor_store(to, _address(source, False))
    return _tensor_load(instruction)


def _commit(g: Lanes) -> None:
    for (lane,) in g.each():
        g.block.stores.setdefault(lane, [[]]).append([])


def _finish_stores(g: Lanes, left: int) -> None:
    """Stores read shared memory as late as they may: when it is waited for."""
    for (lane,) in g.each():
        groups = g.block.stores.setdefault(lane, [[]])
        while len(groups) - 1 > left:
            for finish in groups.pop(0):
                finish()


def _coords(operand: Any) -> tuple[Read, list[Read]]:
    assert isinstance(operand, Address)
    return reader(operand.base, "u64"), [reader(x, "s32") for x in operand.coords]


def _tensor_store(to: Any, address: Read) -> Run:
    read, coords = _coords(to)

    def run(g: Lanes) -> None:
        block = g.block
        for lane, at, source, *point in g.each(read(g), address(g), *(c(g) for c in coords)):
            box = block.launch.maps[at]

            def finish(box: Any = box, point: list[int] = point, source: int = source) -> None:
                tensor.store(box, point, block.shared, source, block.launch.memory)

            block.stores.setdefault(lane, [[]])[-1].append(finish)

    return run


def _tensor_load(instruction: Instruction) -> Run:
    to, source, barrier, *others = instruction.operands
    address, signal = _address(to, False), _address(barrier, False)
    read, coords = _coords(source)
    multicast = reader(others[0], "u16") if "multicast::cluster" in instruction.op else None

    def run(g: Lanes) -> None:
        cluster, memory = g.block.cluster, g.block.launch.memory
        ranks = multicast(g) if multicast else 0
        arrays = (read(g), address(g), signal(g), ranks, *(c(g) for c in coords))
        for _, at, place, signalled, mask, *point in g.each(*arrays):
            box = g.block.launch.maps[at]
            to = [r for r in range(16) if mask >> r & 1] if multicast else [place >> 24]
            for rank in to:
                own, bar = ((x & 0xFFFFFF) | rank << 24 for x in (place, signalled))
                tensor.load(box, point, memory, cluster.shared(own), own)
                cluster.arrive_at(bar, 0, came=box.nbytes)

    return run


def _bulk_rows(instruction: Instruction) -> Run:
    if not instruction.op.startswith("cp.async.bulk.shared::cluster.global.mbarrier"):
        raise PtxError(f"unknown instruction {instruction.op}")
    to, source, count, barrier = instruction.operands[:4]
    arrays = (_address(to, False), _address(source, True), reader(count, "u32"),
              _address(barrier, False))  # fmt: skip

    def run(g: Lanes) -> None:
        cluster = g.block.cluster
        for _, place, start, nbytes, signalled in g.each(*(read(g) for read in arrays)):
            if (place | start | nbytes) % 16:
                raise PtxError(f"{nbytes} bytes from {start:#x}: no multiples of 16")
            _copy(g, cluster.shared(place), place, start, nbytes)
            cluster.arrive_at(signalled, 0, came=nbytes)

    return run


def _copy(g: Lanes, shared: Any, place: int, start: int, nbytes: int) -> None:
    if nbytes:
        memory = g.block.launch.memory
        values = memory.data[memory.rows(np.array([start], np.uint64), nbytes)]
        shared.data[shared.rows(np.array([place]), nbytes)] = values


def copy_16(instruction: Instruction) -> Run:
    """`cp.async`, done at once, and its arrival at an mbarrier."""
    op, operands = instruction.op, instruction.operands
    if op.startswith("cp.async.mbarrier.arrive.noinc"):
        signal = _address(operands[0], False)

        def arrive(g: Lanes) -> None:
            for _, at in g.each(signal(g)):
                g.block.cluster.arrive_at(at)

        return arrive
    if op.split(".")[2] not in ("ca", "cg") or ".shared.global" not in op:
        raise PtxError(f"unknown instruction {op}")
    address, source = _address(operands[0], False), _address(operands[1], True)
    size = operands[2]
    assert isinstance(size, Imm)
    there = reader(operands[3] if len(operands) > 3 else size, "u32")

    def run(g: Lanes) -> None:
        shared, whole = g.block.shared, size.bits
        for _, place, start, nbytes in g.each(address(g), source(g), there(g)):
            if (place | (start if nbytes else 0)) % whole:
                raise PtxError(f"cp.async of {whole} bytes from {start:#x} to {place:#x}")
            shared.data[shared.rows(np.array([place]), whole)] = 0
            _copy(g, shared, place, start, min(nbytes, whole))

    return run
