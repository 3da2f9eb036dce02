"""Conversions of 8- and 4-bit numbers in registers to 16-bit floats, two at a time."""

import cutlass.cute as cute
from cutlass import Uint32

from ...gemm.conversion import Widening
from ...gemm.dtypes import DTYPES


class Integers:
    """int8 and int4 -> 16-bit floats."""

    def __init__(self, bits, half):
        self.numbers = Widening(bits, half)
        self.unit = self.numbers.unit
        self.fma = {"bfloat16": "fma.rn.bf16x2", "float16": "fma.rn.f16x2"}[half]

    def widen(self, pairs, place):
        """Returns two numbers, which begin at a bit of the halves of a register, as A's dtype."""
        return self.numbers.widen(pairs, place, self._masked, self._fma)

    def _masked(self, x, mask, flip):
        # One instruction, which the compiler would make two of: 0x6a is the table of (a & b) ^ c.
        code = f"lop3.b32 {{$w0}}, {{$r0}}, {mask:#x}, {flip:#x}, 0x6a;"
        return instruction(code, x)

    def _fma(self, x, y, z):
        # Constants must be in registers: the instruction takes none.
        code = "{.reg .b32 y, z; mov.b32 y, {$r1}; mov.b32 z, {$r2};"
        return instruction(code + self.fma + " {$w0}, {$r0}, y, z;}", x, Uint32(y), Uint32(z))


class EightBitFloats:
    """float8_e4m3fn and float8_e5m2 -> 16-bit floats; NaN and infinities are kept."""

    unit = 1.0

    def __init__(self, dtype, half):
        kind = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[dtype]
        self.code = (
            "{.reg .b32 two; .reg .b16 pair, high; prmt.b32 two, {$r0}, 0, 0x4420;"
            f" mov.b32 {{pair, high}}, two; cvt.rn.f16x2.{kind}x2 {{$w0}}, pair;}}"
        )
        self.to_bfloat16 = half == "bfloat16"

    def widen(self, pairs, place):
        halves = instruction(self.code, pairs)
        if not self.to_bfloat16:
            return halves
        return instruction(
            "{.reg .b16 low, high; .reg .f32 x, y; mov.b32 {low, high}, {$r0};"
            " cvt.f32.f16 x, low; cvt.f32.f16 y, high; cvt.rn.bf16x2.f32 {$w0}, y, x;}",
            halves,
        )


class Float32s:
    """float32 as it is: TMA has rounded it."""

    unit = 1.0

    def widen(self, word, place):
        return word


def make_conversion(dtype, half):
    """Returns what widens numbers of a dtype."""
    if dtype == half:
        return Float32s()
    if dtype.startswith("float8"):
        return EightBitFloats(dtype, half)
    return Integers(DTYPES[dtype].bits, half)


def instruction(code, *operands):
    """Returns the uint32 of a PTX instruction, or of a few."""
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=list(operands))
