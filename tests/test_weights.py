"""Products of 16-bit arrays and weights of 8 and 4 bits: numbers on XLA, transformations, errors.

The GPU tests run the same programs (`support.weights`) on kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support import tolerance
from support.program_inspection import normal
from support.quantization import dequantize, quantize
from support.weights import BLOCKS, DTYPES, PROGRAMS, quantized

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

pytestmark = pytest.mark.slow

M, N, K = 48, 128, 256
NUMBERS: Any = ((1,), (0,)), ((), ())


def activations(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return normal(shape, dtype)


def weights(block: int | None = None, dtype: str = "int8", shape: Any = (K, N), axis: int = 0):
    return quantized(shape, axis, dtype, block, 1)


def float64(x: Any) -> np.ndarray:
    return np.asarray(dequantize(x) if isinstance(x, jhg.Quantized) else x).astype(np.float64)


def assert_product(result: Any, expected: np.ndarray, magnitude: np.ndarray) -> None:
    """Weights times scales of groups are rounded to 16 bits, and so is the result."""
    assert result.shape == expected.shape
    unit = float(jnp.finfo(result.dtype).eps) / 2
    bound = 2 * unit * np.abs(expected) + (unit + K * 2.0**-24) * magnitude
    assert (np.abs(float64(result) - expected) <= bound + 1e-6).all()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [*DTYPES, "e5m2"])
@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16])
def test_products_are_those_of_dequantized_weights(dtype, block, half):
    x = activations(M, K, dtype=half)
    if dtype == "e5m2":
        w = quantize(normal((K, N), seed=1), jnp.float8_e5m2, (BLOCKS[block], 1))
    else:
        w = weights(BLOCKS[block], dtype)
    assert w.shape == (K, N)
    expected = float64(x) @ float64(w), np.abs(float64(x)) @ np.abs(float64(w))

    @jax.jit
    def products(x: Any, w: Any) -> Any:
        results = [
            jhg.matmul(x, w), jhg.dot_general(x, w, NUMBERS),
            jhg.einsum("mk,kn->mn", x, w), jhg.einsum("mk,kn->nm", x, w).T,
        ]  # fmt: skip
        if not w.packed:
            turned = jhg.Quantized(w.values.T, w.scale.T)
            results += [jhg.einsum("mk,nk->mn", x, turned), jhg.matmul(turned, x.T).T]
        return results

    for result in (jhg.matmul(x, w), *products(x, w)):
        assert result.dtype == half
        assert_product(result, *expected)


@pytest.mark.parametrize(("dtype", "block"), [("int8", "columns"), ("packed", "k64")])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_the_gpu_tests_have_their_numbers_on_xla(name, dtype, block):
    """Within the bound that the kernels keep, but for weights that are rounded to 16 bits."""
    program = PROGRAMS[name]
    x, w = program.arguments(dtype, block, jnp.bfloat16)
    value, magnitude = program.exact(float64(x), float64(w))
    result = jax.jit(partial(program.function, only=None))(x, w)
    assert result.shape == value.shape
    bound = tolerance.error_bound(value, magnitude, x.shape[-1], result.dtype)
    bound += 2 * float(jnp.finfo(jnp.bfloat16).eps) * magnitude
    assert (np.abs(float64(result) - value) <= bound).all()


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int2, jnp.int16])
@pytest.mark.parametrize("scales", [(1, N), (2, N)])
def test_no_kernel_reads_weights_of_other_dtypes(dtype, scales):
    """Qwix makes some of these."""
    values = np.arange(K * N).reshape(K, N).astype(dtype)
    w = jhg.Quantized(*jax.device_put((values, np.full(scales, 0.5, np.float32))))
    x = activations(M, K)
    expected = float64(x) @ float64(w), np.abs(float64(x)) @ np.abs(float64(w))
    assert_product(jhg.matmul(x, w), *expected)
    (spec,) = specs_of(partial(jhg.matmul, implementation="hopper"), x, w)
    assert spec.b_dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_an_einsum_with_its_axes_in_another_order_has_its_dtype_after_an_epilogue(dtype):
    x, w = activations(2, M, K), weights(shape=(2, K, N), axis=1)
    for left, usual in ((x, "bfloat16"), (quantize(x, jnp.int8, (1, 1, None)), "float32")):
        options: Any = {"epilogue": jnp.sin, "preferred_element_type": dtype}
        y = jax.jit(partial(jhg.einsum, "bmk,bkn->mbn", **options))(left, w)
        assert y.dtype == (dtype or usual)
        wide = float64(left) @ float64(w)
        np.testing.assert_allclose(float64(y), np.sin(wide).swapaxes(0, 1), atol=2**-7)


# Derivatives and transformations.


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_those_of_dequantized_weights(block):
    """Of activations, and of scales; values are numbers of 8 bits and have none."""
    x, w = activations(M, K), weights(BLOCKS[block])
    target = activations(M, N, dtype=jnp.float32)

    def loss(x: Any, scale: Any) -> Any:
        y = jhg.matmul(x, jhg.Quantized(w.values, scale), activation="silu")
        return jnp.sum(y.astype(jnp.float32) * target)

    def exact(x: Any, scale: Any) -> Any:
        y = x.astype(jnp.float32) @ jhg.Quantized(w.values, scale).dequantize()
        return jnp.sum(jax.nn.silu(y) * target)

    found = jax.jit(jax.grad(loss, (0, 1)))(x, w.scale)
    expected = jax.jit(jax.grad(exact, (0, 1)))(x, w.scale)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error = np.linalg.norm(float64(ours) - float64(theirs))
        assert error <= 1e-2 * np.linalg.norm(float64(theirs))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("function", ["matmul", "ragged_dot", "gated_linear_unit"])
def test_gradients_of_float16_keep_their_range(function, dtype):
    """Products of the values alone may be above it, cotangents times scales below."""
    x, wide = activations(M, K, dtype=jnp.float16), 0.02 * np.asarray(normal((K, N), seed=1))
    cotangent = np.asarray(activations(M, N, dtype=jnp.float16)) * np.float16(1e-3)
    w = quantize(wide[None] if function == "ragged_dot" else wide, dtype)

    def multiplied(x: Any, scale: Any, exact: bool = False) -> Any:
        right: Any = jhg.Quantized(w.values, scale)
        right = right.dequantize() if exact else right
        if function == "matmul":
            return jhg.matmul(x, right)
        if function == "ragged_dot":
            return jhg.ragged_dot(x, right, np.array([M]))
        return jhg.gated_linear_unit(x, (right, right), activation="silu")

    def pulled(multiplied: Any, x: Any, scale: Any, cotangent: Any) -> Any:
        return jax.vjp(multiplied, x, scale)[1](cotangent)

    found = jax.jit(partial(pulled, multiplied))(x, w.scale, cotangent)
    exact = jax.jit(partial(pulled, partial(multiplied, exact=True)))
    with jax.default_matmul_precision("highest"):
        expected = exact(np.float32(x), w.scale, np.float32(cotangent))
    for ours, theirs in zip(found, expected, strict=True):
        error = np.linalg.norm(float64(ours) - float64(theirs))
        assert error <= 2**-10 * np.linalg.norm(float64(theirs))


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_vector_is_multiplied(batch):
    x, w = activations(K), weights(shape=(*batch, K, N), axis=len(batch))
    expected, magnitude = float64(x) @ float64(w), np.abs(float64(x)) @ np.abs(float64(w))
    result = jhg.matmul(x, w)
    assert result.dtype == x.dtype
    assert_product(result, expected, magnitude)
    column = quantize(normal((K,), seed=1), jnp.int8)
    result = jhg.matmul(activations(M, K), column)
    wide = float64(activations(M, K))
    assert_product(result, wide @ float64(column), np.abs(wide) @ np.abs(float64(column)))


@pytest.mark.parametrize("block", ["columns", "k64"])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_is_a_loop(axes, block):
    x = np.asarray(activations(3, M, K) if axes[0] == 0 else activations(M, K))
    stacked = axes[1] == 0
    w = weights(BLOCKS[block], shape=(3, K, N) if stacked else (K, N), axis=int(stacked))
    if stacked and block == "columns":
        w = jhg.Quantized(w.values, jax.device_put(np.broadcast_to(w.scale, (3, 1, N))))
    mapped = jax.jit(jax.vmap(jhg.matmul, axes))(x, w)
    pick = [jax.tree.map(lambda a, i=i: np.asarray(a)[i], w) if stacked else w for i in range(3)]
    product = jax.jit(jhg.matmul)
    looped = np.stack([product(x[i] if axes[0] == 0 else x, pick[i]) for i in range(3)])
    np.testing.assert_allclose(float64(mapped), float64(looped), rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize(("platforms", "on_chip"), [(["cuda"], True), (["cuda", "cpu"], False)])
def test_an_exported_program_converts_weights_on_chip(platforms, on_chip):
    """Not one for several platforms: there a branch hides the weights from the product."""
    arguments = activations(M, K), weights(64, "packed")

    def product(x: Any, values: Any, scale: Any) -> Any:
        return jhg.matmul(x, jhg.Quantized(values, scale, packed=True), bias=jnp.ones(N))

    leaves = jax.tree.leaves(arguments)
    checks = [export.DisabledSafetyCheck.custom_call("jax_hopper_gemm.v1.launch")]
    whole = export.export(jax.jit(product), platforms=platforms, disabled_checks=checks)(*leaves)
    assert ("_bf16_i4_" in whole.mlir_module()) == on_chip
    if "cpu" in platforms:
        again = export.deserialize(whole.serialize())
        np.testing.assert_array_equal(again.call(*leaves), product(*leaves))


# Errors.

SQUARE = weights(shape=(K, K), axis=1)
NARROW, WIDE32 = activations(M, K), activations(M, K, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda: jhg.matmul(SQUARE, weights(64)), NotImplementedError, "a scale for each 64"),
        (lambda: jhg.matmul(SQUARE, weights(dtype="int4")), TypeError, "b is of int4 beside"),
        (lambda: jhg.matmul(WIDE32, weights()), TypeError, "quantize it"),
        (lambda: jhg.einsum("mk,kn->m", NARROW, weights()), NotImplementedError, "one product"),
        (lambda: weights().pack_weights(), TypeError, "not int4"),
        (
            lambda: jhg.matmul(NARROW, replace(weights(), packed=True)), TypeError,
            "b is packed, of values i8.*, expected u8",
        ),
        (
            lambda: jhg.matmul(NARROW, weights(), recipe=jhg.recipes.BlockScaling()),
            TypeError, "an operand is quantized",
        ),
    ],
)  # fmt: skip
def test_errors_name_the_way_out(function, error, text):
    with pytest.raises(error, match=text):
        function()
