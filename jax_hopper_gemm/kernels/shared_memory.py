"""A CTA's shared memory, handed out in the order of `GemmSpec.smem_bytes`; its named barriers."""

from enum import IntEnum
from itertools import accumulate

import cutlass.cute as cute
from cutlass import Int64
from cutlass.memory import SmemAllocator

from ..gemm.smem import SMEM_ALIGNMENT, SMEM_BARRIERS, barrier_bytes

WARPGROUP = 128  # threads


class BarrierId(IntEnum):
    """The named barriers: the hardware has 16. Each use's first number; 0 is `__syncthreads`."""

    WARPGROUP = 1  # 1, 2, 3: the 128 threads of math warpgroup 0, 1, 2, in its epilogue
    MATH_TURN = 5  # 5, 6: the turn of math warpgroup 0, 1 at the tensor cores; 256 threads
    MATH = 7  # all math threads: what they share is there, or has been read


class SharedMemory:
    """One allocation of `nbytes`; parts follow each other without gaps."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.base = SmemAllocator().allocate(nbytes, SMEM_ALIGNMENT)
        self.used = 0  # bytes handed out

    def pointer(self, dtype, nbytes, alignment, swizzle=None):
        assert self.used % alignment == 0, f"{self.used} bytes are not aligned to {alignment}"
        pointer = cute.recast_ptr(self.base + self.used, swizzle, dtype)
        self.used += nbytes
        return pointer

    def tensor(self, dtype, layout):
        """Returns a tensor of a swizzled layout, its tiles aligned for the swizzle."""
        nbytes = cute.cosize(layout) * dtype.width // 8
        pointer = self.pointer(dtype, nbytes, SMEM_ALIGNMENT, layout.inner)
        return cute.make_tensor(pointer, layout.outer)

    def barriers(self, spec, **words):
        """Returns pointers to int64 words for each user, as `barriers(spec, ring=8, mailbox=9)`."""
        first = self.pointer(Int64, SMEM_BARRIERS, 8)
        assert self.used == self.nbytes == spec.smem_bytes, (
            f"{self.used} bytes are taken, spec says {spec.smem_bytes}"
        )
        in_use = 8 * sum(words.values())
        assert in_use == barrier_bytes(spec) <= SMEM_BARRIERS, (
            f"{in_use} bytes of barriers, spec says {barrier_bytes(spec)}"
        )
        starts = accumulate(words.values(), initial=0)
        return {user: first + start for user, start in zip(words, starts, strict=False)}
