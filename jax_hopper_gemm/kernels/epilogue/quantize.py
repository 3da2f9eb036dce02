"""Casts of float32 to 8 bits, as `jax.numpy.astype` does them.

float8_e4m3fn   to nearest, even of two; NaN beyond 464, where 480 would be next, as it is no
                number of the type
float8_e5m2     to nearest, even of two; infinite from 61440
int8            towards zero; -128 and 127 beyond; NaN is 0
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import max as larger
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_

_LARGEST_E4M3 = 464.0  # that is rounded to a number
_SMALLEST_INFINITE_E5M2 = 61440.0
_CONVERT = (
    "{.reg .b16 pair; cvt.rn.satfinite.%sx2.f32 pair, {$r1}, {$r0}; cvt.u32.u16 {$w0}, pair;}"
)
_WIDEN = (
    "{.reg .b16 pair, low, high; .reg .b32 wide; cvt.u16.u32 pair, {$r0};"
    " cvt.rn.f16x2.%sx2 wide, pair; mov.b32 {low, high}, wide; cvt.f32.f16 {$w0}, low;}"
)


def pack_pairs(dtype, values, packed):
    """Writes float32 `values` to `packed`, registers of an 8-bit dtype; two become 16 bits."""
    pairs = cute.recast_tensor(packed, cutlass.Int16)
    for i in range(cute.size(pairs)):
        pairs[i] = pair_of(dtype, values[2 * i], values[2 * i + 1]).to(cutlass.Int16)


def pair_of(dtype, low, high):
    """Returns two numbers of an 8-bit dtype in the low bits of an int32."""
    if dtype == "int8":
        return (_int8(low) & 0xFF) | ((_int8(high) & 0xFF) << 8)
    if dtype == "float8_e4m3fn":
        return _convert("e4m3", _nan_beyond(low), _nan_beyond(high))
    pair = _convert("e5m2", low, high)  # 57344 for what is infinite: the number before it
    return pair + _is_infinite(low, 1) + _is_infinite(high, 0x100)


def saturated_unit(dtype, values):
    """Returns 8 numbers of an 8-bit float as an int64; the largest ones for what is beyond."""
    kind = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[dtype]
    convert = f"cvt.rn.satfinite.{kind}x2.f32"
    pairs = [f"{convert} p{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)]
    return cute.arch.inline_ptx(
        f"{{.reg .b16 p<4>; {' '.join(pairs)} mov.b64 {{$w0}}, {{p0, p1, p2, p3}};}}",
        write_only_types=[Int64],
        read_only_args=list(values),
    )


def round_to(dtype, x):
    """Returns a float32 rounded to an 8-bit dtype."""
    if dtype == "int8":
        return _int8(x).to(Float32)
    kind = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[dtype]
    return cute.arch.inline_ptx(
        _WIDEN % kind,
        write_only_types=[Float32],
        read_only_args=[pair_of(dtype, x, Float32(0.0))],
    )


def _convert(kind, low, high):
    return cute.arch.inline_ptx(
        _CONVERT % kind, write_only_types=[Int32], read_only_args=[low, high]
    )


def _nan_beyond(x):
    return Float32(select_(cute.math.abs(x) > _LARGEST_E4M3, Float32(float("nan")), x))


def _is_infinite(x, one):
    return Int32(select_(cute.math.abs(x) >= _SMALLEST_INFINITE_E5M2, Int32(one), Int32(0)))


def _int8(x):
    whole = cute.arch.inline_ptx(
        "cvt.rzi.s32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
    )
    return smaller(larger(whole, Int32(-128)), Int32(127))
