"""Programs lowered for CUDA, run on the CPU: NumPy computes what their launches would.

All else is as on a GPU: which kernels run, what they read where and in which order, what XLA does
before and after them. So a wrong operand, layout or order of arguments shows in the numbers. Of
reductions the first partial result is the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from support import epilogue, grouped_results, outcome, reference
from support.casts import cast
from support.places import result_places
from support.trial import Inputs

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph
from jax_hopper_gemm.gemm.grid import result_shapes
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.lowering import call, emit, quantization, register

_IDENTITY = {"row_max": -np.inf, "max": -np.inf}  # of partial results; of others 0


def use(monkeypatch: pytest.MonkeyPatch, launched: list[GemmSpec]) -> None:
    """Makes programs for the CPU those for CUDA. Arrays are quantized by XLA.

    Args:
      launched: gets the kernel of each launch that runs.
    """

    def ffi_lowering(target: str, operand_output_aliases: Any) -> Any:
        def lower(ctx: mlir.LoweringRuleContext, *values: Any, problem: Any, spec: Any) -> Any:
            results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_out]
            run = partial(_run, problem, spec, results, launched)
            launch = lambda *arrays: jax.pure_callback(run, results, *arrays)  # noqa: E731
            return mlir.lower_fun(launch, multiple_results=True)(ctx, *values)

        return lower

    def attributes(problem: GemmProblem, spec: GemmSpec, plan: Any) -> dict[str, Any]:
        return {"problem": problem, "spec": spec}

    monkeypatch.setattr(jax.ffi, "ffi_lowering", ffi_lowering)
    monkeypatch.setattr(emit, "product_attributes", attributes)
    for module in (register, call):
        monkeypatch.setattr(module, "platforms_of", lambda ctx: ("cuda",))
    monkeypatch.setattr(quantization, "launcher_violation", lambda: "NumPy quantizes nothing")


def _run(
    problem: GemmProblem, spec: GemmSpec, results: Any, launched: list[GemmSpec], *buffers: Any
) -> tuple[np.ndarray, ...]:
    launched.append(spec)
    places = result_places(problem, spec)
    found = [np.zeros(x.shape, x.dtype) for x in results]
    if all(array.size for array in found):
        with np.errstate(all="ignore"):
            arrays = _written(problem, spec, _inputs(problem, buffers))
        for place, array, buffer in zip(places, arrays, found, strict=False):
            view = place.view(buffer.reshape(-1))
            view[...] = array.reshape(view.shape)
    return tuple(found)


def _inputs(problem: GemmProblem, buffers: Sequence[Any]) -> Inputs:
    """Returns what a launch reads, as `reference.input_places` lists it."""
    p, flat = problem, (np.asarray(buffer).reshape(-1) for buffer in buffers)
    arrays = [
        [place.view(buffer).reshape(place.shape) for place in places]
        for places, buffer in zip(reference.input_places(p), flat, strict=True)
    ]
    (a,), b, arrays = arrays[0], arrays[1], [array for (array, *_) in arrays[2:]]
    while len(b) < len(p.panels or (None,) * p.graph.accumulators):
        b.append(arrays.pop(0))
    named: dict[str, Any] = {}
    if count := sum(map(bool, (p.a_scales, p.b_scales))) + bool(p.k_group) * p.graph.accumulators:
        named["scales"], arrays = tuple(arrays[-count:]), arrays[:-count]
    if p.indexed:
        (index,) = np.clip(arrays.pop(), 0, p.stack - 1).reshape(-1)
        a, b = (a[index][None], b) if p.indexed == "a" else (a, [x[index][None] for x in b])
    if p.groups and p.groups.gathered:
        named["indices"] = arrays.pop().reshape(-1)
    if p.groups:
        named["sizes"] = arrays.pop().reshape(-1)
    return Inputs(a, tuple(b), tuple(arrays), **named)


def _written(problem: GemmProblem, spec: GemmSpec, inputs: Inputs) -> list[np.ndarray]:
    """Returns each array that the kernel writes."""
    p = problem
    assert not p.reads_parts, "parts of float32 operands are not read"
    shapes, operands = iter(result_shapes(p, spec)), iter(inputs.operands)
    found = []
    for part, b in zip(p.apart, inputs.b if p.panels else [inputs.b], strict=True):
        own = tuple(next(operands) for _ in part.graph.operands)
        given = Inputs(
            inputs.a, b if isinstance(b, tuple) else (b,), own, inputs.sizes, inputs.indices,
            scales=inputs.scales,
        )  # fmt: skip
        values = iter(epilogue.evaluate(part.graph, *_sums_and_operands(part, given)))
        found += _stored(part.graph, values, shapes)
    if p.groups and p.groups.axis == "m":
        nobodys = grouped_results.matrix_of_rows(p, inputs.sizes) < 0  # type: ignore[arg-type]
        for array in found:
            axis = array.shape.index(p.m, 1)
            np.moveaxis(array, axis, 0)[nobodys] = 0
    return found


def _sums_and_operands(problem: GemmProblem, inputs: Inputs) -> tuple[list[Any], list[Any]]:
    if problem.groups:
        rows = np.arange(problem.m) if problem.groups.axis == "m" else None
        assert not inputs.scales, "scales of groups are not read"
        sums = [grouped_results.products(problem, inputs, b) for b in inputs.b]
        return sums, grouped_results.operands_at(problem, inputs, rows)
    pairs = [(inputs.a, b) for b in inputs.b]
    if inputs.scales:
        assert len(pairs) == 1, "scales of gate and up are not read"
        pairs = [reference.scaled(problem, inputs)]
    sums = [reference.product(*pair) for pair in pairs]
    return sums, outcome.broadcast_operands(problem, inputs)


def _stored(graph: EpilogueGraph, values: Any, shapes: Any) -> list[np.ndarray]:
    """Returns the arrays of results by `epilogue.evaluate`."""
    found: list[np.ndarray] = []
    for result in graph.results:
        value, _ = next(values)
        if result.kind == "matrix" and result.plane:
            found[-1][:, :, result.plane] = cast(value, result.dtype)
            continue
        shape, dtype = next(shapes)
        array = np.full(shape, _IDENTITY.get(result.kind, 0), jnp.dtype(dtype))
        if result.kind == "matrix":
            (array[:, :, 0] if result.planes > 1 else array)[...] = cast(value, result.dtype)
        elif result.kind == "row_sumexp":
            array[:, :, 0] = -np.inf
            array[:, 0, 0], (array[:, 0, 1], _) = value, next(values)
        elif result.kind == "max":
            array.flat[0] = value
        elif result.kind.startswith("top_k"):
            array[...] = value
        else:
            array[:, 0] = value
        found.append(array)
    return found
