"""How XLA's time compares with that of our best kernel: regression trees, fitted to measurements.

XLA's kernels are not ours to model: which it takes for a product follows no rule that is published.
So boosted trees predict the logarithm of its time over ours, from what the product is and what our
own model of cost says of it. `benchmarks/survey.py` and `tf32.py` measure,
`benchmarks/fit_xla.py` fits. Fits are for dense products of 16-bit operands, of one matrix each or
of a batch, and of float32 in TF32, of one matrix each, on all SMs of the GPU measured. What was
measured is bfloat16, on an H200 and an H100, whose ratios of times differ too little to tell apart,
and batches and float32 on an H200.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ..gemm.dtypes import HALVES
from ..gemm.problem import GemmProblem, MatrixLayout
from .cost import Estimate, roofline_ns
from .device import Device

FITS = Path(__file__).parent / "tables"
LINE = 64  # elements of 16 bits
NUM_SMS = 132  # of the GPUs that were surveyed
LEAST_IN_BATCHES = 16  # rows, columns and K
XLA_TILES = (128, 256), (256, 128), (128, 128), (64, 256), (192, 192)  # common ones of its kernels
# Of its times over ours, by kind of product: further off, how far says nothing of other products.
RATIOS = {"half": (0.6, 1.7), "batches": (0.6, 3.0), "tf32": (0.5, 2.5)}

# An inner node: the feature's number, its threshold, the trees up to it and above it. A leaf: what
# it adds to the prediction.
Tree = list | float


@dataclass(frozen=True)
class Trees:
    """Trees whose sum is the logarithm of XLA's time over ours."""

    base: float
    trees: tuple[Tree, ...]

    def ratio(self, inputs: tuple[float, ...]) -> float:
        """Returns the ratio of the times; `inputs` are `features`."""
        total = 0
        for tree in self.trees:
            while isinstance(tree, list):
                feature, threshold, low, high = tree
                tree = low if inputs[feature] <= threshold else high
            total += tree
        return math.exp(self.base + total)


@dataclass(frozen=True)
class Fit:
    """What was fitted to one kind of GPU."""

    expected: Trees  # of ratios within `RATIOS`
    products: int  # that it was fitted to
    error: float  # median, relative, of what was expected of products that the fit had not seen


def features(problem: GemmProblem, best: Estimate) -> tuple[float, ...]:
    """Returns what the trees ask of a product and its best kernel's estimate."""
    p, least = problem, roofline_ns(problem)
    sizes = (p.m, p.n, p.k, min(p.m, p.n), max(p.m, p.n), p.m * p.n, p.flops / p.bytes, best.tiles)
    times = (least, best.ns, best.ns / least)
    filled = [_filled(p, *tile) for tile in XLA_TILES]
    lines = (p.a.leading_stride, p.b.leading_stride, p.m, p.n, p.k)
    return (
        *map(math.log, (*sizes, *times)),
        best.occupancy,
        float(best.waves),
        float(best.splits_k),
        float(p.a.major == "k"),
        float(p.b.major == "k"),
        *(math.log2(math.gcd(extent, LINE)) for extent in lines),
        float(p.m == 1),
        math.ceil(p.m / 64) * 64 / p.m,
        *filled,
        max(filled),
        math.log(p.l),
    )


def _filled(problem: GemmProblem, tile_m: int, tile_n: int) -> float:
    """Returns the share of D in what waves of tiles of this size would compute on all SMs."""
    p = problem
    tiles = p.l * math.ceil(p.m / tile_m) * math.ceil(p.n / tile_n)
    return p.l * p.m * p.n / (math.ceil(tiles / NUM_SMS) * NUM_SMS * tile_m * tile_n)


def compared(problem: GemmProblem) -> GemmProblem:
    """Returns the product whose best kernel XLA's time for a product is compared with.

    In TF32 that of operands along K: for others it is often XLA that has to transpose them first.
    """
    p = problem
    if not p.rounds_operands or p.a.major == p.b.major == "k":
        return p
    return replace(p, a=MatrixLayout("k", p.k), b=MatrixLayout("k", p.k))


def surveyed_kind(problem: GemmProblem, device: Device) -> str | None:
    """Returns the key of `RATIOS` of products that were surveyed, if it is one of these."""
    p = problem
    plain = not (p.groups or p.epilogue or p.promoted)
    if not plain or p.a_dtype != p.b_dtype or device.limited:
        return None
    if p.rounds_operands:
        return "tf32" if p.l == 1 else None
    if p.a_dtype not in HALVES:
        return None
    return "half" if p.l == 1 else "batches" if _is_surveyed_batch(p) else None


def _is_surveyed_batch(problem: GemmProblem) -> bool:
    """Whether matrices of all three arrays lie one behind the other in whole lines, none tiny."""
    p = problem
    layouts = ((p.a, p.m * p.k), (p.b, p.n * p.k), (p.d, p.m * p.n))
    even = all(x.batch_stride == size and not x.outer_strides for x, size in layouts)
    whole = not (p.a.copied_line or p.b.copied_line)
    return even and whole and min(p.m, p.n, p.k) >= LEAST_IN_BATCHES


def fit_for(problem: GemmProblem, device: Device) -> Fit | None:
    kind = surveyed_kind(problem, device)
    return read_fit(kind, device.num_sms) if kind else None


@lru_cache
def read_fit(kind: str, num_sms: int) -> Fit | None:
    """Returns the packaged fit for products of a kind, on GPUs of so many SMs."""
    path = FITS / f"xla_{kind}_{num_sms}.json"
    if not path.exists():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    expected = Trees(document["base"], tuple(document["trees"]))
    return Fit(expected, document["products"], document["error"])
