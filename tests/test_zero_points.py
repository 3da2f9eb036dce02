"""Weights with zero points: products are those of `(values - zero) * scale`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.quantization import dequantize, quantize

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

M, K, N = 16, 272, 96
BLOCKS = {"tensor": (None, None), "columns": (None, 1), "groups": (32, 1), "blocks": (128, 32)}


def weights(block: str, dtype: str = "int8", shape: tuple[int, ...] = (K, N)) -> jhg.Quantized:
    """Those that lie between -1 and 5, but for one block that has no number under 0."""
    w = np.random.default_rng(1).uniform(-1, 5, shape).astype(np.float32)
    w[..., :32, :32] += 1
    blocks = (*(1,) * (len(shape) - 2), *BLOCKS[block])
    return quantize(w, dtype, blocks, symmetric=False)


def activations(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(jnp.bfloat16)


def assert_near(got: Any, x: Any, w: Any) -> None:
    """Within the rounding of weights to bfloat16, where XLA multiplies them by their scales."""
    exact = np.asarray(x, np.float64) @ w
    bound = np.abs(np.asarray(x, np.float64)) @ (np.abs(w) + 8) * 2.0**-8
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()


def exact(w: jhg.Quantized) -> np.ndarray:
    scale, zero = (np.asarray(x, np.float64) for x in (w.scale, w.zero))
    for axis, extent in enumerate(w.shape):
        if scale.shape[axis] not in (1, extent):
            each = -(-extent // scale.shape[axis])
            block = min(b for b in (32, 64, 128) if b >= each)
            scale, zero = (
                np.repeat(x, block, axis).take(range(extent), axis) for x in (scale, zero)
            )
    return (np.asarray(w.values, np.float64) - zero) * scale


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("block", BLOCKS)
def test_zero_points_take_all_numbers_of_a_dtype(block, dtype):
    w = np.random.default_rng(1).uniform(-1, 5, (K, N)).astype(np.float32)
    quantized = quantize(w, dtype, BLOCKS[block], symmetric=False)
    assert quantized.zero is not None and quantized.zero.dtype == dtype
    steps = 255 if dtype == "int8" else 15
    np.testing.assert_allclose(exact(quantized), w, atol=1.01 * 6 / steps)
    np.testing.assert_allclose(dequantize(quantized), exact(quantized), rtol=1e-6, atol=1e-6)
    assert {*np.asarray(quantized.values, int).ravel()} >= {-steps // 2, steps // 2}
    error, even = (
        np.abs(np.asarray(dequantize(x)) - w).mean()
        for x in (quantized, quantize(w, dtype, BLOCKS[block]))
    )
    assert error < 0.7 * even


@pytest.mark.slow
def test_blocks_of_equal_numbers_and_of_zeros_are_exact():
    for value in (0.0, 3.0, -2.0):
        block = np.full((32, 32), value, np.float32)
        quantized = quantize(block, "int4", (32, 32), symmetric=False)
        np.testing.assert_allclose(dequantize(quantized), value, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_a_block_with_an_infinity_or_a_nan_is_nan(dtype, broken):
    w = np.ones((64, 256), np.float32)
    w[0, 0] = broken
    quantized = quantize(w, dtype, (1, None), symmetric=False)
    np.testing.assert_array_equal(np.isnan(quantized.scale)[0], np.isnan(broken))
    assert np.isnan(np.asarray(dequantize(quantized))).sum(1).tolist() == [256] + [0] * 63


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "steps"), [("int8", 255), ("int4", 15)])
def test_the_range_of_a_block_may_be_beyond_float32(dtype, steps):
    w = np.array([2e38, -2e38, 0.0], np.float32)
    found = dequantize(quantize(w, dtype, symmetric=False))
    np.testing.assert_allclose(found, w, atol=1.01 * 4e38 / steps)


@pytest.mark.parametrize("dtype", ["int8", "int4", "packed"])
@pytest.mark.parametrize("block", BLOCKS)
def test_products_are_those_of_the_dequantized_weights(block, dtype):
    w, x = weights(block, dtype.replace("packed", "int4")), activations(M, K)
    whole, given = exact(w), w.pack_weights() if dtype == "packed" else w
    bias = np.arange(N, dtype=np.float32)
    float32: Any = {"preferred_element_type": jnp.float32}

    @jax.jit
    def products(x: Any, w: Any) -> Any:
        vector = jhg.matmul(x[0], w, **float32)
        biased = jhg.matmul(x, w, bias=bias, alpha=2.0, **float32)
        matrices = [jhg.matmul(x, w, **float32), (biased - bias) / 2]
        if dtype != "packed":
            numbers: Any = ((0,), (1,)), ((), ())
            matrices.append(jhg.dot_general(w, x, numbers, **float32).T)
            matrices.append(jhg.einsum("mk,kn->nm", x, w, **float32).T)
        return vector, *matrices

    vector, *matrices = products(x, given)
    assert_near(vector, x[0], whole)
    for product in matrices:
        assert_near(product, x, whole)


@pytest.mark.slow
@pytest.mark.parametrize("block", ["columns", "groups"])
def test_batches_groups_and_gates_have_them_too(block):
    w, x = weights(block, shape=(3, K, N)), activations(3, M, K)
    numbers: Any = ((2,), (1,)), ((0,), (0,))
    out = jax.jit(partial(
        jhg.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.float32
    ))(x, w)  # fmt: skip
    rows = jax.jit(jhg.ragged_dot)(x.reshape(-1, K), w, np.full(3, M, np.int32))
    for i, whole in enumerate(exact(w)):
        assert_near(np.asarray(out)[i], x[i], whole)
        assert_near(np.asarray(rows)[M * i : M * (i + 1)], x[i], whole)
    assert w.zero is not None
    pair = tuple(jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], w) for i in range(2))
    gated = jax.jit(partial(jhg.gated_linear_unit, activation=lambda y: y))(x[0], pair)
    gate, up = (np.asarray(x[0], np.float64) @ exact(whole) for whole in pair)
    np.testing.assert_allclose(np.asarray(gated, np.float64), gate * up, rtol=0.05, atol=30)


@pytest.mark.slow
@pytest.mark.parametrize("block", ["columns", "groups"])
def test_gradients_are_those_of_the_dequantized_weights(block):
    w, x = weights(block), activations(M, K)
    dy = activations(M, N)
    dx = jax.jit(lambda x, dy: jax.vjp(lambda x: jhg.matmul(x, w), x)[1](dy)[0])(x, dy)
    assert_near(dx, dy, exact(w).T)


@pytest.mark.parametrize(("block", "group"), [("columns", 0), ("groups", 32)])
def test_the_kernel_reads_the_weights_as_they_are(block, group):
    (spec,) = specs_of(
        partial(jhg.matmul, implementation="hopper"), activations(M, K), weights(block)
    )
    assert (spec.b_dtype, spec.k_group) == ("int8", group)
    assert "sub" in {node.op for node in spec.graph.nodes}


def test_qwix_arrays_bring_their_zero_points():
    qwix = pytest.importorskip("qwix")
    w = jnp.asarray(np.random.default_rng(1).uniform(-1, 5, (256, N)), jnp.float32)
    array = qwix.quantize(
        w, jnp.int4, channelwise_axes=(1,), tiled_axes={0: 128}, calibration_method="minmax"
    )
    x = activations(M, 256)
    assert_near(jhg.matmul(x, array), x, np.asarray(qwix.dequantize(array), np.float64))


def test_errors_name_the_way_out():
    w, x = weights("columns"), activations(M, K)
    with pytest.raises(ValueError, match="float8_e4m3fn has no zero points"):
        jhg.quantize(x, block=(1, 128), symmetric=False)
    with pytest.raises(ValueError, match="expected the shape of its scale"):
        jhg.matmul(x, jhg.Quantized(w.values, w.scale, zero=jnp.zeros(N)))
    with pytest.raises(NotImplementedError, match="zero points beside a quantized array"):
        jhg.matmul(jhg.quantize(x, "int8", (1, None)), w)
