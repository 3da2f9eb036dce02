"""Programs that XLA partitions: each device's share is a program of its own, with our kernels."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client
from support.collectives import collectives, run_counted
from support.partitioned import on_cpu
from support.placed import array, mesh, name_of
from support.program_inspection import CACHED_ON_MESH, integers, lowered, run_fresh

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.sharding import custom_call
from jax_hopper_gemm.sharding.choose_shards import Factors, Shard, choose_shard
from jax_hopper_gemm.sharding.mesh import Mesh

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
SINGLE = [{letter: "y"} for letter in "bmnk"]
PAIRS = [{one: "x", other: "y"} for one, other in itertools.permutations("bmnk", 2)]
BOTH = [{letter: ("x", "y")} for letter in "mnk"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where", SINGLE + PAIRS + BOTH, ids=name_of)
def test_collectives_are_those_of_jnp(where):
    a, b = array("bmk", where), array("bkn", where, seed=1)

    def product_and_gradients(matmul, a, b):
        product, transpose = jax.vjp(matmul, a, b)
        return product, *transpose(product)

    lowered_for_cpu = jax.jit(lambda a, b: product_and_gradients(jhg.matmul, a, b)).lower(a, b)
    assert lowered_for_cpu.as_text().count(custom_call.TARGET) == 3
    ours, found = run_counted(partial(product_and_gradients, jhg.matmul), a, b)
    theirs, expected = run_counted(partial(product_and_gradients, jnp.matmul), a, b)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert found == expected


def test_the_comparison_sees_a_gathered_operand():
    a, b = array("bmk", {"m": "x"}), array("bkn", {})
    whole = NamedSharding(mesh(), P())
    gathered = partial(jax.lax.with_sharding_constraint, shardings=whole)
    _, found = run_counted(lambda a, b: jnp.matmul(gathered(a), b), a, b)
    assert found == {"all-gather": (1, 4 * 8 * 64 * 32)}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("out", [P(None, "y"), P(None, None, "y"), P("x", "y")])
def test_a_sharded_result_of_a_sharded_k_is_scattered(out):
    a, b = array("bmk", {"k": "y"}), array("bkn", {"k": "y"}, seed=1)
    sharding = NamedSharding(mesh(), out)
    ours, found = run_counted(jhg.matmul, a, b, out_shardings=sharding)
    np.testing.assert_array_equal(ours, jnp.matmul(a, b))
    whole = 4 * 8 * 64 * 16
    assert found == {"reduce-scatter": (1, whole // mesh().size if out[0] else whole // 4)}


@pytest.mark.usefixtures("on_cpu")
def test_sharded_weights_are_gathered_as_jnp_gathers_them():
    """Where rows and weights are sharded over the same axis, one of them must be fetched."""
    a, b = array("mk", {"m": "x"}), array("kn", {"k": "x"}, seed=1)
    ours, found = run_counted(jhg.matmul, a, b)
    theirs, expected = run_counted(jnp.matmul, a, b)
    np.testing.assert_array_equal(ours, theirs)
    assert found == {"all-gather": (1, 4 * 32 * 16)}
    assert found["all-gather"] == expected["all-gather"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("out", [P("x", "y"), P("x", None), P(None, "y"), P("y", "x"), P()])
def test_explicit_axes_keep_types_and_numbers(out):
    def product(matmul, a, b):
        return matmul(a, b, out_sharding=out)

    def gradients(matmul, a, b):
        return jax.grad(lambda a, b: (product(matmul, a, b) ** 2).sum(), (0, 1))(a, b)

    with jax.set_mesh(mesh(AxisType.Explicit)):
        a = jax.reshard(integers((64, 32)), P("x", "y"))
        b = jax.reshard(integers((32, 16), seed=1), P("y", None))
        for function in (product, gradients):
            ours = jax.jit(partial(function, jhg.matmul))(a, b)
            theirs = jax.jit(partial(function, jnp.matmul))(a, b)
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)
            assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("types", [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)])
@pytest.mark.parametrize("is_set", [True, False])
def test_a_mesh_of_explicit_axes_need_not_be_set_and_may_have_others(types, is_set):
    inside = jax.make_mesh((2, 4), ("x", "y"), axis_types=types)
    a = jax.device_put(integers((64, 32)), NamedSharding(inside, P("x")))
    b = jax.device_put(integers((32, 16), seed=1), NamedSharding(inside, P(None, "y")))
    with jax.set_mesh(inside) if is_set else nullcontext():
        ours, theirs = (jax.jit(matmul)(a, b) for matmul in (jhg.matmul, jnp.matmul))
        np.testing.assert_array_equal(ours, theirs)
        assert jax.typeof(ours) == jax.typeof(theirs)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where", [{"m": "y"}, {"k": "y"}, {"n": "x", "k": "y"}], ids=name_of)
def test_extents_that_axes_do_not_divide(where):
    def product(matmul, a, b):
        inside = mesh()
        spec = [P(*(where.get(x) for x in letters)) for letters in ("mk", "kn")]
        a, b = (
            jax.lax.with_sharding_constraint(x, NamedSharding(inside, s))
            for x, s in zip((a, b), spec, strict=True)
        )
        return matmul(a, b)

    a, b = integers((30, 18)), integers((18, 7), seed=1)
    ours = jax.jit(partial(product, jhg.matmul))(a, b)
    np.testing.assert_array_equal(ours, a @ b)


@pytest.mark.usefixtures("on_cpu")
def test_einsum_and_vmap_over_a_mesh():
    a = array("bmk", {"b": "x", "m": "y"})
    b = jax.device_put(integers((32, 16), seed=1), NamedSharding(mesh(), P(None, "y")))

    def function(einsum, a, b):
        return jax.vmap(partial(einsum, "mk,kn->nm"), (0, None))(a, b)

    ours, found = run_counted(partial(function, jhg.einsum), a, b)
    np.testing.assert_array_equal(ours, function(jnp.einsum, a, b))
    _, expected = run_counted(partial(function, jnp.einsum), a, b)
    assert sum(size for _, size in found.values()) <= sum(size for _, size in expected.values())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where", [{"k": "y"}, {"m": "x", "n": "y"}], ids=name_of)
def test_an_epilogue_follows_the_reduction(where):
    a, b = array("mk", where), array("kn", where, seed=1)
    bias = array("n", where, seed=2)

    def layer(a, b, bias):
        return jhg.matmul(a, b, bias=bias, activation=jax.nn.relu)

    ours, found = run_counted(layer, a, b, bias)
    theirs, expected = run_counted(lambda a, b, bias: jax.nn.relu(a @ b + bias), a, b, bias)
    np.testing.assert_array_equal(ours, theirs)
    assert found == expected


# What is emitted for CUDA.


def operands(spec_a: P, spec_b: P, dtype: str = "bfloat16") -> list[jax.Array]:
    arrays = integers((512, 256), dtype), integers((256, 512), dtype, seed=1)
    specs = spec_a, spec_b
    return [jax.device_put(x, NamedSharding(mesh(), s)) for x, s in zip(arrays, specs, strict=True)]


@pytest.mark.usefixtures("launcher")
def test_a_program_for_cuda_leaves_the_product_to_the_partitioner():
    a, b = operands(P("x", None), P(None, "y"))
    text = lowered(jhg.matmul, a, b)
    assert f"stablehlo.custom_call @{custom_call.TARGET}" in text
    assert "reduction={j}" in text  # Shardy's rule
    assert "dot_general" in lowered(jhg.matmul, *operands(P("x"), P(), "int16"))


@pytest.mark.usefixtures("launcher")
def test_the_product_of_an_epilogue_is_partitioned_for_cuda():
    a, b = operands(P("x", "y"), P("y", None))
    text = lowered(partial(jhg.matmul, activation=jax.nn.relu), a, b)
    assert custom_call.TARGET in text and "dot_general" not in text


@pytest.mark.usefixtures("launcher")
def test_transposed_operands_are_read_as_they_lie():
    a, b = operands(P("x", None), P(None, "y"))
    text = lowered(lambda a, b: jhg.matmul(b.T, a.T), a, b)
    assert custom_call.TARGET in text and "stablehlo.transpose" not in text


@pytest.mark.usefixtures("launcher")
def test_a_transpose_that_no_kernel_reads_through_stays():
    x, y = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16, 32, 64), (16, 8, 32, 8)))
    shardings = NamedSharding(mesh(), P("y")), NamedSharding(mesh(), P("y"))

    def product(x, y):
        heads_last = y.transpose(0, 2, 1, 3)  # (16, 32, 8, 8), as attention's gradients have it
        return jhg.dot_general(x, heads_last, (((0, 1), (0, 1)), ((), ())))

    traced = jax.jit(product, in_shardings=shardings).trace(x, y)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(custom_call.TARGET) == 1 and "stablehlo.dot_general" not in text


def share_for_cuda(
    spec_k: list[int], out: list[int], dtype: str = "bfloat16", implementation: str | None = None
) -> str:
    """Returns the program of one of two devices, of [512,256] times [256,512]."""
    tiled = partial(xla_client.HloSharding.iota_tile, subgroup_types=[])
    shape = xla_client.Shape.array_shape
    element = jnp.dtype(dtype)
    config = {
        "name": "hopper_dot",
        "labels": asdict(Factors.of(Subscripts.parse("mk,kn->mn"))),
        "sum_dtype": dtype,
        "version": custom_call.VERSION,
        "platforms": ["cuda"],
        "axis": None,
        "params": {
            "subscripts": "mk,kn->mn",
            "precision": [],
            "preferred_element_type": dtype,
            "implementation": implementation,
        },
    }
    result = tiled(out) if max(out) > 1 else xla_client.HloSharding.replicate()
    program, arguments, _ = custom_call._partition(
        [shape(element, (512, 256)), shape(element, (256, 512))],
        [tiled(spec_k), tiled(spec_k[::-1])],
        shape(element, (512, 512)),
        result,
        json.dumps(config).encode(),
    )
    assert [list(x.tile_assignment_dimensions()) for x in arguments] == [spec_k, spec_k[::-1]]
    with mlir.make_ir_context():
        return str(ir.Module.parse(program))


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("out, reduction", [([1, 1], "all_reduce"), ([2, 1], "reduce_scatter")])
def test_a_share_launches_a_kernel_and_reduces(out, reduction):
    text = share_for_cuda([1, 2], out, implementation="hopper")
    assert "jax_hopper_gemm.v1.launch" in text and f"stablehlo.{reduction}" in text
    assert "M=512 N=512 K=128" in text


def test_shards_that_no_kernel_runs_say_so_where_a_kernel_is_wanted():
    share = r"(?s)implementation='hopper'.*shard: int32\[512, 128\] and int32\[128, 512\]"
    with pytest.raises(NotImplementedError, match=share):
        share_for_cuda([1, 2], [1, 1], "int32", "hopper")


def test_programs_of_shares_can_be_seen_and_replaced():
    a, b = array("mk", {"m": "y"}), array("kn", {})
    shapes = []

    def negative(program, shards):
        shapes.append([x.shape for x in shards])
        return lambda *shards: [-x for x in program(*shards)]

    def twice(a, b):
        return jhg.matmul(a, b), jhg.matmul(a, 1 - b)

    with on_cpu(negative):
        found = jax.jit(twice)(a, b)
    assert shapes == [[(16, 32), (32, 16)]] * 2
    expected = a @ b, a @ (1 - b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, -y), found, expected)
    with on_cpu():
        after = jax.jit(lambda a, b: twice(a, b))(a, b)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    assert custom_call.TARGET not in jax.jit(lambda a, b: jhg.matmul(a, b)).lower(a, b).as_text()


# Across processes.

PROGRAM = (
    CACHED_ON_MESH
    + """
sizes = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=NamedSharding(mesh, P()))
x, w, experts = sharded((64, 32), "x", "y"), sharded((32, 16), "y"), sharded((4, 32, 16), "y")
programs = {
    jhg.matmul: (x, w),
    lambda x, w: jhg.matmul(x, w, activation="gelu"): (x, w),
    jhg.ragged_dot: (x, experts, sizes),
}
for function, arguments in programs.items():
    program = jax.jit(function).lower(*arguments)
    assert custom_call.TARGET in program.as_text()
    program.compile()
print([name.split("/")[-1] for name in events if "cache_hits" in name or "cache_misses" in name])
"""
)


@pytest.mark.slow
def test_the_persistent_cache_hits_in_a_second_process(tmp_path):
    first, second = (run_fresh(PROGRAM, str(tmp_path)) for _ in range(2))
    assert first.strip() == str(["cache_misses"] * 3)
    assert second.strip() == str(["cache_hits"] * 3)


@pytest.mark.usefixtures("on_cpu")
def test_an_exported_program_is_partitioned_where_it_is_called():
    a, b = array("mk", {"m": "x", "k": "y"}), array("kn", {"k": "y"}, seed=1)
    checks = jhg.export_disabled_checks()
    exported = jax.export.export(jax.jit(jhg.matmul), disabled_checks=checks)(a, b)
    call = jax.jit(jax.export.deserialize(exported.serialize()).call)
    program = call.lower(a, b).compile()
    assert collectives(program.as_text() or "") == {"all-reduce": (1, 4 * 32 * 16)}
    np.testing.assert_array_equal(program(a, b), jnp.matmul(a, b))


@pytest.mark.usefixtures("on_cpu")
def test_an_exported_program_of_another_version_is_refused(monkeypatch):
    a, b = array("mk", {"m": "x"}), array("kn", {}, seed=1)
    checks = jhg.export_disabled_checks()
    with monkeypatch.context() as patch:
        patch.setattr(custom_call, "VERSION", 7)
        exported = jax.export.export(jax.jit(lambda a, b: jhg.matmul(a, b)), disabled_checks=checks)
        stored = exported(a, b).serialize()
    with pytest.raises(jax.errors.JaxRuntimeError, match="has version 7, .* reads version 1"):
        jax.jit(jax.export.deserialize(stored).call).lower(a, b).compile()


# The choice of a share.


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3), (3, 2), (2, 3, 2), (5,)])
def test_shardings_are_read_back(sizes):
    devices = Mesh(sizes)
    axes = range(len(sizes))
    for count in range(len(sizes) + 1):
        for order in itertools.permutations(axes, count):
            for cut in range(count + 1):
                along = [order[:cut], order[cut:]]
                sharding = devices.sharding(along)
                if sharding.is_tiled():
                    assert devices.axes_of(sharding) == along
                    assert any(Mesh.of([sharding]).axes_of(sharding))


def test_an_odd_order_of_devices_reads_as_a_whole_array():
    odd = xla_client.HloSharding.from_string("{devices=[4,1]0,3,1,2}")
    assert Mesh((2, 2)).axes_of(odd) == [(), ()]


def test_a_share_costs_least():
    devices = Mesh((2, 2, 2))
    choose = partial(choose_shard, devices, Factors.of(Subscripts.parse("mk,kn->mn")))
    extents = {"m": 1024, "k": 512, "n": 256}
    split_k = choose(extents, (2, 2, 2, 2), ([(0,), (1,)], [(1,), ()], [(0,), ()]))
    assert split_k == Shard({"m": (0,), "k": (1,), "n": ()}, {}, (1,))
    scattered = choose(extents, (2, 2, 2, 2), ([(0,), (1, 2)], [(1, 2), ()], [(0, 1), (2,)]))
    assert scattered == Shard({"m": (0,), "k": (1, 2), "n": ()}, {"m": (1,), "n": (2,)}, ())
    contested = choose(extents, (2, 2, 2, 2), ([(0,), ()], [(), (0,)], [(0,), ()]))
    assert contested == Shard({"m": (0,), "k": (), "n": ()}, {}, ())
    replicated = choose(extents, (2, 2, 2, 2), ([(), ()], [(), ()], [(0,), (1,)]))
    assert replicated == Shard({"m": (0,), "k": (), "n": (1,)}, {}, ())
    odd = choose({**extents, "m": 1023}, (2, 2, 2, 2), ([(0,), ()], [(), ()], [(0,), ()]))
    assert odd.axes["m"] == ()
