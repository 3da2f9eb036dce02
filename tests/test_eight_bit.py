"""Products of 8-bit operands: what runs where, numbers and gradients, and what goes to XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import reference
from support.bounds import assert_within
from support.casts import cast
from support.tolerance import error_bound

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.dtypes import QUANTIZED
from jax_hopper_gemm.testing.lowered import launches_of, specs_of

E4M3, E5M2, INT8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
NN: Any = (((1,), (0,)), ((), ()))
NT: Any = (((1,), (1,)), ((), ()))
M, N, K = 48, 32, 160


def random(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    factor = 40 if dtype == INT8 else 1
    x = factor * np.random.default_rng(seed).standard_normal(shape)
    return cast(x.astype(np.float32), jnp.dtype(dtype).name)


def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


A, B = abstract((1024, 2048), E4M3), abstract((1536, 2048), E5M2)


def explained(a: Any, b: Any, dims: Any = NT, **options: Any) -> Any:
    return jhg.explain(jhg.dot_general, a, b, dims, **options)


# What runs.


@pytest.mark.parametrize("lhs", [E4M3, E5M2])
@pytest.mark.parametrize("rhs", [E4M3, E5M2])
@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float16, jnp.float32, E4M3, E5M2])
def test_floats_of_8_bits_are_multiplied_in_any_mix(lhs, rhs, out):
    def function(a: Any, b: Any) -> Any:
        return jhg.dot_general(a, b, NT, preferred_element_type=out, implementation="hopper")

    (spec,) = specs_of(function, abstract(A.shape, lhs), abstract(B.shape, rhs))
    assert (spec.a_dtype, spec.b_dtype) == (jnp.dtype(lhs).name, jnp.dtype(rhs).name)
    assert spec.d_dtype == jnp.dtype(out).name and not spec.promoted
    assert spec.tile_k in (128, 256) and (spec.a_major, spec.b_major) == ("k", "k")


@pytest.mark.parametrize("out", [jnp.int32, jnp.float32, jnp.bfloat16, jnp.float16])
def test_int8_is_summed_in_int32(out):
    def function(a: Any, b: Any) -> Any:
        return jhg.dot_general(a, b, NT, preferred_element_type=out, implementation="hopper")

    (spec,) = specs_of(function, abstract(A.shape, INT8), abstract(B.shape, INT8))
    assert (spec.acc_dtype, spec.d_dtype) == ("int32", jnp.dtype(out).name)


@pytest.mark.parametrize(
    ("precision", "promoted"),
    [
        (None, False), ("default", False), ("high", True), ("highest", True),
        (lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32, True),
        (lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM, False),
        (lax.DotAlgorithmPreset.DEFAULT, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fused", [False, True])
def test_precision_chooses_how_sums_are_kept(precision, promoted, fused):
    epilogue = (lambda y: y * 2) if fused else None
    found = explained(
        A, B, precision=precision, preferred_element_type=jnp.float32, epilogue=epilogue
    )
    assert found.path == "hopper" and found.spec.promoted == promoted


def test_other_algorithms_go_to_xla():
    found = explained(
        A, A, precision=lax.DotAlgorithmPreset.F32_F32_F32, preferred_element_type=jnp.float32
    )
    assert found.path == "xla" and "accumulate in float32" in found.reason


def test_a_16_bit_product_has_nothing_to_promote():
    x = abstract((512, 512), jnp.bfloat16)
    assert not explained(x, x, precision="highest").spec.promoted


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("dims", [NN, (((0,), (1,)), ((), ())), (((0,), (0,)), ((), ()))])
def test_operands_across_k_are_copied_along_it_first(dtype, dims):
    ((lhs_k,), (rhs_k,)), _ = dims
    a = abstract((2048, 1024) if lhs_k == 0 else (1024, 2048), dtype)
    b = abstract((2048, 1536) if rhs_k == 0 else (1536, 2048), dtype)

    def function(a: Any, b: Any) -> Any:
        return jhg.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16)

    (spec,) = specs_of(function, a, b)
    assert (spec.a_major, spec.b_major) == ("k", "k")
    found = explained(a, b, dims, preferred_element_type=jnp.bfloat16)
    assert found.path == "hopper" and "XLA transposes an operand first" in found.reason
    assert found.spec == spec
    text = jax.jit(function).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.transpose") == (lhs_k == 0) + (rhs_k == 0)


def test_a_transposed_operand_is_read_as_it_is_stored():
    def function(a: Any, b: Any) -> Any:
        return jhg.matmul(a, b.T, preferred_element_type=jnp.bfloat16)

    (spec,) = specs_of(function, A, B)
    text = jax.jit(function).trace(A, B).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert spec.b_major == "k" and len(calls) == 1
    assert "tensor<1536x2048xf8E5M2>" in calls[0]


def test_gate_and_up_across_k_are_copied_too():
    x, pair = abstract((4096, 1024), E4M3), abstract((1024, 2, 2048), E4M3)
    for weights in (pair, (abstract((1024, 2048), E4M3),) * 2):

        def function(x: Any, weights: Any) -> Any:
            return jhg.gated_linear_unit(
                x, weights, preferred_element_type=jnp.bfloat16, implementation="hopper"
            )

        (spec,) = specs_of(function, x, weights)
        assert spec.graph.accumulators == 2 and spec.b_major == "k"


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_rows_in_groups_run_on_a_kernel(dtype):
    x, weights = abstract((4096, 1024), dtype), abstract((8, 1024, 2048), dtype)
    sizes = abstract((8,), jnp.int32)

    def function(x: Any, weights: Any, sizes: Any) -> Any:
        out = jnp.int32 if dtype == INT8 else jnp.bfloat16
        return jhg.ragged_dot(
            x, weights, sizes, preferred_element_type=out, implementation="hopper"
        )

    (spec,) = specs_of(function, x, weights, sizes)
    assert (spec.grouped, spec.b_major) == ("m", "k")


# Epilogues.


def test_scales_of_tensors_rows_and_columns_are_the_epilogues_operands():
    def function(a: Any, b: Any, x: Any, row: Any, column: Any) -> Any:
        acc = jhg.dot_general(
            a, b, NT, preferred_element_type=jnp.bfloat16, implementation="hopper",
            epilogue=lambda acc, *s: acc * s[0] * s[1] * s[2], epilogue_operands=(x, row, column),
        )  # fmt: skip
        return acc

    f32 = jnp.float32
    (spec,) = specs_of(
        function, A, B, abstract((), f32), abstract((1536,), f32), abstract((1024, 1), f32)
    )
    assert sorted(operand.kind for operand in spec.graph.operands) == ["column", "row", "scalar"]


@pytest.mark.parametrize("out", QUANTIZED)
@pytest.mark.parametrize("operands", [jnp.bfloat16, E4M3])
def test_a_result_is_quantized_in_the_kernel(out, operands):
    def function(a: Any, b: Any, scale: Any) -> Any:
        return jhg.dot_general(
            a, b, NT, preferred_element_type=jnp.float32, implementation="hopper",
            epilogue=lambda acc, s: ((acc * s).astype(out), jnp.max(jnp.abs(acc))),
            epilogue_operands=(scale,),
        )  # fmt: skip

    arrays = abstract(A.shape, operands), abstract(B.shape, operands), abstract((), jnp.float32)
    (spec,) = specs_of(function, *arrays)
    assert [(r.kind, r.dtype) for r in spec.graph.results] == [("matrix", out), ("max", "float32")]


def test_the_sums_of_int8_are_stored_beside_what_comes_of_them():
    def function(a: Any, b: Any) -> Any:
        return jhg.dot_general(
            a, b, NT, preferred_element_type=jnp.int32, implementation="hopper",
            epilogue=lambda acc: (acc, (acc.astype(jnp.float32) * 0.5).astype(jnp.bfloat16)),
        )  # fmt: skip

    x = abstract((512, 512), INT8)
    (spec,) = specs_of(function, x, x)
    assert [(r.value, r.dtype) for r in spec.graph.results] == [(0, "int32"), (2, "bfloat16")]


def test_integer_arithmetic_after_int8_is_left_to_xla():
    found = explained(
        abstract((512, 512), INT8), abstract((512, 512), INT8), preferred_element_type=jnp.int32,
        epilogue=lambda acc: acc * 2 + 1, implementation="hopper",
    )  # fmt: skip
    assert found.path == "hopper" and found.uncovered


def test_a_function_that_follows_keeps_promoted_sums():
    """An epilogue that takes the place of a bare product adds up as that does."""

    def loss(a: Any, b: Any, bias: Any) -> Any:
        y = jhg.dot_general(a, b, NT, "highest", jnp.float32, implementation="hopper")
        return jnp.tanh(y + bias)

    bias = abstract((1536,), jnp.float32)
    specs = specs_of(jhg.accelerate(loss, implementation="hopper"), A, B, bias)
    assert [spec.promoted for spec in specs] == [True]


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_accelerate_fuses_scales_behind_a_product_of_jax(dtype):
    def program(a: Any, b: Any, x: Any, y: Any) -> Any:
        preferred = jnp.int32 if dtype == INT8 else jnp.float32
        acc = lax.dot_general(a, b, NT, preferred_element_type=preferred)
        return (acc.astype(jnp.float32) * (x * y)).astype(jnp.bfloat16)

    scale = abstract((), jnp.float32)
    arguments = abstract((512, 512), dtype), abstract((512, 512), dtype), scale, scale
    (spec,) = specs_of(jhg.accelerate(program, implementation="hopper"), *arguments)
    assert spec.epilogue and spec.d_dtype == "bfloat16"
    assert [operand.kind for operand in spec.graph.operands][:1] == ["scalar"]


# Numbers, by XLA.


@pytest.mark.parametrize(("lhs", "rhs"), [(E4M3, E4M3), (E4M3, E5M2), (INT8, INT8)])
@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16])
def test_numbers_are_those_of_the_operands(lhs, rhs, out):
    a, b = random((M, K), lhs), random((K, N), rhs, 1)
    result = np.asarray(jhg.matmul(a, b, preferred_element_type=out))
    exact, magnitude = reference.product(a, b), reference.magnitude(a, b)
    bound = error_bound(exact, magnitude, K, result.dtype, "float32", jnp.dtype(lhs).name)
    assert_within(result, exact, bound)


def test_int8_sums_are_exact():
    a, b = random((M, K), INT8), random((K, N), INT8, 1)
    result = np.asarray(jhg.matmul(a, b, preferred_element_type=jnp.int32))
    np.testing.assert_array_equal(result, a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize("preferred", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("precision", [None, "highest"])
def test_gradients_are_those_of_jax(preferred, precision):
    a, b = jnp.asarray(random((M, K), E4M3)), jnp.asarray(random((K, N), E5M2, 1))

    def loss(dot: Any) -> Any:
        def of(a: Any, b: Any) -> Any:
            y = dot(a, b, NN, precision=precision, preferred_element_type=preferred)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(of, argnums=(0, 1))(a, b)

    for ours, theirs in zip(loss(jhg.dot_general), loss(lax.dot_general), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_gradients_pass_through_scales():
    a, b = jnp.asarray(random((M, K), E4M3)), jnp.asarray(random((K, N), E4M3, 1))

    def ours(a: Any, scale: Any) -> Any:
        return jhg.matmul(
            a, b, epilogue=lambda y, s: y * s, epilogue_operands=(scale,), activation="silu",
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    def theirs(a: Any, scale: Any) -> Any:
        return jax.nn.silu(jnp.matmul(a, b, preferred_element_type=jnp.float32)) * scale

    def gradients(f: Any) -> Any:
        return jax.grad(lambda a, scale: jnp.sum(f(a, scale)), (0, 1))

    for function in (gradients, jax.jit):
        mine, their = (function(f)(a, jnp.float32(0.5)) for f in (ours, theirs))
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(their), strict=True):
            assert x.dtype == y.dtype
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            # The product is kept in bfloat16, the gradient rounded to e4m3.
            np.testing.assert_allclose(x, y, rtol=2.0**-3, atol=2.0**-7)


def test_vmap_multiplies_each_matrix():
    a, b = random((3, M, K), E4M3), random((3, K, N), E4M3, 1)
    product = lambda a, b: jhg.matmul(a, b, preferred_element_type=jnp.float32)  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(product)(a, b), [product(*x) for x in zip(a, b)])  # noqa: B905
    specs = specs_of(
        jax.vmap(product), abstract((3, 512, 512), E4M3), abstract((3, 512, 512), E4M3)
    )
    assert len(specs) == 1


def test_ragged_rows_have_the_numbers_of_jax():
    x, weights = map(jnp.asarray, (random((40, K), E4M3), random((4, K, N), E4M3, 1)))
    sizes = jnp.array([10, 0, 20, 5], jnp.int32)
    ours, theirs = (
        f(x, weights, sizes, preferred_element_type=jnp.float32)
        for f in (jhg.ragged_dot, lax.ragged_dot)
    )
    np.testing.assert_array_equal(ours, theirs)


# What goes to XLA.


@pytest.mark.parametrize(
    ("a", "b", "options", "reason"),
    [
        (E4M3, INT8, {"preferred_element_type": jnp.float32}, "float8_e4m3fn and int8"),
        (E4M3, jnp.bfloat16, {"preferred_element_type": jnp.float32}, "and B bfloat16"),
        (INT8, INT8, {}, "D is int8: ask for"),
    ],
)
def test_what_no_kernel_multiplies_says_why(a, b, options, reason):
    found = explained(abstract((512, 512), a), abstract((512, 512), b), **options)
    assert found.path == "xla" and reason in found.reason


def test_k_that_is_no_multiple_of_16_goes_to_xla():
    found = explained(
        abstract((512, 520), E4M3), abstract((512, 520), E4M3), preferred_element_type=jnp.float32
    )
    assert found.path == "xla" and "pad K from 520 to 528" in found.reason


def test_int8_sums_that_could_overflow_go_to_xla():
    """Where sums leave int32, tensor cores saturate; JAX's wrap."""
    x = abstract((64, 1 << 17), INT8)
    found = explained(x, x, preferred_element_type=jnp.int32)
    assert found.path == "xla" and "131072" in found.reason


def test_launches_keep_their_names():
    def function(a: Any, b: Any) -> Any:
        return jhg.dot_general(a, b, NT, "highest", jnp.bfloat16)

    (launch,) = launches_of(function, A, B)
    assert launch.name.startswith("jhg_gemm_promoted_f8_e4m3fn_f8_e5m2_bf16_tn_")
