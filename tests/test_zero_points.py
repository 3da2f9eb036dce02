"""Weights with zero points: products are those of `(values - zero) * scale`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

M, K, N = 16, 272, 96
BLOCKS = {"tensor": (None, None), "columns": (None, 1), "groups": (32, 1), "blocks": (128, 32)}


def weights(block: str, dtype: str = "int8", shape: tuple[int, ...] = (K, N)) -> jhg.Quantized:
    """Those that lie between -1 and 5, but for one block that has no number under 0."""
    w = np.random.default_rng(1).uniform(-1, 5, shape).astype(np.float32)
    w[..., :32, :32] += 1
    blocks = (*(1,) * (len(shape) - 2), *BLOCKS[block])
    return jhg.quantize(w, dtype, blocks, symmetric=False)


def activations(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)


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
    quantized = jhg.quantize(w, dtype, BLOCKS[block], symmetric=False)
    assert quantized.zero is not None and quantized.zero.dtype == dtype
    steps = 255 if dtype == "int8" else 15
    np.testing.assert_allclose(exact(quantized), w, atol=1.01 * 6 / steps)
    np.testing.assert_allclose(quantized.dequantize(), exact(quantized), rtol=1e-6, atol=1e-6)
    assert {*np.asarray(quantized.values, int).ravel()} >= {-steps // 2, steps // 2}
    error, even = (
        np.abs(np.asarray(x.dequantize()) - w).mean()
        for x in (quantized, jhg.quantize(w, dtype, BLOCKS[block]))
    )
    assert error < 0.7 * even


@pytest.mark.slow
def test_blocks_of_equal_numbers_and_of_zeros_are_exact():
    for value in (0.0, 3.0, -2.0):
        quantized = jhg.quantize(jnp.full((32, 32), value), "int4", (32, 32), symmetric=False)
        np.testing.assert_allclose(quantized.dequantize(), value, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_a_block_with_an_infinity_or_a_nan_is_nan(dtype, broken):
    w = np.ones((64, 256), np.float32)
    w[0, 0] = broken
    quantized = jhg.quantize(w, dtype, (1, None), symmetric=False)
    np.testing.assert_array_equal(np.isnan(quantized.scale)[0], np.isnan(broken))
    assert np.isnan(np.asarray(quantized.dequantize())).sum(1).tolist() == [256] + [0] * 63


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "steps"), [("int8", 255), ("int4", 15)])
def test_the_range_of_a_block_may_be_beyond_float32(dtype, steps):
    w = jnp.array([2e38, -2e38, 0.0])
    found = jhg.quantize(w, dtype, symmetric=False).dequantize()
    np.testing.assert_allclose(found, w, atol=1.01 * 4e38 / steps)


@pytest.mark.parametrize("dtype", ["int8", "int4", "packed"])
@pytest.mark.parametrize("block", BLOCKS)
def test_products_are_those_of_the_dequantized_weights(block, dtype):
    w, x = weights(block, dtype.replace("packed", "int4")), activations(M, K)
    whole, given = exact(w), w.pack_weights() if dtype == "packed" else w
    bias = jnp.arange(N, dtype=jnp.float32)
    assert_near(jhg.matmul(x, given, preferred_element_type=jnp.float32), x, whole)
    biased = jhg.matmul(x, given, bias=bias, alpha=2.0, preferred_element_type=jnp.float32)
    assert_near((biased - bias) / 2, x, whole)
    assert_near(jhg.matmul(x[0], given, preferred_element_type=jnp.float32), x[0], whole)
    if dtype != "packed":
        numbers: Any = ((0,), (1,)), ((), ())
        turned = jhg.dot_general(w, x, numbers, preferred_element_type=jnp.float32)
        assert_near(turned.T, x, whole)
        named = jhg.einsum("mk,kn->nm", x, w, preferred_element_type=jnp.float32)
        assert_near(named.T, x, whole)


@pytest.mark.slow
@pytest.mark.parametrize("block", ["columns", "groups"])
def test_batches_groups_and_gates_have_them_too(block):
    w, x = weights(block, shape=(3, K, N)), activations(3, M, K)
    numbers: Any = ((2,), (1,)), ((0,), (0,))
    out = jhg.dot_general(x, w, numbers, preferred_element_type=jnp.float32)
    rows = jhg.ragged_dot(x.reshape(-1, K), w, jnp.full(3, M, jnp.int32))
    for i, whole in enumerate(exact(w)):
        assert_near(out[i], x[i], whole)
        assert_near(rows[M * i : M * (i + 1)], x[i], whole)
    assert w.zero is not None
    pair = [jhg.Quantized(w.values[i], w.scale[i], zero=w.zero[i]) for i in range(2)]
    gated = jhg.gated_linear_unit(x[0], (pair[0], pair[1]), activation=lambda y: y)
    gate, up = (np.asarray(x[0], np.float64) @ exact(whole) for whole in pair)
    np.testing.assert_allclose(np.asarray(gated, np.float64), gate * up, rtol=0.05, atol=30)


@pytest.mark.slow
@pytest.mark.parametrize("block", ["columns", "groups"])
def test_gradients_are_those_of_the_dequantized_weights(block):
    w, x = weights(block), activations(M, K)
    dy = activations(M, N)
    _, pull = jax.vjp(lambda x: jhg.matmul(x, w), x)
    assert_near(pull(dy)[0], dy, exact(w).T)


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
