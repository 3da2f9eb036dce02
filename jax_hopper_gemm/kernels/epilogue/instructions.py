"""Instructions of the reductions, one function each: tests put NumPy in their place."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import select_

LOG2_E = math.log2(math.e)


def shuffle(value, distance):
    """Returns the value of the lane whose number differs by xor."""
    return cute.arch.shuffle_sync_bfly(value, distance)


def select(condition, x, y):
    """Returns x where the condition holds, else y: numbers of y's type."""
    return type(y)(select_(condition, x, y))


def maximum(x, y):
    """Returns the larger; NaN if either is."""
    return cute.arch.fmax(x, y, nan=True)


def plus(x, y):
    """Returns the sum, rounded by itself.

    NOTE: `x + y` may become a fused multiply-add in one kernel and not in another, and so have
    other bits.
    """
    return Float32(
        nvvm.addf(Float32(x).ir_value(), Float32(y).ir_value(), rnd=nvvm.FPRoundingMode.RN)
    )


def finite_or_zero(largest):
    """Returns the number to subtract before `exp`: an infinity minus itself would be NaN."""
    infinite = maximum(largest, -largest) == math.inf
    return select(infinite, as_float(0.0), largest)


def exp(x):
    """Returns e^x to 2 ulp for x up to 0; `exp2` is one instruction."""
    return cute.math.exp2(x * LOG2_E, fastmath=True)


def as_float(x):
    return Float32(x)


def float_bits(x):
    return Float32(x).bitcast(Int32)


def float_of(bits):
    return bits.bitcast(Float32)


def write_scratch(scratch, at, value):
    cute.arch.store(scratch + at, value, ss="cta")


def read_scratch(scratch, at):
    return cute.arch.load(scratch + at, Float32, ss="cta")


@cute.jit
def write_where(condition, pointer, at, value: cutlass.Constexpr):
    """Writes `value()`, which is computed only where the condition holds."""
    if condition:
        cute.arch.store(pointer + at, value())


def store_where(condition, address, bits):
    """Stores a number's bits at a global address, predicated.

    NOTE: of a store behind a branch ptxas moves the address there, too, and computes it anew.
    """
    cute.arch.inline_ptx(
        f"st.global.b{bits.width} [{{$r0}}], {{$r1}};",
        read_only_args=[address, bits], predicate=condition,
    )  # fmt: skip
