"""Programs lowered for CUDA, on any machine: which products become launches, and of what."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import compute_on
from support.program_inspection import LAUNCH, attributes, integers, lowered, shape

import jax_hopper_gemm as jhg
from jax_hopper_gemm import cubin, dispatch
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.launch import ffi_library
from jax_hopper_gemm.launch.plan import make_plan
from jax_hopper_gemm.lowering import fallback
from jax_hopper_gemm.lowering.devices import current_device
from jax_hopper_gemm.lowering.forms import forms_of
from jax_hopper_gemm.lowering.origins import Origin
from jax_hopper_gemm.lowering.request import Request

pytestmark = pytest.mark.usefixtures("launcher")


def hopper(subscripts: str):
    return lambda a, b: jhg.einsum(subscripts, a, b, implementation="hopper")


M, N, K = 1024, 2048, 512
EXTENTS = {
    "l": 4, "m": M, "n": N, "k": K, "b": 2, "t": 512, "h": 8, "d": 128, "e": 256, "s": 384, "x": 4,
    "g": 2, "c": 640, "f": 512,
}  # fmt: skip


def operands(subscripts: str, dtype=jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    return [
        shape(*(EXTENTS[x] for x in labels), dtype=dtype)
        for labels in subscripts.split("->")[0].split(",")
    ]


def test_a_product_is_one_launch_of_the_chosen_kernel():
    problem = GemmProblem.dense(M, N, K)
    decision: Any = dispatch.choose(problem, dispatch.H200, kernel_only=True)
    text = lowered(hopper("mk,kn->mn"), *operands("mk,kn->mn"))
    assert text.count(LAUNCH) == 1
    assert attributes(text, "digest") == [cubin.digest_of(decision.spec)]
    assert attributes(text, "spec") == [decision.spec.to_json()]
    assert attributes(text, "name") == [f"{decision.spec.name} M={M} N={N} K={K} L=1"]
    (words,) = re.findall(r"plan = dense<\[([-\d, ]+)\]> : tensor<\d+xi64>", text)
    plan = make_plan(problem, decision.spec, decision.raster_order, dispatch.H200.num_sms)
    assert tuple(map(int, words.split(", "))) == plan.encode()


@pytest.mark.parametrize(
    "subscripts", ["bthd,bshd->bhts", "btkgd,bskd->bkgts", "bkgts,bskd->btkgd"]
)
def test_gradients_of_attention_are_launches(subscripts):
    """Those of shared keys and values contract two axes: the smaller operand is transposed."""
    extents = {"b": 2, "t": 512, "s": 384, "h": 8, "k": 4, "g": 2, "d": 128}
    letters = *subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    args = [shape(*(extents[x] for x in labels)) for labels in letters]

    def gradients(x, y, cotangent):
        return jax.vjp(hopper(subscripts), x, y)[1](cotangent)

    text = lowered(gradients, *args)
    assert (text.count(LAUNCH), text.count("stablehlo.dot_general")) == (2, 0)
    copied = re.findall(r"stablehlo.transpose .*tensor<([\dx]+)xbf16>", text)
    assert copied == ([] if "g" not in subscripts else ["2x4x2x512x128"])


@pytest.mark.parametrize("subscripts", ["bkgts,btkgd->bskd", "btkgd,bkgts->bskd", "mab,bna->mn"])
def test_the_smaller_operand_is_copied_in_the_order_of_the_other(subscripts):
    extents = {"b": 2, "t": 24, "s": 32, "k": 3, "g": 4, "d": 8, "m": 40, "n": 16, "a": 6}
    parsed = Subscripts.parse(subscripts)
    arrays = [integers(tuple(extents[x] for x in labels)) for labels in (parsed.lhs, parsed.rhs)]
    shapes = [x.shape for x in arrays]
    request = Request(parsed, shapes[0], "bfloat16", shapes[1], "bfloat16", "bfloat16")
    *_, form = forms_of(request, [Origin(), Origin()])
    ((operand, order),) = form.copied
    assert arrays[operand].size == min(x.size for x in arrays)
    arrays[operand] = arrays[operand].transpose(order)
    assert (form.request.lhs_shape, form.request.rhs_shape) == tuple(x.shape for x in arrays)
    assert (
        jnp.einsum(str(form.request.subscripts), *arrays)
        == jnp.einsum(subscripts, *(integers(x) for x in shapes))
    ).all()


def test_contracted_axes_that_are_no_neighbours_are_left_to_xla():
    found = jhg.explain(
        jhg.dot_general, shape(16, 64, 8), shape(8, 16, 32), (((0, 2), (1, 0)), ((), ()))
    )
    assert found.path == "xla" and "the contracted axes do not lie evenly" in found.reason


NESTED = [
    "bthd,bshd->bhts", "bhts,bshd->bthd", "btxgd,bsxd->bxgts", "becd,edf->becf", "bthd,bthe->bhde",
]  # fmt: skip
PRODUCTS = [
    "mk,kn->mn", "km,kn->mn", "mk,nk->mn", "km,nk->mn", "mk,kn->nm",
    "lmk,lkn->lmn", "lkm,lnk->lmn", "mlk,lkn->mln", "mk,lkn->lmn", "bthd,hde->bthe", *NESTED,
]  # fmt: skip


@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_products_launch_with_nothing_transposed(subscripts):
    text = lowered(hopper(subscripts), *operands(subscripts))
    assert text.count(LAUNCH) == 1
    assert "stablehlo.transpose" not in text and "dot_general" not in text


# Their gradients contract axes that do not lie evenly one inside the other.
SUMMED = ("mk,lkn->lmn", "btxgd,bsxd->bxgts", "becd,edf->becf")


@pytest.mark.parametrize("subscripts", [s for s in PRODUCTS if s not in SUMMED])
def test_both_gradients_launch_with_nothing_transposed(subscripts):
    product = hopper(subscripts)
    gradients = jax.grad(lambda a, b: product(a, b).astype(jnp.float32).sum(), (0, 1))
    text = lowered(gradients, *operands(subscripts))
    assert text.count(LAUNCH) == 2
    assert "stablehlo.transpose" not in text and "dot_general" not in text


@pytest.mark.parametrize(
    "axes", [(0, 0), (1, 0), (0, 1), (0, None), (1, None), (None, 0), (None, 1)]
)
def test_vmapped_products_launch_with_nothing_transposed(axes):
    shapes = [[M, K], [K, N]]
    for extents, axis in zip(shapes, axes, strict=True):
        if axis is not None:
            extents.insert(axis, 4)
    text = lowered(jax.vmap(hopper("mk,kn->mn"), axes), *(shape(*s) for s in shapes))
    assert text.count(LAUNCH) == 1 and "stablehlo.transpose" not in text


def test_operands_that_are_transposes_are_read_as_they_lie():
    def product(a, b):
        return jhg.matmul(a.T, jnp.swapaxes(b, 0, 1), implementation="hopper")

    text = lowered(product, shape(K, M), shape(N, K))
    assert text.count(LAUNCH) == 1 and "stablehlo.transpose" not in text
    (spec,) = attributes(text, "spec")
    assert '"a_major":"m"' in spec and '"b_major":"k"' in spec


def test_what_a_transpose_is_made_of_is_padded_where_it_cannot_be_addressed():
    def product(a, b):  # rows of 1001 elements are no multiple of 16 bytes
        return jhg.matmul(a.T, b, implementation="hopper")

    text = lowered(product, shape(K, 1001), shape(K, N))
    assert text.count(LAUNCH) == 1
    assert re.search(rf"@_pad\(%arg0, .* -> tensor<{K}x1008xbf16>", text)


def test_a_swapped_product_takes_its_operands_in_kernel_order():
    text = lowered(hopper("mk,kn->nm"), *operands("mk,kn->nm"))
    assert "(%arg1, %arg0)" in text.split(LAUNCH)[1]


@pytest.mark.slow
def test_workspaces_are_results_of_the_launch(monkeypatch):
    problem = GemmProblem.dense(M, N, K)
    spec, raster_order = next(
        (spec, raster_order)
        for spec, raster_order in dispatch.legal_specs(problem, dispatch.H200)
        if spec.tile_scheduler == "dynamic"
    )
    decision = dispatch.Decision(spec, raster_order, "test", "model")
    monkeypatch.setattr(dispatch, "choose", lambda *args, **kwargs: decision)
    text = lowered(jhg.matmul, shape(M, K), shape(K, N))
    assert re.search(rf"-> \(tensor<{M}x{N}xbf16>, tensor<16xui8>\)", text.split(LAUNCH)[1])


HALF = shape(K, N, dtype=jnp.float16)  # which no kernel multiplies with bfloat16
FALLBACKS = [
    (hopper("mab,abn->mn"), [shape(M, 5, 7), shape(5, 7, N)], "K=35"),
    (hopper("mk,kn->mn"), operands("mk,kn->mn", jnp.int32), "int32"),
    (hopper("mk,kn->mn"), [shape(M, K), shape(K, N, dtype=jnp.float16)], "bfloat16 and float16"),
    (hopper("mk,kn->mn"), [shape(M, 0), shape(0, N)], "an extent is 0"),
    (hopper("bthxmd,xbhtnd->bthxmn"), operands("bthxmd,xbhtnd->bthxmn"), "batch axes"),
    (
        lambda a, b: jhg.matmul(
            a, b, precision=lax.DotAlgorithmPreset.TF32_TF32_F32_X3, implementation="hopper"
        ),
        operands("mk,kn->mn", jnp.float32),
        "precision is",
    ),
]


@pytest.mark.parametrize("function, args, reason", FALLBACKS)
def test_hopper_names_the_condition_that_failed(function, args, reason):
    with pytest.raises(
        NotImplementedError, match=f"implementation='hopper': no kernel runs.*{reason}"
    ):
        lowered(function, *args)


@pytest.mark.parametrize("shapes", [((0, K), (K, N)), ((M, 0), (0, N)), ((M, K), (K, 0))])
def test_empty_operands_are_no_fallback(shapes):
    args = [shape(*extents) for extents in shapes]
    with jhg.on_fallback("error"):
        for product in (jhg.matmul, partial(jhg.matmul, batch_invariant=True)):
            assert LAUNCH not in lowered(product, *args)


def test_any_precision_of_16_bit_operands_is_met_by_the_kernel():
    for precision in ("default", "high", "highest", lax.DotAlgorithmPreset.BF16_BF16_F32):
        text = lowered(
            lambda a, b, p=precision: jhg.matmul(
                a, b, precision=p, preferred_element_type=jnp.float32, implementation="hopper"
            ),
            *operands("mk,kn->mn"),
        )
        assert text.count(LAUNCH) == 1


def mixed(a, b):
    return jhg.matmul(a, b)


def test_fallbacks_are_silent_by_default(monkeypatch):
    monkeypatch.delenv(fallback.ON_FALLBACK_VARIABLE, raising=False)
    text = lowered(mixed, shape(M, K), HALF)
    assert "stablehlo.dot_general" in text and LAUNCH not in text


def test_fallbacks_warn_when_asked(monkeypatch):
    monkeypatch.setenv(fallback.ON_FALLBACK_VARIABLE, "warn")
    expected = r"XLA runs bf16\[1024,512\] x f16\[512,2048\] by 'ab,bc->ac' into f32: .*float16"
    with pytest.warns(jhg.FallbackWarning, match=expected) as told:
        lowered(mixed, shape(M, K), HALF)
    line = mixed.__code__.co_firstlineno + 1
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]


def test_fallbacks_fail_when_asked(monkeypatch):
    monkeypatch.setenv(fallback.ON_FALLBACK_VARIABLE, "error")
    with pytest.raises(NotImplementedError, match="float16.*JAX_HOPPER_GEMM_ON_FALLBACK=error"):
        lowered(mixed, shape(M, K), HALF)


def test_a_context_says_what_a_fallback_does(monkeypatch):
    monkeypatch.setenv(fallback.ON_FALLBACK_VARIABLE, "error")
    program = shape(M, K), HALF
    with jhg.on_fallback("silent"):
        assert LAUNCH not in lowered(mixed, *program)
    with jhg.on_fallback("warn"), pytest.warns(jhg.FallbackWarning, match="float16"):
        lowered(mixed, *program)
    monkeypatch.delenv(fallback.ON_FALLBACK_VARIABLE)
    with jhg.on_fallback("error"), pytest.raises(NotImplementedError, match="on_fallback.'error'"):
        lowered(mixed, *program)
    wrong: Any = "loud"
    with pytest.raises(ValueError, match="policy is 'loud'; expected one of silent, warn, error"):
        jhg.on_fallback(wrong).__enter__()


def test_an_unknown_fallback_policy_is_an_error(monkeypatch):
    monkeypatch.setenv(fallback.ON_FALLBACK_VARIABLE, "loud")
    expected = "JAX_HOPPER_GEMM_ON_FALLBACK is 'loud'; expected one of silent, warn, error"
    with pytest.raises(ValueError, match=expected):
        lowered(mixed, shape(M, K), HALF)


def test_a_product_that_is_faster_on_xla_is_no_fallback(monkeypatch):
    def choose(problem, device, *, kernel_only=False):
        if kernel_only:
            return real(problem, device, kernel_only=True)
        return dispatch.Decision(None, None, "XLA is faster", "model")

    real = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", choose)
    monkeypatch.setenv(fallback.ON_FALLBACK_VARIABLE, "error")
    text = lowered(jhg.matmul, shape(M, K), shape(K, N))
    assert "stablehlo.dot_general" in text and LAUNCH not in text
    found = jhg.explain(jhg.matmul, shape(M, K), shape(K, N))
    assert (found.path, found.reason) == ("xla", "XLA is faster")
    found = jhg.explain(jhg.matmul, shape(M, K), shape(K, N), implementation="hopper")
    assert found.path == "hopper"


def test_another_gpu_runs_on_xla(monkeypatch):
    ampere = dispatch.Device((8, 0), 108)
    monkeypatch.setattr("jax_hopper_gemm.lowering.call.current_device", lambda candidates: ampere)
    assert LAUNCH not in lowered(jhg.matmul, shape(M, K), shape(K, N))
    with pytest.raises(NotImplementedError, match="8.0"):
        lowered(hopper("mk,kn->mn"), shape(M, K), shape(K, N))


def test_a_missing_library_is_named(monkeypatch):
    def library():
        raise ffi_library.NativeLibraryError("the library is missing")

    monkeypatch.delenv("JAX_HOPPER_GEMM_LIBRARY", raising=False)
    monkeypatch.setattr(ffi_library, "library", library)
    assert LAUNCH not in lowered(jhg.matmul, shape(M, K), shape(K, N))
    found = jhg.explain(jhg.matmul, shape(M, K), shape(K, N), implementation="hopper")
    assert (found.path, found.reason) == ("xla", "the library is missing")
    with pytest.raises(NotImplementedError, match="the library is missing"):
        lowered(hopper("mk,kn->mn"), shape(M, K), shape(K, N))


def test_the_device_is_the_first_gpu_among_the_candidates():
    class Gpu:
        compute_capability, core_count, device_kind = "9.0", 114, "NVIDIA H100 PCIe"

    cpu = jax.devices("cpu")[0]
    assert current_device((cpu, Gpu())) == dispatch.Device((9, 0), 114, gpu="H100")
    assert current_device((cpu,)) == dispatch.H200


def test_a_variable_names_the_gpu_where_there_is_none(monkeypatch):
    monkeypatch.setenv("JAX_HOPPER_GEMM_GPU", "H100")
    assert current_device() == dispatch.H100


def test_what_computes_on_the_host_stays_there():
    options = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}
    on_host: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)  # JAX 0.10, 0.12
    program = lowered(on_host(jhg.matmul, **options), shape(M, K), shape(K, N))
    assert LAUNCH not in program and "dot_general" in program


@pytest.mark.skipif(not hasattr(compute_on, "compute_on2"), reason="JAX 0.12 has no context")
def test_accelerate_leaves_on_the_host_what_computes_there():
    on: Any = compute_on.compute_on

    def with_tanh_on_host(x, w):
        product = x @ w
        with on("device_host"):
            return jnp.tanh(product)

    on_kernel = jhg.accelerate(with_tanh_on_host, implementation="hopper")
    program = lowered(on_kernel, shape(M, K), shape(K, N))
    assert LAUNCH in program and '_xla_compute_type = "host"' in program


def test_lowering_compiles_nothing(monkeypatch):
    def compile_now(*args):
        raise AssertionError("a kernel was wanted while lowering")

    monkeypatch.setattr(cubin, "get", compile_now)
    monkeypatch.setattr(cubin, "load", compile_now)
    assert LAUNCH in lowered(hopper("mk,kn->mn"), shape(M, K), shape(K, N))
