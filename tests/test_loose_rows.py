"""Rows that are no multiples of 16 bytes: TMA copies and stores none, so threads store D, and XLA
pads operands."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.loose import LOOSE_PRODUCTS, loose_program_specs, loose_route

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch import H200, problem_violations
from jax_hopper_gemm.dispatch.cost import COPY_PASSES, copying_ns, pass_ns
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.gemm.kernel_params import KernelArgs, Strided, kernel_params
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.launch.plan import Int32, Pointer, TensorMap, make_plan
from jax_hopper_gemm.lowering.launch_operands import in_words


@pytest.mark.parametrize(
    ("n", "dtype", "loose"),
    [(50257, "bfloat16", True), (50264, "bfloat16", False), (50260, "float32", False),
     (50258, "float32", True)],
)  # fmt: skip
def test_a_result_is_loose_where_its_rows_are_no_multiples_of_16_bytes(n, dtype, loose):
    problem = GemmProblem.dense(64, n, 64, b_major="k", d_dtype=dtype)
    assert problem.loose_d == loose
    assert problem_violations(problem) == []


def test_a_result_whose_rows_or_matrices_are_apart_by_other_distances_is_loose():
    problem = GemmProblem.dense(64, 128, 64, 2)
    for layout in (MatrixLayout("n", 130, 64 * 136), MatrixLayout("n", 128, 64 * 128 + 4)):
        assert replace(problem, d=layout).loose_d
    one_row = replace(problem, m=1, l=1, d=MatrixLayout("n", 129, 5))
    assert not one_row.loose_d, "strides along axes of one element mean nothing"


def test_kernel_of_loose_rows_knows_pointer_strides_and_extents():
    problem = GemmProblem.dense(200, 333, 128, 3, b_major="k")
    best, _ = best_kernel(problem, H200)
    assert best and best.spec.loose_d and "loose" in best.spec.name
    params = kernel_params(best.spec)
    assert isinstance(params, KernelArgs)
    (d,) = params.results
    assert isinstance(d, Strided)
    plan = make_plan(problem, best.spec, RasterOrder(), H200.num_sms)
    maps = [p.buffer for p in plan.params if isinstance(p, TensorMap)]
    assert maps == [0, 1], "no tensor map would hold rows of D"
    after = plan.params.index(Pointer(2))
    assert plan.params[after + 1 : after + 3] == (Int32(333), Int32(200 * 333))
    assert plan.params[-2:] == (Int32(200), Int32(333))


def test_kernels_are_for_loose_rows_or_for_others():
    loose = GemmProblem.dense(200, 333, 128, b_major="k")
    whole = GemmProblem.dense(200, 336, 128, b_major="k")
    for problem, other in ((loose, whole), (whole, loose)):
        best, _ = best_kernel(problem, H200)
        assert best and pairing_violations(problem, best.spec) == []
        (reason,) = pairing_violations(other, best.spec)
        assert "loose_d" in reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"nested": True}, "a nested batch"), ({"d_major": "m"}, "D stored along M")],
)
def test_loose_rows_have_no_kernel_with(changed, reason):
    best, _ = best_kernel(GemmProblem.dense(200, 333, 128, b_major="k"), H200)
    assert best
    assert any(reason in x for x in violations(replace(best.spec, **changed)))


@pytest.mark.parametrize("product", LOOSE_PRODUCTS, ids=str)
def test_lines_of_operands_are_padded_and_d_is_not(product):
    found = loose_route(*product)
    assert found.path == "hopper" and found.gemm and found.plan
    p, (_, lhs, rhs) = found.gemm.problem, product
    for number, shape in enumerate((lhs, rhs)):
        assert (number in found.gemm.padded) == (shape[-1] % 8 > 0)
    assert problem_violations(p) == []
    assert p.loose_d == (p.n % 8 > 0)
    assert p.d.leading_stride == p.n


def test_an_array_whose_line_has_several_axes_is_not_padded():
    found = loose_route("mab,abn->mn", (64, 5, 7), (5, 7, 64))
    assert found.path == "xla" and "K=35" in found.reason


def test_matrices_that_an_epilogue_reads_must_have_whole_lines():
    def product(a, b, c):
        return jhg.matmul(a, b, epilogue=lambda x: x + c)

    shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((64, 64), (64, 33), (64, 33))]
    assert "not a multiple of 16" in str(jhg.explain(product, *shapes))


def test_programs_pad_operands_and_store_no_padding():
    def product(a, b):
        return jhg.matmul(a, b, implementation="hopper")

    shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((64, 133), (133, 257))]
    text = jax.jit(product).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "(tensor<64x136xbf16>, tensor<133x264xbf16>) -> tensor<64x257xbf16>" in text


def test_a_product_of_padded_operands_is_not_taken_for_one_of_theirs():
    """An epilogue that takes over a launch reads its operands: they have other extents."""

    def loss(a, b):
        return jnp.sum(jhg.matmul(a, b, implementation="hopper", epilogue=jax.nn.gelu))

    shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((64, 133), (133, 256))]
    lowered = jax.jit(jax.grad(loss, (0, 1))).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "jax_hopper_gemm.v1.launch" in lowered.as_text()


@pytest.mark.parametrize(
    ("subscripts", "lhs", "rhs", "path"),
    [("tv,vd->td", (8192, 50257), (50257, 768), "hopper"),
     ("td,vd->tv", (4096, 1024), (30522, 1024), "hopper"),
     ("tv,vd->td", (4096, 30522), (30522, 1024), "hopper"),
     ("bqk,bkd->bqd", (384, 197, 197), (384, 197, 64), "xla")],
)  # fmt: skip
def test_default_is_what_was_faster_on_a_gpu(subscripts, lhs, rhs, path):
    """Of `benchmarks/layouts.py --loose`: 2.28, 1.07, 2.01 and 0.86 of XLA's speed."""
    assert loose_route(subscripts, lhs, rhs, kernel_only=False).path == path
    assert loose_route(subscripts, lhs, rhs).path == "hopper"


def test_copies_of_operands_count():
    found = loose_route("tv,vd->td", (8192, 50257), (50257, 768))
    assert found.gemm and found.gemm.problem.a.copied_line == 50257
    moved = 8192 * 50257 * 2 * COPY_PASSES
    assert copying_ns(found.gemm.problem) == pytest.approx(pass_ns(moved))
    assert "us more to copy operands" in found.reason
    whole = loose_route("tv,vd->td", (8192, 50256), (50256, 768))
    assert whole.gemm and copying_ns(whole.gemm.problem) == 0


def test_loose_programs_have_kernels():
    assert len(loose_program_specs()) == len(LOOSE_PRODUCTS)


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 6), (4, 7), (0, 4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_array_in_words_has_the_same_bits(dtype, shape):
    integer = f"uint{8 * jnp.dtype(dtype).itemsize}"
    bits = np.random.default_rng(0).integers(0, 2**16, shape).astype(integer)
    found = np.asarray(jax.jit(in_words)(bits.view(jnp.dtype(dtype))))
    np.testing.assert_array_equal(found.view(integer), bits)
