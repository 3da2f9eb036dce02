"""Emission of the kernels that quantize in blocks.

Products that read an array want it along one axis or the other, as the gradients of a layer do of
its input. Each asks for its own; where the program has one launch for the array already, that one
serves, or writes both from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.interpreters import mlir

from ..dispatch.legality import device_violations
from ..gemm.grid import ceil_div
from ..gemm.kernel_params import result_names, spec_from_json
from ..gemm.quantization import EXTENT_MULTIPLE, SOURCES, TARGETS, TILE, QuantizeSpec
from ..launch import ffi_library
from ..launch.ffi_target import TARGET, launcher_violation
from ..launch.plan import make_quantize_plan
from .barriers import behind_barrier
from .call import device_of
from .devices import devices_of
from .launch_operands import Array, launch_attributes

QUANTIZED = "jax_hopper_gemm.quantized"  # of a launch that quantizes an array: the spec
MAX_GRID = 65535  # CTAs along the second and third axis of a grid


def lower_quantize(
    ctx: mlir.LoweringRuleContext, x: Any, *picks: Any, to: str, block: int, transposed: bool
) -> list[Any] | None:
    """Emits a launch, or takes one that is there; None: XLA quantizes.

    Args:
      x: (..., R, C).
      picks: indices of rows, or nothing.
      to, block, transposed: as in `primitives.quantize.hopper_quantize`.

    Returns:
      Values and scales, contracted axes last.
    """
    aval: Any = ctx.avals_in[0]
    *lead, rows, columns = aval.shape
    if picks:
        (rows,) = picks[0].type.shape
    if not _has_kernel(ctx, aval, to, (prod(lead), rows, columns)):
        return None
    straight, across = (0, block) if transposed else (block, 0)
    spec = QuantizeSpec(aval.dtype.name, to, straight, across, picked=bool(picks))
    ffi_library.refuse_fork()
    launch = (None if picks else _launch_for(ctx, x, spec)) or _emit(ctx, spec, x, *picks)
    way = "transposed_" if transposed else ""
    scale = launch.results[f"{way}scales" if block == 1 else "tile_scales"]
    if transposed or block == 1:  # a kernel writes scales of lines by lines last
        (turned,) = Array.of(scale, np.float32).changed(ctx, lambda y: jnp.swapaxes(y, -1, -2))
        scale = turned.value
    return [behind_barrier(launch.results[f"{way}values"]), behind_barrier(scale)]


class _Launch:
    """A launch in the program."""

    def __init__(self, operation: Any, spec: QuantizeSpec):
        self.operation, self.spec = operation, spec
        # MLIR values by name in `QuantizeArgs`.
        self.results = dict(zip(result_names(spec), operation.results, strict=True))


def _has_kernel(
    ctx: mlir.LoweringRuleContext, aval: Any, to: str, extents: tuple[int, int, int]
) -> bool:
    batch, rows, columns = extents
    if aval.dtype.name not in SOURCES or to not in TARGETS:
        return False
    if 0 in extents or any(x % EXTENT_MULTIPLE for x in (rows, columns)):
        return False
    down, along = ceil_div(rows, TILE), ceil_div(columns, TILE)
    if max(batch, down) > MAX_GRID or max(rows, columns, batch * down * TILE * along) >= 2**31:
        return False  # too many tiles, or scales
    if devices_of(ctx) > 1:  # XLA would gather the operands on each
        return False
    return launcher_violation() is None and not device_violations(device_of(ctx))


def _emit(ctx: mlir.LoweringRuleContext, spec: QuantizeSpec, *values: Any) -> _Launch:
    *lead, rows, columns = values[0].type.shape
    source_rows = rows
    if spec.picked:
        (rows,) = values[1].type.shape
    batch, down, along = prod(lead), ceil_div(rows, TILE), ceil_div(columns, TILE)
    shapes = {
        "values": (rows, columns), "transposed_values": (columns, rows), "scales": (along, rows),
        "transposed_scales": (down, columns), "tile_scales": (down, along),
    }  # fmt: skip
    dtypes = {name: "float32" if "scales" in name else spec.to for name in shapes}
    results = [
        ShapedArray((*lead, *shapes[name]), np.dtype(jnp.dtype(dtypes[name])))
        for name in result_names(spec)
    ]
    plan = make_quantize_plan(spec, batch, rows, columns, source_rows)
    dtype_of = [jnp.dtype(spec.dtype), *[np.int32] * len(values[1:])]
    avals = [Array.of(*pair).aval for pair in zip(values, dtype_of, strict=True)]
    attributes = launch_attributes(spec, plan, f"B={batch} R={rows} C={columns}")
    context = ctx.replace(avals_in=avals, avals_out=results)
    emitted = list[Any](jax.ffi.ffi_lowering(TARGET)(context, *values, **attributes))
    operation: Any = emitted[0].owner
    if not spec.picked:
        operation.attributes[QUANTIZED] = ir.StringAttr.get(spec.to_json())
    return _Launch(operation, spec)


def _launch_for(ctx: mlir.LoweringRuleContext, x: Any, wanted: QuantizeSpec) -> _Launch | None:
    """Returns a launch in this block that writes what is wanted of an array.

    If one writes it the other way, both are written in its place.
    """
    joined = [(launch, launch.spec.with_ways_of(wanted)) for launch in _launches_of(x)]
    if there := next((launch for launch, whole in joined if whole == launch.spec), None):
        return there
    before, whole = next((pair for pair in joined if pair[1]), (None, None))
    if before is None or whole is None:
        return None
    with ir.InsertionPoint(before.operation):
        launch = _emit(ctx, whole, before.operation.operands[0])
    # The operation without uses stays: values in Python may be its results. XLA drops it.
    for name, value in before.results.items():
        value.replace_all_uses_with(launch.results[name])
    return launch


def _launches_of(x: Any) -> Iterator[_Launch]:
    """Yields the launches before this point of its block that quantize an array."""
    current: Any = ir.InsertionPoint.current
    source = x
    while getattr(source.owner, "name", None) == "stablehlo.reshape":
        source = source.owner.operands[0]
    alike = [source]
    for value in alike:
        for use in value.uses:
            operation = use.owner
            if operation.name == "stablehlo.reshape":
                alike.append(operation.results[0])
            elif QUANTIZED in operation.attributes and value.type == x.type:
                if operation.operation.block == current.block:
                    text = ir.StringAttr(operation.attributes[QUANTIZED]).value
                    spec = spec_from_json(text)
                    assert isinstance(spec, QuantizeSpec)
                    yield _Launch(operation, spec)
