"""The table of dtypes agrees with NumPy, JAX, MLIR and the driver."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import pytest

from jax_hopper_gemm.gemm.dtypes import (
    DTYPES,
    EPILOGUE,
    OPERANDS,
    RESULTS,
    multiply,
    one_of,
    residual_of,
    results_of,
    short_name,
)

FLOATS = tuple(name for name, row in DTYPES.items() if row.digits)


@pytest.mark.parametrize("name", DTYPES)
def test_a_row_says_what_numpy_mlir_and_the_driver_say(name):
    row = DTYPES[name]
    assert row.itemsize == jnp.dtype(name).itemsize
    text = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((3,), name)).as_text()
    assert f"tensor<3x{row.mlir}>" in text
    driver = pytest.importorskip("cuda.bindings.driver")
    kind = name.upper() if row.itemsize > 1 else "UINT8"  # bytes, whatever they mean
    assert row.tensor_map == getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}")


@pytest.mark.parametrize("name", FLOATS)
def test_digits_are_those_of_the_float(name):
    assert DTYPES[name].digits == jnp.finfo(name).nmant + 1


@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_says_how_it_is_multiplied(name):
    row = DTYPES[name]
    assert row.mma_k * row.itemsize == 32 and "k" in row.majors and multiply(name, name)
    assert (row.majors == ("k",)) == (row.itemsize != 2)
    if row.accumulator == "int32":
        assert results_of(name) == (*RESULTS, "int32") and residual_of(name) == name
        return
    for algorithm in filter(None, (row.algorithm, row.promoted_algorithm)):
        assert jax.lax.DotAlgorithmPreset[algorithm].accumulation_type == jnp.float32
    assert row.residual in RESULTS and residual_of(name) == row.residual and row.fraction_bits


def test_operands_of_one_kind_are_multiplied_in_any_mix():
    pairs = {(a, b) for a, b in product(OPERANDS, OPERANDS) if multiply(a, b) and a != b}
    assert pairs == {("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn")}


def test_other_dtypes_are_their_own_residuals():
    assert [residual_of(name) for name in ("float32", "float64", "int8")] == [
        "float32", "float64", "int8",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [*DTYPES, "int8", "uint32", "complex64"])
def test_short_names_are_those_that_jax_prints(name):
    array = jax.ShapeDtypeStruct((3,), name)
    assert f"{short_name(name)}[3]" in str(jax.make_jaxpr(lambda x: x)(array))


def test_lists_of_dtypes_read_as_text():
    assert one_of(("bfloat16", "float16", "float32")) == "bfloat16, float16 or float32"
    assert one_of(("bfloat16",)) == "bfloat16"


def test_what_kernels_store_they_can_read():
    assert set(RESULTS) < set(EPILOGUE) and "float32" in RESULTS
