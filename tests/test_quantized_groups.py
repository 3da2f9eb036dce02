"""Ragged and gated products of two quantized operands, on kernels and on XLA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.quantization import dequantize, quantize
from support.quantized_groups import BLOCKS, PROGRAMS, SIZES, K, M, gated, normal, ragged

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.spec import GemmSpec


def close(found: Any, wanted: Any, bound: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    error = np.linalg.norm(np.asarray(found, np.float64) - np.asarray(wanted, np.float64))
    assert error <= bound * np.linalg.norm(np.asarray(wanted, np.float64))


@pytest.mark.parametrize("name", PROGRAMS)
def test_products_are_those_of_the_dequantized_arrays(name):
    program = PROGRAMS[name]()
    found = program.ours()(*program.operands)
    assert found.dtype == jnp.float32
    close(found, program.wanted())


@pytest.mark.parametrize("kind", BLOCKS)
def test_kernels_multiply_them(kind):
    """Scales along K are multiplied in while a kernel adds up; a gate is then a launch more."""
    blocks = BLOCKS[kind][-1]
    (spec,) = ragged(kind, "steps", "float8_e4m3fn").specs()
    assert isinstance(spec, GemmSpec) and (spec.a_block, spec.b_block) == (blocks or (0, 0))
    assert len(gated(kind, False, True).specs()) == (2 if blocks else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows and columns", "blocks"])
def test_transformations_are_those_of_the_dequantized_arrays(kind):
    x, w = ragged(kind, "plain", "float8_e4m3fn").operands
    both = np.stack((SIZES, SIZES[::-1]))

    @jax.jit
    def mapped(x: Any, w: Any) -> Any:
        return jax.vmap(lambda s: jhg.ragged_dot(x, w, s, activation="relu"))(both)

    close(mapped(x, w), mapped(dequantize(x), dequantize(w)), 1e-2)
    twice = jax.tree.map(lambda a: np.stack((a, a)), x)
    found = jax.jit(jax.vmap(lambda x: jhg.ragged_dot(x, w, SIZES, activation="relu")))(twice)
    close(found[1], mapped(x, w)[0])

    def loss(scale: Any, wide: bool) -> Any:
        own = replace(w, scale=scale)
        pair = (x.dequantize(), own.dequantize()) if wide else (x, own)
        return (jhg.ragged_dot(*pair, SIZES) ** 2).sum()

    found, wanted = (jax.jit(jax.grad(loss), static_argnums=1)(w.scale, y) for y in (False, True))
    close(found, wanted, 1e-2)


@pytest.mark.parametrize("kind", ["rows and columns", "blocks"])
def test_weights_may_lie_in_any_order(kind):
    x, w = ragged(kind, "plain", "float8_e4m3fn").operands
    numbers = lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
    turned = jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), w)
    found = jhg.ragged_dot_general(x, turned, SIZES, numbers)
    np.testing.assert_array_equal(found, jhg.ragged_dot(x, w, SIZES))
    weights = jhg.ragged_dot_general(x.dequantize("bfloat16"), turned, SIZES, numbers)
    close(weights, jhg.ragged_dot(dequantize(x), dequantize(w), SIZES), 1e-2)


@pytest.mark.slow
def test_mistakes_are_named():
    x, w = ragged("blocks", "plain", "float8_e4m3fn").operands
    with pytest.raises(TypeError, match=r"ragged_dot: rhs is f32\[4,256,160\] beside a quantized"):
        jhg.ragged_dot(x, dequantize(w), SIZES)
    narrow = quantize(normal(M, K), "int4", (1, 32))
    with pytest.raises(TypeError, match="ragged_dot: lhs is of int4 beside a quantized array"):
        jhg.ragged_dot(narrow, w, SIZES)
    with pytest.raises(TypeError, match=r"gated_linear_unit: weights\[1\] is f32"):
        jhg.gated_linear_unit(x, (w, dequantize(w)), group_sizes=SIZES)
    numbers = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    with pytest.raises(NotImplementedError, match="rows in groups, .M, K., are multiplied"):
        jhg.ragged_dot_general(x, x, SIZES, numbers)
    packed = quantize(normal(4, 160, K), "int4").pack_weights()
    numbers = lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
    with pytest.raises(NotImplementedError, match=r"packed ones in the order .G, K, N.; lhs has 2"):
        jhg.ragged_dot_general(normal(M, K).astype(jnp.bfloat16), packed, SIZES, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True])
def test_scales_of_all_groups_are_read_by_no_group(quantized):
    """To a kernel an operand of groups has a row for each."""
    w = quantize(normal(4, K, 16, seed=1), "int8", (None, None, 1))
    x = normal(M, K).astype(jnp.bfloat16)
    rows: Any = quantize(x, "int8", (1, None)) if quantized else x
    wide = (dequantize(rows) if quantized else x.astype(jnp.float32)), dequantize(w)

    def dot(x: Any, w: Any) -> Any:
        return jhg.ragged_dot(x, w, SIZES)

    def gated(x: Any, w: Any) -> Any:
        return jhg.gated_linear_unit(x, (w, w), group_sizes=SIZES)

    for function in (dot, gated):
        assert "rows_of_groups" not in str(jax.make_jaxpr(function)(rows, w))
        close(jax.jit(function)(rows, w), jax.jit(function)(*wide), 1e-2)
