"""Random grouped products: both axes, all layouts of groups, every kind of sizes.

    for seed in range(COUNT):
        tried = case(seed)

Kernels come from `policies.grouped_covering_specs`; extents, layouts and sizes are drawn for each.
"""

from __future__ import annotations

import random

import group_sizes
import numpy as np
from support import graphs
from support.grouped import Case, Layout, of_batch, problem_of
from support.policies import grouped_covering_specs

from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

COUNT = 360
_MAX_ELEMENTS = 1 << 24  # of all weights
_EDGES = (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def case(seed: int) -> Case:
    """Returns a grouped product with sizes, the same on every machine."""
    rng = random.Random(seed)
    axis, plain = rng.choice("mmk"), rng.random() < 0.4
    spec = rng.choice(
        [s for s in grouped_covering_specs() if s.grouped == axis and (s.epilogue is None) == plain]
    )
    many = rng.random() < 0.08
    groups = rng.randint(1000, 4000) if many else rng.choice((1, 2, 3, 5, 8, 13, 31, 32, 33, 64))
    tokens = rng.choice(_EDGES) if rng.random() < 0.15 else rng.randint(1, 3000)
    others = [rng.choice((8, 24, 40, 72)) if many else _extent(rng, 700) for _ in range(2)]
    while groups * others[0] * others[1] > _MAX_ELEMENTS:
        others = [max(1, extent // 2) for extent in others]
    m, n, k = (tokens, *others) if spec.grouped == "m" else (*others, tokens)
    layout, make = random_layout(rng, groups, spec)
    problem = problem_of(spec, layout, m, n, k, gap=8 * rng.choice((0, 0, 1, 5)))
    sizes = make(problem.m if spec.grouped == "m" else problem.k)
    raster_order = RasterOrder(rng.choice(("m", "n")), rng.randint(1, 16))
    exact = graphs.is_exact(spec.graph) and rng.random() < 0.4
    return Case(problem, spec, raster_order, tuple(map(int, sizes)), seed, exact)


def specs(count: int = COUNT) -> list[GemmSpec]:
    """Returns the kernels of the first cases, each once."""
    return list(dict.fromkeys(case(seed).spec for seed in range(count)))


def random_layout(rng: random.Random, groups: int, spec: GemmSpec):
    """Returns a layout of `groups` groups, and a function of the axis's length: its sizes."""
    make = {**group_sizes.KINDS, **group_sizes.HOSTILE}[
        rng.choice((*group_sizes.KINDS, *group_sizes.HOSTILE))
    ]
    seed = rng.getrandbits(32)
    kind = rng.choice(("plain", "plain", "plain", "offset", "batched", "batched"))
    if kind == "batched" and groups >= 2:
        batch = rng.choice((2, 3))
        groups = max(1, groups // batch)
        shared = spec.grouped == "m" and rng.random() < 0.5

        def of_all(length: int) -> list[int]:
            parts = [make(max(1, length // batch), groups, seed + i) for i in range(batch)]
            return of_batch(length, batch, np.stack(parts))

        return Layout.batched(batch, groups, shared), of_all
    if kind == "offset":
        return Layout.offset(groups), lambda length: make(length, groups + 1, seed)
    return Layout.plain(groups), lambda length: make(length, groups, seed)


def _extent(rng: random.Random, largest: int) -> int:
    return rng.choice(_EDGES) if rng.random() < 0.2 else rng.randint(1, largest)
