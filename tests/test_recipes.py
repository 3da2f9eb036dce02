"""Recipes: products and gradients of quantized operands, against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.program_inspection import step
from support.quantization import dequantize, quantize
from support.recipes import ALL, BLOCKS, COLUMNS, CURRENT, INT8, normal

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes
from jax_hopper_gemm.testing.lowered import specs_of

pytestmark = pytest.mark.slow

M, K, N = 200, 272, 144
RECIPES = [
    CURRENT, BLOCKS, recipes.CurrentScaling("float8_e4m3fn"), recipes.BlockScaling("float8_e5m2"),
    COLUMNS,
]  # fmt: skip


def rounded(x: Any, dtype: Any, recipe: Any, axis: int, rows: int = 1) -> np.ndarray:
    """A matrix as a recipe quantizes it, in float64; blocks lie along `axis`."""
    block = [rows, rows]
    block[axis] = 128
    blocks = None if isinstance(recipe, recipes.CurrentScaling) else tuple(block)
    return np.asarray(dequantize(quantize(x, dtype, blocks)), np.float64)


def expected(x: Any, w: Any, dy: Any, recipe: Any) -> tuple[np.ndarray, ...]:
    """(M, N), (M, K) and (K, N): the product and its gradients, in float64."""
    of = partial(rounded, recipe=recipe)
    e4m3, gradients = jnp.float8_e4m3fn, recipe.gradients
    weights = of(w, e4m3, axis=0, rows=128)
    y = of(x, e4m3, axis=1) @ weights
    dx = of(dy, gradients, axis=1) @ weights.T
    columns = getattr(recipe, "gradient_columns", 1)
    dw = of(x, e4m3, axis=0).T @ of(dy, gradients, axis=0, rows=columns)
    return y, dx, dw


def near(got: Any, exact: Any) -> None:
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_product_and_gradients_are_those_of_the_quantized_operands(recipe):
    x, w, dy = normal((M, K), 0), normal((K, N), 1), normal((M, N), 2)
    y, (dx, dw) = jax.jit(partial(step, partial(jhg.matmul, recipe=recipe)))(dy, x, w)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32,) * 3
    for got, exact in zip((y, dx, dw), expected(x, w, dy, recipe), strict=True):
        near(got, exact)
    plain = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    error = np.linalg.norm(y - plain) / np.linalg.norm(plain)
    assert 1e-3 < error < 0.06, "8 bits round"


@pytest.mark.parametrize("recipe", [*RECIPES[:2], COLUMNS], ids=str)
def test_axes_of_dot_general_may_be_any(recipe):
    """Batch and contracted axes anywhere, several free and contracted ones."""
    x, w = normal((3, 8, 4, 40, 5), 0), normal((40, 3, 24, 8), 1)  # b k1 m1 k2 m2; k2 b n k1
    numbers: Any = ((1, 3), (3, 0)), ((0,), (1,))
    product = partial(jhg.dot_general, dimension_numbers=numbers, recipe=recipe)
    dy = normal((3, 4, 5, 24), 2)
    y, (dx, dw) = jax.jit(partial(step, product))(dy, x, w)
    assert y.shape == dy.shape and dx.shape == x.shape and dw.shape == w.shape

    def matrices(y: Any, x: Any, w: Any) -> Any:
        y, x, w = map(np.asarray, (y, x, w))
        left = x.transpose(0, 2, 4, 1, 3).reshape(3, 20, 320)
        return y.reshape(3, 20, 24), left, w.transpose(1, 3, 0, 2).reshape(3, 320, 24)

    of_matrices = jax.jit(partial(step, partial(jhg.matmul, recipe=recipe)))
    expected = of_matrices(*matrices(dy, x, w))
    jax.tree.map(near, matrices(y, dx, dw), (expected[0], *expected[1]))


@pytest.mark.parametrize("epilogue", [None, lambda y: 3 * y])
@pytest.mark.parametrize("recipe", [BLOCKS, INT8], ids=str)
def test_the_second_operand_of_an_einsum_is_the_weights_in_any_order(recipe, epilogue):
    x, w, dy = normal((M, K), 0), normal((K, N), 1), normal((M, N), 2)
    by = {"epilogue": epilogue, "recipe": recipe}
    expected = jax.jit(partial(step, partial(jhg.matmul, **by)))(dy, x, w)
    for order in ("mn", "nm"):

        def product(x: Any, w: Any, order: str = order) -> Any:
            y = jhg.einsum(f"mk,kn->{order}", x, w, **by)
            return y if order == "mn" else y.T

        jax.tree.map(near, jax.jit(partial(step, product))(dy, x, w), expected)


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
def test_the_dtype_of_two_dtypes_is_that_of_jax(recipe):
    x: Any = np.ones((8, 16), np.float16)
    w: Any = np.ones((16, 16), jnp.bfloat16)
    numbers, sizes = ((1,), (0,)), jax.device_put(np.array([8], np.int32))
    plain = lax.dot_general(x, w, (numbers, ((), ()))), lax.ragged_dot(x, w[None], sizes)
    ours = (
        jhg.dot_general(x, w, (numbers, ((), ())), recipe=recipe),
        jhg.ragged_dot(x, w[None], sizes, recipe=recipe),
    )
    for y, like in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(y, like, strict=True)


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
def test_transformations_give_the_same_numbers(recipe):
    xs, w = normal((3, 136, 144), 0), normal((144, 128), 1)

    dy = normal((136, 128), 2)  # one that depends on y may round to another number of 8 bits

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(dy * jhg.matmul(x, w, recipe=recipe))

    gradient = jax.grad(loss)
    each = [jax.jit(gradient)(w, x) for x in np.asarray(xs)]
    near(jax.jit(jax.vmap(gradient, (None, 0)))(w, xs), each)

    def scanned(w: Any, loss: Any) -> Any:
        return lax.scan(lambda total, x: (total + loss(w, x), None), 0.0, xs)[0]

    for own in (loss, jax.checkpoint(loss)):
        got = jax.jit(jax.grad(partial(scanned, loss=own)))(w)
        near(got, np.sum(np.asarray(each, np.float64), 0))


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
def test_what_follows_a_product_is_differentiated(recipe):
    x, w, bias = (normal(shape, i, jnp.bfloat16) for i, shape in enumerate(((M, K), (K, N), (N,))))

    def fused(x: Any, w: Any, bias: Any) -> Any:
        return jhg.matmul(
            x, w, bias=bias, activation="silu", epilogue=lambda y: (y, jnp.max(y)), recipe=recipe
        )

    def apart(x: Any, w: Any, bias: Any) -> Any:
        y = jhg.matmul(x, w, recipe=recipe, preferred_element_type=jnp.float32)
        y = jax.nn.silu(y + bias.astype(jnp.float32))
        return y.astype(jnp.bfloat16), jnp.max(y)

    c = np.ones((M, N), np.float32)
    assert jhg.matmul(x, w, c=c, recipe=recipe).dtype == c.dtype
    for got, exact in zip(fused(x, w, bias), jax.jit(apart)(x, w, bias), strict=True):
        assert got.dtype == exact.dtype
        np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (got, exact)), rtol=2**-7)
    both = (
        jax.grad(lambda *a, f=f: f(*a)[0].astype(jnp.float32).sum(), (0, 1, 2))
        for f in (fused, apart)
    )
    for got, exact in zip(*(jax.jit(f)(x, w, bias) for f in both), strict=True):
        got, exact = (np.asarray(z, np.float32) for z in (got, exact))
        assert np.linalg.norm(got - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize(("recipe", "blocks"), [(CURRENT, 0), (BLOCKS, 1)], ids=str)
def test_all_three_products_run_on_kernels_of_8_bits(recipe, blocks):
    def step(x: Any, w: Any) -> Any:
        product = partial(jhg.matmul, recipe=recipe, implementation="hopper")
        y, pull = jax.vjp(product, x, w)
        return y, *pull(y)

    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 512), (512, 2048)))
    forward, *backward = specs_of(step, *shapes)
    assert forward.a_dtype == forward.b_dtype == "float8_e4m3fn"
    assert len(backward) == 2 and all(spec.promoted for spec in backward)
    assert all(recipe.gradients in (spec.a_dtype, spec.b_dtype) for spec in backward)
    assert all(bool(spec.a_block) == bool(blocks) for spec in (forward, *backward))


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
def test_derivatives_of_any_order_and_mode_are_products_of_the_recipe(recipe):
    """What is linear in an operand stays it: a tangent is quantized as that operand is."""
    x, w, t = normal((128, 136), 0), normal((136, 128), 1), normal((128, 136), 2)
    product = partial(jhg.matmul, recipe=recipe)
    y, tangent = jax.jit(lambda x, t: jax.jvp(lambda x: product(x, w), (x,), (t,)))(x, t)
    near(y, product(x, w))
    near(tangent, product(t, w))

    def cubed(x: Any) -> Any:
        return jnp.sum(product(x, w) ** 3) / 3

    twice = jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(cubed)(x), t)))(x)
    exact = 2 * (np.asarray(y) * (np.asarray(t) @ np.asarray(w))) @ np.asarray(w).T
    assert np.linalg.norm(twice - exact) < 0.15 * np.linalg.norm(exact)


ONES = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((ONES, ONES, "fp8"), TypeError, "recipe is 'fp8', expected"),
        ((ONES.astype(int), ONES, BLOCKS), TypeError, "takes floats"),
        (
            (quantize(ONES), ONES, BLOCKS), TypeError,
            "an operand is quantized",
        ),
        (
            (ONES, ONES, recipes.CurrentScaling("int8")),  # pyright: ignore
            ValueError, "gradients of the recipe are 'int8', expected the name 'float8_",
        ),
        (
            (ONES, ONES, replace(BLOCKS, gradient_columns=64)),  # pyright: ignore
            ValueError, "gradient_columns of the recipe is 64, expected 1 or 128",
        ),
        (
            (ONES, ONES, replace(BLOCKS, grouped_weights="no")),  # pyright: ignore
            TypeError, "grouped_weights of the recipe is 'no', expected True or False",
        ),
    ],
)  # fmt: skip
def test_a_wrong_recipe_or_operand_is_named(arguments, error, text):
    x, w, recipe = arguments
    with pytest.raises(error, match=text):
        jhg.matmul(x, w, recipe=recipe)


def test_a_recipe_alone_rounds_cotangents():
    x = np.ones((128, 128), np.float32)
    with pytest.raises(ValueError, match="cotangent_dtype is bfloat16 and there is a recipe"):
        jhg.dot_general(x, x, (((1,), (0,)), ((), ())), cotangent_dtype=jnp.bfloat16, recipe=BLOCKS)


def test_scales_of_tensors_are_not_batch_invariant():
    x = np.ones((128, 128), np.float32)
    with pytest.raises(ValueError, match="take BlockScaling"):
        jhg.matmul(x, x, recipe=CURRENT, batch_invariant=True)


# int8.


def test_int8_runs_forwards_alone():
    x, w = normal((M, K), 0, jnp.bfloat16), normal((K, N), 1, jnp.bfloat16)
    y, pull = jax.vjp(partial(jhg.matmul, recipe=INT8), x, w)
    left, right = (
        np.asarray(dequantize(quantize(a, jnp.int8, block)), np.float64)
        for a, block in ((x, (1, None)), (w, (None, 1)))
    )
    exact = left @ right
    rough: dict[str, Any] = {"rtol": 2.0**-8, "atol": 2.0**-14 * np.abs(exact).max()}  # bfloat16's
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, **rough)
    plain = jax.vjp(jhg.matmul, x, w)[1](y)
    for got, exact in zip(pull(y), plain, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(exact, np.float32))

    def step(x: Any, w: Any) -> Any:
        y, pull = jax.vjp(partial(jhg.matmul, recipe=INT8, implementation="hopper"), x, w)
        return y, *pull(y)

    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 512), (512, 2048)))
    forward, *backward = specs_of(step, *shapes)
    assert forward.a_dtype == forward.b_dtype == "int8"
    assert [o.kind for o in forward.graph.operands] == ["column", "row"]
    assert {spec.a_dtype for spec in backward} == {"bfloat16"}


# Functions that follow.


@pytest.mark.parametrize("recipe", ALL, ids=str)
def test_what_follows_a_product_runs_in_its_kernel(recipe):
    def function(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        return jhg.matmul(
            x, w, bias=bias, residual=residual, activation="gelu", recipe=recipe,
            implementation="hopper",
        )  # fmt: skip

    shapes = (1024, 512), (512, 2048), (2048,), (1024, 2048)
    (spec,) = specs_of(function, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    kinds = [operand.kind for operand in spec.graph.operands]
    assert {"row", "matrix"} <= set(kinds) and "tanh" in str(spec.graph)
    assert bool(spec.a_block) == (recipe == BLOCKS)


def test_shards_and_exported_programs_quantize():
    x, w = normal((512, 256), 0, jnp.bfloat16), normal((256, 128), 1, jnp.bfloat16) / 16
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jhg.matmul(x, w, activation="silu", recipe=BLOCKS).astype(jnp.float32) ** 2)

    sharded = jax.shard_map(
        lambda *a: lax.psum(loss(*a), "d"), mesh=mesh, in_specs=(spec("d"), spec()),
        out_specs=spec(),
    )  # fmt: skip
    gradients = [jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (loss, sharded)]
    for got, exact in zip(*gradients, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(exact, np.float32))
    arguments = jax.export.symbolic_args_specs((x, w), ["m, 256", "256, 128"])
    exported = jax.export.export(jax.jit(loss), platforms=["cpu"])(*arguments)
    np.testing.assert_allclose(exported.call(x, w), jax.jit(loss)(x, w), rtol=1e-3)


def test_mapped_products_have_scales_of_their_own():
    xs = np.stack([np.asarray(normal((64, 128), i)) * np.float32(10) ** i for i in range(3)])
    w = normal((128, 64), 5)
    product = partial(jhg.matmul, recipe=CURRENT)
    each = np.stack([product(x, w) for x in xs])
    near(jax.vmap(product, (0, None))(xs, w), each)
    mapped = jax.jit(jax.vmap(product, (2, None), 1))(np.moveaxis(xs, 0, 2), w)
    near(np.swapaxes(np.asarray(mapped), 0, 1), each)


def test_reports_name_the_products_of_8_bits():
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jhg.matmul(x, w, activation="relu", recipe=BLOCKS).astype(jnp.float32))

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 512), (512, 2048))]
    report = str(jhg.explain(jax.value_and_grad(loss, (0, 1)), *shapes))
    assert "3 on kernels" in report and "scales of blocks of 1x128 and 128x128" in report
    explanation = str(jhg.explain(jhg.matmul, *shapes, recipe=CURRENT))
    assert "f8_e4m3fn" in explanation or "f8" in explanation
