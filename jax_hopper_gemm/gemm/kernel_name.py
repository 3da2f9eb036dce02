"""What a kernel is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dtypes import DTYPES

if TYPE_CHECKING:
    from .spec import GemmSpec


def kernel_name(spec: GemmSpec) -> str:
    """A name a person understands in a profile: operation, dtypes, layout, tile, schedule."""
    operands = dict.fromkeys((spec.a_dtype, spec.b_dtype))  # one name where they are the same
    dtypes = "_".join(DTYPES[name].short for name in (*operands, spec.d_dtype))
    layout = ("t" if spec.a_major == "k" else "n") + ("t" if spec.b_major == "n" else "n")
    kind = "gemm" if spec.grouped is None else f"grouped_{spec.grouped}"
    if spec.gathered:
        kind += f"_gather_{spec.gathered}"
    if spec.indexed:
        kind += f"_index_{spec.indexed}"
    if spec.a_block or spec.b_block:
        kind += f"_blocks_{spec.a_block}_{spec.b_block}"
    elif spec.promoted:
        kind += "_promoted"
    if spec.k_group:
        kind += f"_scales_{spec.k_group}"
    if spec.nested:
        kind += "_nested"
    if spec.split_k:
        kind += "_split_k"
    if spec.bf16_terms:
        kind += f"_bf16x{spec.bf16_terms}"
    if spec.simt_width:
        kind += f"_simt{spec.simt_width}"
    if spec.rounds_operands:
        kind += f"_{DTYPES[spec.a_dtype].mma}"
    if spec.d_major == "m":
        kind += "_transposed"
    if spec.loose_d:
        kind += "_loose"
    if spec.panels > 1:
        kind += f"_panels_{spec.panels}"
    return (
        f"jhg_{kind}_{dtypes}_{layout}"
        f"_{spec.tile_m}x{spec.tile_n}x{spec.tile_k}_{spec.cluster_m}x{spec.cluster_n}"
        f"_{spec.warp_schedule}_{spec.tile_scheduler}"
        f"_s{spec.num_stages}_e{spec.epi_tile_n}x{spec.epi_stages}"
        + (f"_l{spec.epi_load_stages}" if spec.epi_load_stages else "")
        + ("_short" if spec.short_boxes else "")
        + (f"_stream_{spec.evict_first}" if spec.evict_first else "")
        + (f"_{spec.epilogue.label}" if spec.epilogue else "")
    )
