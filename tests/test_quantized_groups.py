"""Ragged and gated products of two quantized operands, on kernels and on XLA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

M, K, N, G = 96, 256, 160, 4
SIZES = jnp.array([30, 0, 41, 20], jnp.int32)  # of 96 rows
ROWS = jnp.arange(M, dtype=jnp.int32)[::-1] - 1
# Blocks of rows (M, K) and of weights (G, K, N); the kernel's blocks of scales along K, or none.
BLOCKS = {
    "tensors": (None, None, None),
    "rows and columns": ((1, None), (1, None, 1), None),
    "blocks": ((1, 128), (1, 128, 128), (1, 128)),
    "blocks of columns": ((1, 128), (1, 128, 1), (1, 1)),
    "blocks of rows": ((128, 128), (None, 128, 128), (1, 128)),
    "one block of K": ((1, None), (1, 128, 128), (1, 128)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps": {"bias": jnp.ones((G, N)), "activation": "gelu"},
    "picked": {"row_indices": ROWS},
    "offset": {"group_offset": 1, "sizes": jnp.array([5, 30, 0, 41, 20, 9], jnp.int32)},
}


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / 8, jnp.float32)


def close(found: Any, wanted: Any, bound: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    error = np.linalg.norm(np.asarray(found, np.float64) - np.asarray(wanted, np.float64))
    assert error <= bound * np.linalg.norm(np.asarray(wanted, np.float64))


def operands(kind: str, dtype: str) -> tuple[jhg.Quantized, jhg.Quantized, jhg.Quantized]:
    rows, columns, _ = BLOCKS[kind]
    gate, up = (jhg.quantize(normal(G, K, N, seed=i), dtype, columns) for i in (1, 2))
    return jhg.quantize(normal(M, K), dtype, rows), gate, up


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_ragged_products_are_those_of_the_dequantized_arrays(kind, name, dtype):
    x, w, _ = operands(kind, dtype)
    options = dict(OPTIONS[name])
    sizes = options.pop("sizes", SIZES)

    def product(x: Any, w: Any) -> Any:
        return jhg.ragged_dot(x, w, sizes, **options)

    found = jax.jit(product)(x, w)
    assert found.dtype == jnp.float32
    options["precision"] = "highest"
    close(found, product(x.dequantize(), w.dequantize()))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_gated_products_are_those_of_the_dequantized_arrays(kind, stacked, grouped):
    rows, columns, _ = BLOCKS[kind]
    x, gate, up = (normal(M, K), *(normal(G, K, N, seed=i) for i in (1, 2)))
    options: dict[str, Any] = {"bias": (jnp.ones((G, N)), jnp.ones((G, N)) / 2)}
    options["row_scale"] = jnp.arange(M) / M
    if grouped:
        options |= {"group_sizes": SIZES, "row_indices": ROWS}
    else:
        gate, up, columns = gate[0], up[0], columns and columns[1:]
        options["bias"] = tuple(b[0] for b in options["bias"])
    quantized = partial(jhg.quantize, block=columns)
    weights: Any = quantized(gate), quantized(up)
    if stacked:
        block = columns and (*columns[:-1], 1, columns[-1])
        weights = jhg.quantize(jnp.stack((gate, up), -2), block=block)
    x = jhg.quantize(x, block=rows)
    found = jax.jit(lambda x, weights: jhg.gated_linear_unit(x, weights, **options))(x, weights)
    wide = weights.dequantize() if stacked else tuple(w.dequantize() for w in weights)
    close(found, jhg.gated_linear_unit(x.dequantize(), wide, precision="highest", **options))


@pytest.mark.parametrize("kind", BLOCKS)
def test_kernels_multiply_them(kind):
    """Scales along K are multiplied in while a kernel adds up; a gate is then a launch more."""
    x, gate, up = operands(kind, "float8_e4m3fn")
    blocks = BLOCKS[kind][-1]
    (spec,) = specs_of(lambda x, w: jhg.ragged_dot(x, w, SIZES, **OPTIONS["steps"]), x, gate)
    assert (spec.a_block, spec.b_block) == (blocks or (0, 0))
    specs = specs_of(lambda *a: jhg.gated_linear_unit(a[0], a[1:], group_sizes=SIZES), x, gate, up)
    assert len(specs) == (2 if blocks else 1)


@pytest.mark.parametrize("kind", ["rows and columns", "blocks"])
def test_transformations_are_those_of_the_dequantized_arrays(kind):
    x, w, _ = operands(kind, "float8_e4m3fn")
    both = jnp.stack((SIZES, SIZES[::-1]))

    def mapped(x: Any, w: Any) -> Any:
        return jax.vmap(lambda s: jhg.ragged_dot(x, w, s, activation="relu"))(both)

    close(mapped(x, w), mapped(x.dequantize(), w.dequantize()), 1e-2)

    def loss(scale: Any, wide: bool) -> Any:
        own = replace(w, scale=scale)
        pair = (x.dequantize(), own.dequantize()) if wide else (x, own)
        return (jhg.ragged_dot(*pair, SIZES) ** 2).sum()

    close(jax.grad(loss)(w.scale, False), jax.grad(loss)(w.scale, True), 1e-2)


@pytest.mark.parametrize("kind", ["rows and columns", "blocks"])
def test_weights_may_lie_in_any_order(kind):
    x, w, _ = operands(kind, "float8_e4m3fn")
    numbers = lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
    turned = jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), w)
    found = jhg.ragged_dot_general(x, turned, SIZES, numbers)
    np.testing.assert_array_equal(found, jhg.ragged_dot(x, w, SIZES))
    weights = jhg.ragged_dot_general(x.dequantize("bfloat16"), turned, SIZES, numbers)
    close(weights, jhg.ragged_dot(x.dequantize(), w.dequantize(), SIZES), 1e-2)


def test_mistakes_are_named():
    x, w, _ = operands("blocks", "float8_e4m3fn")
    with pytest.raises(TypeError, match=r"ragged_dot: rhs is f32\[4,256,160\] beside a quantized"):
        jhg.ragged_dot(x, w.dequantize(), SIZES)
    narrow = jhg.quantize(normal(M, K), "int4", (1, 32))
    with pytest.raises(TypeError, match="ragged_dot: lhs is of int4 beside a quantized array"):
        jhg.ragged_dot(narrow, w, SIZES)
    with pytest.raises(TypeError, match=r"gated_linear_unit: weights\[1\] is f32"):
        jhg.gated_linear_unit(x, (w, w.dequantize()), group_sizes=SIZES)
    numbers = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    with pytest.raises(NotImplementedError, match="rows in groups, .M, K., are multiplied"):
        jhg.ragged_dot_general(x, x, SIZES, numbers)
