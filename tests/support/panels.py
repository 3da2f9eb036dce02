"""Problems of several right operands side by side, each with a result."""

from __future__ import annotations

from dataclasses import replace

from support import cases

from jax_hopper_gemm.gemm.grid import ceil_div
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec


def panel_problems(spec: GemmSpec, num_sms: int) -> list[tuple[GemmProblem, RasterOrder]]:
    """Returns problems of several right operands, each with an order of tiles.

    They have gaps of their own, and end within a tile but for one. In turn: a tile each; several
    of different widths; several waves of tiles.
    """
    tiles = [(1,) * spec.panels, (3, 1, 2, 4)[: spec.panels], (5, 1, 7, 2)[: spec.panels]]
    waves = ceil_div(2 * num_sms, sum(tiles[-1]))
    rows = [spec.tile_m // 2 + 3, 2 * spec.tile_m + 1, spec.tile_m * waves - 5]
    extents_k = [9, spec.tile_k * (2 * spec.num_stages + 1) + 24, 2 * spec.tile_k]
    found = []
    for i, (m, widths, k) in enumerate(zip(rows, tiles, extents_k, strict=True)):
        columns = [spec.tile_n * count - 8 * (j != 1) for j, count in enumerate(widths)]
        alone = [cases.padded(replace(spec, panels=1), m, n, k) for n in columns]
        alone = [alone[0], *map(_wider, alone[1:])]
        order = RasterOrder("n" if i % 2 else "m", 1 + 3 * i)
        found.append((GemmProblem.side_by_side(alone), order))
    return found


def _wider(problem: GemmProblem) -> GemmProblem:
    def wider(layout: MatrixLayout) -> MatrixLayout:
        return replace(layout, leading_stride=layout.leading_stride + 16)

    p = problem
    return replace(p, d=wider(p.d), b=wider(p.b), operands=tuple(map(wider, p.operands)))
