"""The mailbox in which one warp of a cluster tells all others which tile is next.

    scheduler warp of the cluster's first CTA       readers: warps of all its CTAs
      wait empty[slot]                                wait full[slot]
      for each CTA: numbers -> its slot               read slot; arrive on empty[slot] of the
                    complete full[slot]                 first CTA

The numbers travel by `st.async`, which completes the other CTA's barrier when they have arrived. A
cluster of one CTA has plain stores and an arrival in their place.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

DEPTH = 3  # slots: how far ahead of the slowest reader a tile may be claimed


@dataclass(frozen=True)
class MailboxState:
    """State of a tile scheduler with a mailbox."""

    args: Any  # `KernelArgs`
    full: Any  # pointers to the first barriers and the first slot, in shared memory of the CTA
    empty: Any
    slots: Any


class Mailbox:
    """DEPTH slots of some int32 numbers each, with a full and an empty barrier."""

    def __init__(self, spec, numbers):
        self.spec = spec
        self.numbers = numbers
        # int32 from one slot to the next: whole words, and a power of two.
        self.pitch = max(2, 1 << (numbers - 1).bit_length())
        self.smem_words = DEPTH * (2 + self.pitch // 2)  # full barriers, empty barriers, slots

    @cute.jit
    def setup(self, words, args, num_reader_warps: cutlass.Constexpr):
        """Returns the `MailboxState` at `words`; called by all threads while barriers are made."""
        full, empty = words, words + DEPTH
        slots = cute.recast_ptr(words + 2 * DEPTH, dtype=Int32)
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(DEPTH):
                    cute.arch.mbarrier_init(full + slot, 1)
                    cute.arch.mbarrier_init(empty + slot, num_reader_warps * self.spec.cluster_size)
        return MailboxState(args, full, empty, slots)

    @cute.jit
    def read(self, view, count):
        """Waits for the `count`-th message; called by whole warps. Returns its numbers."""
        slot, phase = count % DEPTH, (count // DEPTH) % 2
        cute.arch.mbarrier_wait(view.full + slot, phase)
        message = [Int32(0)] * self.numbers
        # NOTE: the thread that frees the slot is the one that read it. With one lane reading and
        # another arriving racecheck reports a race, `__syncwarp` between them or not.
        if cute.arch.lane_idx() == 0:
            at = view.slots + slot * self.pitch
            message = [cute.arch.load(at + i, Int32) for i in range(self.numbers)]
            first_cta = 0 if cutlass.const_expr(self.spec.cluster_size > 1) else None
            cute.arch.mbarrier_arrive(view.empty + slot, first_cta)
        return [cute.arch.shuffle_sync(number, 0) for number in message]

    def free_slot(self, view, count):
        """Waits for the slot of the `count`-th message, and returns it; the scheduler warp."""
        slot, phase = count % DEPTH, (count // DEPTH) % 2
        cute.arch.mbarrier_wait(view.empty + slot, phase ^ 1)
        return slot

    @cute.jit
    def publish(self, view, slot, message):
        """Sends a message to a slot of all CTAs of the cluster; the scheduler warp."""
        cta = cute.arch.lane_idx()
        if cta < self.spec.cluster_size:
            self._write(view, slot, message, cta)

    def _write(self, view, slot, message, cta):
        """Writes a slot of one CTA and completes its full barrier; one thread."""
        # NOTE: keep the order of these two addresses. The values do not depend on it, but a
        # kernel's bytes do, and by these it is known which kernels have passed on a GPU.
        at = view.slots + slot * self.pitch if self.numbers > 1 else None
        full = view.full + slot
        # NOTE: `st.async` to shared memory of the cluster wants a cluster of two or more; in a lone
        # CTA memcheck reports it.
        if self.spec.cluster_size > 1:
            cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * self.numbers, cta)
        at = view.slots + slot * self.pitch if at is None else at
        for i, number in enumerate(message):
            if self.spec.cluster_size > 1:
                cute.arch.store_async_dsmem(at + i, number, full, cta)
            else:
                cute.arch.store(at + i, number)
        if self.spec.cluster_size == 1:
            cute.arch.mbarrier_arrive(full)
