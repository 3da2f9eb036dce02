"""The dtypes of arrays that kernels read and write: one row each.

Names are NumPy's. A dtype that is not here is XLA's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

# operand: of a product. result: a matrix that a kernel stores. quantized: the same, of numbers
# that it casts to 8 bits. sum: the same, of accumulators as they are. weight: an operand beside one
# of 16 bits, whose dtype it becomes on chip. epilogue: what one reads or computes with. index:
# sizes of groups, indices of rows and of a matrix in a stack, of a top-k.
Role = Literal["operand", "result", "quantized", "sum", "weight", "epilogue", "index"]

MMA_BYTES = 32  # of K that one wgmma multiplies, whatever the dtype


@lru_cache(maxsize=256)
def name_of(dtype: Any) -> str:
    """Returns the name of a dtype of NumPy, which itself takes 1 to 4 us to spell it."""
    return dtype.name


@dataclass(frozen=True)
class DType:
    """What the library knows of a dtype. The fields with a default are those of an operand."""

    name: str  # NumPy's
    itemsize: int  # bytes of an element, or of `packed` of them
    digits: int  # significant binary digits of a number; 0 of what is no float
    tensor_map: int  # the value of CUtensorMapDataType in cuda.h
    cute: str  # the name of CuTe's type in `cutlass`
    mlir: str  # the name of MLIR's type
    roles: tuple[Role, ...]
    # The indices whose neighbours may be adjacent in memory. wgmma reads 16-bit operands along K or
    # across it, narrower ones along K alone.
    majors: tuple[str, ...] = ()
    # The dtype in which derivatives keep products, and in which shards of a sum are added up.
    residual: str = ""
    # The `jax.lax.DotAlgorithmPreset` of the kernels: exact products, summed in float32; and that
    # of kernels that promote accumulators, where wgmma keeps fewer digits of sums.
    algorithm: str = ""
    promoted_algorithm: str = ""
    # The binary digits that wgmma keeps of each term of a sum when it aligns them
    # (https://arxiv.org/abs/2511.10909).
    fraction_bits: int = 0
    mma: str = ""  # the kind of wgmma: it multiplies operands of one kind, in any mix
    accumulator: str = "float32"  # the dtype in which it sums
    packed: int = 1  # elements that lie in `itemsize` bytes, the first in the lowest bits
    # Where wgmma reads fewer digits than an operand has, the `tensor_map` that rounds to these.
    rounding_map: int = 0

    @property
    def mma_k(self) -> int:
        """Elements of K that one wgmma multiplies."""
        return MMA_BYTES // self.itemsize

    def nbytes(self, elements: int) -> int:
        """Returns the bytes that so many elements take."""
        return elements * self.itemsize // self.packed

    @property
    def bits(self) -> int:
        """Those of an element."""
        return 8 * self.itemsize // self.packed

    @property
    def short(self) -> str:
        """The name in those of kernels, as JAX prints it: "bf16"."""
        return short_name(self.name)


_FLOAT: tuple[Role, ...] = ("operand", "result", "epilogue")
_CAST: tuple[Role, ...] = ("operand", "quantized", "weight")
_ANY, _ALONG_K = ("k", "m", "n"), ("k",)
_F8 = (_ALONG_K, "bfloat16", "ANY_F8_ANY_F8_F32_FAST_ACCUM", "ANY_F8_ANY_F8_F32", 13, "f8")
_ROWS = (
    DType("bfloat16", 2, 8, 9, "BFloat16", "bf16", _FLOAT, _ANY, "bfloat16", "BF16_BF16_F32", "",
          25, "bf16"),
    DType("float16", 2, 11, 6, "Float16", "f16", _FLOAT, _ANY, "float16", "F16_F16_F32", "", 25,
          "f16"),
    DType("float8_e4m3fn", 1, 4, 0, "Float8E4M3FN", "f8E4M3FN", _CAST, *_F8),
    DType("float8_e5m2", 1, 3, 0, "Float8E5M2", "f8E5M2", _CAST, *_F8),
    DType("int8", 1, 0, 0, "Int8", "i8", _CAST, _ALONG_K, mma="i8", accumulator="int32"),
    DType("int4", 1, 0, 0, "Uint8", "i4", ("weight",), packed=2),
    DType("float32", 4, 24, 7, "Float32", "f32", _FLOAT, _ALONG_K, "float32", "TF32_TF32_F32", "",
          25, "tf32", rounding_map=11),
    DType("bool", 1, 0, 0, "Uint8", "i1", ("epilogue",)),  # a byte each, 0 or 1
    DType("int32", 4, 0, 3, "Int32", "i32", ("index", "sum")),
)  # fmt: skip
DTYPES = {row.name: row for row in _ROWS}


def names(role: Role) -> tuple[str, ...]:
    """Returns the dtypes that can play a role."""
    return tuple(row.name for row in _ROWS if role in row.roles)


OPERANDS, RESULTS, EPILOGUE = names("operand"), names("result"), names("epilogue")
QUANTIZED, WEIGHTS = names("quantized"), names("weight")
HALVES = tuple(name for name in OPERANDS if DTYPES[name].itemsize == 2)


def multiply(a: str, b: str) -> bool:
    """Whether tensor cores multiply operands of these dtypes."""
    return a in OPERANDS and b in OPERANDS and DTYPES[a].mma == DTYPES[b].mma


def converts(a: str, b: str) -> bool:
    """Whether kernels make numbers of the first dtype of those of the second, without rounding."""
    return a in HALVES and b in WEIGHTS


def results_of(operand: str) -> tuple[str, ...]:
    """Returns the dtypes in which kernels store products of such operands.

    Sums of integers wrap where JAX casts them to int8: XLA does that.
    """
    row = DTYPES[operand]
    if row.accumulator not in RESULTS:
        return (*RESULTS, row.accumulator)
    return RESULTS + tuple(name for name in QUANTIZED if DTYPES[name].mma == row.mma)


def one_of(dtypes: tuple[str, ...]) -> str:
    """Returns "bfloat16, float16 or float32"."""
    *others, last = dtypes
    return f"{', '.join(others)} or {last}" if others else last


def residual_of(name: str) -> str:
    """Returns the dtype in which a product of such operands is kept; of others their own."""
    return (name in DTYPES and DTYPES[name].residual) or name


def short_name(name: str) -> str:
    """Returns any dtype as JAX prints it: "bf16", "f32", "i8"."""
    for long, short in (
        ("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"),
    ):  # fmt: skip
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
