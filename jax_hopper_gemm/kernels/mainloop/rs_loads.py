"""How math warps load 8- and 4-bit numbers from a stage of B, see `gemm.conversion`."""

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

    words = 8  # of a thread, of `LDMATRIX_K` of K

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
