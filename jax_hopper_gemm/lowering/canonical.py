"""The canonical form of a request: its problem, with scales, stacks and how its sums are formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jax.lax import DotAlgorithmPreset, Precision

from ..dispatch.canonical import Gemm, NotAGemm, as_gemm, with_whole_lines
from ..fusion import Fusion
from ..fusion.memo import memoised
from ..gemm.bf16_parts import PRESETS
from ..gemm.dtypes import DTYPES, HALVES, OPERANDS, converts, multiply
from ..gemm.grid import ceil_div
from ..gemm.groups import GROUP
from ..gemm.legality import MAX_TILE_N
from ..gemm.problem import BlockScales, GemmProblem
from ..gemm.spec import PROMOTION_K, SCALES_ALIGNMENT
from .request import Request


def canonical(request: Request) -> Gemm | None:
    """Returns the canonical form of a product without an epilogue, if a kernel may be asked for."""
    if request_violation(request):
        return None
    try:
        return bare_form(request)
    except NotAGemm:
        return None


def request_violation(request: Request) -> str | None:
    """Returns why no kernel can serve a product that no `GemmProblem` can express."""
    if request.symbolic:
        return "an extent is symbolic; a kernel is launched for extents that are known"
    dtypes = request.lhs_dtype, request.rhs_dtype
    converted = converts(*dtypes) or converts(*dtypes[::-1])
    if dtypes[0] != dtypes[1] and not (multiply(*dtypes) or converted):
        return f"the operands are {' and '.join(dtypes)}; kernels take two operands of one dtype"
    return _precision_violation(request)


def canonical_form(
    request: Request, fusion: Fusion | None = None, labels: Sequence[str] = ()
) -> Gemm:
    """Returns the canonical form of a product, with what a kernel computes of its epilogue.

    Raises:
      NotAGemm: no canonical GEMM is this product.
    """
    if request.panels:
        return side_by_side([bare_form(x) for x in request.apart])
    gemm = as_gemm(request, fusion.graph if fusion else None, labels)
    problem = gemm.problem
    if request.k_group:
        scale_letters(request, problem)  # raises where scales do not lie as B does
        problem = replace(problem, k_group=request.k_group)
    if request.blocks:
        problem = _with_scales(problem, request, gemm.swap_ab)
    elif is_simt(request):
        problem = replace(problem, simt=True)
    elif terms := _bf16_terms(request):
        problem = replace(problem, bf16_terms=terms)
    elif _is_promoted(request):
        problem = replace(problem, promoted=True)
    if request.indexed:
        problem = _in_stack(problem, request, gemm.swap_ab)
    if problem is not gemm.problem:
        gemm = replace(gemm, problem=problem)
    measured = {request.lhs_dtype, request.rhs_dtype} <= set(HALVES)
    if request.indexed or request.groups or problem.up_offset or not measured:
        return gemm
    return with_whole_lines(gemm, request)


bare_form = memoised(canonical_form)  # of products without an epilogue


def side_by_side(forms: Sequence[Gemm]) -> Gemm:
    """Returns the canonical form of products of one left operand, panels of one problem.

    Raises:
      NotAGemm: they are none.
    """
    if any(gemm.swap_ab or gemm.padded for gemm in forms):
        raise NotAGemm("right operands side by side hold no columns of the result, or are padded")
    first, *others = problems = [gemm.problem for gemm in forms]
    arrays: dict[str, Any] = {x: getattr(first, x) for x in ("n", "b", "d", "operands")}
    if first.l > 1 or any(replace(x, **arrays) != first for x in others):
        raise NotAGemm("right operands side by side do not lie alike, or what follows differs")
    return Gemm(GemmProblem.side_by_side(problems), swap_ab=False)


def _with_scales(p: GemmProblem, request: Request, swap_ab: bool) -> GemmProblem:
    """Returns the problem with block scales, in arrays as `scale_shape` has them."""
    assert request.blocks
    a_block, b_block = request.blocks[::-1] if swap_ab else request.blocks
    matrices = prod(request.extents[x] for x in request.subscripts.batch)
    if not request.groups and p.l != matrices:
        raise NotAGemm("rows that share scales lie in several places")

    def scales(block: int, lines: int) -> BlockScales:
        along_k, length = scale_shape(block, lines, p.k)
        return BlockScales(block, length, 0 if p.groups_k else along_k * length)

    return replace(p, promoted=True, a_scales=scales(a_block, p.m), b_scales=scales(b_block, p.n))


def scale_shape(block: int, lines: int, k: int) -> tuple[int, int]:
    """Returns the shape of a matrix's block scales as a kernel reads them, by 128 of K first.

    Behind the last are as many more as a copy into a stage may read.
    """
    length = ceil_div(lines, block)
    step, more = (16, MAX_TILE_N + 16) if block == 1 else (SCALES_ALIGNMENT, SCALES_ALIGNMENT)
    return ceil_div(k, PROMOTION_K), ceil_div(length, step) * step + more


def scale_letters(request: Request, problem: GemmProblem) -> tuple[str, str]:
    """Returns the letters of the right operand that count matrices, and those of columns.

    Raises:
      NotAGemm: they are not neighbours, in this order, in the result.
    """
    subscripts, extents = request.subscripts, request.extents
    if request.groups:
        return GROUP, "n"
    free = [x for x in subscripts.out if x in subscripts.rhs]
    for i in range(len(free) + 1):
        sizes = [prod(extents[x] for x in part) for part in (free[:i], free[i:])]
        if sizes == [problem.l if problem.b.batch_stride and problem.l > 1 else 1, problem.n]:
            return "".join(free[:i]), "".join(free[i:])
    raise NotAGemm("scales along K, and the columns of the right operand are no neighbours")


def _in_stack(p: GemmProblem, request: Request, swap_ab: bool) -> GemmProblem:
    left = request.indexed == "a"
    apart = prod(request.lhs_shape if left else request.rhs_shape)
    indexed: Any = "a" if left != swap_ab else "b"
    layout = replace(getattr(p, indexed), batch_stride=apart)
    return replace(p, indexed=indexed, stack=request.stack, **{indexed: layout})


# How sums are formed, as dtypes and precision ask.


def _precision_violation(request: Request) -> str | None:
    """Returns why no kernel sums as the precision asks."""
    precision = request.options.precision
    if precision is None or isinstance(precision, tuple | Precision):
        return None
    # Products of two operands are exact in float32, where the kernels add them: no `Precision`
    # asks for more, and the dtype's algorithms ask for just that.
    if precision == DotAlgorithmPreset.DEFAULT or reads_any_major(request):
        return None
    if request.lhs_dtype in OPERANDS:
        row = DTYPES[request.lhs_dtype]
        if getattr(precision, "name", None) in (row.algorithm, row.promoted_algorithm):
            return None
    return f"precision is {precision}; kernels for {request.lhs_dtype} accumulate in float32"


def _bf16_terms(request: Request) -> int:
    """Returns of how many products of bfloat16 parts those of float32 numbers are to be sums."""
    if (request.lhs_dtype, request.rhs_dtype) != ("float32", "float32"):
        return 0
    name = getattr(request.options.precision, "name", None)
    return next((terms for terms, preset in PRESETS.items() if preset == name), 0)


def reads_any_major(request: Request) -> bool:
    """Whether kernels for the precision pass float32 through registers, from any layout."""
    return _bf16_terms(request) > 0 or is_simt(request)


def rounds_operands(request: Request) -> bool:
    """Whether kernels read fewer digits than operands have: float32 in TF32."""
    row = DTYPES.get(request.lhs_dtype)
    return bool(row and row.rounding_map) and not reads_any_major(request)


def is_simt(request: Request) -> bool:
    """Whether the products of float32 numbers are to be summed in IEEE float32."""
    if (request.lhs_dtype, request.rhs_dtype) != ("float32", "float32"):
        return False
    precision = request.options.precision
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return not {Precision.HIGHEST, DotAlgorithmPreset.F32_F32_F32}.isdisjoint(precisions)


def _is_promoted(request: Request) -> bool:
    """Whether a product of 8-bit floats keeps all digits of float32 in its sums.

    As XLA has it: any `Precision` but the default asks for that, and an algorithm by its name.
    """
    row, precision = DTYPES.get(request.lhs_dtype), request.options.precision
    if row is None or not row.promoted_algorithm or precision is None:
        return False
    if isinstance(precision, DotAlgorithmPreset):
        return precision.name == row.promoted_algorithm
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return any(x not in (None, Precision.DEFAULT) for x in precisions)
