"""`explain` takes what `matmul` takes, and name what XLA does of an epilogue."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jax_hopper_gemm as jhg

pytestmark = pytest.mark.usefixtures("launcher", "no_tables")


def array(*extents: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, dtype)


A, B = array(512, 256), array(256, 1024)


def test_every_argument_of_matmul_is_taken():
    found = jhg.explain(
        jhg.matmul, A, B, bias=array(1024), residual=array(512, 1024), activation="gelu", alpha=0.5,
        beta=array(dtype="float32"), c=array(512, 1024, dtype="float32"),
        epilogue=lambda y, s: (y * s, jnp.max(jnp.abs(y))), epilogue_operands=(array(512, 1),),
        save_preactivation=False, implementation="hopper",
    )  # fmt: skip
    assert found.path == "hopper" and found.problem and found.problem.d_dtype == "float32"


def test_an_operation_that_no_kernel_computes_is_named():
    found = jhg.explain(
        jhg.matmul, A, B, epilogue=lambda y: jnp.sort(y, -1), implementation="hopper"
    )
    assert found.path == "hopper" and "sort" in found.uncovered
    assert any(line.startswith("by XLA") and "sort" in line for line in str(found).splitlines())


def test_a_bare_product_has_no_epilogue():
    found = jhg.explain(jhg.matmul, A, B, implementation="hopper")
    assert (found.epilogue, found.uncovered) == ("", ())
    assert "epilogue" not in str(found) and "by XLA" not in str(found)


def test_the_report_tells_what_is_fused_and_what_is_not():
    found = jhg.explain(jhg.matmul, A, B, implementation="hopper")
    report = str(replace(found, epilogue="add, tanh", uncovered=("sort", "cumsum"))).splitlines()
    assert report[-2].split(maxsplit=1) == ["epilogue", "add, tanh"]
    assert report[-1].split(maxsplit=2) == ["by", "XLA", "sort, cumsum"]


def test_dimension_numbers_take_an_epilogue():
    found = jhg.explain(
        jhg.dot_general, A, array(1024, 256), (((1,), (1,)), ((), ())),
        epilogue=lambda y, s: y * s, epilogue_operands=(array(1024),), implementation="hopper",
    )  # fmt: skip
    assert found.path == "hopper" and found.problem and found.problem.b.major == "k"


def test_xla_on_request_is_explained():
    found = jhg.explain(jhg.matmul, A, B, activation="gelu", implementation="xla")
    assert (found.path, found.source) == ("xla", "request")


def test_explain_raises_what_matmul_would():
    with pytest.raises(ValueError, match=r"matmul: bias is bf16\[512\], which does not broadcast"):
        jhg.explain(jhg.matmul, A, B, bias=array(512))
