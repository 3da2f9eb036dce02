"""Kernels that cut float32 into bfloat16 parts, run on arrays of all magnitudes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from support import direct
from support.float32 import parts_along
from support.gpu import Gpu
from support.trial import GUARD, POISON

from jax_hopper_gemm.gemm.cutting import CutSpec
from jax_hopper_gemm.launch.plan import make_cut_plan

SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -(2.0**-126), 3.4e38, 2.0**-133], np.float32
)


@dataclass(frozen=True)
class Case:
    """What a kernel cuts.

    Attributes:
      shape: batch, rows, columns.
    """

    spec: CutSpec
    shape: tuple[int, int, int]

    def numbers(self) -> np.ndarray:
        rng = np.random.default_rng(0)
        few = rng.standard_normal(100_003) * np.exp(20 * rng.standard_normal(100_003).clip(-4, 4))
        x = np.resize(few.astype(np.float32), self.shape)
        x.flat[:: x.size // len(SPECIAL)][: len(SPECIAL)] = SPECIAL
        return x

    def check(self, gpu: Gpu) -> None:
        """Runs the kernel and checks every bit that it writes.

        Raises:
          AssertionError: a part is wrong, or something behind them was written.
        """
        x = self.numbers()
        right = parts_along(x, 1 if self.spec.along == "rows" else 2, (0, 0, 3, 6)[self.spec.parts])
        result = gpu.allocate(right.nbytes + GUARD)
        result.fill(POISON)
        plan = make_cut_plan(self.spec, *self.shape)
        direct.planned(gpu, self.spec, plan, [gpu.upload(x), result])()
        gpu.synchronize()
        bits = result.download("uint16")
        got, behind = bits[: right.size].reshape(right.shape), bits[right.size :]
        both_nan = np.isnan(got.view(right.dtype)) & np.isnan(right)
        wrong = np.argwhere((got != right.view(np.uint16)) & ~both_nan)
        assert not wrong.size, (
            f"{self.spec.name} of {self.shape}: {len(wrong)} of {right.size} parts are wrong, the "
            f"first at {wrong[0]}: {got.view(right.dtype)[tuple(wrong[0])]} for "
            f"{right[tuple(wrong[0])]}"
        )
        assert (behind == 0x101 * POISON).all(), f"{self.spec.name} wrote behind its result"


CASES = [
    *(Case(CutSpec(p, "rows"), x) for p in (2, 3) for x in ((1, 70, 136), (3, 64, 40))),
    *(Case(CutSpec(p, "columns"), x) for p in (2, 3) for x in ((1, 70, 132), (3, 64, 36))),
    *(
        Case(CutSpec(p, "columns", aligned=False), x)
        for p in (2, 3)
        for x in ((2, 9, 261), (1, 130, 63))
    ),
]
LARGE = Case(CutSpec(2, "columns"), (1, 2**14 + 8, 2**16))  # parts of more than 2**31 elements
