"""Copies of boxes by TMA, and of adjacent elements by threads."""

import re

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


def load_atom(tensor, layout, tile, box, num_multicast=1):
    """Returns the atom that loads a tile: each of `num_multicast` CTAs loads a part of it for all.

    Only the tensor's type matters: the host sets the map. If it names a `box`, the compiled copy
    moves that.
    """
    op = cpasync.CopyBulkTensorTileG2SOp()
    if num_multicast > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    atom, _ = cpasync.make_tiled_tma_atom(op, tensor, layout, tile, num_multicast)
    if box:
        _check_box(atom, box, num_multicast)
    return atom


def store_atom(tensor, layout, tile, box):
    """Returns the atom that stores a tile."""
    op = cpasync.CopyBulkTensorTileS2GOp()
    atom, _ = cpasync.make_tiled_tma_atom(op, tensor, layout, tile)
    _check_box(atom, box, 1)
    return atom


def _check_box(atom, box, num_multicast):
    """Asserts that the compiled copy moves the box that the host's tensor map will name."""
    compiled = re.search(
        r'tma_gbasis = <"\((\d+),(\d+)(?:,1|,\(1\))+\)', str(atom._trait.value.type)
    )
    assert compiled is not None, f"no box in {atom._trait.value.type}"
    assert tuple(map(int, compiled.groups())) == (box.contiguous, box.other * num_multicast), (
        f"kernel copies {compiled.group(0)}, spec says {box} in each of {num_multicast} CTAs"
    )


def boxes_of(tma, shared, tiles, modes=2, cta=0, num_multicast=1):
    """Returns boxes in shared memory and in a tensor map's array, each box as one mode.

    Args:
      modes: how many a box has.
      cta: which part of each box is this CTA's, of `num_multicast`.
    """
    shared, tiles = (cute.group_modes(x, 0, modes) for x in (shared, tiles))
    return cpasync.tma_partition(tma, cta, cute.make_layout(num_multicast), shared, tiles)


def adjacent(dtype, address, count, space):
    """Returns elements from an address on, a multiple of their bytes, as a tensor."""
    nbytes = count * dtype.width // 8
    pointer = cute.make_ptr(dtype, address, space, assumed_align=nbytes)
    return cute.make_tensor(pointer, cute.make_layout(count))
