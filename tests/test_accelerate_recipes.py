"""`accelerate` with a recipe: which products run in 8 bits, and what counts as their weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes
from jax_hopper_gemm.interop.weights import Weights
from jax_hopper_gemm.testing.lowered import specs_of

pytestmark = pytest.mark.slow

CURRENT, BLOCKS = recipes.CurrentScaling(), recipes.BlockScaling()
S = jax.ShapeDtypeStruct
X, W = S((8, 128, 512), jnp.bfloat16), (S((512, 1024), jnp.bfloat16), S((1024, 512), jnp.bfloat16))
STACK = tuple(S((4, *w.shape), w.dtype) for w in W)


def normal(like: Any, seed: int) -> jax.Array:
    x = np.random.default_rng(seed).standard_normal(like.shape) / np.sqrt(like.shape[-2])
    return jnp.asarray(x, like.dtype)


def layer(x: Any, w: Any) -> Any:
    return x + jax.nn.silu(x @ w[0]) @ w[1]


def loss(params: Any, x: Any, run: Any = layer) -> Any:
    y, _ = lax.scan(lambda x, w: (run(x, w), None), x, params)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def step(params: Any, x: Any, run: Any = layer) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, x, run)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS], ids=str)
def test_products_are_those_of_the_recipe(recipe):
    x, w = normal(X, 0), tuple(normal(like, i) for i, like in enumerate(W))
    single = jhg.accelerate(jnp.matmul, recipe=recipe)(x, w[0])
    product = jhg.matmul(x, w[0], recipe=recipe)
    np.testing.assert_array_equal(np.asarray(single, np.float32), np.asarray(product, np.float32))
    got, plain, x = (
        np.asarray(y, np.float32)
        for y in (jhg.accelerate(layer, recipe=recipe)(x, w), layer(x, w), x)
    )
    error = np.linalg.norm(got - plain) / np.linalg.norm(plain - x)
    assert 0.02 < error < 0.07


@pytest.mark.parametrize("run", [layer, jax.checkpoint(layer)], ids=["plain", "checkpoint"])
def test_gradients_that_a_step_takes_run_in_8_bits(run):
    found = specs_of(jhg.accelerate(partial(step, run=run), recipe=BLOCKS), STACK, X)
    assert {spec.a_dtype for spec in found} == {"float8_e4m3fn"}
    blocks = [(spec.a_block, spec.b_block) for spec in found]
    # Weights are known in both passes; a gradient of weights multiplies activations alone.
    assert blocks.count((1, 1)) == 2 and {*blocks} == {(1, 1), (1, 128)}
    assert any(spec.epilogue for spec in found), "no kernel takes along what follows"
    found = specs_of(jhg.accelerate(step, recipe=CURRENT), STACK, X)
    dtypes = {dtype for spec in found for dtype in (spec.a_dtype, spec.b_dtype)}
    assert len(found) == 6 and dtypes == {"float8_e4m3fn"}


def test_gradients_of_what_it_returns_know_their_cotangents():
    found = specs_of(jax.grad(jhg.accelerate(loss, recipe=CURRENT)), STACK, X)
    assert sum("float8_e5m2" in (spec.a_dtype, spec.b_dtype) for spec in found) == 4
    found = specs_of(jax.grad(jhg.accelerate(loss, recipe=recipes.Int8Forward())), STACK, X)
    dtypes = [spec.a_dtype for spec in found]
    assert dtypes.count("int8") == 2 and {*dtypes} == {"int8", "bfloat16"}


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS], ids=str)
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_are_near_those_of_16_bits(recipe, inside):
    params, x = jax.tree.map(lambda like: normal(like, 3)[:2], STACK), normal(X, 0)[:2]
    plain = jax.jit(jax.grad(loss))(params, x)
    wrap = partial(jhg.accelerate, recipe=recipe)
    ours = jax.jit(wrap(jax.grad(loss)) if inside else jax.grad(wrap(loss)))(params, x)
    for got, exact in zip(*map(jax.tree.leaves, (ours, plain)), strict=True):
        got, exact = (np.asarray(y, np.float32) for y in (got, exact))
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert 0.01 < error < 0.15


def test_attention_and_other_dtypes_stay_as_they_are():
    def attend(q: Any, k: Any, router: Any) -> Any:
        scores = jnp.einsum("bqd,bkd->bqk", q, k)
        return scores, q.astype(jnp.float32) @ router

    shapes = X, X, S((512, 16), jnp.float32)
    found = specs_of(jhg.accelerate(attend, recipe=BLOCKS, implementation="hopper"), *shapes)
    assert [spec.a_dtype for spec in found] == ["bfloat16", "float32"]


def test_ragged_products_take_the_recipe():
    def experts(x: Any, w: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, w, sizes)

    arrays = [S(shape, jnp.bfloat16) for shape in ((4096, 512), (8, 512, 1024))]
    (spec,) = specs_of(jhg.accelerate(experts, recipe=BLOCKS), *arrays, S((8,), jnp.int32))
    assert spec.grouped == "m" and (spec.a_block, spec.b_block) == (1, 128)
    eight = [S(x.shape, jnp.int8) for x in arrays]
    accelerated = jhg.accelerate(experts, recipe=BLOCKS)
    assert jax.eval_shape(accelerated, *eight, S((8,), jnp.int32)).shape == (4096, 1024)


def test_reports_take_the_recipe():
    report = jhg.explain(step, STACK, X, recipe=BLOCKS)
    assert report.kernel_share == 1 and len(report.products) == 6
    assert any("fused: " in product.fused for product in report.products)


@pytest.mark.parametrize(
    ("recipe", "error", "text"),
    [("blocks", TypeError, "accelerate: recipe is 'blocks', expected one of")],
)
def test_a_wrong_recipe_is_named(recipe, error, text):
    with pytest.raises(error, match=text):
        jhg.accelerate(layer, recipe=recipe)


def test_weights_are_arguments_however_they_are_cut():
    def program(x: Any, stack: Any) -> Any:
        cast = jax.jit(lambda w: w.astype(jnp.bfloat16).T)(stack[0])
        whole, ys = lax.scan(lambda c, w: (c + x, w[:2]), x, stack)
        return cast, x * 2, ys, whole, jnp.sin(stack)[0], stack[1, :3]

    jaxpr = jax.make_jaxpr(program)(S((4, 8), jnp.float32), S((3, 4, 8), jnp.float32)).jaxpr
    weights = Weights(jaxpr, (True, True))
    assert weights.marks(jaxpr.outvars) == (True, False, True, False, False, True)
    assert not any(Weights(jaxpr, (False, False)).marks(jaxpr.outvars))


def test_weights_are_known_within_loops_and_branches():
    def program(x: Any, w: Any, flag: Any) -> Any:
        x = lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ w, x)
        x = lax.cond(flag, lambda x: x @ w, lambda x: x @ w.T, x)
        return lax.fori_loop(0, 3, lambda i, c: c @ w, x)

    shapes = S((1024, 512), jnp.bfloat16), S((512, 512), jnp.bfloat16), S((), jnp.bool_)
    found = specs_of(jhg.accelerate(program, recipe=BLOCKS, implementation="hopper"), *shapes)
    assert len(found) == 4 and {(s.a_block, s.b_block) for s in found} == {(1, 128)}


def test_products_that_state_a_sharding_take_the_recipe():
    """As all gradients by JAX do on Explicit axes, and products whose K is sharded."""

    def two(params: Any, x: Any, *specs: P) -> Any:
        hidden, out = specs or (None, None)
        h = jax.nn.silu(jnp.matmul(x, params[0], out_sharding=hidden))
        return jnp.mean(jnp.matmul(h, params[1], out_sharding=out).astype(jnp.float32) ** 2)

    params, x = tuple(map(normal, W, (0, 1))), normal(X, 2)[0]
    whole = jax.jit(jhg.accelerate(jax.value_and_grad(two), recipe=BLOCKS))(params, x)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        own = jax.reshard(params[0], P(None, "b")), jax.reshard(params[1], P("b", None))
        sharded = jax.value_and_grad(lambda p, x: two(p, x, P("a", "b"), P("a", None)))
        run = jhg.accelerate(sharded, recipe=BLOCKS)
        x = jax.reshard(x, P("a", None))
        assert str(jax.make_jaxpr(run)(own, x)).count("recipe=ByRecipe") == 5
        found = jax.jit(run)(own, x)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, whole)), strict=True):
        error = np.linalg.norm(np.asarray(ours, np.float32) - np.asarray(theirs, np.float32))
        assert error < 0.05 * np.linalg.norm(np.asarray(theirs, np.float32))
