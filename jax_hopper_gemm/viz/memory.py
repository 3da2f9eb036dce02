"""The layout of a CTA's shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..gemm.dtypes import DTYPES
from ..gemm.smem import (
    SMEM_BARRIERS,
    SMEM_LIMIT,
    exchange_bytes,
    loaded_bytes,
    scale_stage_bytes,
    scratch_bytes,
)
from ..gemm.spec import GemmSpec
from .canvas import subplots
from .fragments import ROWS

KIND_COLOURS = {
    "A": "#457b9d",
    "B": "#a8dadc",
    "scales": "#ffb703",
    "result": "#e76f51",
    "operand": "#f4a261",
    "scratch": "#9d4edd",
    "barriers": "#333333",
}


@dataclass(frozen=True)
class Part:
    """A piece of a CTA's shared memory."""

    kind: str  # a key of `KIND_COLOURS`
    name: str  # its contents
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
    of_operands = {
        "A": DTYPES[s.a_dtype].nbytes(s.tile_m * s.tile_k),
        "B": DTYPES[s.b_dtype].nbytes(s.tile_n * s.tile_k),
        "scales": scale_stage_bytes(s),
    }
    for kind, nbytes in of_operands.items():
        for stage in range(s.num_stages):
            add(kind, f"{kind}, stage {stage}", nbytes)
    add("B", "bfloat16 parts of B", s.parts_bytes)
    add("scratch", "sums that warpgroups exchange", exchange_bytes(s))
    add("scratch", "sums that CTAs of a cluster send", s.slot_bytes)
    for i, result in enumerate(s.graph.matrices):
        nbytes = ROWS * s.epi_tile_n * DTYPES[result.dtype].itemsize
        for warpgroup in range(s.math_warpgroups):
            for stage in range(s.epi_stages):
                add("result", f"result {i}, warpgroup {warpgroup}, stage {stage}", nbytes)
    for operand in sorted(s.graph.loaded, key=lambda o: o.kind != "matrix"):
        for warpgroup in range(s.math_warpgroups):
            for stage in range(s.epi_load_stages):
                name = f"{operand.kind} operand, warpgroup {warpgroup}, stage {stage}"
                add("operand", name, loaded_bytes(s, operand))
    add("scratch", "partial column sums", scratch_bytes(s))
    add("barriers", "barriers", SMEM_BARRIERS)
    return parts


def draw_shared_memory(specs: Iterable[GemmSpec]) -> Any:
    """Draws the shared memory of kernels to scale, one under the other."""
    specs = list(specs)
    figure, axis = subplots(1, 1, (13, 0.9 + 0.8 * len(specs)))
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
