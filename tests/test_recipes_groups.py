"""Recipes of ragged products, gates and experts: as of each group's quantized operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import step
from support.quantization import dequantize, quantize
from support.recipes import ALL, BLOCKS, CURRENT, GROUPED, INT8, normal

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

pytestmark = pytest.mark.slow


def ragged(x: Any, w: Any, sizes: Any, **options: Any) -> Any:
    return jhg.ragged_dot(x, w, sizes, **options)


@pytest.mark.parametrize("recipe", [BLOCKS, INT8, *GROUPED], ids=str)
def test_ragged_products_are_those_of_each_groups_quantized_operands(recipe):
    sizes = np.array([40, 0, 130, 17], np.int32)
    shapes = (200, 272), (4, 272, 144), (200, 144)
    x, w, dy = (np.asarray(normal(at, i, jnp.bfloat16)) for i, at in enumerate(shapes))
    y, (dx, dw) = jax.jit(partial(step, partial(ragged, sizes=sizes, recipe=recipe)))(dy, x, w)

    def of(a: Any, dtype: Any, block: Any) -> np.ndarray:
        return np.asarray(dequantize(quantize(a, dtype, block)), np.float64)

    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    blocks, current = (isinstance(recipe, type(x)) for x in (BLOCKS, CURRENT))
    if blocks:
        left, right, ct = of(x, e4m3, (1, 128)), of(w, e4m3, (1, 128, 128)), of(dy, e4m3, (1, 128))
    elif current:
        left, right, ct = of(x, e4m3, None), of(w, e4m3, None), of(dy, e5m2, None)
    else:
        left, right = of(x, jnp.int8, (1, None)), of(w, jnp.int8, (1, None, 1))
        ct = np.asarray(dy, np.float64)
    back = np.asarray(w, np.float64) if recipe == INT8 else right
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start := start + size)
        rough: dict[str, Any] = {"rtol": 2.0**-7, "atol": 2.0**-7 * float(np.abs(y).max())}
        np.testing.assert_allclose(np.asarray(y, float)[rows], left[rows] @ right[group], **rough)
        rough["atol"] = 2.0**-7 * float(np.abs(dx).max())
        np.testing.assert_allclose(np.asarray(dx, float)[rows], ct[rows] @ back[group].T, **rough)
        rough["atol"] = 2.0**-7 * float(np.abs(dw).max())
        if recipe not in GROUPED:  # in 16 bits
            wide = [a[rows] for a in (x, dy)]
        elif blocks:  # of 128 rows of a group
            columns = (128, recipe.gradient_columns)
            pairs = (x, (128, 1)), (dy, columns)
            wide = [of(a[rows], e4m3, block) if size else a[rows] for a, block in pairs]
        else:  # rows of no group have no say
            wide = [of(a[: sum(sizes)], t, None)[rows] for a, t in ((x, e4m3), (dy, e5m2))]
        exact = np.asarray(wide[0], np.float64).T @ np.asarray(wide[1], np.float64)
        np.testing.assert_allclose(np.asarray(dw, float)[group], exact, **rough)
    assert not np.any(np.asarray(y)[start:]) and not np.any(np.asarray(dx)[start:])


@pytest.mark.parametrize("recipe", [*ALL, *GROUPED], ids=str)
def test_ragged_products_run_on_kernels_of_8_bits(recipe):
    def step(x: Any, w: Any, sizes: Any) -> Any:
        product = partial(ragged, sizes=sizes, recipe=recipe, implementation="hopper")
        y, pull = jax.vjp(product, x, w)
        return y, *pull(y)

    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 512), (8, 512, 1024))]
    forward, *backward = specs_of(step, *arrays, jax.ShapeDtypeStruct((8,), jnp.int32))
    assert forward.grouped == "m" and (forward.a_block, forward.b_block) == (
        (1, 128) if isinstance(recipe, type(BLOCKS)) else (0, 0)
    )
    eight = {s.grouped: s.a_itemsize == 1 for s in backward}
    assert eight == {"m": recipe != INT8, "k": recipe in GROUPED}


@pytest.mark.parametrize("recipe", ALL, ids=str)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_gates_are_those_of_two_products(recipe, stacked, grouped):
    x = normal((192, 144), 0, jnp.bfloat16)
    lead = (3,) if grouped else ()
    weights = np.asarray(normal((*lead, 144, 2, 160), 1, jnp.bfloat16)) / 32
    pair = weights[..., 0, :], weights[..., 1, :]
    sizes = np.array([64, 100, 20], np.int32) if grouped else None
    dy = normal((192, 160), 2, jnp.bfloat16)

    def fused(x: Any, weights: Any) -> Any:
        return jhg.gated_linear_unit(x, weights, group_sizes=sizes, recipe=recipe)

    def apart(x: Any, weights: Any, **options: Any) -> Any:
        product = partial(jhg.matmul, **options)
        if grouped:
            product = partial(jhg.ragged_dot, group_sizes=sizes, **options)
        both = (weights[..., 0, :], weights[..., 1, :]) if stacked else weights
        gate, up = (product(x, w, preferred_element_type=jnp.float32) for w in both)
        return (jax.nn.silu(gate) * up).astype(jnp.bfloat16)

    def error(got: Any, exact: Any) -> float:
        got, exact = (np.asarray(a, np.float64) for a in (got, exact))
        return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))

    arguments = x, weights if stacked else pair
    y, gradients = jax.jit(partial(step, fused))(dy, *arguments)
    assert error(y, jax.jit(partial(apart, recipe=recipe))(*arguments)) < 2.0**-7
    plain, plain_gradients = jax.jit(partial(step, apart))(dy, *arguments)
    assert error(y, plain) < 0.06
    for got, exact in zip(*map(jax.tree.leaves, (gradients, plain_gradients)), strict=True):
        # Of the gate's derivative, another 8-bit rounding, and float8_e5m2 of two digits.
        assert error(got, exact) < (0.03 if recipe == INT8 else 0.1)


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS], ids=str)
def test_gates_run_on_kernels_of_8_bits(recipe):
    def unit(x: Any, weights: Any) -> Any:
        return jhg.gated_linear_unit(x, weights, recipe=recipe, implementation="hopper")

    shapes = (1024, 512), (512, 2, 1024)
    found = specs_of(unit, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    assert {spec.a_dtype for spec in found} == {"float8_e4m3fn"}
    assert len(found) == (2 if recipe == BLOCKS else 1)
    assert "matrix" in [o.kind for o in found[-1].graph.operands] or recipe == CURRENT


def test_experts_take_the_recipe_and_the_router_does_not():
    def layer(x: Any, *weights: Any) -> Any:
        y, _ = jhg.moe.mixture_of_experts(
            x, *weights, experts_per_token=2, recipe=BLOCKS, implementation="hopper"
        )
        return y

    shapes = (1024, 512), (512, 8), (8, 512, 2, 256), (8, 256, 512)
    router, *experts = specs_of(layer, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    assert router.a_dtype == "bfloat16" and len(experts) == 3
    assert all((x.grouped, x.a_block, x.b_block) == ("m", 1, 128) for x in experts)
