"""The timeline of a CTA: loads, multiplications and stores, by the cost model's cycles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..dispatch import Device
from ..dispatch.cost import TileCycles, tile_cycles
from ..gemm.problem import GemmProblem
from ..gemm.spec import GemmSpec
from .canvas import subplots
from .fragments import ROWS

TILE_COLOURS = ("#457b9d", "#e76f51", "#2a9d8f", "#9d4edd")


@dataclass(frozen=True)
class Span:
    """Work of one actor from `start` to `end`, in cycles.

    Attributes:
      actor: "loader", "math 0", "math 1", ..., "stores 0", "stores 1", ...
      kind: "load" and "multiply" of a k-tile, "epilogue" of a tile, "store" of an epilogue tile,
        for which only the moment of its issue is known.
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
    """Returns the timeline of one CTA: the cost model's cycles in the kernel's order of events.

    The lengths are those of `dispatch.cost`. The order is the kernel's. A stage is loaded again
    when all of its readers are one k-tile further. The tensor cores serve one warpgroup at a time:
    of those that are ready, the one ahead. Pingpong warpgroups take turns by tiles, some others by
    k-tiles. Latencies and the effects of other CTAs are in the model's constants, not here.

    Args:
      tiles: number of tiles that the CTA computes.
    """
    cycles = tile_cycles(problem, spec, device)
    return _Simulation(spec, cycles, tiles).run()


class _Simulation:
    """One CTA, event by event. K-tiles are numbered through all of its tiles."""

    def __init__(self, spec: GemmSpec, cycles: TileCycles, tiles: int) -> None:
        self.spec, self.cycles = spec, cycles
        self.pingpong, self.in_turns = spec.warp_schedule == "pingpong", spec.k_in_turns
        self.step = 2 if self.in_turns else 1  # from a warpgroup's k-tile to its next
        self.total = tiles * cycles.k_tiles
        self.spans: list[Span] = []
        self.arrived: list[float] = []  # when each k-tile was in shared memory
        self.ends: dict[tuple[int, int], float] = {}  # of (warpgroup, k-tile)'s multiplication

    def released(self, k_tile: int) -> float:
        """Returns the time at which a k-tile's stage became free again; infinity: not yet."""
        tile, step = divmod(k_tile, self.cycles.k_tiles)
        readers = range(self.spec.math_warpgroups)
        if self.pingpong or self.in_turns:
            readers = [(tile if self.pingpong else k_tile) % 2]
        last = step + self.step >= self.cycles.k_tiles
        behind = k_tile if last else k_tile + self.step  # one group of wgmma stays in flight
        return max(self.ends.get((reader, behind), math.inf) for reader in readers)

    def load(self) -> None:
        """Loads every k-tile that finds its stage free."""
        while (k_tile := len(self.arrived)) < self.total:
            before = k_tile - self.spec.num_stages
            free = self.released(before) if before >= 0 else 0.0
            if math.isinf(free):
                return
            start = max(free, self.arrived[-1] if self.arrived else 0.0)
            self.arrived.append(start + self.cycles.load)
            self.add("loader", "load", k_tile, start, self.arrived[-1])

    def add(self, actor: str, kind: Any, k_tile: int, start: float, end: float) -> None:
        tile, step = divmod(k_tile, self.cycles.k_tiles)
        self.spans.append(Span(actor, kind, tile, step, start, end))

    def run(self) -> list[Span]:
        k_tiles, warpgroups = self.cycles.k_tiles, self.spec.math_warpgroups
        alone = self.pingpong or self.in_turns
        length = self.cycles.multiply / (1 if alone else warpgroups)
        apart = k_tiles if self.pingpong else self.step - 1
        position = [w * apart for w in range(warpgroups)]
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
            position[w] += self.step
            if position[w] // k_tiles > k_tile // k_tiles:
                ready[w] = self.epilogue(w, k_tile, idle)
                if self.pingpong:
                    position[w] += k_tiles
                    turn += 1

    def epilogue(self, warpgroup: int, k_tile: int, start: float) -> float:
        end = start + self.cycles.epilogue
        tile = k_tile // self.cycles.k_tiles
        self.spans.append(Span(f"math {warpgroup}", "epilogue", tile, 0, start, end))
        s = self.spec
        count = s.rows_per_warpgroup // ROWS * (s.d_tile_n // s.warpgroups_n // s.epi_tile_n)
        for step in range(count if s.graph.matrices else 0):
            at = start + (step + 1) / count * (end - start)
            self.spans.append(Span(f"stores {warpgroup}", "store", tile, step, at, at))
        return end


def draw_timeline(
    problem: GemmProblem, specs: Sequence[GemmSpec], device: Device, tiles: int = 3
) -> Any:
    """Draws `timeline` for each kernel on one scale, the same work each; a colour for each tile.

    Args:
      tiles: number of the largest kernel's tiles; the others compute as many elements.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, axes = subplots(len(specs), 1, (13, 2.6 * len(specs)), squeeze=False, sharex=True)
    elements = tiles * max(spec.tile_m * spec.tile_n for spec in specs)
    for axis, spec in zip(axes[:, 0], specs, strict=True):
        count = elements // (spec.tile_m * spec.tile_n)
        spans = timeline(problem, spec, device, count)
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
        tile = f"{count} tiles of {spec.tile_m}x{spec.tile_n}"
        axis.set_title(f"{spec.warp_schedule}, {tile}: {spec.name}", fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("cycles by the cost model")
    colour = TILE_COLOURS[0]
    figure.legend(
        handles=[
            Patch(color=colour, label="a k-tile: loaded, multiplied"),
            Patch(facecolor=colour, edgecolor="white", hatch="///", label="a tile's epilogue"),
            Line2D([], [], color=colour, marker="|", linestyle="", label="a store is issued"),
            Patch(facecolor="none", label="each tile has a colour of its own"),
        ],
        loc="outside lower center", ncols=4, frameon=False,
    )  # fmt: skip
    return figure
