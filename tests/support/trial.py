"""A kernel on trial: run on memory where any access out of place shows.

The gaps in and around all inputs hold NaNs, so an element that is read but is not the problem's
spoils the result; around integers they hold large ones. Results, workspaces and all around them are
filled with NaNs before each run, so an element that is not written stays one, and what is written
outside is found; so is what is written to an input or around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from support import float32
from support.direct import WORKSPACE_GUARD, Launch, prepare
from support.gpu import Buffer, Gpu
from support.places import Place, result_places
from support.reference import input_places

from jax_hopper_gemm.gemm.dtypes import DTYPES
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

GUARD = 1024  # elements before and after each array
POISON = 0xFF  # a byte; all ones are a NaN in every float, true as bool, -1 as int32
LARGE = 0x11  # a byte; an int32 of them is more than any axis has elements, and no address


@dataclass(frozen=True)
class Inputs:
    """What a problem reads.

    Attributes:
      a: (L, M, K).
      b: one (L, K, N), or gate and up.
      operands: of the epilogue: (L, M, N), rows (L, N), columns (L, M), scalars (L,).
      sizes: of a grouped product, int32.
      indices: of the rows that are gathered, int32.
      scales: of blocks of A and of B, (L, blocks along K, blocks) float32; or of groups along K of
        B, and of up, (L, groups, N).
      index: (1,) int32: which matrix of a stack is the operand, whose L is that of the stack.

    Of a grouped product's arrays some have L = 1, as `reference.input_places` says.
    """

    a: np.ndarray
    b: tuple[np.ndarray, ...]
    operands: tuple[np.ndarray, ...] = ()
    sizes: np.ndarray | None = None
    indices: np.ndarray | None = None
    index: np.ndarray | None = None
    scales: tuple[np.ndarray, ...] = ()


def run(
    gpu: Gpu,
    problem: GemmProblem,
    spec: GemmSpec,
    raster_order: RasterOrder,
    a: np.ndarray,
    b: np.ndarray,
    repeats: int = 1,
    num_sms: int | None = None,
) -> np.ndarray:
    """Returns D as `spec`'s kernel of a plain product computes it; see `run_all`.

    Args:
      a: (L, M, K), of the problem's dtype.
      b: (L, K, N), likewise.

    Returns:
      (L, M, N), a view.
    """
    return run_all(gpu, problem, spec, raster_order, Inputs(a, (b,)), repeats, num_sms)[0]


def run_all(
    gpu: Gpu,
    problem: GemmProblem,
    spec: GemmSpec,
    raster_order: RasterOrder,
    inputs: Inputs,
    repeats: int = 1,
    num_sms: int | None = None,
) -> list[np.ndarray]:
    """Returns every array that `spec`'s kernel writes, having checked where it wrote.

    Args:
      repeats: how often the kernel runs, at least once; results are poisoned before each.
      num_sms: SMs that a persistent grid fills; None for all that the GPU has.

    Returns:
      Arrays of the shapes that `plan.result_shapes` gives.

    Raises:
      AssertionError: memory outside the results changed, or a repeat gave other bits.
    """
    on_gpu = uploaded(gpu, problem, spec, raster_order, inputs, num_sms)
    launch, outputs, places = on_gpu.launch, on_gpu.outputs, result_places(problem, spec)

    def launched() -> list[np.ndarray]:
        for buffer in (*outputs, *launch.workspaces):
            buffer.fill(POISON)
        launch()
        gpu.synchronize()
        return [
            output.download(f"u{jnp.dtype(place.dtype).itemsize}")
            for output, place in zip(outputs, places, strict=True)
        ]

    first = launched()
    for repeat in range(1, repeats):
        for i, (bits, again) in enumerate(zip(first, launched(), strict=True)):
            differ = np.count_nonzero(again != bits)
            assert differ == 0, (
                f"{spec.name}: run {repeat} gave other bits in {differ} elements of result {i}"
            )
    for i, (flat, buffer) in enumerate(on_gpu.inputs):
        assert_unchanged(flat, buffer.download("uint8"), f"{spec.name}, input {i},")
    for i, workspace in enumerate(launch.workspaces):
        behind = workspace.download("uint8")[-WORKSPACE_GUARD:]
        assert (behind == POISON).all(), f"{spec.name} wrote behind workspace {i}"
    results = []
    for i, (bits, place) in enumerate(zip(first, places, strict=True)):
        assert_untouched_outside(place, bits, f"{spec.name}, result {i},")
        result = place.view(bits.view(jnp.dtype(place.dtype))[GUARD:])
        results.append(result.reshape(place.shape))
    return results


@dataclass(frozen=True)
class OnGpu:
    """A launch with its memory.

    Attributes:
      inputs: what each holds, and its buffer.
      outputs: the results' buffers, of which nothing is set; nor is it of the workspaces.
    """

    launch: Launch
    inputs: list[tuple[np.ndarray, Buffer]]
    outputs: list[Buffer]


def uploaded(
    gpu: Gpu,
    problem: GemmProblem,
    spec: GemmSpec,
    raster_order: RasterOrder,
    inputs: Inputs,
    num_sms: int | None = None,
) -> OnGpu:
    """Returns `spec`'s kernel ready to launch, on guarded inputs; see `run_all`."""
    if spec.reads_parts:
        inputs = in_parts(inputs, spec)
    pending = [inputs.a, *inputs.b, *inputs.operands]
    pending += [
        array for array in (inputs.sizes, inputs.indices, inputs.index) if array is not None
    ]
    pending += inputs.scales
    given, buffers = [], []
    for places in input_places(problem.as_read_by(spec)):
        values = [pending.pop(0) for _ in places]
        flat = guarded(places, values)
        given.append((flat, gpu.upload(flat)))
        start = GUARD * flat.itemsize // DTYPES[places[0].dtype].packed
        buffers.append(given[-1][1].part(start))
    assert not pending, f"{len(pending)} inputs have no place in {problem}"
    places = result_places(problem, spec)
    sizes = [(place.end + 2 * GUARD) * jnp.dtype(place.dtype).itemsize for place in places]
    outputs = [gpu.allocate(size) for size in sizes]
    for output, place in zip(outputs, places, strict=True):
        buffers.append(output.part(GUARD * jnp.dtype(place.dtype).itemsize))
    launch = prepare(gpu, problem, spec, raster_order, buffers, num_sms)
    return OnGpu(launch, given, outputs)


def in_parts(inputs: Inputs, spec: GemmSpec) -> Inputs:
    """Returns inputs with the operands as the kernel reads them: cut into bfloat16 parts."""
    b = (float32.parts_along(x, 1, spec.bf16_terms) for x in inputs.b)
    return replace(inputs, a=float32.parts_along(inputs.a, 2, spec.bf16_terms), b=tuple(b))


def guarded(places: Sequence[Place], values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a flat array with `values` in their places, NaNs or large integers elsewhere.

    Of a dtype that is stored `packed` it holds bytes.
    """
    dtype = jnp.dtype(places[0].dtype)
    elements = max(place.end for place in places) + 2 * GUARD
    poison = LARGE if dtype.kind == "i" else POISON
    flat = np.full(elements * dtype.itemsize, poison, np.uint8).view(dtype)
    for place, value in zip(places, values, strict=True):
        array = place.view(flat[GUARD:])
        array[:] = value.reshape(array.shape)
    if DTYPES[places[0].dtype].packed == 1:
        return flat
    bits = np.resize(flat.view(np.uint8) & 15, elements + elements % 2)
    return bits[::2] | bits[1::2] << 4


def assert_unchanged(flat: np.ndarray, after: np.ndarray, what: str) -> None:
    """Checks that a guarded input holds what it held before the run.

    Args:
      after: its bytes after the run.
    """
    changed = np.flatnonzero(flat.view(np.uint8) != after)
    assert changed.size == 0, (
        f"{what} was written to: {changed.size} bytes changed, the first {changed[0]} bytes from "
        f"its guard's start, of {after.size}"
    )


def assert_untouched_outside(place: Place, bits: np.ndarray, what: str) -> None:
    """Checks that a guarded result was written in its own elements only.

    Args:
      bits: the buffer after the run, as unsigned integers of the result's size.
    """
    untouched = np.iinfo(bits.dtype).max
    rest = bits.copy()
    place.view(rest[GUARD:])[:] = untouched
    stray = np.flatnonzero(rest != untouched)
    assert stray.size == 0, (
        f"{what} wrote {stray.size} elements outside, the first {stray[0] - GUARD} elements "
        f"from its start; it spans {place.end}"
    )
