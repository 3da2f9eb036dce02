"""Kernels that quantize: how programs launch them, and which specs and plans there are."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.quantization import CASES, Case

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes
from jax_hopper_gemm.gemm.kernel_params import param_list, spec_from_json
from jax_hopper_gemm.gemm.quantization import QuantizeSpec
from jax_hopper_gemm.launch.plan import make_quantize_plan
from jax_hopper_gemm.primitives.quantize import hopper_quantize
from jax_hopper_gemm.testing.lowered import all_specs_of

S = jax.ShapeDtypeStruct
BLOCKS = recipes.BlockScaling()
COLUMNS = recipes.BlockScaling(gradient_columns=128)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_scales_are_numpys(case):
    arrays = case.arguments()
    for ours, exact in zip(case.run(*arrays), case.expected(*arrays), strict=True):
        values, scale = (np.asarray(x, np.float32) for x in ours)
        np.testing.assert_allclose(scale, exact[1], rtol=2.0**-23)
        assert (values != exact[0]).mean() < 1e-3  # of quotients between two numbers


def launched(case: Case) -> list[QuantizeSpec]:
    return [spec for spec in case.specs() if isinstance(spec, QuantizeSpec)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_last_launch_writes_all_that_is_asked_for(case):
    *_, spec = sorted(launched(case), key=lambda x: sum(way > 0 for way in x.ways))
    assert spec.ways == case.ways and spec.picked == bool(case.picked)


@pytest.mark.parametrize("recipe", [BLOCKS, COLUMNS], ids=str)
def test_one_launch_serves_all_products_that_read_an_array(recipe):
    """Of a layer's step x, w and the cotangent are each read once."""

    def step(x, w):
        y, pull = jax.vjp(partial(jhg.matmul, recipe=recipe), x, w)
        return y, pull(x @ w), jhg.matmul(x.reshape(2, 128, 512), w, recipe=recipe)

    program = jax.jit(step).trace(S((256, 512), jnp.bfloat16), S((512, 384), jnp.bfloat16))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    whole = [line for line in text.splitlines() if re.search("_straight_.*_transposed_", line)]
    assert len(whole) == 3
    for line in text.splitlines():  # what they replace nobody reads
        if "jhg_quantize" in line and line not in whole:
            name = line.split("=")[0].split(":")[0].strip()
            assert text.count(f"{name}#") + text.count(f"{name},") + text.count(f"{name})") == 0


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((100, 128), jnp.bfloat16), ((128, 104), jnp.bfloat16), ((0, 128), jnp.bfloat16)],
)
def test_xla_quantizes_what_no_kernel_does(shape, dtype):
    quantize = partial(hopper_quantize, dtype="float8_e4m3fn", block=1, transposed=True)
    assert all_specs_of(quantize, S(shape, dtype)) == []
    assert [x.shape for x in jax.eval_shape(quantize, S(shape, dtype))] == [
        shape[::-1], (shape[1], -(-shape[0] // 128)),
    ]  # fmt: skip


def test_products_on_xla_quantize_on_xla():
    product = partial(jhg.matmul, recipe=BLOCKS, implementation="xla")
    assert all_specs_of(product, S((256, 512), jnp.bfloat16), S((512, 384), jnp.bfloat16)) == []


@pytest.mark.slow
def test_mapped_arrays_are_batches_and_the_derivative_is_xlas():
    case = Case((3, 144, 272), dtype="float32")
    (x,) = case.arguments()
    each = jax.jit(jax.vmap(case.run))(x)
    for got, exact in zip(jax.tree.leaves(each), jax.tree.leaves(case.run(x)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(exact))
    x, rows = np.asarray(x), np.tile(np.arange(16, dtype=np.int32)[::-1], (3, 1))
    pick = jax.jit(lambda x, i: hopper_quantize(x, case.to, 1, transposed=True, rows=i))
    picked, one = jax.jit(jax.vmap(pick))(x, rows), pick(x[1], rows[1])
    np.testing.assert_array_equal(np.asarray(picked[0])[1], np.asarray(one[0]))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jhg.quantize(x, block=(1, 128)).scale)))(x[0])
    assert np.isclose(np.abs(gradient).sum(), (144 * 3 - 16) / 448)  # but for blocks of zeros


@pytest.mark.slow
def test_specs_and_plans_fit_together():
    for spec in dict.fromkeys(spec for case in CASES for spec in launched(case)):
        assert spec_from_json(spec.to_json()) == spec
        plan = make_quantize_plan(spec, 2, 400, 272, source_rows=300)
        assert [p.kind for p in plan.params] == [p.kind for p in param_list(spec)]
        assert plan.grid == (3, 4, 2) and plan.smem_bytes == spec.smem_bytes
    with pytest.raises(ValueError, match="it writes nothing"):
        QuantizeSpec("bfloat16", "float8_e4m3fn", straight=0)
    with pytest.raises(ValueError, match="no kernel quantizes so"):
        QuantizeSpec("bfloat16", "int8")
