"""Every operation of an epilogue on a trial: kernels of one operation, and products to feed them.

A product has any float32 numbers for accumulators, exactly: each is the sum of three bfloat16
pieces of 8 bits. So operations are tested in the kernels that users run, no other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jax_hopper_gemm.gemm.epilogue_arithmetic import arithmetic_of
from jax_hopper_gemm.gemm.epilogue_graph import (
    ARITY,
    ROW_REDUCTIONS,
    EpilogueGraph,
    Node,
    Operand,
    Result,
)
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.spec import GemmSpec

OPERATIONS = tuple(sorted(set(ARITY) - ROW_REDUCTIONS))
DTYPES = ("float32", "float16", "bfloat16")
K = 16  # of the products; three are in use
_PARAMETERS = {"integer_pow": (-3,), "convert": ("bfloat16",), "constant": (1.5,)}
_TRUTH = ("eq", "ne", "lt", "le", "gt", "ge", "is_finite", "and", "or", "xor", "not")


class Builder:
    """Collects nodes: `b.add(1.0, b.tanh(0))` returns the number of the sum."""

    def __init__(self, operands: int = 0):
        self.operands = (Operand("matrix", "float32"),) * operands
        self.nodes: list[Node] = []

    def __getattr__(self, op: str) -> Callable[..., int]:
        def append(*args: int | float, params: tuple = ()) -> int:
            numbers = tuple(self._number(argument) for argument in args)
            self.nodes.append(Node(op, numbers, params))
            return len(self.operands) + len(self.nodes)

        return append

    def _number(self, argument: int | float) -> int:
        return argument if isinstance(argument, int) else self.constant(params=(argument,))

    def graph(self, *values: int, dtype: str = "bfloat16") -> EpilogueGraph:
        results = tuple(Result("matrix", value, dtype) for value in values)
        return EpilogueGraph(1, self.operands, tuple(self.nodes), results)


def operation_graph(op: str, dtype: str, params: tuple = (), operands: int = 0) -> EpilogueGraph:
    """Returns the graph of one operation of accumulator and operands; truth values select 1 or 0.

    Arguments past the operands are the accumulator too; truth values compare with 0.
    """
    b = Builder(operands)
    given = [i if i <= operands else 0 for i in range(ARITY[op])]
    if op in ("and", "or", "xor", "not"):
        found = getattr(b, op)(*(b.gt(argument, 0.0) for argument in given))
    elif op == "select":
        found = b.select(b.gt(0, 0.0), *given[1:])
    else:
        found = getattr(b, op)(*given, params=params)
    if op in _TRUTH:
        found = b.select(found, 1.0, 0.0)
    return b.graph(found, dtype=dtype)


def parameters_of(op: str) -> tuple:
    """Returns static parameters for a node of an operation that has some."""
    return _PARAMETERS.get(op, ())


def operation_spec(graph: EpilogueGraph) -> GemmSpec:
    """Returns a small kernel for a graph with one matrix for a result."""
    return GemmSpec(
        "bfloat16", "bfloat16", graph.results[0].dtype, "k", "n", 128, 64, num_stages=2,
        epi_stages=2, epilogue=graph, epi_load_stages=2 if graph.loaded else 0,
    )  # fmt: skip


def operation_specs() -> dict[str, GemmSpec]:
    """Returns a kernel for each operation and each form that it has, by a name for a test."""
    found = {}
    for op in OPERATIONS:
        forms = set()
        for dtype in DTYPES:
            operands = min(2, max(0, ARITY[op] - 1))
            graph = operation_graph(op, dtype, parameters_of(op), operands)
            arithmetic = arithmetic_of(graph)
            form = arithmetic.forms[arithmetic.number(graph.results[0].value)]
            if form not in forms:
                forms.add(form)
                found[f"{op}-{form}"] = operation_spec(graph)
    return found


def problem_of(spec: GemmSpec, m: int, n: int) -> GemmProblem:
    """Returns the problem whose operands are (m, n) matrices."""
    problem = GemmProblem.dense(m, n, K, d_dtype=spec.d_dtype)
    operands = (MatrixLayout("n", n, m * n),) * len(spec.graph.operands)
    return dataclasses.replace(problem, epilogue=spec.epilogue, operands=operands)


def factors_of(x: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns bfloat16 matrices whose product is x[i] * 2**exponents[j], without any rounding.

    Args:
      x: (M,) float32, no subnormal numbers and none under 2**-100.
      exponents: (N,) integers.

    Returns:
      (M, K) and (K, N).
    """
    a = np.zeros((x.size, K), jnp.bfloat16)
    rest = x.astype(np.float32)
    for piece in range(3):
        upper = (rest.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        a[:, piece] = upper.astype(jnp.bfloat16)
        rest = np.where(np.isfinite(rest), rest - np.where(np.isfinite(upper), upper, 0), 0)
        rest = rest.astype(np.float32)
    b = np.zeros((K, exponents.size), jnp.bfloat16)
    b[:3] = np.exp2(exponents.astype(np.float32)).astype(jnp.bfloat16)
    return a, b
