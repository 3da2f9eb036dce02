"""What a kernel with an epilogue should have written, and whether it has.

Two ways. `exact`: small integers through a graph that float32 carries out without rounding; every
part of every result has one right answer, bit for bit, whatever the order of sums.
`assert_within_bound`: any numbers, whole results, float64 and a derived bound for each element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from support import bounds, graphs, random_operands, reference, tolerance
from support.casts import cast, same
from support.gpu import Gpu
from support.places import shape_of
from support.trial import Inputs, run_all

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Result
from jax_hopper_gemm.gemm.grid import ceil_div
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.smem import EPI_TILE_M
from jax_hopper_gemm.gemm.spec import GemmSpec

_EXACT: dict[str, Callable[..., np.ndarray]] = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "square": np.square, "add": np.add,
    "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "select": np.where, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or,
    "xor": np.logical_xor, "not": np.logical_not, "is_finite": np.isfinite, "floor": np.floor,
    "ceil": np.ceil, "round": np.rint,
}  # fmt: skip


def check(
    gpu: Gpu,
    spec: GemmSpec,
    problem: GemmProblem,
    raster_order: RasterOrder,
    seed: int,
    num_sms: int | None = None,
    repeats: int = 1,
    exactly: bool | None = None,
) -> None:
    """Runs a kernel and checks all that it wrote, and that it wrote nothing else.

    Args:
      seed: of the inputs.
      num_sms, repeats: as in `trial.run_all`.
      exactly: whether inputs are integers and results exact; None where the epilogue allows it.
    """
    assert problem_violations(problem) + pairing_violations(problem, spec) == []
    exactly = graphs.is_exact(spec.graph) if exactly is None else exactly
    inputs = (random_operands.integer_inputs if exactly else random_operands.normal_inputs)(
        problem, seed
    )
    results = run_all(gpu, problem, spec, raster_order, inputs, repeats, num_sms)
    what = f"{spec.name} on {problem} along {raster_order}"
    if problem.panels:  # each is a product of its own
        count = len(problem.panels)
        both = zip(inputs.b, _equal_parts(inputs.operands, count), strict=True)
        each = [replace(inputs, b=(b,), operands=operands) for b, operands in both]
        parts = zip(problem.apart, each, _equal_parts(results, count), strict=True)
    else:
        parts = [(problem, inputs, results)]
    for part, given, found in parts:
        if exactly:
            assert_exact(found, exact(part, spec, given), what)
        else:
            assert_within_bound(part, spec, given, found, what)


def _equal_parts(sequence: Any, count: int) -> list[Any]:
    length = len(sequence) // count
    return [sequence[i * length : (i + 1) * length] for i in range(count)]


def check_scaled(
    gpu: Gpu,
    spec: GemmSpec,
    problem: GemmProblem,
    raster_order: RasterOrder,
    seed: int,
    num_sms: int | None = None,
    repeats: int = 1,
) -> None:
    """The same of a kernel with block scales, on integers and, without an epilogue, on other
    numbers; see `check`."""
    assert problem_violations(problem) + pairing_violations(problem, spec) == []
    what = f"{spec.name} on {problem} along {raster_order}"
    makers = [random_operands.integer_inputs, random_operands.normal_inputs]
    for make in makers[: 1 if spec.epilogue else 2]:
        inputs = random_operands.scale_inputs(problem, make(problem, seed), seed)
        results = run_all(gpu, problem, spec, raster_order, inputs, repeats, num_sms)
        a, b = reference.scaled(problem, inputs)
        exact, magnitude = reference.product(a, b), reference.magnitude(a, b)
        if make is random_operands.integer_inputs:
            sums = [exact.astype(np.float32)]
            assert_exact(results, _evaluated(problem, spec, inputs, sums), what)
            continue
        (result,) = results
        bound = tolerance.error_bound(
            exact, magnitude, problem.k, spec.d_dtype, "promoted", spec.a_dtype
        )
        inside = np.abs(exact) + bound < 400  # a cast to 8 bits overflows beyond
        found = np.where(inside, result.astype(np.float64), 0)
        bounds.assert_within(found, np.where(inside, exact, 0), bound, what)


def exact(problem: GemmProblem, spec: GemmSpec, inputs: Inputs) -> list[np.ndarray]:
    """Returns the one right content of each array that the kernel writes, for small integers."""
    sums = [reference.integer_product(inputs.a, b, np.dtype(np.float32)) for b in inputs.b]
    return _evaluated(problem, spec, inputs, sums)


def _evaluated(
    problem: GemmProblem, spec: GemmSpec, inputs: Inputs, sums: list[np.ndarray]
) -> list[np.ndarray]:
    """Returns what the kernel writes of its products, by the graph of the epilogue."""
    values = exact_values(problem.graph, sums, broadcast_operands(problem, inputs))
    stored = [values[result.value] for result in problem.graph.results]
    return arrays_of(problem.graph, spec, stored, shape_of(problem, "d"))


def exact_values(
    graph: EpilogueGraph, accumulators: list[np.ndarray], operands: list[np.ndarray]
) -> list[np.ndarray]:
    """Returns every value of a graph of exact operations, in float32 or bool.

    Args:
      accumulators: (L, M, N) float32 each.
      operands: of shapes that broadcast to that.
    """
    values = [*accumulators]
    for given in operands:
        values.append(given if given.dtype == bool else given.astype(np.float32))
    for node in graph.nodes:
        arguments = [values[argument] for argument in node.args]
        if node.op == "constant":
            values.append(np.array(node.params[0], np.float32))
        elif node.op == "convert":
            values.append(cast(arguments[0], node.params[0]).astype(np.float32))
        elif node.op in ("row_sum", "row_max"):
            reduce = np.sum if node.op == "row_sum" else np.max
            values.append(reduce(arguments[0], axis=-1, keepdims=True))
        else:
            values.append(_EXACT[node.op](*arguments))
    return values


def assert_exact(got: list[np.ndarray], expected: list[np.ndarray], what: str) -> None:
    """Checks that every element of every result is the right one.

    Raises:
      AssertionError: it is not. A NaN, which is what was not written, is right only in 8 bits.
    """
    for i, (result, right) in enumerate(zip(got, expected, strict=True)):
        assert result.shape == right.shape, f"{what}: result {i} is {result.shape}, {right.shape}"
        wrong = np.argwhere(~same(result, right))
        assert wrong.size == 0, (
            f"{what}: {len(wrong)} of {right.size} elements of result {i} differ, the first at "
            f"{wrong[0]}: {result[tuple(wrong[0])]} for {right[tuple(wrong[0])]}"
        )


def assert_within_bound(
    problem: GemmProblem, spec: GemmSpec, inputs: Inputs, got: list[np.ndarray], what: str
) -> None:
    """Checks every result against float64, within the error that its operations may make.

    Raises:
      AssertionError: an element is farther off, or was not written.
    """
    from support import epilogue

    sums = [reference.product(inputs.a, b) for b in inputs.b]
    summation = bounds.summation_of(problem)
    relative = tolerance.accumulation_error(problem.k, summation, problem.a_dtype)
    errors = [relative * reference.magnitude(inputs.a, b) for b in inputs.b]
    expected = epilogue.evaluate(problem.graph, sums, broadcast_operands(problem, inputs), errors)
    assert_near(finished(problem, got), expected, problem.n, what)


def assert_near(
    got: list[tuple[str, np.ndarray]],
    expected: list[tuple[np.ndarray, np.ndarray]],
    n: int,
    what: str,
) -> None:
    """Checks results by `finished` against values and bounds by `epilogue.evaluate`.

    Args:
      n: columns of D.

    Raises:
      AssertionError: an element is farther off, or was not written.
    """
    for (name, array), (value, bound) in zip(got, expected, strict=True):
        bounds.assert_within(array, value, bound, f"{what}: {name}")
        if name.startswith("top_k_indices"):  # uncertain ones are anyone's, but none twice
            ordered = np.sort(array, axis=-1)
            assert (ordered[..., 1:] > ordered[..., :-1]).all(), f"{what}: {name} repeat"
            assert array.min() >= 0 and array.max() < n, f"{what}: {name} outside D"


def finished(problem: GemmProblem, got: list[np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """Returns each whole result with its name, of what a kernel wrote.

    Matrices (L, M, N); row_* (L, M), of row_sumexp two, largest and sum; column_sum (L, N); max
    (); top_k_* (L, M, k). Parts are added in float64.
    """
    arrays, found = iter(got), []
    array = np.empty(0)
    for i, result in enumerate(problem.graph.results):
        if result.plane == 0:
            array = next(arrays)
        name = f"{result.kind} {i}"
        if result.kind == "matrix":
            found.append((name, array[:, :, result.plane] if result.planes > 1 else array))
        elif result.kind in ("column_sum", "row_sum"):
            found.append((name, array.sum(axis=1, dtype=np.float64)))
        elif result.kind == "row_max":
            found.append((name, array.max(axis=1)))
        elif result.kind == "max":
            found.append((name, array.max()))
        elif result.kind == "row_sumexp":
            largest, parts = (array[:, :, j].astype(np.float64) for j in (0, 1))
            whole = largest.max(axis=1)
            total = (parts * np.exp(largest - whole[:, None])).sum(axis=1)
            found += [(f"{name}, largest", whole), (f"{name}, sum", total)]
        else:
            found.append((name, array))
    return found


def broadcast_operands(problem: GemmProblem, inputs: Inputs) -> list[np.ndarray]:
    """Returns the operands in shapes that broadcast to (L, M, N)."""
    axes = {"matrix": (), "row": (1,), "column": (2,), "scalar": (1, 2)}
    pairs = zip(problem.graph.operands, inputs.operands, strict=True)
    return [np.expand_dims(array, axes[operand.kind]) for operand, array in pairs]


def arrays_of(
    graph: EpilogueGraph, spec: GemmSpec, values: list[np.ndarray], shape: tuple[int, ...]
) -> list[np.ndarray]:
    """Returns the arrays that hold each result's `values`, whole in the first case of planes.

    Args:
      values: for each of the graph's results, of shapes that broadcast to `shape`, (L, M, N).
    """
    found = []
    for result, value in zip(graph.results, values, strict=True):
        value = np.broadcast_to(value, shape)
        if result.kind == "matrix":
            stored = cast(value, result.dtype)
            if result.plane == 1:
                found[-1] = np.stack([found[-1], stored], axis=2)
            else:
                found.append(stored)
        elif result.kind.startswith("top_k"):
            order = np.argsort(-value, axis=-1, kind="stable")[..., : result.k]
            if result.kind == "top_k_indices":
                found.append(order.astype(np.int32))
            else:
                found.append(np.take_along_axis(value, order, axis=-1))
        else:
            found.append(_reduced(result, value, spec))
    return found


def _reduced(result: Result, value: np.ndarray, spec: GemmSpec) -> np.ndarray:
    """Returns the partial sums or maxima of (L, M, N) that a kernel of `spec` writes."""
    rows = {"column_sum": EPI_TILE_M, "max": 16}.get(result.kind, 1)
    columns = 1 if result.kind == "column_sum" else spec.d_tile_n
    is_sum = result.kind.endswith("sum")
    reduce, identity = (np.add, 0.0) if is_sum else (np.maximum, -np.inf)
    batches, m, n = value.shape
    blocks_m, blocks_n = ceil_div(m, rows), ceil_div(n, columns)
    padding = ((0, 0), (0, blocks_m * rows - m), (0, blocks_n * columns - n))
    padded = np.pad(value, padding, constant_values=identity)
    blocks = padded.reshape(batches, blocks_m, rows, blocks_n, columns)
    partial = reduce.reduce(reduce.reduce(blocks, axis=4), axis=2)
    if is_sum and value.dtype == np.float32:
        assert np.abs(partial).max(initial=0) < 2**24, "sums too large to be exact in float32"
    # (L, M, tiles along N) is stored with M last
    return partial.swapaxes(1, 2) if result.kind in ("row_sum", "row_max") else partial
