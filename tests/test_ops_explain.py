"""`explain` tells of one product what lowering does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.program_inspection import LAUNCH, attributes, lowered

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch
from jax_hopper_gemm.gemm.grid import max_clusters
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.launch.plan import make_plan

pytestmark = pytest.mark.usefixtures("launcher")


def bf16(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.bfloat16)


A, B = bf16(4096, 4096), bf16(4096, 8192)
EXPLAIN: Any = jhg.explain


def test_the_explained_kernel_is_the_one_that_is_launched():
    found: Any = jhg.explain(jhg.matmul, A, B, implementation="hopper")
    program = lowered(lambda a, b: jhg.matmul(a, b, implementation="hopper"), A, B)
    assert found.path == "hopper" and found.problem == GemmProblem.dense(4096, 8192, 4096)
    assert attributes(program, "spec") == [found.spec.to_json()]
    plan = make_plan(found.problem, found.spec, found.raster_order, dispatch.H200.num_sms)
    assert found.grid == plan.grid
    clusters = -(-4096 // (found.spec.tile_m * found.spec.cluster_m))
    clusters *= -(-8192 // (found.spec.tile_n * found.spec.cluster_n))
    resident = max_clusters(found.spec, dispatch.H200.num_sms)
    assert (found.waves - 1) * resident < clusters <= found.waves * resident


def test_where_xla_is_faster_than_a_kernel_of_transposes_the_product_as_written_is_told():
    wide = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    found: Any = jhg.explain(jhg.matmul, wide, wide)
    assert found.path == "xla" and "transposes that it reads" in found.reason
    assert (found.problem.a.major, found.problem.b.major) == ("k", "n")


@pytest.mark.parametrize("shapes", [((4096, 4096), (4096, 8192)), ((4, 4096), (4096, 4096)),
                                    ((64, 100), (100, 64)), ((8,), (8,))])  # fmt: skip
def test_explain_without_a_request_agrees_with_lowering(shapes):
    a, b = (bf16(*s) for s in shapes)
    found = jhg.explain(jhg.matmul, a, b)
    assert (LAUNCH in lowered(jhg.matmul, a, b)) == (found.path == "hopper")
    assert found.reason


def test_the_report_is_readable():
    text = str(jhg.explain(jhg.matmul, A, B, implementation="hopper"))
    assert "bf16[4096,4096] x bf16[4096,8192]" in text
    for word in ("compute capability 9.0, 132 SMs", "hopper", "M=4096 N=8192 K=4096", "waves"):
        assert word in text


def test_a_single_wave_is_not_plural():
    found = jhg.explain(jhg.matmul, bf16(128, 128), bf16(128, 128), implementation="hopper")
    assert found.waves == 1 and str(found).endswith("1 wave")


def test_fields_are_plain_data():
    fields = asdict(jhg.explain(jhg.matmul, A, B, implementation="hopper"))
    assert fields["problem"]["m"] == 4096 and fields["spec"]["a_dtype"] == "bfloat16"


def test_dimension_numbers_explain_a_dot_general():
    dims = (((1,), (1,)), ((), ()))
    found: Any = jhg.explain(jhg.dot_general, A, bf16(8192, 4096), dims, implementation="hopper")
    assert (found.problem.b.major, found.spec.b_major) == ("k", "k")


def test_operands_on_several_devices_are_said_to_be_shared_out():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    a = jax.ShapeDtypeStruct(A.shape, A.dtype, sharding=sharding)
    found = jhg.explain(jhg.matmul, a, B)
    assert found.devices == 2 and "each runs its shard" in str(found)
    found = jhg.explain(jhg.matmul, A, B)
    assert found.devices == 1 and "share" not in str(found)


def test_xla_on_request_is_explained():
    found = jhg.explain(jhg.matmul, A, B, implementation="xla")
    assert (found.path, found.source, found.spec) == ("xla", "request", None)
    assert "implementation='xla'" in str(found)


@pytest.mark.parametrize(
    "a, b, options, reason",
    [
        (bf16(64, 64), jax.ShapeDtypeStruct((64, 64), jnp.float32), {}, "bfloat16 and float32"),
        (
            bf16(64, 64),
            bf16(64, 64),
            {"precision": lax.DotAlgorithmPreset.F16_F16_F16},
            "precision",
        ),
        (bf16(64, 0), bf16(0, 64), {}, "an extent is 0"),
        (jax.ShapeDtypeStruct((8, 8), jnp.int8),) * 2 + ({}, "int8"),
    ],
)
def test_what_no_kernel_runs_is_explained_whoever_asks(a, b, options, reason):
    for implementation in (None, "hopper"):
        found = jhg.explain(jhg.matmul, a, b, implementation=implementation, **options)
        assert (found.path, found.source) == ("xla", "unsupported") and reason in found.reason


def test_explain_raises_what_matmul_would():
    with pytest.raises(ValueError, match="matmul: K differs"):
        jhg.explain(jhg.matmul, A, bf16(8192, 4096))


def test_one_product_is_explained_a_function_reported():
    one = jhg.explain(jhg.matmul, A, B)
    report = jhg.explain(lambda a, b: jhg.matmul(a, b), A, B)
    assert isinstance(one, jhg.Explanation) and isinstance(report, jhg.ProductReport)
    assert report.products[0].explanation == one
    equal = jhg.explain(jhg.einsum, "mk,kn->mn", A, B)
    assert (equal.path, equal.spec, equal.grid) == (one.path, one.spec, one.grid)


def test_calls_that_are_not_one_product_are_refused():
    with pytest.raises(ValueError, match="this call of einsum is 2 products, not one: explain a f"):
        jhg.explain(jhg.einsum, "ab,bc,cd->ad", A, B, bf16(8192, 512))
    report = jhg.explain(lambda *x: jhg.einsum("ab,bc,cd->ad", *x), A, B, bf16(8192, 512))
    assert len(report.products) == 2
    with pytest.raises(TypeError, match="matmul is one product, and has no argument fuse"):
        EXPLAIN(jhg.matmul, A, B, fuse=False)


@pytest.mark.parametrize("dtype", ["int16", "complex64"])
def test_dtypes_that_kernels_do_not_know_are_unsupported(dtype: str):
    a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 50), (50, 64)))
    found = jhg.explain(jhg.matmul, a, b)
    assert (found.path, found.source) == ("xla", "unsupported") and dtype in found.reason
