"""Products with epilogues that XLA partitions: one call, its function behind the reduction."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.collectives import collectives, run_counted
from support.program_inspection import CACHED_ON_MESH, LAUNCH, integers, run_fresh

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.groups import Groups
from jax_hopper_gemm.gemm.product import Options, Product
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.primitives.call_words import FusedProduct
from jax_hopper_gemm.sharding import custom_call
from jax_hopper_gemm.sharding.mesh import Mesh

EXTENTS = {"b": 8, "m": 64, "n": 16, "k": 32, "c": 2}
CALL = r"name\\22: \\22(\w+)"
relu = jax.nn.relu


def mesh(axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type, axis_type))


def array(letters: str, where: dict[str, Any], seed: int = 0, dtype: Any = "float32") -> jax.Array:
    values = integers(tuple(EXTENTS[x] for x in letters), dtype, seed=seed)
    return jax.device_put(values, NamedSharding(mesh(), P(*(where.get(x) for x in letters))))


def name_of(where: dict[str, Any]) -> str:
    return "-".join(f"{letter}{axis}" for letter, axis in where.items())


def value_and_gradients(function: Callable[..., Any], *args: Any) -> Any:
    result, transpose = jax.vjp(function, *args)
    return result, transpose(result)


def statistics(y: jax.Array) -> Any:
    return y, y.sum(0), y.sum(1), y.max(), jax.nn.logsumexp(y, -1)


PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[..., Any], Callable[..., Any]]] = {
    "bias": (
        ("bmk", "kn", "n"),
        lambda a, b, c: jhg.matmul(a, b, bias=c, activation=relu),
        lambda a, b, c: relu(a @ b + c),
    ),
    "residual": (
        ("mk", "kn", "mn"),
        lambda a, b, c: jhg.matmul(a, b, activation=relu, residual=c),
        lambda a, b, c: relu(a @ b) + c,
    ),
    "gated": (
        ("mk", "kn", "kn"),
        lambda x, gate, up: jhg.gated_linear_unit(x, (gate, up), activation=relu),
        lambda x, gate, up: relu(x @ gate) * (x @ up),
    ),
    "mlp": (
        ("mk", "kn", "n", "nk", "k"),
        lambda x, u, v, w, z: jhg.matmul(jhg.matmul(x, u, bias=v, activation=relu), w, bias=z),
        lambda x, u, v, w, z: relu(x @ u + v) @ w + z,
    ),
}
FUSED = {"bias": (1, 2), "residual": (1, 2), "gated": (2, 3), "mlp": (3, 4)}  # and bare products
WHERE = [{"m": "y"}, {"n": "y"}, {"k": "y"}, {"m": "x", "n": "y"}, {"n": "x", "k": "y"}]
CASES = [(name, where) for name in PROGRAMS for where in WHERE] + [("bias", {"b": "y"})]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "name, where", CASES, ids=lambda x: x if isinstance(x, str) else name_of(x)
)
def test_collectives_are_those_of_jnp(name, where):
    labels, ours, plain = PROGRAMS[name]
    args = [array(letters, where, i) for i, letters in enumerate(labels)]
    step = partial(value_and_gradients, ours)
    calls = re.findall(CALL, jax.jit(lambda *args: step(*args)).lower(*args).as_text())
    assert (calls.count("hopper_fused"), calls.count("hopper_dot")) == FUSED[name]
    results, found = run_counted(step, *args)
    expected, wanted = run_counted(partial(value_and_gradients, plain), *args)
    jax.tree.map(np.testing.assert_array_equal, results, expected)
    assert found == wanted


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where", WHERE[:3], ids=name_of)
def test_stacked_weights(where):
    x, weights = array("mk", where), array("kcn", where, 1)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return relu(x @ w[:, 0]) * (x @ w[:, 1])

    step = partial(value_and_gradients, partial(jhg.gated_linear_unit, activation=relu))
    results, found = run_counted(step, x, weights)
    expected, wanted = run_counted(partial(value_and_gradients, plain), x, weights)
    jax.tree.map(np.testing.assert_array_equal, results, expected)
    count, size = found.get("all-reduce", (0, 0))
    assert set(found) == set(wanted)
    assert (count, size) <= wanted.get("all-reduce", (0, 0))  # both planes' gradient of x at once


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where", WHERE, ids=name_of)
def test_statistics_are_reduced_over_devices(where):
    a, b = array("mk", where), array("kn", where, 1)
    epilogue = partial(jhg.matmul, epilogue=statistics)
    assert re.findall(CALL, jax.jit(epilogue).lower(a, b).as_text()) == ["hopper_fused"]
    results, found = run_counted(epilogue, a, b)
    expected, wanted = run_counted(lambda a, b: statistics(a @ b), a, b)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), results, expected)
    moved, allowed = (sum(size for _, size in x.values()) for x in (found, wanted))
    assert set(found) <= set(wanted) and moved <= allowed


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where", [{"n": "y"}, {"m": "y"}, {"n": "x", "k": "y"}], ids=name_of)
def test_softmax_of_sharded_rows(where):
    a, b = array("mk", where), array("kn", where, 1)
    results, found = run_counted(partial(jhg.matmul, epilogue=jax.nn.softmax), a, b)
    expected, wanted = run_counted(lambda a, b: jax.nn.softmax(a @ b), a, b)
    np.testing.assert_allclose(results, expected, rtol=1e-6)
    assert found == wanted


@pytest.mark.usefixtures("on_cpu")
def test_log_sum_exp_where_a_device_has_minus_infinity_alone():
    a, b = array("mk", {}), array("kn", {"n": "y"}, 1)
    mask = jnp.where(jnp.arange(16) < 4, -jnp.inf, 0.0)  # of the first device's columns
    layer = jax.jit(lambda a, b, shift: jhg.matmul(
        a, b, epilogue=lambda y, s: jax.nn.logsumexp(y + s, -1), epilogue_operands=(shift,)
    ))  # fmt: skip
    for shift in (mask, mask - 200.0, jnp.full(16, -jnp.inf)):
        expected = jax.nn.logsumexp(a @ b + shift, -1)
        np.testing.assert_allclose(layer(a, b, shift), expected, rtol=1e-6)


@pytest.mark.usefixtures("on_cpu")
def test_a_sum_over_devices_is_scattered_before_the_function():
    a, b, c = array("mk", {"k": "y"}), array("kn", {"k": "y"}, 1), array("mn", {"m": "y"}, 2)
    sharding = NamedSharding(mesh(), P("y"))
    results, found = run_counted(
        lambda a, b, c: jhg.matmul(a, b, activation=relu, residual=c),
        a, b, c, out_shardings=sharding,
    )  # fmt: skip
    np.testing.assert_array_equal(results, relu(a @ b) + c)
    assert found == {"reduce-scatter": (1, 4 * 64 * 16 // 4)}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("out", [P("x", "y"), P("x", None), P()])
def test_explicit_axes_keep_types_and_numbers(out):
    def layer(matmul: Any, a: Any, b: Any, c: Any) -> Any:
        if matmul is jhg.matmul:
            return matmul(a, b, bias=c, activation=relu, out_sharding=out)
        return relu(matmul(a, b, out_sharding=out) + c)

    def gradients(matmul: Any, *args: Any) -> Any:
        return jax.grad(lambda *args: (layer(matmul, *args) ** 2).sum(), (0, 1, 2))(*args)

    with jax.set_mesh(mesh(AxisType.Explicit)):
        a = jax.reshard(integers((64, 32)), P("x", None))
        b = jax.reshard(integers((32, 16), seed=1), P(None, "y"))
        c = jax.reshard(integers((16,), seed=2), P("y"))
        if out != P("x", "y"):
            c = jax.reshard(c, P())
        for function in (layer, gradients):
            ours = jax.jit(partial(function, jhg.matmul))
            theirs = jax.jit(partial(function, jnp.matmul))
            assert "hopper_fused" in ours.lower(a, b, c).as_text()
            found, expected = ours(a, b, c), theirs(a, b, c)
            jax.tree.map(np.testing.assert_array_equal, found, expected)
            assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
            if out == P("x", "y"):
                programs = [f.lower(a, b, c).compile().as_text() or "" for f in (ours, theirs)]
                moved, allowed = map(collectives, programs)
                assert moved == allowed


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("where", [{"n": "y"}, {"k": "y"}], ids=name_of)
def test_products_that_derivatives_multiply_again(where):
    a, b = array("mk", where), array("kn", where, 1)
    again = partial(jhg.matmul, activation="gelu", save_preactivation=False)
    found, _ = run_counted(partial(value_and_gradients, again), a, b)
    expected, _ = run_counted(
        partial(value_and_gradients, lambda a, b: jax.nn.gelu(a @ b)), a, b
    )  # fmt: skip
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), found, expected)


@pytest.mark.usefixtures("on_cpu")
def test_a_function_of_whole_rows_follows_a_product_of_its_own():
    a, b = array("mk", {"m": "x", "k": "y"}), array("kn", {"k": "y"}, 1)
    first = partial(jhg.matmul, epilogue=lambda y: tuple(jax.lax.top_k(y, 4)))
    assert re.findall(CALL, jax.jit(first).lower(a, b).as_text()) == ["hopper_dot"]
    found, _ = run_counted(first, a, b)
    expected = jax.lax.top_k(a @ b, 4)
    jax.tree.map(np.testing.assert_array_equal, found, tuple(expected))


# What a call says.


# Of version 1: exported programs hold such text.
SAID = (
    '{"graph": {"accumulators": 1, "operands": [{"kind": "row", "dtype": "bfloat16"}], '
    '"nodes": [{"op": "add", "args": [0, 1], "params": []}], "results": [{"kind": "matrix", '
    '"value": 2, "dtype": "bfloat16", "k": 0, "plane": 0, "planes": 1}]}, '
    '"subscripts": "mk,gkn->mn", "m": "m", "n": "n", "precision": ["HIGHEST"], '
    '"implementation": "hopper", "max_sms": 32, "in_place": [0]'
)


@pytest.mark.parametrize(
    "end, groups", [("}", None), (', "spans": [9, 8, 0, 8]}', Groups(9, 8, 0, 8))]
)
def test_what_a_call_says_has_the_same_text(end, groups):
    product = FusedProduct.from_dict(json.loads(SAID + end))
    add = EpilogueGraph(
        1, (Operand("row", "bfloat16"),), (Node("add", (0, 1)),), (Result("matrix", 2, "bfloat16"),)
    )
    options = Options("hopper", jax.lax.Precision.HIGHEST, np.dtype("float32"), max_sms=32)
    assert product.product == Product(Subscripts.parse("mk,gkn->mn"), options, groups=groups)
    assert product.graph == add
    assert json.dumps(product.to_dict()) == SAID + end


def test_a_call_may_say_what_the_first_result_alone_overwrites():
    said = SAID.replace('"in_place": [0]', '"in_place": {}') + "}"
    for text, in_place in (("0", (0,)), ("null", ()), ("[null, 0]", (None, 0))):
        assert FusedProduct.from_dict(json.loads(said.replace("{}", text))).in_place == in_place


def test_a_call_from_before_max_sms_has_no_limit():
    product = FusedProduct.from_dict(json.loads(SAID.replace('"max_sms": 32, ', "") + "}"))
    assert (product.product.options.max_sms, product.in_place) == (None, (0,))


# What a device runs.


def shares_for_cuda(function: Callable[..., Any], cut: str, *args: Any) -> list[str]:
    """Returns the programs that one of two devices runs of the calls of a program for CUDA.

    Args:
      cut: what is sharded: "m" or "n", the rows or columns of each call's product, or "k".
    """
    fresh = jax.jit(lambda *args: function(*args))
    module: Any = fresh.trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    found = []
    for operation in calls_of(module.operation):
        config = operation.attributes["backend_config"].value
        labels = json.loads(config)["labels"]
        (m, n), (lhs, *_) = labels["out"], labels["factors"]
        letter = {"m": m, "n": n, "k": next(x for x in lhs if x not in labels["out"])}[cut]
        names = [*labels["factors"], *labels["others"], *labels["results"]]
        types = [x.type for x in (*operation.operands, *operation.results)]
        arrays = tuple((tuple(t.shape), DTYPES[str(t.element_type)]) for t in types)
        given = tuple(tuple((0,) if x == letter else () for x in letters) for letters in names)
        program, _ = custom_call._answer.__wrapped__(
            Mesh((2,)), arrays, given, config.encode(), False
        )
        with mlir.make_ir_context():
            found.append(str(ir.Module.parse(program)))
    return found


def calls_of(operation: Any) -> Any:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == "stablehlo.custom_call":
                    if inner.attributes["call_target_name"].value == custom_call.TARGET:
                        yield inner.operation
                yield from calls_of(inner.operation)


DTYPES = {"bf16": jnp.dtype("bfloat16"), "f32": jnp.dtype("float32")}


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("letter, extents", [("m", "256 N=512 K=512"), ("n", "512 N=256 K=512")])
def test_a_share_with_all_of_k_is_one_kernel(letter, extents):
    a, b, c = big("mk"), big("kn"), big("n")
    layer = partial(value_and_gradients, lambda a, b, c: jhg.matmul(a, b, bias=c, activation=relu))
    text, *_ = shares_for_cuda(layer, letter, a, b, c)
    assert text.count(LAUNCH) == 1 and f"M={extents}" in text and "dot_general" not in text
    assert "all_reduce" not in text and "stablehlo.add" not in text


@pytest.mark.usefixtures("launcher", "kernels_by_default")
def test_a_share_of_k_is_a_kernel_a_sum_in_16_bits_and_the_function():
    a, b, c = big("mk"), big("kn"), big("n")
    layer = partial(jhg.matmul, bias=c, activation=relu)
    (text,) = shares_for_cuda(layer, "k", a, b)
    assert text.count(LAUNCH) == 1 and "M=512 N=512 K=256" in text
    (reduced,) = re.findall(r"all_reduce.*?tensor<512x512x(\w+)>", text, re.DOTALL)
    assert reduced == "bf16" and text.index(LAUNCH) < text.index("stablehlo.maximum")
    wide = partial(layer, preferred_element_type=jnp.float32)
    (text,) = shares_for_cuda(wide, "k", a, b)
    assert re.findall(r"all_reduce.*?tensor<512x512x(\w+)>", text, re.DOTALL) == ["f32"]


@pytest.mark.usefixtures("launcher")
def test_a_share_adds_to_an_accumulator_where_it_lies():
    a, b, c = big("mk"), big("kn"), big("mn").astype("float32")
    (text,) = shares_for_cuda(lambda a, b, c: jhg.matmul(a, b, c=c), "m", a, b, c)
    assert text.count(LAUNCH) == 1 and "operand_index = 2" in text


@pytest.mark.usefixtures("launcher", "kernels_by_default")
def test_the_gradients_function_is_part_of_the_product_before_it():
    x, up, down, bias = big("mk"), big("kn"), big("nk"), big("n")

    def mlp(x: Any, up: Any, bias: Any, down: Any) -> Any:
        return jhg.matmul(jhg.matmul(x, up, bias=bias, activation="gelu"), down)

    programs = shares_for_cuda(partial(value_and_gradients, mlp), "m", x, up, bias, down)
    assert all(text.count(LAUNCH) == 1 for text in programs)
    assert sum("all_reduce" in text for text in programs) == 1  # the gradient of the bias
    weights = shares_for_cuda(partial(value_and_gradients, jhg.gated_linear_unit), "m", x, (up, up))
    assert len(weights) == 5 and all(text.count(LAUNCH) == 1 for text in weights)


def big(letters: str) -> jax.Array:
    values = integers(tuple({"m": 512, "n": 512, "k": 512}[x] for x in letters), "bfloat16")
    return jax.device_put(values, NamedSharding(mesh(), P()))


# Across processes.

PROGRAM = (
    CACHED_ON_MESH
    + """
layer = lambda a, b, c: jhg.matmul(a, b, bias=c, activation="gelu")
program = jax.jit(jax.grad(lambda *args: layer(*args).sum(), (0, 1, 2))).lower(
    sharded((64, 32), "x", "y"), sharded((32, 16), "y"), sharded((16,)))
assert "hopper_fused" in program.as_text()
program.compile()
print([name.split("/")[-1] for name in events if "cache_hits" in name or "cache_misses" in name])
"""
)


@pytest.mark.slow
def test_the_persistent_cache_hits_in_a_second_process(tmp_path):
    first, second = (run_fresh(PROGRAM, str(tmp_path)) for _ in range(2))
    assert first.strip() == "['cache_misses']"
    assert second.strip() == "['cache_hits']"


LOADED = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_hopper_gemm

auto = jax.sharding.AxisType.Auto
mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(auto, auto))
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
a, b, c = (
    jax.device_put(np.ones(x.shape, x.dtype), NamedSharding(mesh, P(*spec)))
    for x, spec in zip(exported.in_avals, [("x", "y"), ("y",), ()], strict=True))
program = jax.jit(exported.call).lower(a, b, c).compile()
print(np.unique(program(a, b, c)), program.as_text().count(" all-reduce("))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_an_exported_program_carries_its_function(tmp_path):
    where = {"m": "x", "k": "y"}
    a, b, c = array("mk", where), array("kn", where, 1), array("n", where, 2)
    layer = jax.jit(lambda a, b, c: jhg.matmul(a, b, bias=c, activation=relu))
    exported = jax.export.export(layer, disabled_checks=jhg.export_disabled_checks())(a, b, c)
    assert "hopper_fused" in exported.mlir_module()
    (tmp_path / "layer").write_bytes(exported.serialize())
    assert run_fresh(LOADED, str(tmp_path / "layer")).split() == ["[33.]", "1"]
