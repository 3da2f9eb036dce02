"""How math warps load numbers from a stage of B, see `gemm.conversion`."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Uint32

from ...gemm.conversion import LDMATRIX_K, offset_along_k, offset_along_n
from ...gemm.wgmma_fragment import Position
from .widening import instruction


@dataclass(frozen=True)
class Raw:
    """What a thread reads of a stage."""

    position: Position
    base: Any  # shared address of the stages
    starts: tuple  # for each span of blocks, what its loads begin with


class LoadsAlongK:
    """Loads of what is stored (N, K): two neighbours along K at a time."""

    k = LDMATRIX_K  # elements of K that are loaded together
    words = 8  # of a thread, of so many

    def __init__(self, spec, held):
        self.spec, self.bits = spec, held.bits
        self.code = "ld.shared.u16" if self.bits == 8 else "ld.shared.u8"

    def start(self, position, lane, column):
        return column + 16 * position.warp

    def load(self, raw, stage, span, k):
        """Returns the words of a span from `k` on, each at its `index`."""
        s = self.spec
        words = []
        inside = raw.position.quad_lane * (self.bits // 4)
        for at in range(k, k + LDMATRIX_K, 8):
            first = at * self.bits // 8
            chunk = first // 16 * 16
            for h in range(2):
                offset = offset_along_k(
                    raw.position, raw.starts[span], h, chunk, s.b_box.swizzle, s.tile_n
                )
                address = stage + offset + (first - chunk) + inside
                words.append(instruction(self.code + " {$w0}, [{$r0}];", address))
        return words

    def index(self, k, h, i):
        """Returns which word holds what wgmma wants from `k` on: (h, first or second 8 of K)."""
        return k // 4 + 2 * i + h


class LoadsAlongN:
    """Loads of what is stored (K, N), by ldmatrix: 16 bits along N of 32 of K."""

    k = LDMATRIX_K
    words = 4

    def __init__(self, spec, held):
        self.spec, self.held = spec, held

    def start(self, position, lane, column):
        slab = (column + self.held.slab(position)) * self.held.bits // 8
        return offset_along_n(lane, slab, self.spec.b_box.swizzle, self.spec.tile_k)

    def load(self, raw, stage, span, k):
        return cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * self.words,
            read_only_args=[stage + raw.starts[span] + k * self.spec.b_box.swizzle],
        )

    def index(self, k, h, i):
        return k // 8 + i


class LoadsOfFloat32:
    """Loads of float32 numbers that are stored (K, N): two neighbours along N at a time.

    Of half a warp's threads, the eight that read lines k to k + 3 of K at some columns do so 16
    columns apart: as TMA swizzles a stage, these are other banks.
    """

    k = 16
    words = 8

    def __init__(self, spec, held):
        self.spec, self.held = spec, held

    def start(self, position, lane, column):
        nbytes = (column + self.held.column(position, 0, 0)) * self.held.bits // 8
        width, lines = self.spec.b_box.swizzle, self.spec.tile_k
        return tuple(offset_along_n(position.quad_lane + i, nbytes, width, lines) for i in (0, 4))

    def load(self, raw, stage, span, k):
        words = []
        for at in range(k, k + self.k, 8):
            for start in raw.starts[span]:
                words += cute.arch.inline_ptx(
                    "ld.shared.v2.u32 {{$w0}, {$w1}}, [{$r0}];",
                    write_only_types=[Uint32] * 2,
                    read_only_args=[stage + start + at * self.spec.b_box.swizzle],
                )
        return words

    def index(self, k, h, i):
        return k // 2 + 2 * i + h
