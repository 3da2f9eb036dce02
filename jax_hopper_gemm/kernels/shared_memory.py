"""A CTA's shared memory, handed out part by part in the order of `GemmSpec.smem_bytes`."""

import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ..gemm.spec import SMEM_ALIGNMENT


class SharedMemory:
    """One allocation of `nbytes`; parts follow each other without gaps.

    Attributes:
      used: bytes handed out.
    """

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.base = SmemAllocator().allocate(nbytes, SMEM_ALIGNMENT)
        self.used = 0

    def pointer(self, dtype, nbytes, alignment, swizzle=None):
        """Returns a pointer to the next `nbytes`."""
        assert self.used % alignment == 0, f"{self.used} bytes are not aligned to {alignment}"
        pointer = cute.recast_ptr(self.base + self.used, swizzle, dtype)
        self.used += nbytes
        return pointer

    def tensor(self, dtype, layout):
        """Returns a tensor of a swizzled layout, its tiles aligned for the swizzle."""
        nbytes = cute.cosize(layout) * dtype.width // 8
        pointer = self.pointer(dtype, nbytes, SMEM_ALIGNMENT, layout.inner)
        return cute.make_tensor(pointer, layout.outer)
