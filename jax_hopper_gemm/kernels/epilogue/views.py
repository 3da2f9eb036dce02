"""Views of an epilogue: the device's values, each made where its reader's role begins.

    Parameters      tensor maps and pointers of the kernel      all threads
    SharedTensors   shared memory                               all threads
    CtaView         both, barriers and TMA coordinates          all threads
    MathView        partitions of one math thread               math warps
    TileView        the same, for one tile                      math warps

An operand warp's view of a tile is `operand_ring.RingLoader`. Policy objects (`FusedEpilogue`, its
matrices, operands and reductions) hold constants of the trace alone. So a view is the only way from
one role to another, and no value made inside one role's branch is used in another's.
"""

from dataclasses import dataclass
from typing import Any

from .operand_ring import RingBarriers, RingReader


@dataclass(frozen=True)
class Parameters:
    """The kernel's parameters of an epilogue, by kind, in the graph's order.

    Attributes:
      stores: tensor maps of the matrices among the results.
      pointers: global pointers to the other results.
      loads: tensor maps of the operands that are no scalars.
      scalars: global pointer and batch stride of each scalar, by the number of its value.
      k_tiles: an int32 of at least 0 that is not known while compiling.
      extents: (M, N) of D if the graph needs them, else None.
    """

    stores: tuple
    pointers: tuple
    loads: tuple
    scalars: dict
    k_tiles: Any
    extents: tuple | None

    @classmethod
    def of(cls, graph, results, operands, k_tiles, extents):
        """Returns the parameters of a kernel, sorted by kind.

        Args:
          results, operands: a parameter for each of the graph's, in order.
        """
        numbered = enumerate(graph.operands, graph.accumulators)
        results = list(zip(graph.results, results, strict=True))
        operands = list(zip(numbered, operands, strict=True))
        return cls(
            stores=tuple(atom for result, atom in results if result.kind == "matrix"),
            pointers=tuple(pointer for result, pointer in results if result.kind != "matrix"),
            loads=tuple(atom for (_, operand), atom in operands if operand.kind != "scalar"),
            scalars={n: scalar for (n, operand), scalar in operands if operand.kind == "scalar"},
            k_tiles=k_tiles,
            extents=extents,
        )

    @property
    def atoms(self):
        """All tensor maps in use."""
        return (*self.stores, *self.loads)


@dataclass(frozen=True)
class SharedTensors:
    """An epilogue's shared memory, of all math warpgroups.

    Attributes:
      matrices: staged tiles (64, epi_tile_n, buffers) of each matrix of results.
      operands: slots of each loaded operand.
      scratch: of each reduction, a pointer to its floats; None where it needs none.
    """

    matrices: tuple
    operands: tuple
    scratch: tuple


@dataclass(frozen=True)
class CtaView:
    """The view that all warps of a CTA begin with.

    Attributes:
      tma_coords: the coordinates of tiles, see `tile_coords.py`.
    """

    parameters: Parameters
    shared: SharedTensors
    barriers: RingBarriers
    tma_coords: Any


@dataclass(frozen=True)
class MathView:
    """One math thread's view.

    Attributes:
      acc: its accumulator.
      warpgroup, thread: index of the math warpgroup, and of the thread in it.
      first_buffer: of the warpgroup's staged tiles.
      barrier: the warpgroup's named barrier.
      matrices: a `StagingView` for each matrix of results.
      ring: see there.
      reductions: a `ThreadView` for each reduction.
    """

    cta: CtaView
    acc: Any  # ((2, 2, tile_n / 8), row blocks, 1)
    warpgroup: Any
    thread: Any
    first_buffer: Any
    barrier: Any
    matrices: tuple
    ring: RingReader
    reductions: tuple


@dataclass(frozen=True)
class TileView:
    """A math thread's view of one tile.

    Attributes:
      coords: the tile's coordinates.
      scalars: the graph's scalars, by the number of the value.
      is_store_warp: whether this warp issues its warpgroup's TMA stores.
      ring: of operands, for this tile.
      stores: a `StoreView` for each matrix of results.
      folds: a `Fold` for each reduction. They alone change while the tile is traced.
    """

    math: MathView
    coords: Any
    scalars: dict
    is_store_warp: Any
    ring: RingReader
    stores: tuple
    folds: tuple
