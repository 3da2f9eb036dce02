"""Views of an epilogue: the device's values, each made where its reader's role begins.

An operand warp's view of a tile is `operand_ring.RingLoader`. Policy objects (`FusedEpilogue`, its
matrices, operands and reductions) hold constants of the trace alone. So a view is the only way from
one role to another, and no value made inside one role's branch is used in another's.
"""

from dataclasses import dataclass
from typing import Any

from .operand_ring import RingBarriers, RingReader


@dataclass(frozen=True)
class Parameters:
    """The kernel's parameters of an epilogue, by kind, in the graph's order."""

    stores: tuple  # tensor maps of the matrices among the results
    pointers: tuple  # global pointers to the other results
    loads: tuple  # tensor maps of the operands that are no scalars
    scalars: dict  # by the number of its value, each scalar's global pointer and batch stride
    k_tiles: Any  # an int32 of at least 0 that is not known while compiling
    extents: tuple | None  # (M, N) of D if the graph needs them

    @classmethod
    def of(cls, graph, args):
        """Returns those among the kernel's, `KernelArgs`."""
        numbered = enumerate(graph.operands, graph.accumulators)
        results = list(zip(graph.results, args.results, strict=True))
        operands = list(zip(numbered, args.operands or (), strict=True))
        return cls(
            stores=tuple(atom for result, atom in results if result.kind == "matrix"),
            pointers=tuple(pointer for result, pointer in results if result.kind != "matrix"),
            loads=tuple(atom for (_, operand), atom in operands if operand.kind != "scalar"),
            scalars={n: scalar for (n, operand), scalar in operands if operand.kind == "scalar"},
            k_tiles=args.k_tiles,
            extents=args.extents,
        )


@dataclass(frozen=True)
class SharedTensors:
    """An epilogue's shared memory, of all math warpgroups."""

    matrices: tuple  # staged tiles (64, epi_tile_n, buffers) of each matrix of results
    operands: tuple  # slots of each loaded operand
    scratch: tuple  # of each reduction, a pointer to its floats; None where it needs none


@dataclass(frozen=True)
class CtaView:
    """The view that all warps of a CTA begin with."""

    parameters: Parameters
    shared: SharedTensors
    barriers: RingBarriers
    tma_coords: Any  # `TmaCoords`


@dataclass(frozen=True)
class MathView:
    """One math thread's view."""

    cta: CtaView
    acc: Any  # ((2, 2, tile_n / 8), row blocks, 1)
    warpgroup: Any  # index of the math warpgroup
    thread: Any  # index in the warpgroup
    first_buffer: Any  # of the warpgroup's staged tiles
    barrier: Any  # the warpgroup's named barrier
    matrices: tuple  # a `StagingView` for each matrix of results
    ring: RingReader
    reductions: tuple  # a `ThreadView` for each reduction


@dataclass(frozen=True)
class TileView:
    """A math thread's view of one tile."""

    math: MathView
    coords: Any  # `TileCoords`
    scalars: dict  # by the number of the value
    is_store_warp: Any  # whether this warp issues its warpgroup's TMA stores
    ring: RingReader
    stores: tuple  # a `StoreView` for each matrix of results
    folds: tuple  # a `Fold` for each reduction; they alone change while the tile is traced
