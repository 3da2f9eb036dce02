"""Epilogues that users ask for, as graphs: what tests and benchmarks run without tracing anything.

`STANDARD` holds each by its name. Between them they use every kind of operand and of result, and
every way in which results share a pass.
"""

from __future__ import annotations

from typing import Any

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, OperandKind, Result


class Builder:
    """Makes a graph line by line; a value is its number.

        build = Builder()
        bias = build.operand("row", "bfloat16")
        build.result(build("add", 0, bias), "bfloat16")
        graph = build.graph()

    All operands come before the first operation. Numbers among an operation's arguments that are
    floats become constants.
    """

    def __init__(self, accumulators: int = 1):
        self.accumulators = accumulators
        self.operands: list[Operand] = []
        self.nodes: list[Node] = []
        self.results: list[Result] = []

    def operand(self, kind: OperandKind, dtype: str = "float32") -> int:
        assert not self.nodes, "operands come before operations"
        self.operands.append(Operand(kind, dtype))
        return self.accumulators + len(self.operands) - 1

    def __call__(self, op: str, *args: int | float, params: tuple = ()) -> int:
        """Returns the value of a new node."""
        numbers = tuple(
            self("constant", params=(arg,)) if isinstance(arg, float) else arg for arg in args
        )
        self.nodes.append(Node(op, numbers, params))
        return self.accumulators + len(self.operands) + len(self.nodes) - 1

    def result(self, value: int, dtype: str = "float32", **fields: Any) -> None:
        """Adds a matrix of results."""
        self.results.append(Result("matrix", value, dtype, **fields))

    def reduce(self, kind: Any, value: int, k: int = 0) -> None:
        """Adds another result."""
        self.results.append(Result(kind, value, k=k))

    def graph(self) -> EpilogueGraph:
        return EpilogueGraph(
            self.accumulators, tuple(self.operands), tuple(self.nodes), tuple(self.results)
        )


def bias(dtype: str = "bfloat16") -> EpilogueGraph:
    """acc + bias."""
    build = Builder()
    row = build.operand("row", dtype)
    build.result(build("add", 0, row), dtype)
    return build.graph()


def bias_gelu(dtype: str = "bfloat16", saved: bool = False) -> EpilogueGraph:
    """gelu(acc + bias), by tanh; `saved` stores the sum, too, as a second result."""
    build = Builder()
    row = build.operand("row", dtype)
    x = build("add", 0, row)
    build.result(_gelu(build, x), dtype)
    if saved:
        build.result(x, dtype)
    return build.graph()


def bias_silu(dtype: str = "bfloat16") -> EpilogueGraph:
    """silu(acc + bias)."""
    build = Builder()
    row = build.operand("row", dtype)
    x = build("add", 0, row)
    build.result(build("mul", x, build("logistic", x)), dtype)
    return build.graph()


def residual(dtype: str = "bfloat16", result_dtype: str = "bfloat16") -> EpilogueGraph:
    """acc + residual."""
    build = Builder()
    matrix = build.operand("matrix", dtype)
    build.result(build("add", 0, matrix), result_dtype)
    return build.graph()


def alpha_beta(dtype: str = "float32") -> EpilogueGraph:
    """alpha * acc + beta * c."""
    build = Builder()
    alpha, beta, c = (
        build.operand("scalar"),
        build.operand("scalar"),
        build.operand("matrix", dtype),
    )
    build.result(build("add", build("mul", 0, alpha), build("mul", c, beta)), dtype)
    return build.graph()


def scaled_rows() -> EpilogueGraph:
    """acc * column."""
    build = Builder()
    column = build.operand("column")
    build.result(build("mul", 0, column), "bfloat16")
    return build.graph()


def masked() -> EpilogueGraph:
    """acc where a mask is true, else 0."""
    build = Builder()
    mask = build.operand("matrix", "bool")
    build.result(build("select", mask, 0, 0.0), "bfloat16")
    return build.graph()


def masked_vectors() -> EpilogueGraph:
    """acc where the row's and the column's mask are true, else -1; float16."""
    build = Builder()
    row, column = build.operand("row", "bool"), build.operand("column", "bool")
    build.result(build("select", build("and", row, column), 0, -1.0), "float16")
    return build.graph()


def two_matrices() -> EpilogueGraph:
    """2 acc as bfloat16, and acc as float32."""
    build = Builder()
    build.result(build("mul", 0, 2.0), "bfloat16")
    build.result(0, "float32")
    return build.graph()


def planes(dtype: str = "bfloat16") -> EpilogueGraph:
    """gate * up, and both sums in one array (M, 2, N)."""
    build = Builder(2)
    build.result(build("mul", 0, 1), dtype)
    build.result(0, dtype, plane=0, planes=2)
    build.result(1, dtype, plane=1, planes=2)
    return build.graph()


def gated_silu(dtype: str = "bfloat16") -> EpilogueGraph:
    """silu(gate) * up."""
    build = Builder(2)
    build.result(build("mul", build("mul", 0, build("logistic", 0)), 1), dtype)
    return build.graph()


def silu_gradient() -> EpilogueGraph:
    """acc * silu'(x), of a saved x, and its column sums: a backward pass through bias and silu."""
    build = Builder()
    x = build.operand("matrix", "bfloat16")
    s = build("logistic", x)
    slope = build("mul", s, build("add", 1.0, build("mul", x, build("sub", 1.0, s))))
    gradient = build("mul", 0, slope)
    build.result(gradient, "bfloat16")
    build.reduce("column_sum", gradient)
    return build.graph()


def reduced(kind: str, dtype: str = "bfloat16", k: int = 0) -> EpilogueGraph:
    """acc, and one reduction of it."""
    build = Builder()
    build.result(0, dtype)
    build.reduce(kind, 0, k)
    return build.graph()


def largest_magnitude() -> EpilogueGraph:
    """acc, and the largest |acc|."""
    build = Builder()
    build.result(0, "bfloat16")
    build.reduce("max", build("abs", 0))
    return build.graph()


def sums_alone() -> EpilogueGraph:
    """Row and column sums of acc, which itself is not stored."""
    build = Builder()
    build.reduce("row_sum", 0)
    build.reduce("column_sum", 0)
    return build.graph()


def softmax() -> EpilogueGraph:
    """softmax(acc) along whole rows."""
    build = Builder()
    _, _, probabilities = _softmax(build)
    build.result(probabilities, "float32")
    return build.graph()


def router(k: int = 8) -> EpilogueGraph:
    """softmax(acc) along whole rows, and its k largest with their columns."""
    build = Builder()
    _, _, probabilities = _softmax(build)
    build.result(probabilities, "float32")
    build.reduce("top_k_values", probabilities, k)
    build.reduce("top_k_indices", probabilities, k)
    return build.graph()


def top_k(k: int = 4) -> EpilogueGraph:
    """acc, and the k largest of each row with their columns."""
    build = Builder()
    build.result(0, "bfloat16")
    build.reduce("top_k_values", 0, k)
    build.reduce("top_k_indices", 0, k)
    return build.graph()


def everything() -> EpilogueGraph:
    """Every kind of operand, two matrices and every reduction, in one pass; exact on integers."""
    build = Builder()
    alpha = build.operand("scalar")
    row, column = build.operand("row", "bfloat16"), build.operand("column")
    matrix, mask = build.operand("matrix", "bfloat16"), build.operand("matrix", "bool")
    x = build("add", build("mul", 0, alpha), row)
    y = build("select", mask, build("add", x, matrix), build("sub", x, column))
    build.result(y, "bfloat16")
    build.result(x, "float32")
    build.reduce("column_sum", y)
    build.reduce("row_sum", y)
    build.reduce("row_max", x)
    build.reduce("max", build("abs", y))
    return build.graph()


def _gelu(build: Builder, x: int) -> int:
    cubic = build("mul", build("integer_pow", x, params=(3,)), 0.044715)
    inner = build("mul", build("add", x, cubic), 0.7978845608028654)
    return build("mul", build("mul", x, 0.5), build("add", build("tanh", inner), 1.0))


def _softmax(build: Builder) -> tuple[int, int, int]:
    largest = build("row_max", 0)
    powers = build("exp", build("sub", 0, largest))
    total = build("row_sum", powers)
    return largest, total, build("div", powers, total)


STANDARD: dict[str, EpilogueGraph] = {
    "bias": bias(), "bias_gelu": bias_gelu(), "bias_gelu_saved": bias_gelu(saved=True),
    "bias_silu": bias_silu(), "residual": residual(),
    "residual_float32": residual("float32", "float32"), "alpha_beta": alpha_beta(),
    "scaled_rows": scaled_rows(), "masked": masked(), "masked_vectors": masked_vectors(),
    "two_matrices": two_matrices(), "planes": planes(), "gated_silu": gated_silu(),
    "silu_gradient": silu_gradient(), "column_sum": reduced("column_sum"),
    "row_sum": reduced("row_sum"), "row_max": reduced("row_max"),
    "row_sumexp": reduced("row_sumexp", "float32"), "amax": largest_magnitude(),
    "sums_alone": sums_alone(), "softmax": softmax(), "router": router(), "top_k": top_k(),
    "everything": everything(),
}  # fmt: skip


def scaled(*kinds: OperandKind, dtype: str = "bfloat16", rounded: bool = False) -> EpilogueGraph:
    """acc times scales, `rounded` to an integer."""
    build = Builder()
    x = 0
    for scale in [build.operand(kind) for kind in kinds]:
        x = build("mul", x, scale)
    build.result(build("round", x) if rounded else x, dtype)
    return build.graph()


def quantized(dtype: str) -> EpilogueGraph:
    """acc times a scale in 8 bits, and the largest |acc|."""
    build = Builder()
    scale = build.operand("scalar")
    build.result(build("mul", 0, scale), dtype)
    build.reduce("max", build("abs", 0))
    return build.graph()


def through(dtype: str) -> EpilogueGraph:
    """acc, rounded to 8 bits and stored in float32."""
    build = Builder()
    build.result(build("convert", 0, params=(dtype,)))
    return build.graph()


# What follows products of 8 bits: scales of each operand, and casts to 8 bits.
EIGHT_BIT: dict[str, EpilogueGraph] = {
    "scaled": scaled("scalar", "scalar"),
    "scaled_rows_columns": scaled("row", "column"),
    "scaled_e4m3": scaled("scalar", dtype="float8_e4m3fn"),
    "scaled_e5m2": scaled("row", "column", dtype="float8_e5m2"),
    "scaled_int8": scaled("scalar", dtype="int8", rounded=True),
    "quantized_e4m3": quantized("float8_e4m3fn"),
    "through_e4m3": through("float8_e4m3fn"),
    "through_e5m2": through("float8_e5m2"),
    "through_int8": through("int8"),
}

# Operations that float32 carries out without rounding on small integers.
EXACT_OPS = frozenset(
    {"constant", "neg", "abs", "sign", "square", "add", "sub", "mul", "max", "min", "select",
     "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "is_finite", "convert",
     "floor", "ceil", "round", "row_sum", "row_max"}
)  # fmt: skip


def is_exact(graph: EpilogueGraph) -> bool:
    """Returns whether every result for small integers has one right answer, bit for bit."""
    return all(node.op in EXACT_OPS for node in graph.nodes) and not any(
        result.kind == "row_sumexp" for result in graph.results
    )
