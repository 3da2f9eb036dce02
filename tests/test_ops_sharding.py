"""Programs over four devices: correct everywhere, launches only where operands are whole."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.partitioned import on_cpu
from support.program_inspection import LAUNCH, integers, lowered

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes, sharding

pytestmark = pytest.mark.usefixtures("launcher")


def mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type, axis_type))


def loss(matmul, a, b):
    return (matmul(a, b) ** 2).sum()


def test_a_program_that_xla_partitions_holds_no_launch_of_the_whole_product():
    on = partial(NamedSharding, mesh(AxisType.Auto))
    a = jax.device_put(integers((256, 256), "bfloat16"), on(P("x", None)))
    b = jax.device_put(integers((256, 512), "bfloat16"), on(P(None, "y")))
    np.testing.assert_array_equal(jax.jit(jhg.matmul)(a, b), jnp.matmul(a, b))
    assert LAUNCH not in lowered(jhg.matmul, a, b)
    with pytest.raises(NotImplementedError, match="no kernel runs"):
        whole = [x.astype("complex64") for x in (a, b)]
        lowered(partial(jhg.matmul, implementation="hopper"), *whole)


def test_shard_map_launches_on_each_device():
    layout = mesh(AxisType.Auto)

    def mapped(matmul):
        def local(a, b):
            return jax.lax.psum(matmul(a, b), "y")

        specs = {"in_specs": (P("x", "y"), P("y", None)), "out_specs": P("x", None)}
        return jax.shard_map(local, mesh=layout, **specs)

    a, b = integers((256, 256)), integers((256, 512), seed=1)
    np.testing.assert_array_equal(jax.jit(mapped(jhg.matmul))(a, b), a @ b)
    gradients = jax.jit(jax.grad(partial(loss, mapped(jhg.matmul)), (0, 1)))(a, b)
    expected = jax.jit(jax.grad(partial(loss, jnp.matmul), (0, 1)))(a, b)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    half = [np.asarray(x, jnp.bfloat16) for x in (a, b)]
    assert LAUNCH in lowered(mapped(partial(jhg.matmul, implementation="hopper")), *half)


@pytest.mark.parametrize("axes, left", [("xy", 1), ("xyz", 2)])
def test_shard_map_over_some_axes_leaves_the_product_to_the_partitioner_along_one(axes, left):
    layout = jax.make_mesh((2,) * len(axes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    mapped = jax.shard_map(
        jhg.matmul, mesh=layout, axis_names={"x"}, in_specs=(P("x"), P()), out_specs=P("x")
    )
    text = lowered(mapped, *(integers((256, 256), "bfloat16") for _ in "ab"))
    assert LAUNCH not in text
    assert (sharding.TARGET in text) == (left == 1)
    assert ("dot_general" in text) == (left == 2)


def test_a_replicated_operand_of_shard_map_has_its_gradient_summed():
    def mapped(matmul):
        return jax.shard_map(
            matmul, mesh=mesh(AxisType.Auto), in_specs=(P(("x", "y")), P()), out_specs=P(("x", "y"))
        )

    a, b = integers((8, 4)), integers((4, 6), seed=1)
    ours, theirs = (
        jax.jit(jax.grad(partial(loss, mapped(f)), (0, 1)))(a, b) for f in (jhg.matmul, jnp.matmul)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("out_spec", [P("x", "y"), P("x", None), P(None, "y"), P()])
def test_out_sharding_is_that_of_the_result(out_spec):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        a = jax.reshard(integers((8, 4)), P("x", "y"))
        b = jax.reshard(integers((4, 6), seed=1), P("y", None))

        def product(matmul, a, b):
            return matmul(a, b, out_sharding=out_spec)

        ours, theirs = (jax.jit(partial(product, f))(a, b) for f in (jhg.matmul, jnp.matmul))
        assert jax.typeof(ours) == jax.typeof(theirs)
        np.testing.assert_array_equal(ours, theirs)
        gradients = [
            jax.jit(jax.grad(partial(loss, partial(product, f)), (0, 1)))(a, b)
            for f in (jhg.matmul, jnp.matmul)
        ]
        for ours, theirs in zip(*gradients, strict=True):
            assert jax.typeof(ours) == jax.typeof(theirs)
            np.testing.assert_array_equal(ours, theirs)


def test_explicit_axes_pass_through_einsum_and_vmap():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        a = jax.reshard(integers((2, 8, 4)), P("x", None, "y"))
        b = jax.reshard(integers((4, 6), seed=1), P("y", None))

        def product(einsum, a, b):
            return jax.vmap(partial(einsum, "mk,kn->nm", out_sharding=P(None, None)), (0, None))(
                a, b
            )

        ours, theirs = (jax.jit(partial(product, f))(a, b) for f in (jhg.einsum, jnp.einsum))
        assert jax.typeof(ours) == jax.typeof(theirs)
        np.testing.assert_array_equal(ours, theirs)


STATE: Any = np.full(3, 0.25, "f4"), np.zeros((3, 2), "f4")
BY_RECIPE = [
    recipes.BlockScaling(), recipes.CurrentScaling(), recipes.DelayedScaling(*STATE),
]  # fmt: skip


@pytest.mark.parametrize("recipe", BY_RECIPE, ids=lambda recipe: type(recipe).__name__)
def test_explicit_axes_pass_through_products_by_recipes(recipe):
    """Rows of two sharded axes are contracted in a gradient, K is no whole block of a device."""

    def step(recipe, a, b):
        def loss(a, b, state):
            y = jhg.matmul(a, b, activation="relu", recipe=state or recipe)
            return (y**2).sum(), y

        state = recipe if isinstance(recipe, recipes.DelayedScaling) else None
        gradients, y = jax.grad(loss, (0, 1, 2), has_aux=True)(a, b, state)
        return y, gradients

    a, b = integers((2, 6, 300)), integers((300, 8), seed=1)
    whole = jax.jit(partial(step, recipe))(a, b)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        a, b = jax.reshard(a, P("x", "y")), jax.reshard(b, P(None, None))
        found = jax.jit(partial(step, recipe))(a, b)
    _, (da, db, _) = found
    assert [jax.typeof(x) for x in (da, db)] == [jax.typeof(x) for x in (a, b)]
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-2)
    jax.tree.map(close, found, whole)


def quantized(dtype, block, x):
    return jhg.quantize(x, dtype, block)


QUANTIZED = {  # K of 500 is no whole number of blocks
    "tensors": (partial(quantized, "int8", None), partial(quantized, "int8", None)),
    "columns": (partial(quantized, "int8", (1, None)), partial(quantized, "int8", (None, 1))),
    "blocks": (
        partial(quantized, "float8_e4m3fn", (1, 128)),
        partial(quantized, "float8_e4m3fn", (128, 128)),
    ),
    "weights": (jnp.asarray, partial(quantized, "int8", (None, 1))),
    "groups": (jnp.asarray, lambda w: jhg.quantize(w, "int4", (32, 1)).pack_weights()),
    "zero points": (jnp.asarray, lambda w: jhg.quantize(w, "int4", (128, 1), symmetric=False)),
    "dequantized": (jnp.asarray, lambda w: jhg.quantize(w, "int4", (128, 64)).dequantize(w.dtype)),
}


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("specs", [(P("x", None), P(None, "y")), (P("x", "y"), P("y", None))])
@pytest.mark.parametrize("transposed", [False, True])
def test_explicit_axes_pass_through_quantized_products(kind, specs, transposed):
    """Rows, columns or K are sharded; a sharding is that of the result in its own order."""
    left, right = QUANTIZED[kind]

    def product(a, b, **options):
        options["preferred_element_type"] = "float32"  # as devices add up parts of K
        if transposed:
            return jhg.einsum("mk,kn->nm", left(a), right(b), epilogue=jnp.abs, **options)
        return jhg.matmul(left(a), right(b), **options)

    a, b = integers((8, 500), "bfloat16"), integers((500, 128), "bfloat16", seed=1)
    whole = jax.jit(product)(a, b)
    out_spec = P(*("yx" if transposed else "xy")) if specs[0][1] is None else P("x", None)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        found = jax.jit(partial(product, out_sharding=out_spec))(*map(jax.reshard, (a, b), specs))
        assert jax.typeof(found).sharding.spec == out_spec
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", BY_RECIPE, ids=lambda recipe: type(recipe).__name__)
def test_products_by_recipes_take_a_sharding_where_k_is_sharded(recipe):
    def step(a, b, **options):
        def loss(a, b):
            y = jhg.matmul(a, b, **options)
            return (y.astype("float32") ** 2).sum(), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(a, b)

    a, b = integers((8, 300)), integers((300, 64), seed=1)
    whole = jax.jit(partial(step, recipe=recipe))(a, b)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        a, b = jax.reshard(a, P("x", "y")), jax.reshard(b, P("y", None))
        found = jax.jit(partial(step, recipe=recipe, out_sharding=P("x", None)))(a, b)
        ((_, y), gradients) = found
        assert jax.typeof(y).sharding.spec == P("x", None)
        assert [jax.typeof(x) for x in gradients] == [jax.typeof(x) for x in (a, b)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-2), found, whole)


def test_an_einsum_of_three_keeps_its_sharding():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        a = jax.reshard(integers((8, 4)), P("x", "y"))
        b, c = integers((4, 6), seed=1), integers((6, 4), seed=2)
        ours, theirs = (
            jax.jit(partial(f, "ab,bc,cd->da", out_sharding=P(None, "x")))(a, b, c)
            for f in (jhg.einsum, jnp.einsum)
        )
        assert jax.typeof(ours) == jax.typeof(theirs)
        np.testing.assert_array_equal(ours, theirs)


def unreduced(module: Any, a: Any, b: Any) -> Any:
    """Leaves the sum over the devices that share K to a reshard behind it."""
    out_sharding = P(None, "x", None, unreduced=frozenset("y"))
    product = module.einsum("bmk,kn->nbm", a, b, out_sharding=out_sharding)
    return jax.reshard(product, P(None, "x", None))


def reduced(module: Any, a: Any, b: Any) -> Any:
    """Gathers weights as FSDP does, so that their gradients are unreduced."""
    b = jax.reshard(b, P(None, None, reduced=frozenset("x")))
    return jax.vmap(lambda a: module.matmul(a, b))(jax.reshard(a, P("x", None, None)))


def activated(module: Any, a: Any, b: Any) -> Any:
    """Like `reduced`, with epilogues."""
    b, relu = jax.reshard(b, P(None, None, reduced=frozenset("x"))), jax.nn.relu
    a = jax.reshard(a, P("x", None, None))
    if module is jnp:
        return relu(a @ b) + relu(a @ b) * (a @ b)
    gated = module.gated_linear_unit(a, (b, b), activation="relu")
    return module.matmul(a, b, activation="relu") + gated


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("program", [unreduced, reduced, activated])
def test_sums_over_devices_may_be_left_open(program, partitioned):
    with jax.set_mesh(mesh(AxisType.Explicit)), on_cpu() if partitioned else nullcontext():
        a, b = jnp.sign(integers((4, 8, 16), "bfloat16")), integers((16, 8), "bfloat16", seed=1)
        a, b = jax.reshard(a, P("x", None, "y")), jax.reshard(jnp.sign(b), P("y", None))
        c = jax.reshard(integers(program(jnp, a, b).shape, "bfloat16", seed=2), P(None))
        theirs = partial(program, jnp)
        ours = [partial(program, jhg), jhg.accelerate(theirs)]

        def step(function, a, b):
            result, pull = jax.vjp(function, a, b)
            return result, pull(jax.reshard(c, jax.typeof(result).sharding.spec))

        expected = jax.jit(partial(step, theirs))(a, b)
        for function in ours:
            found = jax.jit(partial(step, function))(a, b)
            assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
            jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("recipe", [None, recipes.BlockScaling()], ids=["bfloat16", "recipe"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_gated_unit_takes_a_sharding_where_k_is_sharded(recipe, stacked):
    def step(x, weights, **options):
        def loss(x, weights):
            y = jhg.gated_linear_unit(x, weights, recipe=recipe, **options)
            return (y.astype("float32") ** 2).sum(), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, weights)

    x, w = integers((8, 256)), integers((256, 64), seed=1)
    weights: Any = np.stack((w, w), 1) if stacked else (w, w)
    whole = jax.jit(step)(x, weights)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x, weights = jax.reshard(x, P("x", "y")), jax.reshard(weights, P("y"))
        found = jax.jit(partial(step, out_sharding=P("x", None)))(x, weights)
        ((_, y), (dx, dw)) = found
        assert jax.typeof(y).sharding.spec == P("x", None)
        assert jax.tree.map(jax.typeof, (dx, dw)) == jax.tree.map(jax.typeof, (x, weights))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-2), found, whole)


def test_a_grouped_gate_takes_a_sharding_where_experts_are_sharded():
    x, w, sizes = integers((16, 8)), integers((4, 8, 8), seed=1), jnp.array([3, 0, 9, 4])
    whole = jax.jit(jhg.gated_linear_unit)(x, (w, w), group_sizes=sizes)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        w = jax.reshard(w, P("x"))
        found = jhg.gated_linear_unit(x, (w, w), group_sizes=sizes, out_sharding=P("y"))
        assert jax.typeof(found).sharding.spec == P("y", None)
    np.testing.assert_allclose(found, whole, rtol=1e-5)


def gated(x, w, recipe):
    return jhg.gated_linear_unit(x, (w, w), recipe=recipe)


def by_matmul(x, w, recipe):
    return jhg.matmul(x, w, activation="relu", recipe=recipe)


@pytest.mark.slow
@pytest.mark.parametrize("product", [by_matmul, gated])
@pytest.mark.parametrize(
    "recipe", [*BY_RECIPE[:2], recipes.Int8Forward()], ids=lambda recipe: type(recipe).__name__
)
def test_arrays_need_not_be_placed_on_explicit_axes_for_a_recipe(product, recipe):
    def step(x, w):
        def loss(x, w):
            y = product(x, w, recipe)
            return (y**2).sum(), y

        return jax.grad(loss, (0, 1), has_aux=True)(x, w)

    x, w = integers((8, 256)) / 8, integers((256, 128), seed=1) / 8
    whole = jax.jit(step)(x, w)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        found = [step(x, w), jax.jit(step)(x, w)]
    for results in found:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-2), results, whole)


@pytest.mark.slow
def test_arrays_need_not_be_placed_on_explicit_axes_to_be_quantized():
    x, w = integers((8, 256)), integers((256, 128), seed=1)

    def results(x, w):
        rows, columns = jhg.quantize(x, block=(1, 128)), jhg.quantize(w, block=(128, 128))
        weights = jhg.quantize(w, "int4", (32, 1)).pack_weights()
        products = jhg.matmul(rows, columns), jhg.matmul(x.astype("bfloat16"), weights)
        return rows, rows.dequantize(), *products

    whole = jax.jit(results)(x, w)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        found = [results(x, w), jax.jit(results)(x, w)]
    float32 = partial(np.asarray, dtype=np.float32)
    close = partial(np.testing.assert_allclose, rtol=1e-2)
    for each in found:
        jax.tree.map(lambda x, y: close(float32(x), float32(y)), each, whole)


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, ("x", "y")), P("y", None)])
def test_weights_of_any_sharding_are_packed(spec):
    w = jhg.quantize(integers((64, 128)), "int4", (32, 1))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        values, scale = jax.reshard(w.values, spec), jax.reshard(w.scale, P(None, None))
        packed = jhg.Quantized(values, scale).pack_weights()
        assert jax.typeof(packed.values).sharding.spec == spec
    np.testing.assert_array_equal(packed.values, w.pack_weights().values)


@pytest.mark.slow
@pytest.mark.parametrize("out_spec", [P("x"), None])
def test_rows_that_are_picked_have_their_scales(out_spec):
    x, w = integers((40, 32)), integers((3, 32, 16), seed=1)
    sizes, rows = jnp.array([10, 0, 10]), jnp.arange(20)[::-1]

    def product(x, w, **options):
        rows_of_x, columns = (
            jhg.quantize(x, "int8", (1, None)),
            jhg.quantize(w, "int8", (1, None, 1)),
        )
        options |= {"group_sizes": sizes, "row_indices": rows}
        gated = jhg.gated_linear_unit(rows_of_x, (columns, columns), **options)
        return gated, jhg.ragged_dot(rows_of_x, columns, **options)

    whole = jax.jit(product)(x, w)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        found = product(jax.reshard(x, P("x")), jax.reshard(w, P()), out_sharding=out_spec)
        assert {jax.typeof(y).sharding.spec for y in found} == {P(*(out_spec or (None,)), None)}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, whole)
