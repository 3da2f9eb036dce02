"""Pictures of what a kernel's epilogue does, drawn from specs and from the kernels' arithmetic.

    from jax_hopper_gemm import viz
    viz.draw_shared_memory([spec])

First what is shown, as text and data: `graph_lines`, `shared_memory`, `timeline`. Then the
drawings, which need matplotlib (extra "notebooks"); each returns its figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .dispatch import Device
from .dispatch.cost import TileCycles, tile_cycles
from .epilogue import EpilogueGraph
from .problem import ITEMSIZE, GemmProblem
from .spec import SMEM_BARRIERS, SMEM_LIMIT, GemmSpec
from .staging import (
    CHUNK,
    LINE,
    ROWS,
    bank_conflicts,
    fragment_element,
    fragment_owner,
    staged_offset,
    stmatrix_row,
)

WARP_COLOURS = ("#8ecae6", "#ffb703", "#95d5b2", "#e5989b")
TILE_COLOURS = ("#457b9d", "#e76f51", "#2a9d8f", "#9d4edd")
KIND_COLOURS = {
    "A": "#457b9d",
    "B": "#a8dadc",
    "result": "#e76f51",
    "operand": "#f4a261",
    "scratch": "#9d4edd",
    "barriers": "#333333",
}


def graph_lines(graph: EpilogueGraph) -> list[str]:
    """Returns an epilogue as text: what each numbered value is, then the results."""
    lines = [f"v{i} = accumulator" for i in range(graph.accumulators)]
    for value in range(graph.accumulators, graph.num_values):
        if operand := graph.operand(value):
            lines.append(f"v{value} = {operand.kind} operand, {operand.dtype}")
        elif node := graph.node(value):
            arguments = [f"v{argument}" for argument in node.args] + list(map(str, node.params))
            lines.append(f"v{value} = {node.op}({', '.join(arguments)})")
    lines += [f"result: {r.kind} of v{r.value}, {r.dtype}" for r in graph.results]
    return lines


@dataclass(frozen=True)
class Part:
    """A piece of a CTA's shared memory.

    Attributes:
      kind: a key of `KIND_COLOURS`.
      name: what it holds.
      offset, nbytes: where it lies.
    """

    kind: str
    name: str
    offset: int
    nbytes: int


def shared_memory(spec: GemmSpec) -> list[Part]:
    """Returns the parts of a kernel's shared memory, in their order, without gaps."""
    parts: list[Part] = []

    def add(kind: str, name: str, nbytes: int) -> None:
        end = parts[-1].offset + parts[-1].nbytes if parts else 0
        if nbytes:
            parts.append(Part(kind, name, end, nbytes))

    s = spec
    for kind, extent in (("A", s.tile_m), ("B", s.tile_n)):
        for stage in range(s.num_stages):
            add(kind, f"{kind}, stage {stage}", extent * s.tile_k * ITEMSIZE[s.ab_dtype])
    for i, result in enumerate(s.graph.matrices):
        nbytes = ROWS * s.epi_tile_n * ITEMSIZE[result.dtype]
        for warpgroup in range(s.math_warpgroups):
            for stage in range(s.epi_stages):
                add("result", f"result {i}, warpgroup {warpgroup}, stage {stage}", nbytes)
    for operand in sorted(s.graph.loaded, key=lambda o: o.kind != "matrix"):
        for warpgroup in range(s.math_warpgroups):
            for stage in range(s.epi_load_stages):
                name = f"{operand.kind} operand, warpgroup {warpgroup}, stage {stage}"
                add("operand", name, s.loaded_bytes(operand))
    add("scratch", "partial column sums", s.scratch_bytes)
    add("barriers", "barriers", SMEM_BARRIERS)
    return parts


@dataclass(frozen=True)
class Span:
    """What one actor does from `start` to `end`, in cycles.

    Attributes:
      actor: "loader", "math 0", "math 1", ..., "stores 0", "stores 1", ...
      kind: "load" and "multiply" of a k-tile, "epilogue" of a tile, "store" of an epilogue tile,
        which is given with the moment of its issue alone.
      tile: 0, 1, ... of the CTA's tiles.
      step: k-tile or epilogue tile.
    """

    actor: str
    kind: Literal["load", "multiply", "epilogue", "store"]
    tile: int
    step: int
    start: float
    end: float


def timeline(problem: GemmProblem, spec: GemmSpec, device: Device, tiles: int = 3) -> list[Span]:
    """Returns how the cost model's cycles fall into the kernel's order of events, in one CTA.

    The lengths are `dispatch.cost`'s. The order is the kernel's: a stage is loaded again when
    all of its readers have gone one k-tile further; the tensor cores serve one warpgroup at a
    time, of those that can go on the one that is ahead; pingpong warpgroups take turns by
    tiles. What the hardware adds to that (latencies, the other CTAs) the model has in its
    constants, not here.

    Args:
      tiles: tiles that the CTA computes.
    """
    cycles = tile_cycles(problem, spec, device)
    return _Simulation(spec, cycles, tiles).run()


class _Simulation:
    """One CTA, event by event. K-tiles are numbered through all of its tiles."""

    def __init__(self, spec: GemmSpec, cycles: TileCycles, tiles: int) -> None:
        self.spec, self.cycles = spec, cycles
        self.pingpong = spec.warp_schedule == "pingpong"
        self.total = tiles * cycles.k_tiles
        self.spans: list[Span] = []
        self.arrived: list[float] = []  # when each k-tile was in shared memory
        self.ends: dict[tuple[int, int], float] = {}  # of (warpgroup, k-tile)'s multiplication

    def readers(self, k_tile: int) -> list[int]:
        """Returns the warpgroups that multiply a k-tile."""
        warpgroups = range(self.spec.math_warpgroups)
        return [k_tile // self.cycles.k_tiles % 2] if self.pingpong else list(warpgroups)

    def released(self, k_tile: int) -> float | None:
        """Returns when a k-tile's stage was free again; None while it is not."""
        last = k_tile % self.cycles.k_tiles == self.cycles.k_tiles - 1
        behind = k_tile if last else k_tile + 1  # one group of wgmma stays in flight
        ends = [self.ends.get((reader, behind)) for reader in self.readers(k_tile)]
        return None if None in ends else max(end for end in ends if end is not None)

    def load(self) -> None:
        """Loads every k-tile that finds its stage free."""
        while (k_tile := len(self.arrived)) < self.total:
            free: float | None = 0.0
            if k_tile >= self.spec.num_stages:
                free = self.released(k_tile - self.spec.num_stages)
            if free is None:
                return
            start = max(free, self.arrived[-1] if self.arrived else 0.0)
            self.arrived.append(start + self.cycles.load)
            self.add("loader", "load", k_tile, start, self.arrived[-1])

    def add(self, actor: str, kind: Any, k_tile: int, start: float, end: float) -> None:
        tile, step = divmod(k_tile, self.cycles.k_tiles)
        self.spans.append(Span(actor, kind, tile, step, start, end))

    def run(self) -> list[Span]:
        k_tiles, warpgroups = self.cycles.k_tiles, self.spec.math_warpgroups
        length = self.cycles.multiply / (1 if self.pingpong else warpgroups)
        position = [w * k_tiles if self.pingpong else 0 for w in range(warpgroups)]
        ready, idle, turn = [0.0] * warpgroups, 0.0, 0
        while True:
            self.load()
            able = [
                w
                for w in range(warpgroups)
                if position[w] < len(self.arrived)
                and (not self.pingpong or position[w] // k_tiles == turn)
            ]
            if not able:
                return self.spans
            starts = {w: max(ready[w], self.arrived[position[w]], idle) for w in able}
            w = min(able, key=lambda w: (starts[w], -position[w], w))
            k_tile = position[w]
            ready[w] = idle = self.ends[w, k_tile] = starts[w] + length
            self.add(f"math {w}", "multiply", k_tile, starts[w], idle)
            position[w] += 1
            if position[w] % k_tiles == 0:
                ready[w] = self.epilogue(w, k_tile, idle)
                if self.pingpong:
                    position[w] += k_tiles
                    turn += 1

    def epilogue(self, warpgroup: int, k_tile: int, start: float) -> float:
        end = start + self.cycles.epilogue
        tile = k_tile // self.cycles.k_tiles
        self.spans.append(Span(f"math {warpgroup}", "epilogue", tile, 0, start, end))
        s = self.spec
        count = s.rows_per_warpgroup // ROWS * (s.d_tile_n // s.epi_tile_n)
        for step in range(count if s.graph.matrices else 0):
            at = start + (step + 1) / count * (end - start)
            self.spans.append(Span(f"stores {warpgroup}", "store", tile, step, at, at))
        return end


def draw_fragment(columns: int = 32) -> Any:
    """Draws which thread of a warpgroup has which element of a wgmma of 64 rows.

    Left, all of it: warps, and the values of thread 0. Right, a warp's first 16 rows and columns
    element by element: T thread, v number of the value.
    """
    figure, (whole, corner) = _subplots(1, 2, (13, 7.5), width_ratios=[1, 1.6])
    for row in range(ROWS):
        for column in range(columns):
            thread, value = fragment_owner(row, column)
            colour = WARP_COLOURS[thread // 32]
            _cell(whole, column, row, "#d62828" if thread == 0 else colour)
            if row < 16 and column < 16:
                text = f"T{thread}\nv{value}"
                _cell(corner, column, row, "#d62828" if thread == 0 else colour, text)
    for warp in range(4):
        whole.text(columns + 0.5, 16 * warp + 8, f"warp {warp}", va="center")
    whole.set_title(f"64 x {columns}: a warp has 16 rows; red: thread 0")
    corner.set_title("warp 0, the first 16 columns")
    _frame(whole, columns, ROWS)
    _frame(corner, 16, 16)
    return figure


def draw_stmatrix(lane: int = 5, first_value: int = 0) -> Any:
    """Draws one stmatrix.x4 of warp 0: its 8x8 matrices, addresses, and what one lane holds.

    Args:
      lane: the lane whose 8 values are shown in red.
      first_value: number of the first of them, a multiple of 8.
    """
    figure, axis = _subplots(1, 1, (8.5, 7.5))
    addresses = [stmatrix_row(i, first_value) for i in range(32)]
    first_column = addresses[0][1]
    for row in range(16):
        for column in range(16):
            matrix = row // 8 + 2 * (column // 8)
            _cell(axis, column, row, WARP_COLOURS[matrix])
    for value in range(first_value, first_value + 8):
        row, column = fragment_element(lane, value)
        _cell(axis, column - first_column, row, "#d62828", f"v{value}")
    for giver, (row, column) in enumerate(addresses):
        x = -0.3 if column == first_column else 16.3
        side = "right" if x < 0 else "left"
        axis.text(x, row + 0.5, f"lane {giver}", ha=side, va="center", fontsize=8)
    for matrix in range(4):
        x, y = 8 * (matrix // 2) + 4, 8 * (matrix % 2) + 4
        axis.text(x, y, str(matrix), fontsize=40, alpha=0.25, ha="center", va="center")
    axis.set_title(f"four 8x8 matrices; beside each row, who gives its address\nred: lane {lane}")
    _frame(axis, 16, 16)
    return figure


def draw_staged_tile(spec: GemmSpec, dtype: str = "bfloat16", rows: int = 16) -> Any:
    """Draws where the first rows of a staged tile lie in shared memory, by banks.

    A cell is 16 bytes of one row, a line 128 bytes: all 32 banks. Outlined: what the first 8x8
    matrix of an stmatrix writes. Beside it the same without the swizzle.
    """
    itemsize, swizzle = ITEMSIZE[dtype], spec.epi_box(dtype).swizzle
    per_row = min(spec.epi_tile_n * itemsize, swizzle) // CHUNK
    figure, axes = _subplots(1, 2, (13, 5))
    for axis, width in zip(axes, (swizzle, CHUNK), strict=True):
        matrix = []
        for row in range(rows):
            for chunk in range(per_row):
                offset = row * swizzle + chunk * CHUNK
                if width == swizzle:
                    offset = staged_offset(row, chunk * CHUNK // itemsize, itemsize, swizzle)
                x, y = offset % LINE // CHUNK, offset // LINE
                in_matrix = row < 8 and chunk == 0
                if in_matrix:
                    matrix.append(offset)
                colour = plain_colour(chunk)
                _cell(axis, x, y, colour, f"r{row} c{chunk}", bold=in_matrix)
        wanted = bank_conflicts(matrix, CHUNK)
        name = f"{swizzle}-byte swizzle" if width == swizzle else "no swizzle"
        axis.set_title(f"{name}: {wanted} access{'es' if wanted > 1 else ''} to the busiest bank")
        _frame(axis, LINE // CHUNK, rows * swizzle // LINE, aspect="auto")
        labels = [f"{4 * i}-{4 * i + 3}" for i in range(LINE // CHUNK)]
        axis.set_xticks([i + 0.5 for i in range(LINE // CHUNK)], labels)
        axis.set_xlabel("banks")
    figure.suptitle(f"staged tile of 64 x {spec.epi_tile_n} {dtype}: row r, 16-byte chunk c")
    return figure


def plain_colour(index: int) -> Any:
    """Returns a light colour, one for each of eight numbers."""
    from matplotlib import colormaps

    return (*colormaps["Set2"](index % 8)[:3], 0.7)


def draw_shared_memory(specs: Iterable[GemmSpec]) -> Any:
    """Draws the shared memory of kernels to scale, one under the other."""
    specs = list(specs)
    figure, axis = _subplots(1, 1, (13, 0.9 + 0.8 * len(specs)))
    kinds: dict[str, Any] = {}
    for y, spec in enumerate(specs):
        for part in shared_memory(spec):
            bar = axis.barh(
                y, part.nbytes / 1024, left=part.offset / 1024, height=0.6, edgecolor="white",
                color=KIND_COLOURS[part.kind], linewidth=0.7,
            )  # fmt: skip
            kinds.setdefault(part.kind, bar)
        axis.text(0, y - 0.33, spec.name, fontsize=8, va="bottom")
    axis.axvline(SMEM_LIMIT / 1024, color="black", linestyle="--")
    axis.set_ylim(len(specs) - 0.5, -0.7)
    axis.set_yticks([])
    axis.set_xlabel("KB of shared memory; dashed: what a CTA may have")
    axis.legend(kinds.values(), kinds, ncols=len(kinds), loc="upper left", bbox_to_anchor=(0, -0.3))
    return figure


def draw_timeline(
    problem: GemmProblem, specs: Sequence[GemmSpec], device: Device, tiles: int = 3
) -> Any:
    """Draws `timeline` for each kernel on one scale; a colour for each tile."""
    figure, axes = _subplots(len(specs), 1, (13, 2.6 * len(specs)), squeeze=False, sharex=True)
    for axis, spec in zip(axes[:, 0], specs, strict=True):
        spans = timeline(problem, spec, device, tiles)
        actors = ["loader", *(f"math {w}" for w in range(spec.math_warpgroups))]
        actors += [f"stores {w}" for w in range(spec.math_warpgroups)]
        for span in spans:
            y, colour = actors.index(span.actor), TILE_COLOURS[span.tile % len(TILE_COLOURS)]
            if span.kind == "store":
                axis.plot([span.start] * 2, [y - 0.35, y + 0.35], color=colour, linewidth=1.5)
                continue
            hatch = "///" if span.kind == "epilogue" else None
            axis.barh(
                y, span.end - span.start, left=span.start, height=0.7, color=colour,
                edgecolor="white", linewidth=0.4, hatch=hatch,
            )  # fmt: skip
        axis.set_yticks(range(len(actors)), actors)
        axis.invert_yaxis()
        axis.set_title(f"{spec.warp_schedule}: {spec.name}", fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("cycles by the cost model; a colour a tile, hatched: epilogue")
    return figure


def draw_epilogue_tiles(record: dict[str, Any]) -> Any:
    """Draws what `benchmarks/epilogue_tiles.py --json` wrote: time over scheduler and tile."""
    rows = record["rows"]
    clusters = list(dict.fromkeys(tuple(row["cluster"]) for row in rows))
    schedulers = list(dict.fromkeys(row["scheduler"] for row in rows))
    tiles = list(dict.fromkeys((row["epi_tile_n"], row["epi_stages"]) for row in rows))
    figure, axes = _subplots(1, len(clusters), (12, 4), squeeze=False, sharey=True)
    for axis, cluster in zip(axes[0], clusters, strict=True):
        for i, (columns, stages) in enumerate(tiles):
            points = [
                (schedulers.index(row["scheduler"]) + 0.2 * (i - 1), row["us"])
                for row in rows
                if tuple(row["cluster"]) == cluster and row["epi_tile_n"] == columns
            ]
            label = f"{ROWS} x {columns}, {stages} stages"
            axis.plot(*zip(*points, strict=True), "o", color=TILE_COLOURS[i], label=label)
        axis.axhline(record["xla_us"], color="black", linestyle="--", label="XLA")
        axis.set_xticks(range(len(schedulers)), schedulers)
        axis.set_title(f"cluster {cluster[0]}x{cluster[1]}")
        axis.grid(axis="y", alpha=0.4)
    axes[0, 0].set_ylabel("us")
    axes[0, -1].legend()
    figure.suptitle(f"measured on {record['environment']['device']}")
    return figure


def _subplots(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Any:
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "jax_hopper_gemm.viz draws with matplotlib, which is not installed: "
            'python -m pip install "jax-hopper-gemm[notebooks]"'
        ) from error
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", **options)


def _cell(axis: Any, x: float, y: float, colour: Any, text: str = "", bold: bool = False) -> None:
    from matplotlib.patches import Rectangle

    edge, width = ("#d62828", 2.5) if bold else ("white", 0.6)
    axis.add_patch(
        Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=edge, linewidth=width, zorder=1 + bold)
    )
    if text:
        axis.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7, zorder=3)


def _frame(axis: Any, columns: int, rows: int, aspect: Any = "equal") -> None:
    """Shows `rows` x `columns` cells as a matrix: row 0 on top."""
    axis.set_xlim(0, columns)
    axis.set_ylim(rows, 0)
    axis.set_aspect(aspect)
    axis.set_xticks(range(0, columns + 1, 8))
    axis.set_yticks(range(0, rows + 1, 8 if rows > 8 else 1))
    for side in axis.spines.values():
        side.set_visible(False)
