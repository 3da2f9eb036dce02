"""Ragged products lowered for CUDA, on any machine: which launches they become, and of what."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.program_inspection import LAUNCH, attributes, integers, lowered, shape

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch
from jax_hopper_gemm.fusion import GroupedRows
from jax_hopper_gemm.fusion.flatten import flatten
from jax_hopper_gemm.fusion.jaxprs import traced
from jax_hopper_gemm.fusion.segments import GroupedProgram
from jax_hopper_gemm.gemm.grid import num_inputs
from jax_hopper_gemm.gemm.groups import VARLEN_K, VARLEN_M_KN, VARLEN_M_NK, GroupedAxis, Groups
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.product import Options, Product
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.launch.plan import make_plan
from jax_hopper_gemm.lowering import fallback
from jax_hopper_gemm.lowering.call import product_at
from jax_hopper_gemm.lowering.finish import finished_results
from jax_hopper_gemm.lowering.request import Request
from jax_hopper_gemm.lowering.route import route
from jax_hopper_gemm.primitives import fused_grad
from jax_hopper_gemm.primitives.fused_grad import epilogue_p
from jax_hopper_gemm.primitives.ragged_dot import hopper_ragged_dot
from jax_hopper_gemm.primitives.segments import segment_broadcast, segment_mask

pytestmark = pytest.mark.usefixtures("launcher", "kernels")

T, K, N, G = 512, 256, 384, 8
PLAIN = Groups.plain(G)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[GemmProblem]:
    """One kernel for every ragged product; gives the problems that were asked for."""
    asked: list[GemmProblem] = []

    def choose(problem, device, *, kernel_only=False):
        if not problem.groups:
            return dispatch.Decision(None, None, "it is dense", "model")
        asked.append(problem)
        epilogue = problem.epilogue
        spec = GemmSpec(
            problem.a_dtype, problem.b_dtype, problem.d_dtype, problem.a.major, problem.b.major,
            128, 128, grouped=problem.groups.axis, epilogue=epilogue,
            epi_load_stages=2 if epilogue and epilogue.loaded else 0,
        )  # fmt: skip
        return dispatch.Decision(spec, RasterOrder("m", 1), "the test's", "model")

    monkeypatch.setattr(dispatch, "choose", choose)
    return asked


LHS, RHS, SIZES = shape(T, K), shape(G, K, N), shape(G, dtype=np.int32)
hopper = partial(jhg.ragged_dot, implementation="hopper")
GROUPS = GroupedAxis("m", G, Groups(G + 1, G))
FORWARD = GemmProblem(
    T, N, K, G, "bfloat16", "bfloat16", "bfloat16",
    a=MatrixLayout("k", K), b=MatrixLayout("n", N, K * N), d=MatrixLayout("n", N), groups=GROUPS,
)  # fmt: skip
OF_LHS = replace(
    FORWARD, n=K, k=N, a=MatrixLayout("k", N), b=MatrixLayout("k", N, K * N),
    d=MatrixLayout("n", K),
)  # fmt: skip
OF_RHS = GemmProblem(
    K, N, T, G, "bfloat16", "bfloat16", "bfloat16",
    a=MatrixLayout("m", K), b=MatrixLayout("n", N), d=MatrixLayout("n", N, K * N),
    groups=replace(GROUPS, axis="k"),
)  # fmt: skip


def plans(text: str) -> list[tuple[int, ...]]:
    found = re.findall(r"plan = dense<\[([-\d, ]+)\]> : tensor<\d+xi64>", text)
    return [tuple(map(int, words.split(", "))) for words in found]


def arguments(text: str) -> list[str]:
    """Returns the operands of each launch."""
    return re.findall(re.escape(LAUNCH) + r"\((.*?)\)", text)


def test_a_ragged_product_is_one_launch_on_the_caller_s_arrays(kernels):
    text = lowered(hopper, LHS, RHS, SIZES)
    assert arguments(text) == ["%arg0, %arg1, %arg2"] and set(kernels) == {FORWARD}
    (spec,) = map(GemmSpec.from_json, attributes(text, "spec"))
    assert spec.grouped == "m"
    assert plans(text) == [make_plan(FORWARD, spec, RasterOrder("m", 1), 132).encode()]
    assert f"-> tensor<{T}x{N}xbf16>" in text.split(LAUNCH)[1]
    (line,) = (line for line in text.splitlines() if LAUNCH in line)
    assert not re.search(r"stablehlo\.(?!custom_call)", text), line


def test_both_gradients_are_launches_with_nothing_moved(kernels):
    def gradients(lhs, rhs, sizes, cotangent):
        return jax.vjp(lambda lhs, rhs: hopper(lhs, rhs, sizes), lhs, rhs)[1](cotangent)

    text = lowered(gradients, LHS, RHS, SIZES, shape(T, N))
    assert sorted(arguments(text)) == ["%arg0, %arg3, %arg2", "%arg3, %arg1, %arg2"]
    assert set(kernels) == {OF_LHS, OF_RHS}
    assert not re.search(r"stablehlo\.(?!custom_call)", text)


def test_a_weight_gradient_may_be_float32(kernels):
    text = lowered(
        partial(
            hopper_ragged_dot,
            product=Product(
                VARLEN_K, Options("hopper", preferred_element_type=np.dtype("float32")),
                groups=PLAIN,
            ),
        ),
        LHS, shape(T, N), SIZES,
    )  # fmt: skip
    assert set(kernels) == {replace(OF_RHS, d_dtype="float32")}
    assert f"-> tensor<{G}x{K}x{N}xf32>" in text.split(LAUNCH)[1]


def test_transposed_weights_are_read_as_they_lie(kernels):
    def product(lhs, rhs, sizes):
        return hopper(lhs, jnp.swapaxes(rhs, 1, 2), sizes)

    text = lowered(product, LHS, shape(G, N, K), SIZES)
    expected = replace(FORWARD, b=MatrixLayout("k", K, K * N))
    assert arguments(text) == ["%arg0, %arg1, %arg2"] and set(kernels) == {expected}
    assert "stablehlo.transpose" not in text


def test_dimension_numbers_of_transposed_weights_need_no_transpose(kernels):
    numbers = lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
    product = partial(
        jhg.ragged_dot_general, ragged_dot_dimension_numbers=numbers, implementation="hopper"
    )
    text = lowered(product, LHS, shape(G, N, K), SIZES)
    assert set(kernels) == {replace(FORWARD, b=MatrixLayout("k", K, K * N))}
    assert not re.search(r"stablehlo\.(?!custom_call)", text)


def test_weights_with_groups_in_another_place_are_moved(kernels):
    def product(lhs, rhs, sizes):
        return hopper(lhs, jnp.transpose(rhs, (1, 0, 2)), sizes)

    text = lowered(product, LHS, shape(K, G, N), SIZES)
    assert text.count("stablehlo.transpose") == 1 and set(kernels) == {FORWARD}


def test_an_offset_is_spans_before_the_first_group(kernels):
    def product(lhs, rhs, sizes, first):
        return hopper(lhs, rhs, sizes, group_offset=first)

    args = LHS, shape(2, K, N), SIZES, shape(dtype=np.int32)
    assert lowered(product, *args).count(LAUNCH) == 1
    assert {p.groups for p in kernels} == {GroupedAxis("m", 3, Groups(4, 2, first=1))}


@pytest.mark.parametrize("axes", [a for a in itertools.product((None, 0), repeat=3) if any(
    x is not None for x in a
)])  # fmt: skip
def test_every_vmap_is_one_launch(kernels, axes):
    args = [
        x if axis is None else shape(2, *x.shape, dtype=x.dtype)
        for x, axis in zip((LHS, RHS, SIZES), axes, strict=True)
    ]
    assert lowered(jax.vmap(hopper, axes), *args).count(LAUNCH) == 1
    (problem,) = set(kernels)
    if axes == (None, 0, None):
        assert (problem.n, problem.groups) == (2 * N, GROUPS)
    else:
        step = 0 if axes[1] is None else G
        assert problem.m == 2 * T and problem.l == (G if step == 0 else 2 * G)
        assert problem.groups == GroupedAxis("m", 2 * G + 1, Groups(G + 1, G, step=step))


def test_xla_s_own_product_needs_no_kernel():
    text = lowered(partial(jhg.ragged_dot, implementation="xla"), LHS, RHS, SIZES)
    assert "chlo.ragged_dot" in text and LAUNCH not in text


def test_what_no_kernel_runs_is_named(monkeypatch):
    expected = (
        r"XLA runs bf16\[512,256\] x f32\[8,256,384\] by 'mk,gkn->mn' into f32, rows in 8 groups: "
        "the operands are bfloat16 and float32"
    )
    monkeypatch.setenv(fallback.ON_FALLBACK_VARIABLE, "warn")
    args = LHS, shape(G, K, N, dtype=jnp.float32), SIZES
    with pytest.warns(jhg.FallbackWarning, match=expected):
        lowered(jhg.ragged_dot, *args)
    with pytest.raises(NotImplementedError, match="no kernel runs.*rows in 8 groups: the operands"):
        lowered(hopper, *args)


@pytest.mark.parametrize("lhs, rhs", [((0, K), (G, K, N)), ((T, K), (0, K, N))])
def test_empty_products_are_xlas(lhs, rhs):
    with pytest.raises(NotImplementedError, match="an extent is 0"):
        lowered(hopper, shape(*lhs), shape(*rhs), shape(rhs[0], dtype=np.int32))


@pytest.mark.parametrize("lhs, rhs", [((0, K), (G, K, N)), ((T, K), (0, K, N))])
def test_empty_products_and_their_gradients_are_no_fallback(lhs, rhs):
    def total(*args):
        with jhg.batch_invariant():
            return jnp.sum(jhg.ragged_dot(*args).astype(jnp.float32))

    args = shape(*lhs), shape(*rhs), shape(rhs[0], dtype=np.int32)
    with jhg.on_fallback("error"):
        assert LAUNCH not in lowered(jax.value_and_grad(total, (0, 1)), *args)


# Epilogues.


def product_with(function, subscripts, lhs, rhs, accumulator, *operands, **options) -> Request:
    jaxpr = traced(function, shape(*accumulator, dtype=jnp.float32), *operands)
    return Request(
        subscripts, lhs, "bfloat16", rhs, "bfloat16", jaxpr.out_avals[0].dtype.name,
        function=jaxpr, groups=GroupedAxis.of(subscripts, PLAIN, G), **options,
    )  # fmt: skip


def product_of_rows(function, *operands) -> Request:
    """A product of rows, of whose function sizes are the first operand."""
    return product_with(
        function, VARLEN_M_KN, (T, K), (G, K, N), (T, N), SIZES, *operands, sizes_operand=0
    )


def own(x, sizes):
    return segment_broadcast(x, sizes, PLAIN, T)


def test_operands_lie_as_the_letters_of_groups_and_rows_say(kernels):
    def function(acc, sizes, bias, scale, residual, row, column):
        out = acc * own(scale, sizes) + own(bias, sizes) + residual + row + column
        return segment_mask(out.astype(jnp.bfloat16), sizes, PLAIN)

    product = product_of_rows(
        function, shape(G, N), shape(G, 1, dtype=jnp.float32), shape(T, N), shape(N), shape(T, 1)
    )
    found = route(product, dispatch.H200)
    (problem,) = set(kernels)
    kinds = [operand.kind for operand in problem.graph.operands]
    assert kinds == ["row", "scalar", "matrix", "row", "column"]
    strides = [(layout.leading_stride, layout.batch_stride) for layout in problem.operands]
    assert strides == [(N, N), (1, 1), (N, 0), (N, 0), (T, 0)]
    assert found.path == "hopper" and found.uncovered == () and found.plan
    assert num_inputs(problem) == 8 and problem.groups == GROUPS


def test_operands_of_a_contraction_lie_like_its_matrices(kernels):
    product = product_with(
        lambda acc, c, row: (acc + c + row).astype(jnp.float32), VARLEN_K, (T, K), (T, N),
        (G, K, N), shape(G, K, N, dtype=jnp.float32), shape(G, 1, N),
    )  # fmt: skip
    assert route(product, dispatch.H200).path == "hopper"
    (problem,) = set(kernels)
    assert [layout.batch_stride for layout in problem.operands] == [K * N, N]
    assert (problem.m, problem.n, problem.k, problem.l) == (K, N, T, G)


@pytest.mark.parametrize("labels, up_offset", [("gkcn", N), ("gckn", K * N), ("gcnk", K * N)])
def test_gate_and_up_of_each_group_may_lie_in_one_array(kernels, labels, up_offset):
    extents = {"g": G, "k": K, "c": 2, "n": N}
    product = Request(
        Subscripts("mk", labels, "mn"), (T, K), "bfloat16", tuple(extents[x] for x in labels),
        "bfloat16", "bfloat16", groups=GroupedAxis("m", G, PLAIN), function=traced(
            lambda gate, up: (gate * up).astype(jnp.bfloat16), *[shape(T, N, dtype=np.float32)] * 2
        ),
    )  # fmt: skip
    assert route(product, dispatch.H200).gemm
    (problem,) = set(kernels)
    assert problem.gated and (problem.up_offset, problem.b.batch_stride) == (up_offset, 2 * K * N)


@pytest.mark.parametrize("inner, stored", [
    (lambda acc, bias: acc + bias, "add"), (lambda acc, bias: jnp.cos(acc + bias), "add"),
    (lambda acc, bias: jnp.cos(acc) + bias, None),
])  # fmt: skip
def test_xla_goes_on_with_what_is_0_in_rows_of_no_group(kernels, inner, stored):
    def function(acc, sizes, bias):
        return lax.cumsum(inner(acc, own(bias, sizes)), 1)

    found = route(product_of_rows(function, shape(G, N)), dispatch.H200)
    assert found.path == "hopper" and "cumsum" in found.uncovered
    (problem,) = set(kernels)
    (result,) = problem.graph.results
    assert result.kind == "matrix" and result.dtype == "float32"
    inputs = 1 + len(problem.operands)
    assert (problem.graph.nodes[result.value - inputs].op if result.value else None) == stored


def test_results_of_a_kernel_are_those_of_the_function():
    """A launch stands in for the kernel; what XLA does with its results is evaluated."""
    y, sums = integers((T, N), "bfloat16"), jnp.ones((1, N // 128, T))

    def function(acc, sizes, bias):
        out = acc + own(bias, sizes)
        return segment_mask(out.astype(jnp.bfloat16), sizes, PLAIN), jnp.sum(out, -1)

    request = product_of_rows(function, shape(G, N))
    sizes, bias = jnp.full(G, 32, np.int32), jnp.zeros((G, N), jnp.bfloat16)
    chosen = route(request, dispatch.H200)
    results = finished_results(request, chosen, y, sums, sizes, bias)
    np.testing.assert_array_equal(results[0], y)
    # The kernel adds up what it does not store, too.
    np.testing.assert_array_equal(results[1], np.where(np.arange(T) < 32 * G, N // 128, 0))


def fused_epilogue(function, *others):
    """A product of ours whose result goes to a function and nowhere else."""

    def program(lhs, rhs, sizes, *others):
        y = hopper(lhs, rhs, sizes)
        jaxpr = traced(function, y, *others)
        return epilogue_p.bind(y, *others, jaxpr=jaxpr)

    text = lowered(program, LHS, RHS, SIZES, *others)
    return [GemmSpec.from_json(spec) for spec in attributes(text, "spec")], text


def test_a_function_of_a_launch_becomes_its_epilogue():
    def function(y, x):
        return [y.astype(jnp.float32) * jnp.tanh(x.astype(jnp.float32))]

    specs, text = fused_epilogue(function, shape(T, N))
    (fused,) = (spec for spec in specs if spec.epilogue)
    assert fused.grouped == "m" and [o.kind for o in fused.graph.operands] == ["matrix"]
    assert arguments(text)[-1] == "%arg0, %arg1, %arg3, %arg2"


def test_a_function_that_is_not_0_where_rows_belong_to_no_group_stays_apart():
    specs, text = fused_epilogue(lambda y, x: [y + x], shape(T, N))
    assert not any(spec.graph.operands for spec in specs)
    assert {node.op for spec in specs for node in spec.graph.nodes} <= {"convert"}
    assert "stablehlo.add" in text


def test_the_launch_says_which_product_it_holds(monkeypatch):
    found: list[Any] = []

    def look_at(value):  # NOTE: values are gone once the program is lowered
        call = product_at(value)
        assert call
        found.append((call.request, len(call.values), call.sizes.type.shape))
        return None

    monkeypatch.setattr(fused_grad, "product_at", look_at)
    groups = Groups(4, 2, first=1)
    sizes = shape(3, dtype=np.int32)

    def program(lhs, rhs, sizes):
        y = hopper_ragged_dot(
            lhs, rhs, sizes, Product(VARLEN_M_NK, Options("hopper"), groups=groups)
        )
        return epilogue_p.bind(y, jaxpr=traced(lambda y: [2 * y], y))

    lowered(program, LHS, shape(2, N, K), sizes)
    ((request, count, sizes_shape),) = found
    assert request == Request(
        VARLEN_M_NK, (T, K), "bfloat16", (2, N, K), "bfloat16", "bfloat16",
        groups=GroupedAxis("m", 3, groups),
    )  # fmt: skip
    assert count == 2 and sizes_shape == [3]


VANISHING = [
    (lambda y, x: [y * jnp.exp(x)], True),
    (lambda y, x: [jnp.where(x > 0, y, -y / 2), jnp.sum(y * x, 0)], True),
    (lambda y, x: [jax.jit(lambda y: jnp.maximum(y, 0))(y).astype(jnp.bfloat16)], True),
    (lambda y, x: [y + x], False),
    (lambda y, x: [jnp.where(x > 0, y, 1.0)], False),
    (lambda y, x: [jnp.exp(y)], False),
    (lambda y, x: [y, x], False),
    (lambda y, x: [x / y], False),
]


@pytest.mark.parametrize("function, expected", VANISHING)
def test_functions_that_vanish_with_the_product_are_known(function, expected):
    x = shape(4, 5, dtype=jnp.float32)
    program = flatten(traced(function, x, x))
    grouped = GroupedProgram(program, 1, GroupedRows(None, PLAIN, "g", each=False))
    found = [grouped.vanishes(y) for y in program.outputs if y.shape == (4, 5)]
    assert all(found) is expected
