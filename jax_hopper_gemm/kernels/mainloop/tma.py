"""The producer that loads A and B by TMA; CTAs of a cluster that need the same tile share it."""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cutlass_dsl import select_

from ...gemm.tma_box import TmaBox
from ..copies import boxes_of, load_atom
from ..dtypes import CUTE_DTYPE
from ..panels import own_map
from .ring import operand_smem_layout

EVICT_FIRST = (
    0x12F0000000000000  # an L2 policy for all bytes of a copy: CUTLASS's TMA::CacheHintSm90
)


@dataclass(frozen=True)
class TmaView:
    """What a loader warp needs of one operand, whatever the tile."""

    maps: Any  # tensor maps: of A, or of each B
    stages: Any  # for each map its part of all stages, (rows, bK, stages)
    tma_coords: Any  # `TmaCoords`
    cta: Any  # which of the CTAs that share a tile this one is
    mask: Any  # CTAs that its part goes to; None: there is this one alone
    own_mask: Any  # this CTA alone
    panels: Any = None  # where B is several panels, the tensor maps of all


class TmaOperand:
    """A, or each of the B's: a tile is loaded in as many slices as CTAs of the cluster share it."""

    def __init__(self, spec, operand):
        s = self.spec = spec
        self.is_a = operand == "a"
        # The extents of a tile, and how many CTAs load a slice of it each.
        self.tile, self.num_multicast = (s.tile_m, s.tile_k), s.cluster_n
        if not self.is_a:
            self.tile, self.num_multicast = s.stored_b(s.d_tile_n, s.tile_k), s.cluster_m
        self.box = s.a_box if self.is_a else s.b_box
        self.is_k_major = (s.a_major if self.is_a else s.b_major) == "k"
        self.dtype = CUTE_DTYPE[s.a_dtype if self.is_a else s.b_dtype]
        self.parts = parts = 1 if self.is_a else s.graph.accumulators
        self.nbytes = parts * math.prod(self.tile) * self.dtype.width // 8
        self.evict_first = s.evict_first == operand

    def make_tma_atoms(self, tensors):
        """Returns the atom of each tensor."""
        staged = operand_smem_layout(self.dtype, self.is_k_major, *self.tile, 1)
        one_stage = cute.slice_(staged, (None, None, 0))
        return tuple(
            load_atom(x, one_stage, self.tile, self.box, self.num_multicast) for x in tensors
        )

    def view(self, maps, stages, tma_coords, cta):
        s = self.spec
        if self.is_a:
            parts = (stages.sA,)
            mask, rank = sum(1 << (s.cluster_m * j) for j in range(s.cluster_n)) << cta.m, cta.n
        else:
            # (bN of one B, bK, B's, 1, stages)
            sBs = cute.flat_divide(stages.sB, self.tile)
            parts = tuple(sBs[None, None, part, 0, None] for part in range(self.parts))
            mask, rank = ((1 << s.cluster_m) - 1) << (s.cluster_m * cta.n), cta.m
        return TmaView(
            maps[: self.parts], parts, tma_coords, rank,
            mask=cutlass.Int16(mask) if self.num_multicast > 1 else None,
            own_mask=cutlass.Int16(1 << cta.m) if s.paired else None,
            panels=maps if len(maps) > self.parts else None,
        )  # fmt: skip

    def partition(self, view, coords):
        """Returns, for each map, this CTA's slice of each stage and of each k-tile of a tile."""
        return self.slices_of(view, coords, view.cta)

    def slices_of(self, view, coords, cta):
        tiles, at = view.tma_coords.a(coords) if self.is_a else view.tma_coords.b(coords)
        slices = []
        for tma, stages in zip(view.maps, view.stages, strict=True):
            shared, boxes = boxes_of(tma, stages, tiles, cta=cta, num_multicast=self.num_multicast)
            slices.append((shared, boxes[None, *at]))
        return slices

    def load(self, view, slices, k_tile, stage, full, coords):
        """Sends this CTA's `slices` of a k-tile to a stage, whose barrier is `full`."""
        self.copy(view, slices, k_tile, stage, full, view.mask, coords)

    def copy(self, view, slices, k_tile, stage, full, mask, coords):
        # tXsX: slices of stages, tXgX: slices of k-tiles; of A or a B, partitioned for the copy
        _, options = own_map(view.panels, coords.panel)
        if mask is not None:
            options["mcast_mask"] = mask
        if self.evict_first:
            options["cache_policy"] = Int64(EVICT_FIRST)
        for tma, (tXsX, tXgX) in zip(view.maps, slices, strict=True):
            source, target = tXgX[None, k_tile], tXsX[None, stage]
            cute.copy(tma, source, target, tma_bar_ptr=full, **options)


class ScalesOfB:
    """The scales of groups along K of the columns of each B: every CTA loads all of its own."""

    def __init__(self, spec):
        self.spec = spec
        self.tile = (spec.d_tile_n, spec.tile_k // spec.k_group)
        self.nbytes = spec.scale_bytes

    def make_tma_atoms(self, tensors):
        layout, box = cute.make_layout(self.tile), TmaBox(*self.tile, swizzle=0)
        return tuple(load_atom(tensor, layout, self.tile, box) for tensor in tensors)

    def view(self, maps, stages, tma_coords, cta):
        return TmaView(maps, stages.sS, tma_coords, cta=0, mask=None, own_mask=None)

    def partition(self, view, coords):
        tiles, at = view.tma_coords.scales_of_b(coords)
        slices = []
        for tma, stages in zip(view.maps, view.stages, strict=True):
            shared, boxes = boxes_of(tma, stages, tiles)
            slices.append((shared, boxes[None, *at]))
        return slices

    def load(self, view, slices, k_tile, stage, full, coords):
        for tma, (tXsX, tXgX) in zip(view.maps, slices, strict=True):
            cute.copy(tma, tXgX[None, k_tile], tXsX[None, stage], tma_bar_ptr=full)


class Together:
    """Two operands that are loaded as one, each from so many of the tensor maps."""

    def __init__(self, first, second, maps):
        self.operands, self.maps = (first, second), maps
        self.nbytes = first.nbytes + second.nbytes

    def parts(self, maps):
        return zip(self.operands, (maps[: self.maps], maps[self.maps :]), strict=True)

    def make_tma_atoms(self, tensors):
        return sum((x.make_tma_atoms(own) for x, own in self.parts(tensors)), ())

    def view(self, maps, stages, tma_coords, cta):
        return tuple(x.view(own, stages, tma_coords, cta) for x, own in self.parts(maps))

    def partition(self, view, coords):
        return tuple(x.partition(own, coords) for x, own in zip(self.operands, view, strict=True))

    def load(self, view, slices, k_tile, stage, full, coords):
        for x, *own in zip(self.operands, view, slices, strict=True):
            x.load(*own, k_tile, stage, full, coords)


class PairedB:
    """The B's of a multicast pair: two CTAs along M share columns of B, where they have the same.

    At the end of a group with an odd number of tiles they take two tiles of columns instead
    (`group_search.tile_in_pair`), and each loads all of its own. `TileCoords.together` says which.
    """

    def __init__(self, spec):
        self.operand = TmaOperand(spec, "b")
        self.nbytes = self.operand.nbytes
        self.make_tma_atoms = self.operand.make_tma_atoms
        self.view = self.operand.view

    def partition(self, view, coords):
        """Returns this CTA's slices, and the other's: apart it loads these, too."""
        mine = self.operand.slices_of(view, coords, view.cta)
        return mine, self.operand.slices_of(view, coords, 1 - view.cta)

    def load(self, view, slices, k_tile, stage, full, coords):
        mine, others = slices
        mask = cutlass.Int16(select_(coords.together, view.mask, view.own_mask))
        self.operand.copy(view, mine, k_tile, stage, full, mask, coords)
        self._load_others(view, others, k_tile, stage, full, coords)

    @cute.jit
    def _load_others(self, view, others, k_tile, stage, full, coords):
        if not coords.together:
            self.operand.copy(view, others, k_tile, stage, full, view.own_mask, coords)


class TmaProducer:
    """One warp loads both operands. The protocol is documented in `mainloop/__init__.py`."""

    loader_warps = (0,)
    arrivals = 1  # and the bytes

    def __init__(self, spec, a, b):
        self.spec = spec
        self.a, self.b = a, b  # `TmaOperand`, or an object with its methods
        self.tma_bytes = a.nbytes + b.nbytes

    def make_tma_atoms(self, tensors):
        return self.a.make_tma_atoms(tensors[:1]) + self.b.make_tma_atoms(tensors[1:])

    def tensor_maps(self, tma_ab):
        return tma_ab

    def partition_for_load(self, args, stages, tma_coords, cta):
        of_a = self.a.view(args.tma_ab[:1], stages, tma_coords, cta)
        return of_a, self.b.view(args.tma_ab[1:], stages, tma_coords, cta)

    def partition(self, view, coords):
        """Returns what is loaded of a tile: A's slices, then B's."""
        of_a, of_b, *_ = view
        return self.a.partition(of_a, coords), self.b.partition(of_b, coords)

    @cute.jit
    def load(self, view, ring, state, coords):
        slices = self.partition(view, coords)
        for i in cutlass.range(coords.k_tiles, unroll=1):
            k_tile = coords.k_first + i
            full = self.load_stage(view, slices, k_tile, k_tile, ring, state, coords)
            self.load_beside(view, slices, i, state.index, full)
            state.advance()
        return state

    def load_stage(self, view, slices, of_a, of_b, ring, state, coords):
        """Loads a k-tile of A and one of B into the next stage; returns its barrier."""
        ring.producer_acquire(state)
        full = ring.producer_get_barrier(state)
        self.b.load(view[1], slices[1], of_b, state.index, full, coords)
        self.a.load(view[0], slices[0], of_a, state.index, full, coords)
        return full

    def load_beside(self, view, slices, i, stage, full):
        """Loads what else a stage holds of the tile's k-tile `i`; here there is nothing."""

    def before_read(self):
        """Nothing: TMA writes by the proxy that wgmma reads by."""
