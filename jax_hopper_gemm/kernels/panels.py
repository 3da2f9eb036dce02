"""Panels: B and D are several arrays side by side, and a tile lies in the columns of one of them.

Tensor maps of panels have one type. So a copy names the first one's, and takes the address of the
tile's own. Among the kernel's parameters those of panels are a tuple.
"""

import cutlass._mlir.dialects.cute as cute_ir
import cutlass._mlir.dialects.cute_nvgpu as cute_nvgpu
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

MAP_ALIGNMENT = 64  # bytes, of the address of a tensor map


def panel_at(starts, n):
    """Returns the panel of the `n`-th tile of columns, and which of the panel's tiles this is.

    Args:
      starts: the tiles of columns before each panel but the first.
    """
    panel, before = Int32(0), Int32(0)
    for start in starts:
        inside = n >= start
        panel, before = panel + Int32(inside), select_(inside, start, before)
    return panel, n - before


def of_panels(array, function):
    """Returns `function` of an array, or of each of several that panels have."""
    return tuple(map(function, array)) if isinstance(array, tuple) else function(array)


def own_map(maps, panel):
    """Returns the tensor map that a copy names, and options by which it takes a panel's own."""
    if not isinstance(maps, tuple):
        return maps, {}
    address = _address(maps[0])
    for i, tma in enumerate(maps[1:], 1):
        address = select_(panel == i, _address(tma), address)
    aligned = cute_ir.ConstrainedIntType.get(MAP_ALIGNMENT, Int64.width)
    value = cute_ir.assume(aligned, address.ir_value())
    return maps[0], {"tma_desc_ptr": cute_ir.inttoptr(_pointer_type(), value)}


def own_scalar(scalars, panel):
    """Returns pointer and batch stride of a scalar; of several those of a panel."""
    if panel is None:
        return scalars
    (pointer, stride), *others = scalars
    address = pointer.toint()
    for i, (other, its_stride) in enumerate(others, 1):
        address = select_(panel == i, other.toint(), address)
        stride = select_(panel == i, its_stride, stride)
    return cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4), stride


def _address(tma):
    """Returns where the kernel's parameters hold a tensor map."""
    copy = cute_nvgpu.atom_make_exec_tma(tma._trait.value)
    return cute_nvgpu.get_tma_desc_addr(_pointer_type(), copy).toint()


def _pointer_type():
    pointed = cute_nvgpu.TmaDescriptorTiledType.get()
    return cute_ir.PtrType.get(pointed, cute.AddressSpace.generic, MAP_ALIGNMENT)
