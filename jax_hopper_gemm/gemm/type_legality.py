"""Types of problems: every reason why there is no kernel for one, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from . import simt
from .bf16_parts import PRESETS
from .dtypes import (
    DTYPES,
    HALVES,
    OPERANDS,
    QUANTIZED,
    RESULTS,
    converts,
    multiply,
    names,
    one_of,
    results_of,
)
from .epilogue_checks import graph_violations
from .epilogue_graph import EpilogueGraph
from .problem import VarlenAxis
from .problem_type import ProblemType
from .spec import BLOCKS, K_GROUPS

# Operands that a kernel can gather by an array of indices, for each grouped axis.
GATHERABLE: dict[VarlenAxis | None, tuple[Literal["a", "b"], ...]] = {
    None: (), "m": ("a",), "k": ("a", "b"),
}  # fmt: skip


NO_CODE = "have no code for"
MAX_PANELS = 4  # right operands of a launch that has a result for each
MAX_TENSOR_MAPS = 28  # of a launch, as `ffi/src/plan.h` has it: 3,584 of 4,096 bytes of parameters


def type_violations(t: ProblemType) -> Iterator[str]:
    """Yields every reason why there is no kernel for a type of problems."""
    yield from _operand_violations(t)
    yield from _result_violations(t)
    if t.a_block or t.b_block:
        yield from _block_violations(t)
    # What passes through registers on its way to the tensor cores may have any layout.
    any_major = bool(t.bf16_terms or t.simt_width)
    yield from _major_violations("A", "MK", t.a_dtype, t.a_major, any_major)
    any_major_of_b = any_major or t.b_in_registers
    yield from _major_violations("B", "NK", t.b_dtype, t.b_major, any_major_of_b)
    yield from _register_violations(t)
    if t.epilogue:
        yield from _epilogue_violations(t, t.epilogue)
    if t.grouped not in (None, "m", "k"):
        yield f"groups cut the axis {t.grouped!r}, not 'm' or 'k'"
        return
    yield from _stack_violations(t)
    if t.loose_d:
        yield from _loose_violations(t)
    if t.gathered:
        yield from _gather_violations(t, t.gathered)
    if t.grouped == "m":
        yield from _varlen_m_violations(t)
    if t.d_major != "n":
        yield from _transposed_violations(t)
    if t.grouped == "k":
        yield from _varlen_k_violations(t)
    if t.panels != 1:
        yield from _panel_violations(t)
    yield from _tensor_map_violations(t)


def _operand_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel multiplies operands of these dtypes."""
    if t.simt_width:
        yield from _simt_type_violations(t)
    elif t.bf16_terms:
        yield from _terms_violations(t)
    elif t.a_dtype == t.b_dtype and t.a_dtype not in OPERANDS:
        yield f"A and B are {t.a_dtype}: cast them to {one_of(OPERANDS)}"
    elif not (multiply(t.a_dtype, t.b_dtype) or converts(t.a_dtype, t.b_dtype)):
        yield f"A is {t.a_dtype} and B {t.b_dtype}: cast one to the other's dtype"


def _result_violations(t: ProblemType) -> Iterator[str]:
    """Yields why sums of these operands are not promoted, or not stored in the dtype of D."""
    results = results_of(t.a_dtype) if t.a_dtype in OPERANDS else RESULTS
    if t.promoted:
        results = tuple(name for name in results if name not in names("sum"))
    if t.d_dtype not in results + (QUANTIZED if t.epilogue else ()):
        yield f"D is {t.d_dtype}: ask for {one_of(results)}"
    if t.promoted and not t.a_block and t.a_dtype in OPERANDS:
        if not DTYPES[t.a_dtype].promoted_algorithm:
            yield f"sums of {t.a_dtype} have all digits already: promote none"


def _epilogue_violations(t: ProblemType, graph: EpilogueGraph) -> Iterator[str]:
    """Yields why no kernel has the epilogue, or stores what it results in."""
    if broken := [f"epilogue: {reason}" for reason in graph_violations(graph)]:
        yield from broken
    elif graph.matrices:
        if (first := graph.matrices[0].dtype) != t.d_dtype:
            yield f"D is {t.d_dtype}, the epilogue's first result {first}"
        own = {DTYPES[t.a_dtype].accumulator} if t.a_dtype in DTYPES else set()
        for dtype in sorted({r.dtype for r in graph.matrices} & set(names("sum")) - own):
            yield f"accumulators of {t.a_dtype} are stored as {dtype}: convert the product instead"


def _gather_violations(t: ProblemType, operand: str) -> Iterator[str]:
    """Yields why no kernel picks rows of an operand by indices."""
    if operand not in GATHERABLE[t.grouped]:
        where = f"where groups cut {t.grouped.upper()}" if t.grouped else "without groups"
        yield f"no kernel gathers {operand.upper()} by indices {where}: gather it beforehand"
    elif operand == "b" and t.epilogue and t.epilogue.accumulators > 1:
        yield "no kernel gathers two B's: gather them beforehand"
    elif t.rounds_operands:
        yield f"no kernel rounds rows of {t.a_dtype} that it gathers: gather them beforehand"


def _varlen_m_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel multiplies groups of A's rows."""
    if t.a_major != "k":
        yield "rows of A are cut into groups, so A must be stored (M, K): copy it"
    results = t.epilogue.results if t.epilogue else ()
    for kind in sorted({r.kind for r in results} & {"column_sum", "max"}):
        yield f"a {kind} of rows that are cut into groups: leave it to XLA"


def _without(others: dict[str, Any], lacking: str, way_out: str = "") -> Iterator[str]:
    """Yields of what is there, by name, what is lacking for it."""
    for name, there in others.items():
        if there:
            yield f"{lacking} {name}{way_out}"


def _varlen_k_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel contracts groups of rows that lie as A and B have them."""
    if t.a_dtype in OPERANDS and DTYPES[t.a_dtype].itemsize == 1:
        if t.gathered:
            yield f"rows of {t.a_dtype} are contracted, which lie along K: gather them beforehand"
    elif (t.a_major, t.b_major) != ("m", "n"):
        yield (
            "K is cut into groups, so A must be stored (K, M) and B (K, N): copy what is stored "
            "otherwise"
        )


def _terms_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel multiplies bfloat16 parts of the operands."""
    if t.bf16_terms not in PRESETS:
        yield f"{t.bf16_terms} products of bfloat16 parts, not {one_of(tuple(map(str, PRESETS)))}"
    operands = t.a_dtype, t.b_dtype
    if operands not in (("float32", "float32"), ("bfloat16", "bfloat16")):
        yield f"A is {t.a_dtype} and B {t.b_dtype}: float32 is cut into bfloat16 parts"
    if t.a_dtype == "bfloat16":
        others = {"groups": t.grouped, "a matrix of a stack": t.indexed}
        yield from _without(others, f"kernels that read bfloat16 parts from memory {NO_CODE}")
    if t.promoted or t.a_block or t.b_block:
        yield "sums of bfloat16 parts are promoted already, and blocks of float32 have no scales"


def _register_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel takes B from registers, or has scales of groups along K for it."""
    if t.k_group and not converts(t.a_dtype, t.b_dtype):
        yield f"groups along K of {t.b_dtype} have scales beside {t.a_dtype}: multiply by them"
        return
    if not t.b_in_registers:
        return
    if t.k_group and t.k_group not in K_GROUPS:
        groups = one_of(tuple(map(str, K_GROUPS)))
        yield f"scales of {t.k_group} elements of K, not {groups}: multiply by them"
    if t.k_group and t.nested:
        yield "groups along K have scales, and the product has a nested batch: copy it"
    if t.grouped == "k" and t.a_dtype != t.b_dtype:
        yield f"B is {t.b_dtype}, and K is cut into groups: cast it to {t.a_dtype}"
    if t.gathered == "b" or (t.indexed == "b" and t.k_group):
        yield f"B is {t.b_dtype}, one of an array's rows or matrices: copy it"
    for kind in dict.fromkeys(r.kind for r in t.epilogue.results) if t.epilogue else ():
        if kind != "matrix":
            yield f"a {kind} of a product whose B is in registers: leave it to XLA"
    if t.epilogue and t.epilogue.row_nodes:
        yield "statistics of rows of a product whose B is in registers: leave them to XLA"


def _transposed_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel stores D along M."""
    if t.d_major != "m":
        yield f"D has major {t.d_major!r}, not 'm' or 'n'"
    others = {
        "groups": t.grouped, "FMA units": t.simt_width,
        "bfloat16 parts that they cut": t.bf16_terms and t.a_dtype not in HALVES,
        "promoted sums": t.promoted, "two B's": t.epilogue and t.epilogue.accumulators > 1,
        f"operands of {t.a_dtype} and {t.b_dtype}": {t.a_dtype, t.b_dtype} - set(HALVES),
        "reductions": t.epilogue and t.epilogue.needs_extents,
    }  # fmt: skip
    yield from _without(others, f"kernels that store D along M {NO_CODE}")
    arrays = [*t.epilogue.matrices, *t.epilogue.operands] if t.epilogue else []
    for array in arrays:
        if array.kind == "matrix" and DTYPES[array.dtype].itemsize == 1:
            yield f"a thread has no two neighbours of {array.dtype} where D is stored along M"


def _loose_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel stores rows of D that begin and end anywhere."""
    results = t.epilogue.matrices if t.epilogue else ()
    others = {
        "groups": t.grouped, "a nested batch": t.nested, "D stored along M": t.d_major == "m",
        "FMA units": t.simt_width, "gate and up side by side": any(r.planes > 1 for r in results),
        "results of 4 or 8 bits": any(DTYPES[r.dtype].itemsize == 1 for r in results),
        f"operands of {t.a_dtype} and {t.b_dtype}": {t.a_dtype, t.b_dtype} - set(HALVES),
    }  # fmt: skip
    yield from _without(others, "rows of D that are no multiples of 16 bytes, and", ": pad N")


def _panel_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel multiplies A by several arrays into several others."""
    graph = t.epilogue
    if not 1 <= t.panels <= MAX_PANELS:
        yield f"{t.panels} right operands, not 1 to {MAX_PANELS}: take several launches"
    others = {
        "groups": t.grouped,
        "gate and up": graph and (graph.accumulators == 2 or any(r.plane for r in graph.results)),
        "reductions in their epilogue": graph and graph.needs_extents,
        "a matrix of a stack": t.indexed, "a nested batch": t.nested,
        "D stored along M": t.d_major == "m",
        "rows of D that are no multiples of 16 bytes": t.loose_d,
        f"operands of {t.a_dtype} and {t.b_dtype}": {t.a_dtype, t.b_dtype} - set(HALVES),
    }  # fmt: skip
    yield from _without(others, f"kernels of several right operands {NO_CODE}")


def _tensor_map_violations(t: ProblemType) -> Iterator[str]:
    """Yields that there are more arrays than a launch has tensor maps for."""
    graph = t.epilogue
    factors = graph.accumulators if graph and t.panels == 1 else t.panels
    others = len(graph.loaded) + len(graph.matrices) if graph else 1
    if (maps := 1 + factors * (2 if t.k_group else 1) + t.panels * others) > MAX_TENSOR_MAPS:
        yield f"TMA reads and writes {maps} arrays, over {MAX_TENSOR_MAPS}: take several launches"


def _simt_type_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel adds up the products in FMA units."""
    if t.simt_width not in (1, simt.VECTOR):
        yield f"vectors of FMA units have {t.simt_width} elements, not 1 or {simt.VECTOR}"
    if (t.a_dtype, t.b_dtype, t.d_dtype) != ("float32",) * 3:
        yield (
            f"A is {t.a_dtype}, B {t.b_dtype} and D {t.d_dtype}: kernels for FMA units have "
            "float32 alone"
        )
    others = {
        "an epilogue": t.epilogue, "groups": t.grouped, "gathered rows": t.gathered,
        "one matrix of a stack": t.indexed, "promoted sums": t.promoted,
        "block scales": t.a_block or t.b_block, "a nested batch": t.nested,
        "bfloat16 parts": t.bf16_terms,
    }  # fmt: skip
    yield from _without(others, f"kernels for FMA units {NO_CODE}", ": leave the product to XLA")


def _block_violations(t: ProblemType) -> Iterator[str]:
    """Yields why no kernel multiplies blocks of 128 along K by scales of their own."""
    if DTYPES[t.a_dtype].itemsize != 1:
        yield f"blocks of {t.a_dtype} have scales: kernels scale blocks of 8-bit operands"
    for operand, block in (("A", t.a_block), ("B", t.b_block)):
        if block not in BLOCKS:
            yield f"blocks of {operand} have {block} lines, not {one_of(tuple(map(str, BLOCKS)))}"
    if not t.promoted:
        yield "block scales are multiplied in where accumulators are promoted: promote them"
    if t.epilogue and t.epilogue.accumulators > 1:
        yield "a product with two B's has block scales: multiply one after the other"
    if t.nested:
        yield "blocks have scales, and the product has a nested batch: copy it"
    if t.gathered:
        yield "blocks have scales, and the product gathers rows: gather them beforehand"
    if t.grouped == "m" and t.a_block != 1:
        yield "groups begin within blocks of A: take blocks of one row, or copy it"


def _major_violations(
    operand: str, axes: str, dtype: str, major: str, any_major: bool
) -> Iterator[str]:
    """Yields why an operand cannot be stored with neighbours along an index in memory."""
    if major.upper() not in axes:
        yield f"{operand} has major {major!r}, not {' or '.join(map(repr, axes.lower()))}"
    elif not any_major and dtype in OPERANDS and major not in DTYPES[dtype].majors:
        yield (
            f"{operand} is {dtype}, which tensor cores read along K alone, so it must be stored "
            f"({axes[0]}, K): copy it"
        )


def _stack_violations(t: ProblemType) -> Iterator[str]:
    if t.indexed not in (None, "a", "b"):
        yield f"one matrix of a stack is {t.indexed!r}, not 'a' or 'b'"
    elif t.indexed and t.grouped:
        yield (
            f"{t.indexed.upper()} is one matrix of a stack, and the product has groups: copy it "
            "out of the stack"
        )
