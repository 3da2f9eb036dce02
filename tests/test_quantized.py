"""Quantized arrays: what `quantize` gives, and products of them on kernels and on XLA."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.quantization import dequantize, quantize
from support.tolerance import accumulation_error

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.dtypes import QUANTIZED
from jax_hopper_gemm.testing.lowered import specs_of

M, K, N = 200, 400, 320
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# Half a unit in the last place: of floats relative to a value, of integers to the largest.
HALF_UNIT = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 0.5 / 127}
# Blocks of A (M, K) and of B (K, N): per tensor, row and column, and blocks of 128.
PAIRS = [
    ((None, None), (None, None)), ((1, None), (None, 1)), ((1, 128), (128, 128)),
    ((1, 128), (128, 1)), ((128, 128), (128, 128)), ((1, 128), (None, None)),
    ((128, None), (None, 128)),
]  # fmt: skip

matmul = jax.jit(jhg.matmul)


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape)
    return (x * np.exp(np.linspace(-2, 2, shape[-1]))).astype(np.float32)


def exact(x: jhg.Quantized) -> np.ndarray:
    """The values times their scales, in float64."""
    scale = np.asarray(x.scale, np.float64)
    for axis, extent in enumerate(x.shape):
        if scale.shape[axis] not in (1, extent):
            scale = np.repeat(scale, 128, axis).take(range(extent), axis)
    return np.asarray(x.values, np.float64) * scale


# quantize


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("block", [None, (1, None), (1, 128), (128, 128), (128, 1), (None, 128)])
def test_a_quantized_array_is_near_the_array(dtype, block):
    x = normal((M, K))
    quantized = quantize(x, dtype, block)
    blocks = block or (None, None)
    counts = {None: lambda n: 1, 1: lambda n: n, 128: lambda n: -(-n // 128)}
    assert quantized.scale.shape == tuple(
        counts[b](n) for b, n in zip(blocks, x.shape, strict=True)
    )
    assert quantized.values.dtype == dtype and quantized.shape == x.shape
    ones: Any = np.ones_like(x)
    near, scale = exact(quantized), exact(jhg.Quantized(ones, quantized.scale))
    unit = np.abs(x) if dtype != "int8" else scale * 127
    smallest = 2.0**-9 if dtype != "int8" else 0.0
    assert (np.abs(near - x) <= (HALF_UNIT[dtype] + 2.0**-22) * unit + smallest * scale).all()
    np.testing.assert_allclose(np.asarray(dequantize(quantized)), near, rtol=2.0**-23)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_the_largest_of_a_block_becomes_the_largest_number(dtype):
    x = normal((64, 256))
    quantized = quantize(x, dtype, (1, 128))
    tops = np.abs(np.asarray(quantized.values, np.float32)).reshape(64, 2, 128).max(-1)
    assert (tops == LARGEST[dtype]).all()


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_blocks_without_numbers_are_defined(dtype):
    x = np.ones((4, 128), np.float32)
    x[0] = 0
    x[1, 3] = np.inf
    x[2, 5] = np.nan
    x[3] = 1e-42  # subnormal; XLA may take it for 0
    quantized = jhg.quantize(x, dtype, (1, 128))
    scale, values = np.asarray(quantized.scale)[:, 0], np.asarray(quantized.values, np.float32)
    assert scale[0] == 1 and (values[0] == 0).all()
    assert np.isinf(scale[1]) and np.isnan(scale[2])
    assert scale[3] >= 2.0**-126 and (values[3] == 0).all()
    assert np.isnan(np.asarray(quantized.dequantize())[1:3]).all()


@pytest.mark.parametrize("dtype", [*QUANTIZED, "int4"])
@pytest.mark.parametrize("block", [None, (1, None), (None, 1), (1, 128), (128, 128)])
def test_a_nan_is_not_lost_in_a_large_block(dtype, block):
    x = normal((64, 256))
    x[0, 0] = np.nan
    quantized = quantize(x, dtype, block)
    assert np.isnan(quantized.scale).sum() == 1 and np.isnan(quantized.scale).ravel()[0]
    pairs = zip(block or (None, None), x.shape, strict=True)
    rows, columns = (n if b is None else b for b, n in pairs)
    nan = np.isnan(np.asarray(dequantize(quantized)))
    assert nan[:rows, :columns].all() and nan.sum() == nan[:rows, :columns].sum()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*QUANTIZED, "int4"])
def test_values_have_no_derivative_and_scales_that_of_the_largest(dtype):
    """So no cotangent is rounded to 8 bits, in which one of 1e6 would be NaN."""
    x = normal((2, 256))

    def loss(x: Any) -> Any:
        return jnp.sum(jhg.quantize(x, dtype, (1, None)).dequantize() * 1e6)

    values = np.asarray(quantize(x, dtype, (1, None)).values, np.float32)
    of_scale = 1e6 * values.sum(1, keepdims=True) / np.abs(values).max()
    largest = np.abs(x) == np.abs(x).max(1, keepdims=True)
    expected = np.where(largest, np.sign(x) * of_scale, 0)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), expected, rtol=1e-4, atol=1)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_scales_are_no_subnormals(dtype):
    x = np.full((1, 128), 2.0**-125, np.float32)
    quantized = quantize(x, dtype)
    assert np.asarray(quantized.scale).item() == 2.0**-126
    np.testing.assert_array_equal(dequantize(quantized), x)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [((1, 128), (128, 128)), ((1, None), (None, 1))])
@pytest.mark.parametrize("special", [0.0, np.inf, np.nan, 2.0**-140, 2.0**-126])
def test_a_scale_multiplies_whatever_it_is(blocks, special):
    """Of rows 0 to 3; a result is that of the values times the scales, the other rows unharmed."""
    a, b = (
        quantize(normal((16, 256)), block=blocks[0]),
        quantize(normal((256, 128), 1), block=blocks[1]),
    )
    scale: Any = np.array(a.scale)
    scale[:4, -1] = special
    a = jhg.Quantized(a.values, scale)
    result = np.asarray(matmul(a, b), np.float64)
    with np.errstate(invalid="ignore"):
        expected = exact(a) @ exact(b)
    np.testing.assert_allclose(result[4:], expected[4:], rtol=1e-4, atol=1e-3)
    if np.isfinite(special):
        np.testing.assert_allclose(result[:4], expected[:4], rtol=1e-4, atol=1e-3)
    else:  # infinities of both signs make a NaN, which one of them depends on the order
        assert not np.isfinite(result[:4]).any()


@pytest.mark.parametrize(
    ("x", "dtype", "block", "error", "text"),
    [
        (np.ones((4, 4), np.float32), "float16", None, TypeError, "dtype is float16, expected"),
        (np.ones((4, 4), np.int32), "int8", None, TypeError, "expected floats"),
        (np.ones((4, 4), np.float32), "int8", (1,), ValueError, "expected 2 entries"),
        (np.ones((4, 4), np.float32), "int8", (1, 48), ValueError,
         "expected 1, 32, 64, 128 or None"),
        (np.ones((4, 4), np.float32), "int3", None, TypeError, "dtype is 'int3', expected"),
        (np.ones((4, 4), np.float32), "int8", 128, TypeError, "block is 128, expected 1, 32"),
        (np.ones((4, 4), np.float32), "int8", (1.0, 1), TypeError, r"block is \(1.0, 1\), exp"),
    ],
)  # fmt: skip
def test_quantize_says_what_is_wrong(x, dtype, block, error, text):
    with pytest.raises(error, match=text):
        jhg.quantize(x, dtype, block)


def test_zero_points_are_asked_for_by_a_bool():
    with pytest.raises(TypeError, match="symmetric is None, expected True or False"):
        jhg.quantize(normal((4, 4)), jnp.int8, symmetric=None)  # type: ignore[arg-type]


def test_a_scalar_is_quantized():
    x = jhg.quantize(2.0, jnp.int8)
    assert x.shape == () and x.values == 127 and np.isclose(x.dequantize(), 2.0)


@pytest.mark.slow
def test_a_vector_has_blocks():
    x = normal((300,))
    quantized, row = quantize(x, block=(128,)), quantize(x[None], block=(1, 128))
    np.testing.assert_array_equal(dequantize(quantized), dequantize(row)[0])


def test_blocks_may_be_an_array():
    assert jhg.quantize(normal((4, 256)), block=jnp.array([1, 128])).scale.shape == (4, 2)  # type: ignore[arg-type]


def test_a_quantized_array_is_a_pytree():
    quantized = quantize(normal((M, K)), block=(1, 128))
    assert [x.shape for x in jax.tree.leaves(quantized)] == [(M, K), (M, 4)]
    doubled = jax.jit(lambda q: jhg.Quantized(q.values, 2 * q.scale))(quantized)
    np.testing.assert_array_equal(dequantize(doubled), 2 * np.asarray(dequantize(quantized)))


# Products: numbers, by XLA.


@pytest.mark.parametrize(("a_block", "b_block"), PAIRS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_products_are_those_of_the_dequantized_arrays(a_block, b_block, dtype):
    a = quantize(normal((M, K)), dtype, a_block)
    b = quantize(normal((K, N), 1), dtype, b_block)
    result = np.asarray(matmul(a, b), np.float64)
    expected, magnitude = exact(a) @ exact(b), np.abs(exact(a)) @ np.abs(exact(b))
    bound = (accumulation_error(K, "float32") + 2.0**-21) * magnitude
    assert (np.abs(result - expected) <= bound).all()


@pytest.mark.slow
def test_what_follows_a_product_follows_its_scales():
    bias = normal((N,), 2)
    for a_block, b_block in PAIRS:
        a = quantize(normal((M, K)), block=a_block)
        b = quantize(normal((K, N), 1), block=b_block)
        result = jax.jit(partial(
            jhg.matmul, activation="relu", preferred_element_type=jnp.bfloat16,
            epilogue=lambda y, s: (y * s, jnp.max(y)), epilogue_operands=(np.float32(0.5),),
        ))(a, b, bias=bias)  # fmt: skip
        y = np.maximum(exact(a) @ exact(b) + bias, 0)
        assert result[0].dtype == jnp.bfloat16 and result[1].dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(result[0], np.float64), y * 0.5, 2.0**-7, 1e-3)
        np.testing.assert_allclose(result[1], y.max(), 1e-5)


@pytest.mark.parametrize("block", [(1, 1, 128), (1, 1, None), (None, None, None)])
def test_scales_of_16_bits_are_converted(block):
    a = quantize(normal((3, 40, 256)), block=block)
    b = quantize(normal((256, 48), 1), block=(128, 128))
    scales: Any = [np.asarray(x.scale, jnp.bfloat16) for x in (a, b)]
    narrow = [jhg.Quantized(x.values, scale) for x, scale in zip((a, b), scales, strict=True)]
    wide = [jhg.Quantized(x.values, x.scale.astype(np.float32)) for x in narrow]
    np.testing.assert_array_equal(matmul(*narrow), matmul(*wide))
    types = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pair)
        for pair in (narrow, wide)
    ]
    found, expected = (specs_of(jhg.matmul, *pair) for pair in types)
    assert found == expected
    jax.jit(jhg.matmul).trace(*types[0]).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("blocks", [((1, 128), (128, 128)), ((1, None), (None, 1))])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_product_without_k_is_zeros(blocks, lead):
    a = quantize(normal((*lead, 4, 1))[..., :0], block=(*(1 for _ in lead), *blocks[0]))
    b = quantize(normal((1, 8))[:0], block=blocks[1])
    np.testing.assert_array_equal(matmul(a, b), np.zeros((*lead, 4, 8), np.float32))


@pytest.mark.parametrize("block", [(1, 1, 128), (1, 1, None), (None, None, None)])
def test_dot_general_has_batches_and_any_order_of_axes(block):
    a = quantize(normal((3, 40, 256)), block=block)
    b = quantize(normal((3, 256, 48), 1), block=(block[0], block[2], block[1]))
    dims: Any = (((2,), (1,)), ((0,), (0,)))
    dot_general = jax.jit(jhg.dot_general, static_argnums=2)
    result = dot_general(a, b, dims)
    np.testing.assert_allclose(result, exact(a) @ exact(b), rtol=1e-4, atol=1e-3)
    swapped = dot_general(b, a, (((1,), (2,)), ((0,), (0,))))
    np.testing.assert_allclose(swapped, np.swapaxes(exact(a) @ exact(b), 1, 2), 1e-4, 1e-3)


def test_leading_axes_count_as_rows():
    a, b = quantize(normal((2, 5, 256)), block=(1, 1, 128)), quantize(normal((256, 48), 1))
    np.testing.assert_allclose(jhg.matmul(a, b), exact(a) @ exact(b), rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_gradients_by_scales_are_those_of_the_dequantized_arrays():
    a = quantize(normal((64, 256)), block=(1, 128))
    b = quantize(normal((256, 128), 1), block=(128, 128))

    def ours(a_scale: Any, b_scale: Any) -> Any:
        product = jhg.matmul(jhg.Quantized(a.values, a_scale), jhg.Quantized(b.values, b_scale))
        return jnp.sum(jnp.sin(product))

    def theirs(a_scale: Any, b_scale: Any) -> Any:
        wide = jhg.Quantized(a.values, a_scale), jhg.Quantized(b.values, b_scale)
        x, y = (q.dequantize() for q in wide)
        return jnp.sum(jnp.sin(jnp.matmul(x, y, precision="highest")))

    found, expected = (jax.jit(jax.grad(f, (0, 1)))(a.scale, b.scale) for f in (ours, theirs))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
def test_vmap_of_block_scales_is_a_batch():
    a = quantize(normal((3, 64, 256)), block=(1, 1, 128))
    b = quantize(normal((256, 128), 1), block=(128, 128))
    mapped = jax.vmap(jhg.matmul, in_axes=(0, None))
    result = jax.jit(mapped)(a, b)
    np.testing.assert_allclose(result, exact(a) @ exact(b), rtol=1e-4, atol=1e-3)
    pair = jax.tree.map(lambda x: np.stack([x, x]), b)
    twice = jax.jit(jax.vmap(mapped, (None, 0)))(a, pair)
    np.testing.assert_allclose(twice[1], exact(a) @ exact(b), rtol=1e-4, atol=1e-3)


def test_results_have_the_same_dtypes_whatever_the_order_of_their_axes():
    x, w = normal((2, 8, 64)).astype(jnp.bfloat16), quantize(normal((2, 64, 16)))
    dtypes: Any = (None, jnp.float32)
    of = dict(epilogue=lambda y: (y, y), preferred_element_type=dtypes)
    products = (partial(jhg.einsum, f"bmk,bkn->{order}", **of) for order in ("mbn", "bmn"))
    results = (jax.jit(product)(x, w) for product in products)
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, np.asarray(theirs).swapaxes(0, 1), strict=True)


def test_an_ellipsis_of_an_einsum_stands_for_axes():
    x, w = normal((2, 8, 64)).astype(jnp.bfloat16), normal((64, 16)).astype(jnp.bfloat16)
    by_recipe: dict[str, Any] = {"recipe": jhg.recipes.CurrentScaling()}
    for right, options in ((jhg.quantize(w, jnp.int8, (None, 1)), {}), (w, by_recipe)):
        expected = jhg.einsum("bmk,kn->bmn", x, right, **options)
        for subscripts in ("...k,kn->...n", "b...k,k...n->b...n", "...k,kn"):
            ours = jhg.einsum(subscripts, x, right, **options)
            np.testing.assert_array_equal(ours, expected, strict=True)


# Products: kernels.


def abstract(shape: tuple[int, ...], dtype: Any, counts: tuple[int, ...]) -> jhg.Quantized:
    struct: Any = jax.ShapeDtypeStruct
    return jhg.Quantized(struct(shape, dtype), struct(counts, jnp.float32))


def specs(a: Any, b: Any, **options: Any) -> Any:
    def function(a: Any, b: Any) -> Any:
        return jhg.matmul(
            a, b, preferred_element_type=jnp.bfloat16, implementation="hopper", **options
        )

    return specs_of(function, a, b)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize(
    ("a_scales", "b_scales", "blocks"),
    [
        ((512, 8), (8, 6), (1, 128)), ((512, 8), (8, 768), (1, 1)), ((4, 8), (8, 6), (128, 128)),
        ((512, 8), (1, 1), (1, 1)), ((1, 8), (8, 768), (1, 1)),
    ],
)  # fmt: skip
def test_block_scales_are_multiplied_in_by_the_kernel(dtype, a_scales, b_scales, blocks):
    a, b = abstract((512, 1024), dtype, a_scales), abstract((1024, 768), dtype, b_scales)
    (spec,) = specs(a, b)
    assert (spec.a_block, spec.b_block) == blocks and spec.promoted
    assert (spec.d_dtype, spec.acc_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("a_scales", "b_scales", "kinds"),
    [
        ((1, 1), (1, 1), ["scalar", "scalar"]), ((512, 1), (1, 768), ["column", "row"]),
        ((4, 1), (1, 1), ["column", "scalar"]),
    ],
)  # fmt: skip
def test_other_scales_are_operands_of_the_epilogue(a_scales, b_scales, kinds):
    a = abstract((512, 1024), jnp.float8_e4m3fn, a_scales)
    b = abstract((1024, 768), jnp.float8_e4m3fn, b_scales)
    (spec,) = specs(a, b, activation="gelu")
    assert [operand.kind for operand in spec.graph.operands] == kinds and not spec.a_block


def test_a_report_names_the_blocks():
    a = abstract((512, 1024), jnp.int8, (512, 8))
    b = abstract((1024, 768), jnp.int8, (8, 6))
    report = str(jhg.explain(lambda a, b: jhg.matmul(a, b), a, b))
    assert "1 on kernels" in report and "scales of blocks of 1x128 and 128x128" in report


@pytest.mark.parametrize("precision", [None, "highest", "ANY_F8_ANY_F8_F32"])
def test_a_precision_is_what_jax_makes_of_it(precision):
    """Sums by block scales are promoted whatever is asked for."""
    a = abstract((512, 1024), "float8_e4m3fn", (512, 8))
    b = abstract((1024, 768), "float8_e4m3fn", (8, 6))
    (spec,) = specs(a, b, precision=precision)
    assert spec.promoted and spec.a_block
