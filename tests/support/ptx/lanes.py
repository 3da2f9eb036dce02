"""Registers of the threads of a block, and the lanes that run an instruction together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.ptx.parse import REGISTER_FILES, Imm, Name, Operand, PtxError, Reg

# NumPy's dtype of PTX's types. Pairs ("bf16x2") are bits; `arithmetic` takes them apart.
DTYPE: dict[str, np.dtype] = {
    "pred": np.dtype(bool),
    **{f"{kind}{8 * n}": np.dtype(f"u{n}") for kind in "bu" for n in (1, 2, 4, 8)},
    **{f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"),
    "bf16": np.dtype("u2"), "bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4"),
    "e4m3x2": np.dtype("u2"), "e5m2x2": np.dtype("u2"),
}  # fmt: skip

WARP = 32


class Lanes:
    """Lanes of one block, between the first and the last that run.

    Attributes:
      block: the `machine.Block`.
      lo, hi: the first lane, and the one after the last.
      mask: which of the lanes between them run; True where all do.
    """

    def __init__(self, block: Any, lo: int, hi: int, mask: Any):
        self.block, self.lo, self.hi, self.mask = block, lo, hi, mask
        self.views: dict[str, np.ndarray] = block.views(lo, hi)

    @classmethod
    def of(cls, block: Any, running: np.ndarray) -> Lanes:
        """Returns the lanes where `running`, a bool for each thread of the block, is true."""
        there = np.flatnonzero(running)
        lo, hi = int(there[0]), int(there[-1]) + 1
        return cls(block, lo, hi, True if hi - lo == there.size else running[lo:hi].copy())

    def where(self, condition: np.ndarray) -> Lanes | None:
        """Returns those of the lanes for which `condition` holds; None if there are none."""
        mask = condition if self.mask is True else condition & self.mask
        if mask.all():
            return self
        return Lanes(self.block, self.lo, self.hi, mask) if mask.any() else None

    @property
    def running(self) -> np.ndarray:
        """A bool for each thread of the block."""
        whole = np.zeros(self.block.threads, bool)
        whole[self.lo : self.hi] = self.mask
        return whole

    @property
    def chosen(self) -> Any:
        """What picks the lanes that run from an array of all between `lo` and `hi`."""
        return slice(None) if self.mask is True else np.flatnonzero(self.mask)

    def each(self, *values: Any) -> list[tuple[int, ...]]:
        """Returns for each lane that runs its number, and its elements of arrays."""
        count = self.hi - self.lo
        whole = [np.arange(self.lo, self.hi), *(np.broadcast_to(v, count) for v in values)]
        return list(zip(*(array[self.chosen].tolist() for array in whole), strict=True))


Read = Callable[[Lanes], Any]
Write = Callable[[Lanes, Any], None]


def reader(operand: Operand, dtype: str) -> Read:
    """Returns what reads an operand as PTX's type `dtype`, the low bits of a wider register."""
    if isinstance(operand, Reg):
        i, wanted = operand.row, DTYPE[dtype]
        if operand.file == "pred" or wanted.itemsize == REGISTER_FILES[operand.file]:
            key = dtype if operand.file != "pred" else "pred"
            return lambda g: g.views[key][i]
        file, bits = operand.file, np.dtype(f"u{wanted.itemsize}")
        return lambda g: g.views[file][i].astype(bits).view(wanted)
    if isinstance(operand, Imm):
        wanted = DTYPE[dtype]
        if dtype == "pred":
            value: Any = np.bool_(operand.bits)
        else:
            bits = operand.bits & ((1 << 8 * wanted.itemsize) - 1)
            value = np.array(bits, f"u{wanted.itemsize}").view(wanted)[()]
        return lambda g: value
    if isinstance(operand, Name):
        text, cast = operand.text, DTYPE[dtype].type
        return lambda g: g.block.value_of(text, g.lo, g.hi, cast)
    raise PtxError(f"{operand} is not one value")


def writer(operand: Operand) -> Write:
    """Returns what writes a register; numbers of fewer bits are extended by their sign."""
    if isinstance(operand, Name) and operand.text == "_":
        return lambda g, value: None
    if not isinstance(operand, Reg):
        raise PtxError(f"{operand} cannot be written")
    file, i = operand
    if file == "pred":
        return lambda g, value: np.copyto(g.views["pred"][i], value, where=g.mask)
    own, size = DTYPE[file], REGISTER_FILES[file]

    def write(g: Lanes, value: Any) -> None:
        if value.dtype.itemsize != size:
            assert value.dtype.itemsize < size and value.dtype.kind in "ui", value.dtype
            value = value.astype(f"{value.dtype.kind}{size}")
        np.copyto(g.views[file][i], value.view(own), where=g.mask)

    return write
