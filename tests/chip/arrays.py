"""Where a product's arrays lie in an arena with guard zones, described for `checker.cu`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from support.grouped import random_indices
from support.grouped_results import spans
from support.places import Place

from chip.arena import Batch, Placed
from chip.problems import ITEMSIZE, Trial
from chip.structs import ARRAY, DTYPES, KINDS, NODE, OPS, ROLES
from jax_hopper_gemm.gemm.bf16_parts import num_parts
from jax_hopper_gemm.gemm.dtypes import DTYPES as ROWS
from jax_hopper_gemm.gemm.smem import EPI_TILE_M
from jax_hopper_gemm.gemm.spec import PROMOTION_K
from jax_hopper_gemm.launch.plan import make_plan

GUARD = 4096  # bytes between arrays, at least
_LINES = (113, 127)  # distinct rows of A, columns of B
_SHIFTS = (41, 43, 37)  # by a step along each axis of the batch


def place(batch: Batch, trial: Trial) -> None:
    """Places a product behind those of a batch; Full: nothing has changed."""
    with batch.unless_full():
        _Placing(batch, trial).run()


class _Placing:
    """One product on its way into a batch."""

    def __init__(self, batch: Batch, trial: Trial):
        self.batch, self.trial, self.problem = batch, trial, trial.problem
        self.rng = random.Random(-1 - trial.seed)
        self.number = len(batch.problems)
        self.groups = trial.problem.groups
        self.direct = trial.problem.a_scales is not None
        self.parts = num_parts(trial.spec.bf16_terms) if trial.spec.reads_parts else 0
        self.indices: np.ndarray | None = None
        self.index = -1
        self.tables: dict[str, int] = {}

    def run(self) -> None:
        trial, batch = self.trial, self.batch
        start = batch.arena.next
        self._group_tables()
        first_array = len(batch.arrays)
        operands = len(trial.buffers) - len(_first_planes(trial))
        addresses = [self._take(nbytes) for _, nbytes in trial.buffers]
        for describe in self._inputs(addresses):
            batch.arrays.append(describe)
        for describe in self._results(addresses[operands:]):
            batch.arrays.append(describe)
        plan = make_plan(trial.problem, trial.spec, trial.raster_order, trial.num_sms)
        sizes = [nbytes for _, nbytes in trial.buffers]
        mode = self.rng.choice((0, 1, 1, 2))
        for nbytes in plan.workspaces:
            addresses.append(self._take(nbytes))
            sizes.append(nbytes)
            batch.arrays.append(
                self._array(
                    "workspace", "int32", addresses[-1], (1, 1, 1, 1, nbytes // 4),
                    (0, 0, 0, 0, 1), kind=mode,
                )
            )  # fmt: skip
        self._reference(first_array)
        placed = Placed(trial, plan, addresses, sizes, operands, start, batch.arena.next)
        batch.products.append(placed)

    def _take(self, nbytes: int) -> int:
        """Returns an address at any multiple of 16 bytes."""
        apart = GUARD + 16 * self.rng.randrange(64)
        return self.batch.arena.take(nbytes, 16, apart)

    def _array(
        self, role: str, dtype: str, address: int, extent: Sequence[int], stride: Sequence[int],
        **fields: Any,
    ) -> tuple:  # fmt: skip
        kind = fields.get("kind", 0)
        return (
            address, extent, stride, fields.get("table", 0), fields.get("alive", (0, 0, 0)),
            fields.get("shift_rows", (0, 0, 0)), fields.get("shift_columns", (0, 0, 0)),
            self.number, ROLES.index(role), DTYPES.index(dtype), fields.get("which", 0),
            kind, fields.get("block_m", 0), fields.get("block_n", 0), fields.get("packed", 0),
            fields.get("parts", 0),
        )  # fmt: skip

    def _group_tables(self) -> None:
        """Uploads what the sizes of groups say of rows and matrices."""
        groups, p = self.groups, self.problem
        if groups is None:
            return
        matrices = self.trial.matrices
        owned = matrices >= 0
        if groups.gathered:
            seed = self.rng.getrandbits(31)
            self.indices = random_indices(groups.source_rows, matrices.size, seed)
            self.tables["indices"] = self.batch.stage(self.indices)
            picked = self.indices[owned]
            there = np.zeros(groups.source_rows, np.uint8)
            there[picked[(picked >= 0) & (picked < groups.source_rows)]] = 1
            self.tables["source"] = self.batch.stage(there)
        self.tables["alive"] = self.batch.stage(owned.astype(np.uint8))
        used = np.zeros(p.l, np.uint8)
        used[matrices[owned]] = 1
        self.tables["used"] = self.batch.stage(used)
        if groups.axis == "m":
            self.tables["row_matrix"] = self.batch.stage(matrices.astype(np.int32))
            return
        of_matrix = np.zeros((p.l, 2), np.int64)
        for span in spans(p, np.array(self.trial.sizes, np.int64)):
            if span.matrix >= 0:
                of_matrix[span.matrix] = span.start, span.end
        self.tables["spans"] = self.batch.stage(of_matrix)

    def _inputs(self, addresses: list[int]) -> Iterator[tuple]:
        """Yields the arrays that the kernel reads, A, B and up, then the epilogue's, first."""
        trial, p = self.trial, self.problem
        pending = list(zip(addresses, (of for of, _ in trial.buffers), strict=True))
        factors = 2 + (p.gated and p.up_offset is None)
        which = itertools.count()
        factor: tuple[Any, ...] = ()
        for address, places in pending[:factors]:
            for place in places:
                factor = self._factor(place, address, next(which))
                yield factor
        given = pending[factors : factors + len(p.operands)]
        for i, (address, (place,)) in enumerate(given):
            yield self._operand(place, address, i)
        rest = iter(pending[factors + len(p.operands) :])
        tables: list[np.ndarray] = []
        if self.groups:
            tables.append(np.array(trial.sizes, np.int64).astype(np.int32))
        if self.indices is not None:
            tables.append(self.indices)
        if p.indexed:
            given_index = self.rng.choice((-5, 0, 1, p.stack - 1, p.stack + 7))
            self.index = min(max(given_index, 0), p.stack - 1)
            tables.append(np.array([given_index], np.int32))
        for table in tables:
            address, _ = next(rest)
            yield self._array(
                "table", "int32", address, (1, 1, 1, 1, table.size), (0, 0, 0, 0, 1),
                table=self.batch.stage(table),
            )  # fmt: skip
        for which_one in range(p.graph.accumulators if p.k_group else 0):
            address, (place,) = next(rest)
            extent, stride, _ = self._axes(place)
            along_b = dict(zip(ARRAY.names or (), factor, strict=True))["shift_columns"]
            yield self._array(
                "scale", "float32", address, extent, stride, which=which_one, kind=1,
                shift_columns=along_b,
            )  # fmt: skip
        for which_one, (scales, lines) in enumerate(((p.a_scales, p.m), (p.b_scales, p.n))):
            if scales:
                address, (place,) = next(rest)
                count, along_k, _ = place.shape
                yield self._array(
                    "scale", "float32", address, (1, 1, count, along_k, -(-lines // scales.block)),
                    (0, 0, *place.strides), which=which_one,
                    shift_rows=(int(scales.batch_stride > 0), 0, 0),
                )  # fmt: skip

    def _factor(self, place: Place, address: int, which: int) -> tuple:
        """Returns A, B or up."""
        p, groups = self.problem, self.groups
        extent, stride, shift = self._axes(place)
        lines = p.m if which == 0 else p.n
        if self.direct:
            shift = tuple(lines * (by > 0) for by in shift)
        alive = [0, 0, 0]  # of the batch, of rows, of columns
        if groups:
            gathers = groups.gathered == ("a" if which == 0 else "b")
            along = self.tables["source" if gathers else "alive"]
            if groups.axis == "k":
                alive[2 if which == 0 else 1] = along
            elif which == 0:
                alive[1] = along
            elif stride[2]:
                alive[0] = self.tables["used"]
        name, row, packed = "shift_rows" if which == 0 else "shift_columns", ROWS[place.dtype], 0
        if row.packed == 2:
            packed = stride.index(1, 3)
            extent = tuple(e // 2 if i == packed else e for i, e in enumerate(extent))
            stride = tuple(s if i == packed else s // 2 for i, s in enumerate(stride))
        return self._array(
            "factor", place.dtype, address + row.nbytes(place.offset), extent, stride,
            which=which, alive=tuple(alive), packed=packed, parts=self.parts, **{name: shift},
        )  # fmt: skip

    def _operand(self, place: Place, address: int, index: int) -> tuple:
        """Returns an operand of the epilogue."""
        kind = self.problem.graph.operands[index].kind
        rows, columns = kind in ("matrix", "column"), kind in ("matrix", "row")
        axes = list(place.axes)
        tail = [axes.pop() if columns else (1, 0)]
        tail.insert(0, axes.pop() if rows else (1, 0))
        batch = [(1, 0)] * (3 - len(axes)) + _distinct(axes)
        extent, stride = zip(*batch, *tail, strict=True)
        shift = tuple(1009 * by * (s > 0) for by, (_, s) in zip((1, 3, 7), batch, strict=True))
        alive = [0, 0, 0]
        if self.groups and self.groups.axis == "m":
            if rows:
                alive[1] = self.tables["alive"]
            elif stride[2]:
                alive[0] = self.tables["used"]
        return self._array(
            "operand", place.dtype, address, extent, stride, which=index, alive=tuple(alive),
            shift_rows=shift, block_m=int(rows), block_n=int(columns),
        )  # fmt: skip

    def _axes(self, place: Place) -> tuple[tuple, tuple, tuple[int, ...]]:
        """Returns extents, strides, and what a step along each axis of the batch adds to a line."""
        axes = [(1, 0)] * (5 - len(place.axes)) + _distinct(place.axes)
        extent, stride = zip(*axes, strict=True)
        shift = tuple(by * (s > 0) for by, s in zip(_SHIFTS, stride[:3], strict=True))
        return extent, stride, shift

    def _results(self, addresses: list[int]) -> Iterator[tuple]:
        trial, p, spec = self.trial, self.problem, self.trial.spec
        places = [of[0] for of, _ in trial.buffers[len(trial.buffers) - len(addresses) :]]
        arrays = iter(zip(addresses, places, strict=True))
        address, place = 0, None
        for result in p.graph.results:
            if result.plane == 0:
                address, place = next(arrays)
            assert place is not None
            known = trial.exact and result.kind in KINDS
            if p.groups and p.groups.axis == "m" and result.kind in ("column_sum", "max"):
                known = False  # rows of no group count in none
            kind = result.kind if known else "written"
            base, axes = address, list(place.axes)
            if result.planes > 1:
                (_, apart) = axes.pop(2)
                base += result.plane * apart * ITEMSIZE[place.dtype]
            if result.kind == "row_sumexp":
                axes = [axes[0], (axes[1][0] * 2, axes[2][1]), axes[3]]
            axes = [(1, 0)] * (5 - len(axes)) + axes
            extent, stride = zip(*axes, strict=True)
            rows = {"column_sum": EPI_TILE_M, "max": 16}.get(result.kind, 1)
            columns = 1 if result.kind in ("column_sum", "matrix") else spec.d_tile_n
            yield self._array(
                "result", place.dtype, base, extent, stride, which=result.value,
                kind=KINDS.index(kind), block_m=rows, block_n=columns,
            )  # fmt: skip

    def _reference(self, first_array: int) -> None:
        """Appends the sums of lines, and the problem."""
        batch, p, groups = self.batch, self.problem, self.groups
        graph, instances = p.graph, 1
        arrays, scratch = batch.arrays, batch.scratch
        lines = self._lines(arrays[first_array], arrays[first_array + 1])
        if groups and groups.axis == "k":
            instances = p.l
        shape = lines
        if self.direct:
            instances, shape = 1 if groups and groups.axis == "m" else p.l, (p.m, p.n)
        extent = (1, graph.accumulators, instances, *shape)
        stride = (0, instances * shape[0] * shape[1], shape[0] * shape[1], shape[1], 1)
        sums = scratch.take(4 * extent[1] * stride[1])
        arrays.append(self._array("sums", "float32", sums, extent, stride))
        nodes = np.array([_node(node, graph) for node in graph.nodes], NODE)
        inner, middle = p.l, 1
        if p.outer:
            (inner, _), (middle, _), *_ = p.batch_axes(p.d)
        scales, blocks, scale_k = (0, 0), (1, 1), p.k_group
        if p.a_scales and p.b_scales:
            first = next(
                i for i in range(first_array, len(arrays)) if arrays[i][8] == ROLES.index("scale")
            )
            scales, blocks = (first, first + 1), (p.a_scales.block, p.b_scales.block)
            scale_k = PROMOTION_K
        stored = (
            self.batch.stage(nodes) if graph.nodes and self.trial.exact else 0, sums,
            self.tables.get("row_matrix", 0), self.tables.get("spans", 0),
            self.tables.get("indices", 0), p.m, p.n, p.k, middle, inner, lines,
            first_array, first_array + 1, first_array + 1 + graph.accumulators,
            graph.accumulators, len(p.operands), len(nodes), instances, int(self.direct),
            groups.source_rows if groups else 0,
            " ab".index(groups.gathered or " ") if groups else 0,
            " mk".index(groups.axis) if groups else 0,
            self.index if p.indexed == "a" else -1, self.index if p.indexed == "b" else -1,
            self.trial.widths, self.trial.seed * 2654435761 % 2**32, scale_k, scales, blocks,
        )  # fmt: skip
        batch.problems.append(stored)

    def _lines(self, a: tuple, b: tuple) -> tuple[int, int]:
        """Returns how many distinct rows of A and columns of B there are."""
        found = []
        for which, (_, extent, _, _, _, rows, columns, *_, packed, _) in enumerate((a, b)):
            shift, lines = (rows, extent[3]) if which == 0 else (columns, extent[4])
            most = lines * (2 if packed == 4 else 1) + sum(
                by * (count - 1) for by, count in zip(shift, extent[:3], strict=True)
            )
            found.append(most if self.direct else min(most, _LINES[which]))
        return found[0], found[1]


def _first_planes(trial: Trial) -> list[Any]:
    """Returns the results that have an array of their own."""
    return [r for r in trial.problem.graph.results if r.kind != "matrix" or r.plane == 0]


def _distinct(axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns extents and strides, those of axes along which nothing varies (1, 0)."""
    return [(extent if stride else 1, stride) for extent, stride in axes]


def _node(node: Any, graph: Any) -> tuple:
    args = (*node.args, 0, 0, 0)[:3]
    if node.op not in OPS:
        return (0, args, 0, 0.0)  # of a graph whose numbers are not checked
    dtype = DTYPES.index(node.params[0]) if node.op == "convert" else 0
    value = node.params[0] if node.op == "constant" else 0.0
    return (OPS.index(node.op), args, dtype, value)
