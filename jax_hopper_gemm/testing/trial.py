"""A kernel on trial: run on memory where any access out of place shows.

The gaps in and around A and B hold NaNs, so an element that is read but is not the problem's
spoils the result. D and all around it is filled with NaNs before each run, so an element that
is not written stays one, and what is written outside is found.
"""

from __future__ import annotations

import numpy as np

from ..problem import GemmProblem
from ..spec import GemmSpec, Traversal
from . import reference
from .direct import prepare
from .gpu import Gpu
from .reference import Operand

GUARD = 1024  # elements before and after each operand
POISON = 0xFF  # a byte; all ones are a NaN in every float


def run(
    gpu: Gpu,
    problem: GemmProblem,
    spec: GemmSpec,
    traversal: Traversal,
    a: np.ndarray,
    b: np.ndarray,
    repeats: int = 1,
    num_sms: int | None = None,
) -> np.ndarray:
    """Returns D as `spec`'s kernel computes it, having checked where it wrote.

    Args:
      a: (L, M, K), of the problem's dtype.
      b: (L, K, N), likewise.
      repeats: how often the kernel runs, at least once; D is poisoned before each.
      num_sms: SMs that a persistent grid fills; None for all that the GPU has.

    Returns:
      (L, M, N), a view.

    Raises:
      AssertionError: memory outside D changed, or a repeat gave other bits.
    """
    dtype = reference.dtype_of(problem, "d")
    inputs = [gpu.upload(guarded(problem, "a", a)), gpu.upload(guarded(problem, "b", b))]
    output = gpu.allocate((reference.num_elements(problem, "d") + 2 * GUARD) * dtype.itemsize)
    operands = [buffer.part(GUARD * a.dtype.itemsize) for buffer in inputs]
    operands.append(output.part(GUARD * dtype.itemsize))
    launch = prepare(gpu, problem, spec, traversal, operands, num_sms)

    def launched() -> np.ndarray:
        output.fill(POISON)
        launch()
        gpu.synchronize()
        return output.download(f"u{dtype.itemsize}")

    bits = launched()
    for repeat in range(1, repeats):
        differ = np.count_nonzero(launched() != bits)
        assert differ == 0, f"{spec.name}: run {repeat} gave other bits in {differ} elements"
    assert_untouched_outside(problem, bits, spec.name)
    return reference.view(problem, "d", bits.view(dtype)[GUARD:])


def guarded(problem: GemmProblem, operand: Operand, values: np.ndarray) -> np.ndarray:
    """Returns a flat array with `values` (L, rows, columns) in their places and NaNs elsewhere."""
    dtype = reference.dtype_of(problem, operand)
    nbytes = (reference.num_elements(problem, operand) + 2 * GUARD) * dtype.itemsize
    flat = np.full(nbytes, POISON, np.uint8).view(dtype)
    reference.view(problem, operand, flat[GUARD:])[:] = values
    return flat


def assert_untouched_outside(problem: GemmProblem, bits: np.ndarray, what: str) -> None:
    """Checks that a guarded D was written in its own elements only.

    Args:
      bits: the buffer after the run, as unsigned integers of D's size.
    """
    untouched = np.iinfo(bits.dtype).max
    rest = bits.copy()
    reference.view(problem, "d", rest[GUARD:])[:] = untouched
    stray = np.flatnonzero(rest != untouched)
    assert stray.size == 0, (
        f"{what} wrote {stray.size} elements outside D, the first {stray[0] - GUARD} elements "
        f"from its start; D spans {reference.num_elements(problem, 'd')}"
    )
