"""What a kernel with an epilogue should have written, and whether it has.

Two ways. `exact`: small integers through a graph that float32 carries out without rounding; every
result has one right answer, bit for bit, whatever the order of sums. `assert_within_bound`:
float64 and a bound on the error of every value; sums and maxima of values add and take the
maximum of their errors.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ..epilogue import EpilogueGraph, Result
from ..plan import ceil_div
from ..problem import GemmProblem
from ..spec import EPI_TILE_M, GemmSpec
from . import reference, tolerance
from .trial import Inputs

UNIT = 2.0**-24  # of float32's rounding
EXP_ERROR = 2.0**-20  # relative, of exp of a float32 difference: far more than the hardware's

_EXACT: dict[str, Callable[..., np.ndarray]] = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "square": np.square, "add": np.add,
    "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "select": np.where, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or,
    "xor": np.logical_xor, "not": np.logical_not, "is_finite": np.isfinite, "floor": np.floor,
    "ceil": np.ceil, "round": np.rint,
}  # fmt: skip


def exact(problem: GemmProblem, spec: GemmSpec, inputs: Inputs) -> list[np.ndarray]:
    """Returns the one right content of each array that the kernel writes, for small integers."""
    sums = [reference.integer_product(inputs.a, b, np.dtype(np.float32)) for b in inputs.b]
    values = exact_values(problem.graph, sums, _broadcast(problem, inputs))
    return _arrays(problem, spec, [values[result.value] for result in problem.graph.results])


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
            values.append(arguments[0].astype(jnp.dtype(node.params[0])).astype(np.float32))
        elif node.op in ("row_sum", "row_max"):
            reduce = np.sum if node.op == "row_sum" else np.max
            values.append(reduce(arguments[0], axis=-1, keepdims=True))
        else:
            values.append(_EXACT[node.op](*arguments))
    return values


def assert_exact(got: list[np.ndarray], expected: list[np.ndarray], what: str) -> None:
    """Checks that every element of every result is the right one.

    Raises:
      AssertionError: it is not; a NaN, which is what was not written, is wrong, too.
    """
    for i, (result, right) in enumerate(zip(got, expected, strict=True)):
        assert result.shape == right.shape, f"{what}: result {i} is {result.shape}, {right.shape}"
        wrong = np.argwhere(~(result == right))
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
    graph = problem.graph
    values, errors = _bounded_values(problem, inputs)
    shape = reference.shape_of(problem, "d")
    arrays = iter(enumerate(got))
    largest_of_row: np.ndarray | None = None
    for result in graph.results:
        value = np.broadcast_to(values[result.value], shape)
        error = np.broadcast_to(errors[result.value], shape)
        if result.kind == "matrix":
            if result.plane == 0:
                index, array = next(arrays)
            part = array[:, :, result.plane] if result.planes > 1 else array
            bound = error + _rounding(value, error, result.dtype)
            _check(part, value, bound, f"{what}: result {index}")
            continue
        index, array = next(arrays)
        name = f"{what}: result {index}, a {result.kind},"
        if result.kind == "row_sumexp":
            _check_sumexp(array, value, error, spec, name)
        elif result.kind == "top_k_values":
            largest_of_row = array
            order = -np.sort(-value, axis=-1)[..., : result.k]
            _check(array, order, np.max(error, axis=-1, keepdims=True) + 0 * order, name)
        elif result.kind == "top_k_indices":
            chosen = np.take_along_axis(value, array.astype(np.int64), axis=-1)
            order = -np.sort(-value, axis=-1)[..., : result.k]
            _check(chosen, order, 2 * np.max(error, axis=-1, keepdims=True) + 0 * order, name)
            distinct = np.sort(array, axis=-1)
            assert (np.diff(distinct, axis=-1) > 0).all(), f"{name} names a column twice"
            if largest_of_row is not None:
                assert (np.diff(largest_of_row, axis=-1) <= 0).all(), f"{name} is out of order"
        else:
            right = _reduced(result, value, spec)
            if result.kind.endswith("sum"):
                terms = EPI_TILE_M if result.kind == "column_sum" else spec.d_tile_n
                magnitude = _reduced(result, np.abs(value) + error, spec)
                bound = _reduced(result, error, spec) + terms * UNIT * magnitude
            else:
                bound = _reduced(result, error, spec)
            _check(array, right, bound, name)


def _bounded_values(
    problem: GemmProblem, inputs: Inputs
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns every value of the problem's graph in float64, and the largest error of each."""
    from .epilogue import evaluate

    sums = [reference.product(inputs.a, b) for b in inputs.b]
    relative = tolerance.accumulation_error(problem.k)
    acc_error = [relative * reference.magnitude(inputs.a, b) for b in inputs.b]
    found = evaluate(problem.graph, sums, _broadcast(problem, inputs), acc_error)
    return [value for value, _ in found], [error for _, error in found]


def _broadcast(problem: GemmProblem, inputs: Inputs) -> list[np.ndarray]:
    """Returns the operands in shapes that broadcast to (L, M, N)."""
    axes = {"matrix": (), "row": (1,), "column": (2,), "scalar": (1, 2)}
    pairs = zip(problem.graph.operands, inputs.operands, strict=True)
    return [np.expand_dims(array, axes[operand.kind]) for operand, array in pairs]


def _arrays(problem: GemmProblem, spec: GemmSpec, values: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the arrays that hold each result's `values`, whole in the first case of planes."""
    found = []
    for result, value in zip(problem.graph.results, values, strict=True):
        value = np.broadcast_to(value, reference.shape_of(problem, "d"))
        if result.kind == "matrix":
            cast = value.astype(jnp.dtype(result.dtype))
            if result.plane == 1:
                found[-1] = np.stack([found[-1], cast], axis=2)
            else:
                found.append(cast)
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


def _check_sumexp(
    array: np.ndarray, value: np.ndarray, error: np.ndarray, spec: GemmSpec, name: str
) -> None:
    """Checks the largest value and the sum of exponentials of each row of each tile."""
    largest, total = array[:, :, 0].astype(np.float64), array[:, :, 1].astype(np.float64)
    tiles = range(0, value.shape[2], spec.d_tile_n)
    pieces = [value[:, :, i : i + spec.d_tile_n] for i in tiles]
    bounds = [error[:, :, i : i + spec.d_tile_n].max(axis=-1) for i in tiles]
    right = np.stack([piece.max(axis=-1) for piece in pieces], axis=1)
    bound = np.stack(bounds, axis=1)
    _check(largest, right, bound, f"{name} largest")
    log_sums = [p.max(-1) + np.log(np.exp(p - p.max(-1, keepdims=True)).sum(-1)) for p in pieces]
    log_sum = np.stack(log_sums, axis=1)
    # A relative error of the sum is an absolute one of its logarithm.
    relative = spec.d_tile_n * UNIT + EXP_ERROR
    spread = UNIT * np.stack([np.abs(p).max(axis=-1) for p in pieces], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        got = largest + np.log(total)
    _check(got, log_sum, bound + relative + 4 * spread, f"{name} log of the sum")


def _rounding(value: np.ndarray, error: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the largest error of rounding a value, itself so far off, to `dtype`."""
    if dtype == "float32":
        return np.zeros_like(value)
    info = jnp.finfo(dtype)
    return float(info.eps) / 2 * (np.abs(value) + error) + float(info.smallest_subnormal) / 2


def _check(got: np.ndarray, expected: np.ndarray, bound: np.ndarray, what: str) -> None:
    assert got.shape == expected.shape, f"{what} is {got.shape}, not {expected.shape}"
    off = np.abs(got.astype(np.float64) - expected)
    wrong = np.argwhere(~(off <= bound))
    assert wrong.size == 0, (
        f"{what}: {len(wrong)} of {got.size} elements are beyond their bounds, the first at "
        f"{wrong[0]}: {got[tuple(wrong[0])]!r} for {expected[tuple(wrong[0])]!r} within "
        f"{bound[tuple(wrong[0])]:.3e}"
    )
