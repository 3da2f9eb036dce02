"""Products of float32 by FMA units, on the CPU: threads' shares, legality, plans, lowering."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import sgemm
from support.sgemm import MAJORS

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch import H200, choose, problem_violations
from jax_hopper_gemm.dispatch.candidates import considered_specs
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm import simt
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.launch.plan import Pointer, TensorMap, make_plan
from jax_hopper_gemm.testing.lowered import specs_of

KERNELS = sgemm.kernels()
A, B = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 64), (64, 128)))


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_threads_copy_each_element_of_a_stage_once(spec):
    assert violations(spec) == []
    for of_b in (False, True):
        c = simt.copies(spec, of_b)
        copied = Counter(
            (line + i, k + j)
            for thread in range(spec.threads)
            for line, k in [c.first(thread)]
            for i in c.line_steps
            for j in c.k_steps
        )
        expected = {(line, k) for line in range(c.lines) for k in range(spec.tile_k)}
        assert copied.keys() == expected and set(copied.values()) == {1}


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_steps_are_all_copies_and_share_the_blocks(spec):
    for of_b in (False, True):
        c = simt.copies(spec, of_b)
        places = [place for step in range(c.steps) for place in c.places(step)]
        assert sorted(places) == [(line, k) for line in c.line_steps for k in c.k_steps]
        blocks = spec.tile_k // simt.block_k(spec)
        assert c.steps < blocks or c.steps % blocks == 0


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_stages_are_aligned_for_tma(spec):
    assert spec.stage_bytes % 128 == 0
    assert simt.pitch(spec.tile_m, spec.a_major == "k") * spec.tile_k * simt.ITEMSIZE % 128 == 0


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_copies_write_each_bank_once(spec):
    for of_b in (False, True):
        c = simt.copies(spec, of_b)
        row = simt.pitch(c.lines, c.along_k)
        words = [k * row + line for line, k in map(c.first, range(32))]
        assert len({word % 32 for word in words}) == 32


def test_threads_of_a_warp_multiply_each_element_once():
    rows = simt.vectors(simt.THREAD_M, simt.LANES_M)
    columns = simt.vectors(simt.THREAD_N, simt.LANES_N)
    computed = Counter(
        (simt.first_row(lane) + i + x, simt.first_column(lane) + j + y)
        for lane in range(32)
        for i in rows
        for x in range(simt.VECTOR)
        for j in columns
        for y in range(simt.VECTOR)
    )
    assert len(computed) == simt.WARP_M * simt.WARP_N and set(computed.values()) == {1}


def test_products_of_a_k_are_each_beside_one_of_the_same_row_or_column():
    assert len(set(simt.PRODUCTS)) == simt.THREAD_M * simt.THREAD_N
    for (row, column), (next_row, next_column) in pairwise(simt.PRODUCTS):
        assert (row == next_row) != (column == next_column)


@pytest.mark.parametrize("first", (simt.first_row, simt.first_column))
def test_sixteen_threads_read_four_vectors(first):
    """Of other banks each, and one of a thread's two neighbours reads the same."""
    for half in (0, 16):
        lanes = range(half, half + 16)
        vectors = {first(lane) for lane in lanes}
        assert len(vectors) == 4 and len({v // 4 % 8 for v in vectors}) == 4
        assert any(all(first(x) == first(x ^ apart) for x in lanes) for apart in (1, 2))


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_a_plan_has_a_tensor_map_of_what_tma_copies(spec):
    by_tma = {buffer for buffer in (0, 1) if simt.by_tma(spec, of_b=buffer == 1)}
    for problem in sgemm.problems(spec):
        assert problem_violations(problem) + pairing_violations(problem, spec) == []
        plan = make_plan(problem, spec, RasterOrder(), 132)
        maps = {param.buffer: param for param in plan.params if isinstance(param, TensorMap)}
        assert maps.keys() == by_tma
        for buffer, tensor_map in maps.items():
            lines, tile = ((problem.m, spec.tile_m), (problem.n, spec.tile_n))[buffer]
            assert tensor_map.dims == (lines, problem.k, problem.l)
            assert tensor_map.box == (tile, spec.tile_k, 1) and tensor_map.swizzle == 0
        others = {param.buffer for param in plan.params if isinstance(param, Pointer)}
        assert others == {0, 1, 2} - by_tma
        tiles = -(-problem.m // spec.tile_m) * -(-problem.n // spec.tile_n) * problem.l
        assert plan.grid == (tiles, 1, 1) and plan.threads == spec.threads
        assert plan.smem_bytes == spec.num_stages * spec.stage_bytes


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
def test_vectors_are_moved_where_lines_allow(a_major, b_major):
    spec = sgemm.spec_of(a_major, b_major, 4)
    assert sgemm.problem_of(spec, 256, 128, 64).simt_width == 4
    assert sgemm.problem_of(spec, 256, 128, 61).simt_width == 4  # nothing is moved along K
    assert sgemm.problem_of(spec, 256, 127, 64).simt_width == 1
    assert sgemm.problem_of(spec, 255, 128, 64).simt_width == (4 if a_major == "k" else 1)
    shifted = sgemm.problem_of(spec, 256, 128, 64, 2)
    shifted = replace(shifted, d=replace(shifted.d, batch_stride=shifted.d.batch_stride + 1))
    assert shifted.simt_width == 1


def test_what_no_kernel_does():
    spec = sgemm.spec_of("k", "n", 4)
    for reason, fields in {
        "tile_m 192 for FMA units is not": {"tile_m": 192},
        "tile_k 64 for FMA units is not": {"tile_k": 64},
        "computes one tile": {"cluster_m": 2},
        "take the scheduler single": {"tile_scheduler": "static"},
        "num_stages 1 is under 2": {"num_stages": 1},
        "bytes of shared memory": {"num_stages": 40},
        "not 1 or 4": {"simt_width": 2},
        "float32 alone": {"d_dtype": "bfloat16"},
        "no code for bfloat16 parts": {"bf16_terms": 3},
        "no code for one matrix of a stack": {"indexed": "a"},
    }.items():
        assert any(reason in text for text in violations(replace(spec, **fields))), reason


def test_strides_that_no_kernel_takes():
    problem = sgemm.problem_of(sgemm.spec_of("k", "n", 4), 256, 128, 64)
    for reason, fields in {
        "A has a stride of 4294967296": {"a": MatrixLayout("k", 2**32)},
        "elements of D overlap": {"d": MatrixLayout("n", 64)},
        "no code for a nested batch": {"outer": (2,)},
    }.items():
        assert any(reason in text for text in problem_violations(replace(problem, **fields)))


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
def test_large_products_take_large_tiles(a_major, b_major):
    problem = GemmProblem.dense(4096, 4096, 4096, a_major=a_major, b_major=b_major, dtype="float32")
    problem = replace(problem, simt=True)
    spec = choose(problem, H200, kernel_only=True).spec
    assert spec and (spec.tile_m, spec.tile_n) == (128, 128)
    few = choose(replace(problem, m=64), H200, kernel_only=True).spec
    assert few and few.tile_m == 64
    assert "about as fast" in choose(replace(problem, m=64), H200).reason


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
def test_shared_memory_of_candidates_is_that_of_their_layout(a_major, b_major):
    problem = GemmProblem.dense(256, 256, 256, a_major=a_major, b_major=b_major, dtype="float32")
    specs = considered_specs(replace(problem, simt=True))
    assert specs and all(spec.smem_bytes == replace(spec).smem_bytes for spec in specs)


@pytest.mark.parametrize("letters", sgemm.LETTERS, ids=",".join)
@pytest.mark.parametrize("extents", sgemm.PROGRAM_EXTENTS, ids=str)
def test_every_order_of_axes_is_one_kernel_that_copies_nothing(letters, extents):
    function = partial(sgemm.einsum, letters)
    (spec,) = specs_of(function, *sgemm.arrays(letters[:2], extents))
    assert spec.simt_width == (4 if extents["m"] % 4 == 0 else 1)


def lowered(function: Any, *shapes: tuple[int, ...]) -> tuple[list[str], int, str]:
    """Returns how its operands lie for each kernel, the transposes, and what `explain` says."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    kernels = [spec.a_major + spec.b_major for spec in specs_of(function, *arrays)]
    return kernels, text.count("stablehlo.transpose"), str(jhg.explain(function, *arrays))


def highest(subscripts: str, a: Any, b: Any, implementation: Any = "hopper") -> Any:
    return jhg.einsum(subscripts, a, b, precision="highest", implementation=implementation)


@pytest.mark.parametrize(
    ("letters", "lies", "moved"),
    [("mk,kn", "kn", 1), ("mk,nk", "kk", 2), ("km,kn", "mn", 0), ("km,nk", "mk", 1)],
)
def test_what_lies_along_k_is_transposed_where_that_is_repaid(letters, lies, moved):
    large = partial(highest, f"{letters}->mn")
    shapes = (2048, 2048), (2048, 2048)
    kernels, transposes, explained = lowered(large, *shapes)
    assert (kernels, transposes) == (["mn"], moved)
    assert ("XLA first transposes what lies along K" in explained) == (moved > 0)
    small, transposes, _ = lowered(large, (1024, 1024), (1024, 1024))
    assert (small, transposes) == ([lies], 0)


def test_transposes_of_large_operands_are_read_in_place():
    kernels, transposes, _ = lowered(lambda a, b: highest("mk,kn->mn", a.T, b), *[(2048, 2048)] * 2)
    assert (kernels, transposes) == (["mn"], 1)  # which is the program's, and unused
    kernels, transposes, _ = lowered(lambda a, b: highest("km,kn->mn", a.T, b), *[(2048, 2048)] * 2)
    assert (kernels, transposes) == (["mn"], 2)


def test_an_operand_that_many_tiles_read_is_transposed_alone():
    narrow = partial(highest, "mk,nk->mn")
    assert lowered(narrow, (8192, 2048), (1024, 2048))[:2] == (["kn"], 1)


def test_lines_of_no_whole_vectors_are_not_transposed():
    kernels, transposes, _ = lowered(partial(highest, "mk,kn->mn"), (2048, 2048), (2048, 2047))
    assert (kernels, transposes) == (["kn"], 0)


def test_batches_are_transposed_matrix_by_matrix():
    batch = partial(highest, "lmk,lnk->lmn")
    assert lowered(batch, (2, 2048, 2048), (2, 2048, 2048))[:2] == (["mn"], 2)


@pytest.mark.parametrize(
    ("extents", "taken"),
    [((4096, 4096, 4096), True), ((2048, 2048, 2048), True), ((3072, 1024, 6272), False),
     ((2560, 2048, 2048), False), ((4096, 4095, 4096), False), ((4096, 4096, 512), False)],
)  # fmt: skip
def test_large_products_that_fill_the_sms_run_on_kernels_by_default(extents, taken):
    m, n, k = extents
    kernels, _, explained = lowered(
        partial(highest, "mk,kn->mn", implementation=None), (m, k), (k, n)
    )
    assert (len(kernels) == 1) == taken
    assert ("about as fast" in explained) != taken


PRECISIONS: tuple[Any, ...] = ("highest", lax.DotAlgorithmPreset.F32_F32_F32)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_precision_is_asked_for(precision):
    hopper = partial(jhg.matmul, precision=precision, implementation="hopper")
    assert [spec.simt_width for spec in specs_of(hopper, A, B)] == [4]
    assert specs_of(partial(jhg.matmul, precision=precision), A, B) == []  # not measured
    explained = str(jhg.explain(jhg.matmul, A, B, precision=precision, implementation="hopper"))
    assert "bound by FMA units" in explained


def test_the_default_precision_is_one():
    with jax.default_matmul_precision("highest"):
        (spec,) = specs_of(partial(jhg.matmul, implementation="hopper"), A, B)
    assert spec.simt_width == 4


@pytest.mark.parametrize("precision", (None, "default", "high"))
def test_other_precisions_are_not_summed_by_fma_units(precision):
    product = partial(jhg.matmul, precision=precision, implementation="hopper")
    assert [spec.simt_width for spec in specs_of(product, A, B)] == [0]


def test_an_epilogue_is_left_to_xla():
    layer = partial(jhg.matmul, activation="gelu", precision="highest")
    assert specs_of(layer, A, B) == []
    with pytest.raises(NotImplementedError, match="no code for an epilogue"):
        specs_of(partial(layer, implementation="hopper"), A, B)


def test_gradients_are_kernels():
    arguments = sgemm.arrays(("mk", "kn", "mn"), sgemm.PROGRAM_EXTENTS[1])
    specs = specs_of(sgemm.gradients, *arguments)
    assert {(spec.a_major, spec.b_major) for spec in specs} == {("k", "k"), ("m", "n")}


def test_the_chain_is_one_of_fused_operations():
    a = np.array([[[1 + 2.0**-12, -1]]], np.float32)
    b = np.array([[[1 + 2.0**-12], [1 + 2.0**-11]]], np.float32)
    assert sgemm.chain(a, b)[0, 0, 0] == 0.0  # the first product is rounded
    assert sgemm.chain(a[..., ::-1], b[:, ::-1])[0, 0, 0] == 2.0**-24  # the last one is not
