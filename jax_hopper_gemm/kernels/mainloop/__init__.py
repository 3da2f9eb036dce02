"""Mainloops: a producer brings A and B into a ring of stages, a consumer multiplies them.

Either is a class of its own, and any producer serves any consumer.

A producer:
    loader_warps        warps of the CTA that run `load`
    arrivals            on a stage's full barrier, by threads
    tma_bytes           of a stage that TMA brings, which complete it too
    make_tma_atoms(tensors)             → the kernel's `tma_ab`; on the host, for the types alone
    tensor_maps(tma_ab)                 → those of `tma_ab` that are tensor maps
    partition_for_load(args, stages, tma_coords, cta)
                                        → a frozen view; once, in the loader warps
    load(view, ring, state, coords)     → state; sends a tile's k-tiles into the ring
    before_read()                       what a math warp does before it reads a full stage

A consumer:
    make_tiled_mma(warpgroups)          → the MMA of so many warpgroups side by side along M
    partition_for_math(stages, warpgroup, args)
                                        → a frozen view that holds the accumulators, `acc`
    multiply(view, ring, state, coords, on_issued)
                                        → state past the tile's last stage; calls `on_issued` when
                                        the tensor cores have all of the tile's work
    sums(view)                          → registers that `finish` adds to those of other CTAs
    settle(view)                        makes the accumulators of them, where they are others

A tile's loads begin at its k-tile `coords.k_first` and are `coords.k_tiles` many. What a view holds
is made in the role that uses it, and no value of the GPU is kept in a producer or consumer.
"""

from .block_scales import ScaledConsumer, ScalesProducer
from .gather import GatherProducer
from .parts import PartsConsumer, StoredPartsConsumer, StoredPartsProducer
from .promoted import PromotedConsumer
from .promoted_in_turns import PromotedInTurnsConsumer, ScaledInTurnsConsumer
from .rs import RegisterConsumer
from .rs_in_turns import RegisterInTurnsConsumer
from .ss import SharedConsumer
from .tma import PairedB, ScalesOfB, TmaOperand, TmaProducer, Together


def _b(spec):
    b = PairedB(spec) if spec.paired else TmaOperand(spec, "b")
    return Together(b, ScalesOfB(spec), spec.graph.accumulators) if spec.k_group else b


# How A and B arrive, by the operand that is gathered: a function of the spec that makes a producer.
PRODUCERS = {
    None: lambda spec: TmaProducer(spec, TmaOperand(spec, "a"), _b(spec)),
    "a": lambda spec: GatherProducer(spec, _b(spec)),
    "b": lambda spec: GatherProducer(spec, TmaOperand(spec, "a")),
}


def make_producer(spec):
    if spec.a_block:
        return ScalesProducer(spec, TmaOperand(spec, "a"), _b(spec))
    if spec.reads_parts:
        return StoredPartsProducer(spec, TmaOperand(spec, "a"), _b(spec))
    return PRODUCERS[spec.gathered](spec)


def make_consumer(spec, producer, atom_layout_m):
    """Returns the consumer of the stages; `atom_layout_m` warpgroups share a tile's rows."""
    if spec.bf16_terms:
        kind = StoredPartsConsumer if spec.reads_parts else PartsConsumer
    elif spec.b_in_registers:
        kind = RegisterInTurnsConsumer if spec.k_in_turns else RegisterConsumer
    elif spec.a_block:
        kind = ScaledInTurnsConsumer if spec.k_in_turns else ScaledConsumer
    elif spec.promoted:
        kind = PromotedInTurnsConsumer if spec.k_in_turns else PromotedConsumer
    else:
        kind = SharedConsumer
    return kind(spec, atom_layout_m, producer.before_read)
