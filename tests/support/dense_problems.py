"""Dense products and a kernel that tests of dispatch draw and compare."""

from __future__ import annotations

from random import Random

from jax_hopper_gemm.gemm.dtypes import HALVES
from jax_hopper_gemm.gemm.problem import GemmProblem, Major
from jax_hopper_gemm.gemm.spec import GemmSpec

A_MAJORS: tuple[Major, ...] = ("k", "m")
B_MAJORS: tuple[Major, ...] = ("n", "k")
BASE = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, num_stages=6, epi_stages=2)


def random_problem(random: Random) -> GemmProblem:
    """Returns a product of 16-bit operands: any extents to 9000, batches, layouts."""

    def extent() -> int:
        return random.choice(
            [random.randint(1, 9000), 8 * random.randint(1, 1125), 2 ** random.randint(0, 13)]
        )

    dtype = random.choice(HALVES)
    return GemmProblem.dense(
        extent(), extent(), extent(), random.choice([1, 1, 1, 2, 7]),
        a_major=random.choice(A_MAJORS), b_major=random.choice(B_MAJORS),
        dtype=dtype, d_dtype=random.choice([dtype, dtype, "float32"]),
    )  # fmt: skip
