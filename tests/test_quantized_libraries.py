"""Arrays and layers of other libraries that quantize: Qwix, Flax, AQT."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.quantization import quantize

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

M, K, N = 64, 512, 256
S = jax.ShapeDtypeStruct


class QArray(NamedTuple):
    """The fields of Qwix's."""

    qvalue: Any
    scale: Any
    zero_point: Any = None


def array(shape: tuple[int, ...], scales: tuple[int, ...], seed: int) -> tuple[QArray, np.ndarray]:
    """Returns an array of e4m3 with random scales, and its values in float64."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(jnp.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, scales).astype(np.float32)
    wide = scale
    for axis, (extent, count) in enumerate(zip(shape, scales, strict=True)):
        wide = np.repeat(wide, extent // count, axis)
    return QArray(*map(jax.device_put, (values, scale))), np.asarray(values, np.float64) * wide


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 1), (1, 1)), ((M, 1), (1, N)), ((M, 4), (4, N)), ((M, 2), (1, N)), ((1, 1), (2, 8)),
        ((16, 1), (1, 4)),
    ],
)  # fmt: skip
def test_a_qarray_is_taken_as_it_is(left, right):
    """Scales of a tensor, of channels, and of tiles of 128, 256 along K and of others across it."""
    (a, a_wide), (b, b_wide) = array((M, K), left, 0), array((K, N), right, 1)
    numbers: Any = ((1,), (0,)), ((), ())
    exact = a_wide @ b_wide
    products = jhg.matmul, partial(jhg.dot_general, dimension_numbers=numbers)
    for result in (jax.jit(product)(a, b) for product in products):
        np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


def test_tiles_of_k_run_on_kernels():
    a = QArray(S((M, K), jnp.float8_e4m3fn), S((M, 2), jnp.float32))
    b = QArray(S((K, N), jnp.float8_e4m3fn), S((2, 2), jnp.float32))
    product = partial(jhg.matmul, implementation="hopper")
    (spec,) = specs_of(product, a, b)
    assert (spec.a_block, spec.b_block) == (1, 128)


@pytest.mark.parametrize(
    ("a", "text"),
    [
        (
            array((M, K), (M, 1), 0)[0]._replace(zero_point=np.zeros((M, 1), np.float32)),
            "zero points beside a quantized",
        ),
        (array((M, K), (M, 8), 0)[0], "a scale for each 64 of the contracted axis"),
    ],
)
def test_what_no_kernel_multiplies_is_named(a, text):
    with pytest.raises(NotImplementedError, match=text):
        jhg.matmul(a, array((K, N), (1, N), 1)[0])


def test_indices_of_a_table_are_refused():
    """Qwix's nf4; its int3 is stored as numbers."""
    qwix = pytest.importorskip("qwix")
    x = np.ones((4, K), jnp.bfloat16)
    w = jax.device_put(np.random.default_rng(0).standard_normal((K, N)).astype(np.float32))
    nf4, int3 = (qwix.quantize(w, qtype, channelwise_axes=(1,)) for qtype in ("nf4", "int3"))
    with pytest.raises(TypeError, match="b is of nf4, whose values .* are indices of a table"):
        jhg.matmul(x, nf4)
    exact = np.asarray(x, np.float64) @ np.asarray(qwix.dequantize(int3), np.float64)
    np.testing.assert_allclose(np.asarray(jhg.matmul(x, int3), np.float64), exact, 1e-2, 1)


def test_qwix_quantizes_them():
    qwix = pytest.importorskip("qwix")
    x, w = (jnp.asarray(np.random.default_rng(i).standard_normal(s)) for i, s in
            enumerate(((M, K), (K, N))))  # fmt: skip
    quantize = partial(qwix.quantize, qtype="float8_e4m3fn")
    a = quantize(x, channelwise_axes=(0,), tiled_axes={1: 128})
    b = quantize(w, channelwise_axes=(1,), tiled_axes={0: 128})
    np.testing.assert_allclose(jhg.matmul(a, b), qwix.dot(a, b), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["int8", "packed", "zero points", "state"])
def test_flax_stores_them(kind):
    """Arrays alone; what is static is that of the one restored into, as for Flax's own classes."""
    serialization = pytest.importorskip("flax.serialization")
    w = np.random.default_rng(0).standard_normal((K, N)).astype(np.float32)
    made: dict[str, Any] = {
        "int8": lambda w: jhg.quantize(w, jnp.int8, (None, 1)),
        "packed": lambda w: jhg.quantize(w, jnp.int4, (128, 1)).pack_weights(),
        "zero points": lambda w: jhg.quantize(w, jnp.int4, (128, 1), symmetric=False),
        "state": lambda _: jhg.recipes.DelayedScaling(jnp.arange(3.0), jnp.ones((3, 4))),
    }
    tree = {"layer": jax.jit(made[kind])(w)}
    like = jax.tree.map(jnp.zeros_like, tree)
    again = serialization.from_bytes(like, serialization.to_bytes(tree))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for x, y in zip(*map(jax.tree.leaves, (again, tree)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match=r"a stored one has \['values'\], expected \['"):
        serialization.from_state_dict(like, {"layer": {"values": 1}})


@pytest.mark.parametrize("function", ["matmul", "ragged_dot", "gated_linear_unit"])
def test_a_flax_variable_may_hold_one(function):
    nnx = pytest.importorskip("flax.nnx")
    x = np.ones((M, K), jnp.bfloat16)
    w = quantize(np.ones((1, K, N), np.float32), jnp.int8, (None, None, 1))
    if function != "ragged_dot":
        w = jax.tree.map(lambda array: array[0], w)
    products: dict[str, Any] = {
        "matmul": jhg.matmul, "ragged_dot": lambda x, w: jhg.ragged_dot(x, w, jnp.array([M])),
        "gated_linear_unit": lambda x, w: jhg.gated_linear_unit(x, (w, w)),
    }  # fmt: skip
    product = products[function]
    np.testing.assert_array_equal(product(x, nnx.Param(w)), product(x, w))


def test_flax_products_of_8_bits_run_on_kernels():
    """Scales that follow the products of its gradients are in their kernels.

    JAX keeps that of the forward pass in a `custom_vjp_call`, which `accelerate` does not open.
    """
    nn = pytest.importorskip("flax.linen")
    from flax.linen import fp8_ops

    layer = nn.Dense(N, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, dtype=jnp.bfloat16)
    x = S((256, K), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def loss(variables: Any, x: Any) -> Any:
        return jnp.sum(layer.apply(variables, x).astype(jnp.float32) ** 2)

    step = jhg.accelerate(jax.value_and_grad(loss, (0, 1)), implementation="hopper")
    forward, *backward = specs_of(step, variables, x)
    assert forward.a_dtype == forward.b_dtype == "float8_e4m3fn"
    dtypes = [{spec.a_dtype, spec.b_dtype} for spec in backward]
    assert dtypes == [{"float8_e4m3fn", "float8_e5m2"}] * 2
    assert all("mul" in {node.op for node in spec.graph.nodes} for spec in backward)


def test_aqt_products_of_int8_run_on_kernels():
    aqt = pytest.importorskip("aqt.jax.v2.config")
    dot_general = aqt.config_v4(fwd_bits=8, dlhs_bits=None, drhs_bits=None)
    numbers: Any = ((1,), (0,)), ((), ())

    def product(x: Any, w: Any) -> Any:
        return dot_general(x, w, numbers)

    shapes = S((256, K), jnp.bfloat16), S((K, N), jnp.bfloat16)
    found = specs_of(jhg.accelerate(product, implementation="hopper"), *shapes)
    assert [(spec.a_dtype, spec.b_dtype) for spec in found] == [("int8", "int8")]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_jax_products_by_narrow_weights_run_on_kernels_that_read_them(dtype):
    """JAX multiplies arrays of two dtypes as they are, and so do models with weights of 8 bits."""
    x, w, experts = S((M, K), jnp.bfloat16), S((K, N), dtype), S((4, K, N), dtype)
    numbers: Any = ((1,), (0,)), ((), ())

    def products(x: Any, w: Any, experts: Any, scale: Any, sizes: Any) -> Any:
        y = jax.lax.dot_general(x, w, numbers, preferred_element_type=x.dtype)
        z = jax.lax.dot_general(w.T, x.T, numbers, preferred_element_type=jnp.float32).T
        return y * scale, z, jax.lax.ragged_dot(x, experts, sizes) * scale

    arguments = x, w, experts, S((N,), jnp.bfloat16), S((4,), jnp.int32)
    found = jhg.explain(products, *arguments, implementation="hopper")
    assert [x.runner for x in found.products] == ["kernel"] * 3
    specs = specs_of(jhg.accelerate(products, implementation="hopper"), *arguments)
    name = jnp.dtype(dtype).name
    assert [(spec.a_dtype, spec.b_dtype) for spec in specs] == [("bfloat16", name)] * 3

    rng = np.random.default_rng(0)
    arrays = [rng.integers(-8, 8, x.shape).astype(x.dtype) for x in arguments[:-1]]
    arrays.append(np.array([20, 0, 30, 4], np.int32))
    for ours, plain in zip(
        jax.jit(jhg.accelerate(products, fuse=False))(*arrays), jax.jit(products)(*arrays),
        strict=True,
    ):  # fmt: skip
        assert ours.dtype == plain.dtype
        np.testing.assert_array_equal(ours, plain)
