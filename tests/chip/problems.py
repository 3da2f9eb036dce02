"""Random products for kernels that are built: extents, layouts, groups, orders of tiles.

A seed means the same product as long as the kernels (`kernels`), this file and what it imports from
`support/` stay as they are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from support import cases, graphs, grouped, grouped_results, random_grouped, sgemm
from support.places import Place, result_places
from support.policies import all_specs
from support.reference import input_places

from chip import families
from jax_hopper_gemm.dispatch import H200, problem_violations, table_specs
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.dtypes import DTYPES
from jax_hopper_gemm.gemm.problem import GemmProblem, Major, MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

ITEMSIZE = {name: row.itemsize for name, row in DTYPES.items()}
PAST_INT32 = 2**31 + 2**20  # elements
NUM_SMS = (132, 132, 132, 36, 16, 8)  # that a persistent grid fills; of few it wraps around
_LONGEST = {True: 8192, False: 1 << 18}  # K, by whether operands have 8 bits: exact sums
HUGE = 2000  # one of so many products may have an array of over 2^31 elements, where its kernel can
RUN = 32  # seeds that follow one another and have one kernel, which a process loads once


@dataclass(frozen=True)
class Trial:
    """A product, its kernel and its launch.

    Attributes:
      sizes: of groups.
      kind: what it is counted as.
    """

    seed: int
    problem: GemmProblem
    spec: GemmSpec
    raster_order: RasterOrder
    num_sms: int
    kind: str
    sizes: tuple[int, ...] = ()

    @cached_property
    def exact(self) -> bool:
        """Whether every result has one right answer; else only its place is checked."""
        return graphs.is_exact(self.spec.graph) and not self.spec.graph.row_nodes

    @cached_property
    def buffers(self) -> list[tuple[tuple[Place, ...], int]]:
        """What lies in each buffer of the call but workspaces, and its bytes; operands first."""
        places = [*input_places(self.problem.as_read_by(self.spec))]
        places += [(place,) for place in result_places(self.problem, self.spec)]
        return [(of, max(DTYPES[at.dtype].nbytes(at.end) for at in of)) for of in places]

    @cached_property
    def widths(self) -> tuple[int, int]:
        """The largest magnitude of the integers in A and in B.

        Sums of their products are exact in float32, and so are those that a kernel of bfloat16
        parts makes: of two operands of several parts it may leave out products of these.
        """
        spec = self.spec
        if spec.a_dtype.startswith("float8"):
            return 1, 1
        if any(result.kind != "matrix" for result in spec.graph.results):
            return 3, 3  # sums of many elements, too, are exact
        if spec.b_in_registers:
            return 3, 7
        if not spec.bf16_terms:
            return 3, 3
        if spec.bf16_terms > 3 and not spec.epilogue and self.problem.k < 300 and self.seed % 2:
            return 600, 600  # sums of 21 digits, some of 23: an epilogue would round twice of them
        return (600, 3) if self.seed % 4 < 2 else (3, 600)

    @property
    def matrices(self) -> np.ndarray:
        """(length,) the matrix of each element of the grouped axis; -1: none."""
        return grouped_results.matrix_of_rows(self.problem, np.array(self.sizes, np.int64))

    def __str__(self) -> str:
        sizes = f", sizes {list(self.sizes[:40])}" if self.sizes else ""
        return (
            f"seed {self.seed}: {self.kind}, {self.spec.name} on {self.problem} along "
            f"{self.raster_order}, {self.num_sms} SMs{sizes}"
        )


def kernels(tables: str) -> list[GemmSpec]:
    """Returns the kernels to build: all pairs of policies, and every family that dispatch chooses.

    But none of panels, of which `tests/gpu/test_panel_kernels.py` runs products of its own.

    Args:
      tables: "bf16" adds all that dispatch can choose for plain products of bfloat16, "all" for
        those of every 16-bit dtype, "none" nothing.
    """
    pairs = {"bf16": [("bfloat16", "bfloat16")], "all": None, "none": []}[tables]
    chosen = [] if pairs == [] else table_specs(H200, pairs)
    found = [*all_specs(), *sgemm.kernels(), *chosen]
    found += families.chosen_specs(found)
    return list(dict.fromkeys(spec for spec in found if spec.panels == 1))


class Draw:
    """Random products for a list of kernels; a seed gives the same one on every machine.

    Args:
      largest: bytes that a product's arrays may take.
      huge: one of so many products has an array of over 2^31 elements; 0: none.
      run: so many seeds, which follow one another, have the same kernel; then comes the next of a
        list in which families are mixed.
    """

    def __init__(self, specs: Sequence[GemmSpec], largest: int, huge: int = HUGE, run: int = RUN):
        self.specs, self.largest, self.huge, self.run = list(specs), largest, huge, run
        random.Random(0).shuffle(self.specs)

    def __call__(self, seed: int) -> Trial:
        """Returns a legal product.

        Raises:
          RuntimeError: a hundred draws of this seed found none.
        """
        rng = random.Random(seed)
        spec = self.specs[seed // self.run % len(self.specs)]
        for _ in range(100):
            found = self._draw(rng, seed, spec)
            p = found.problem.as_read_by(spec)
            if problem_violations(p) or pairing_violations(p, spec):
                continue
            if sum(nbytes for _, nbytes in found.buffers) <= self.largest:
                return found
        raise RuntimeError(f"seed {seed} finds no product for {spec.name}")

    def _draw(self, rng: random.Random, seed: int, spec: GemmSpec) -> Trial:
        num_sms = rng.choice(NUM_SMS)
        if spec.grouped:
            return self._grouped(rng, seed, spec, num_sms)
        order = RasterOrder(rng.choice(("m", "n")), rng.randint(1, 16))
        kind = _kind(spec)
        if self.huge and not spec.a_block and rng.randrange(self.huge) == 0:
            if problem := _huge(rng, spec):
                return Trial(seed, problem, spec, order, num_sms, "over 2^31 elements")
        if spec.nested:
            problem = _nested(rng, spec)
        elif spec.indexed:
            problem = _stacked(rng, spec)
        elif spec.simt_width:
            problem = _strided(rng, spec, self._extent(rng, spec))
        else:
            problem, order = cases.random_problem(rng, spec, self._extent(rng, spec))
            problem = _shortened(rng, spec, problem)
        return Trial(seed, problem, spec, order, num_sms, kind)

    def _extent(self, rng: random.Random, spec: GemmSpec) -> int:
        """Returns the largest extent: most products are small, some are not."""
        if spec.a_block:
            return 400
        return rng.choices((300, 1000, 3000, 9000), (60, 30, 9, 1))[0]

    def _grouped(self, rng: random.Random, seed: int, spec: GemmSpec, num_sms: int) -> Trial:
        scaled = bool(spec.a_block)
        groups = rng.choice((1, 2, 3, 5, 8, 13, 31, 32, 33, 64))
        if not scaled and rng.random() < 0.02:
            groups = rng.randint(500, 1500)
        tokens = rng.choice((1, 2, 63, 64, 65, 129, 257)) if rng.random() < 0.15 else 0
        tokens = tokens or rng.randint(1, 300 if scaled else 2000)
        most = 120 if scaled else 72 if groups > 64 else 500
        others = [rng.randint(1, most) for _ in range(2)]
        while groups * others[0] * others[1] > 1 << 22:
            others = [max(1, extent // 2) for extent in others]
        m, n, k = (tokens, *others) if spec.grouped == "m" else (*others, tokens)
        layout, make = random_grouped.random_layout(rng, groups, spec)
        gap = 8 * rng.choice((0, 0, 1, 5))
        problem = grouped.problem_of(spec, layout, m, n, k, gap=gap)
        length = problem.m if spec.grouped == "m" else problem.k
        sizes = grouped.sizes_for(spec, length, make(length))
        if spec.grouped == "k" and not spec.spans_k:  # what is padded has room for all groups
            problem = grouped.problem_of(spec, layout, m, n, max(length, sum(sizes)), gap=gap)
        order = RasterOrder(rng.choice(("m", "n")), rng.randint(1, 16))
        kind = f"groups of {spec.grouped}" + (", gathered" if spec.gathered else "")
        kind = ", ".join((kind, *_arithmetic(spec)))
        return Trial(seed, problem, spec, order, num_sms, kind, sizes)


def _kind(spec: GemmSpec) -> str:
    parts = ["dense" if not spec.epilogue else "gated" if spec.graph.accumulators == 2 else "fused"]
    parts += [*_arithmetic(spec), *["transposed"] * (spec.d_major == "m")]
    parts += ["split K"] * spec.split_k + ["nested batch"] * spec.nested
    parts += ["stack"] * bool(spec.indexed)
    return ", ".join(parts + ["short boxes"] * spec.short_boxes)


def _arithmetic(spec: GemmSpec) -> list[str]:
    if spec.a_dtype != spec.b_dtype and spec.b_in_registers:
        return [f"weights of {'4' if spec.b_dtype == 'int4' else '8'} bits"]
    if ITEMSIZE[spec.a_dtype] == 1:
        return ["8 bits", *["block scales"] * bool(spec.a_block)]
    if spec.bf16_terms:
        return ["parts in memory" if spec.reads_parts else "parts"]
    if spec.a_dtype == "float32":
        return ["FMA units" if spec.simt_width else "TF32"]
    return []


def _shortened(rng: random.Random, spec: GemmSpec, problem: GemmProblem) -> GemmProblem:
    """Returns the product, or one of few rows or of a long K in its place."""
    if spec.a_block:
        return problem
    p, draw = problem, rng.random()
    long_k = min(_LONGEST[ITEMSIZE[spec.a_dtype] == 1], 20000)
    if draw < 0.15 or spec.short_boxes:
        return cases.padded(spec, rng.randint(1, 64), p.n, p.k, min(p.l, 2))
    if draw < 0.18 or (spec.split_k and draw < 0.5):
        return cases.padded(spec, min(p.m, 300), min(p.n, 300), rng.randint(1, long_k), min(p.l, 2))
    return p


def _nested(rng: random.Random, spec: GemmSpec) -> GemmProblem:
    m, n, k = (rng.randint(1, 300) for _ in range(3))
    outer = rng.choice(((2,), (3,), (2, 3), (4, 2)))
    return cases.nested(spec, m, n, k, outer, rng.randint(1, 5))


def _strided(rng: random.Random, spec: GemmSpec, largest: int) -> GemmProblem:
    """Returns a product for FMA units, which take lines of any length."""
    m, n, k = (round(math.exp(rng.uniform(0, math.log(largest)))) for _ in range(3))
    batches, width = rng.choice((1, 1, 2, 5)), spec.simt_width

    def layout(major: Major, contiguous: int, other: int) -> MatrixLayout:
        line = -(-contiguous // width) * width + width * rng.choice((0, 0, 1, 7))
        if rng.random() < 0.3:  # the lines of the batch's matrices take turns
            return MatrixLayout(major, line * batches, line)
        return MatrixLayout(major, line, line * other + width * rng.randint(0, 3))

    m, n = (-(-extent // width) * width for extent in (m, n))
    problem = sgemm.problem_of(spec, m, n, k, batches)
    a = ("k", k, m) if spec.a_major == "k" else ("m", m, k)
    b = ("n", n, k) if spec.b_major == "n" else ("k", k, n)
    shared = replace(layout(*b), batch_stride=0) if rng.random() < 0.2 else layout(*b)
    return replace(problem, a=layout(*a), b=shared, d=layout("n", n, m))


def _stacked(rng: random.Random, spec: GemmSpec) -> GemmProblem:
    m, n, k = (rng.randint(1, 700) for _ in range(3))
    problem = cases.padded(spec, m, n, k, cases.STACK)
    alone = cases.padded(spec, m, n, k)
    layout = problem.a if spec.indexed == "a" else problem.b
    named: dict[str, Any] = {str(spec.indexed): layout}
    return replace(alone, indexed=spec.indexed, stack=cases.STACK, **named)


def _huge(rng: random.Random, spec: GemmSpec) -> GemmProblem | None:
    """Returns a product of which A, B or D has over 2^31 elements; None: the kernel takes none."""
    others = spec.nested, spec.indexed, spec.graph.needs_whole_rows, spec.simt_width
    if any(others) or spec.d_tile_m > spec.tile_m:  # of few rows
        return None
    which, long = rng.choice("abd"), rng.choice((4096, 65536, 200_000))
    short = rng.choice((8, 16, 24))
    other = math.ceil(PAST_INT32 / long)
    k_most = _LONGEST[ITEMSIZE[spec.a_dtype] == 1]
    if which == "d":
        m, n, k = long, other, short
    else:
        k = min(rng.choice((2048, 8192)), k_most)
        lines = math.ceil(PAST_INT32 / k)
        m, n = (lines, short) if which == "a" else (short, lines)
    return cases.padded(spec, m, n, k)
