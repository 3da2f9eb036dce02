"""Random batches of products, for `survey.py --batches`."""

from __future__ import annotations

from functools import partial
from random import Random

from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.testing.shapes import random_extent

_MIN_FLOPS, _MAX_FLOPS, _MAX_BYTES = 2**28, 2**40, 2**31


def random_batches(count: int, seed: int) -> list[GemmProblem]:
    """Returns random products of bfloat16, of 2 to 1024 matrices that lie one behind the other.

    Half of them have heads: 64 to 256 columns, or K. Rows are multiples of 16 bytes.
    """
    random = Random(seed)
    problems: dict[GemmProblem, None] = {}
    extent = partial(random_extent, random)
    while len(problems) < count:
        batch = extent(2, 1024, step=1)
        m, n, k = (extent(16, 4096) for _ in "mnk")
        heads = random.choice((0, 0, 0, 0, 64, 80, 128, 256))
        if heads and random.random() < 0.5:
            n = heads
        elif heads:
            k = heads
        a_major, b_major = random.choice(("k", "k", "m")), random.choice(("n", "k"))
        problem = GemmProblem.dense(m, n, k, batch, a_major=a_major, b_major=b_major)
        if _MIN_FLOPS <= problem.flops <= _MAX_FLOPS and problem.bytes <= _MAX_BYTES:
            problems[problem] = None
    return list(problems)
