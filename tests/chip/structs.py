"""What `checker.cu` and `values.cuh` are told: their numbers, and their structures."""

from __future__ import annotations

import numpy as np

ROLES = ("factor", "operand", "table", "scale", "workspace", "sums", "result")
DTYPES = (
    "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "float32", "bool", "int32",
    "int4",
)  # fmt: skip
KINDS = (
    "matrix", "row_sum", "row_max", "column_sum", "max", "top_k_values", "top_k_indices", "written"
)  # fmt: skip
OPS = (
    "constant", "neg", "abs", "sign", "square", "floor", "ceil", "round", "convert", "add", "sub",
    "mul", "max", "min", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not",
    "is_finite", "select",
)  # fmt: skip
FILL, REFERENCE, CHECK = range(3)
PHASES: dict[str, tuple[int, ...]] = {role: (FILL, CHECK) for role in ROLES}
PHASES |= {"sums": (REFERENCE,), "result": (CHECK,)}

NODE = np.dtype([("op", "i4"), ("args", "i4", 3), ("dtype", "i4"), ("value", "f4")], align=True)
ARRAY = np.dtype(
    [
        ("address", "i8"), ("extent", "i8", 5), ("stride", "i8", 5), ("table", "i8"),
        ("alive", "i8", 3), ("shift_rows", "i4", 3), ("shift_columns", "i4", 3),
        ("problem", "i4"), ("role", "i4"), ("dtype", "i4"), ("which", "i4"),
        ("kind", "i4"), ("block_m", "i4"), ("block_n", "i4"), ("packed", "i4"),
        ("parts", "i4"),
    ],
    align=True,
)  # fmt: skip
PROBLEM = np.dtype(
    [
        ("nodes", "i8"), ("sums", "i8"), ("row_matrix", "i8"), ("spans", "i8"), ("indices", "i8"),
        ("m", "i4"), ("n", "i4"), ("k", "i4"), ("outer_middle", "i4"),
        ("inner", "i4"), ("lines", "i4", 2), ("a", "i4"), ("b", "i4"), ("first_operand", "i4"),
        ("accumulators", "i4"), ("operands", "i4"), ("num_nodes", "i4"), ("instances", "i4"),
        ("direct", "i4"), ("source_rows", "i4"), ("gathered", "i4"), ("grouped", "i4"),
        ("index_of_a", "i4"), ("index_of_b", "i4"), ("widths", "i4", 2), ("seed", "u4"),
        ("scale_k", "i4"), ("scales", "i4", 2), ("blocks", "i4", 2),
    ],
    align=True,
)  # fmt: skip
CHUNK = np.dtype([("begin", "i8"), ("end", "i8"), ("array", "i4"), ("unused", "i4")], align=True)
STRUCTS = (NODE, ARRAY, PROBLEM, CHUNK)
