"""`MoE` of nnx and linen: their parameters, over devices, in training, and from checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.moe_reference import assert_close, looped, weights_of
from support.program_inspection import normal
from support.trees import assert_equal

from jax_hopper_gemm import moe

flax = pytest.importorskip("flax", reason="needs the extra `flax`")

import flax.linen as linen  # noqa: E402
from flax import nnx  # noqa: E402

from jax_hopper_gemm import nn  # noqa: E402
from jax_hopper_gemm.nn import linen as ours_linen  # noqa: E402

SIZES: dict[str, Any] = {"num_experts": 8, "experts_per_token": 2}


def layer(**options):
    return nn.MoE(6, 10, rngs=nnx.Rngs(0), **{**SIZES, **options})


def filled(**options):
    """Returns a layer with the weights of `weights_of`, and x."""
    x, router, gate_up, down = weights_of(8, 6, 8, 10)
    made = layer(**options)
    made.router[...], made.down[...] = router, down
    if made.stacked:
        made.gate_up[...] = gate_up
    else:
        made.gate[...], made.up[...] = gate_up[:, :, 0], gate_up[:, :, 1]
    return made, x


@partial(nnx.jit, static_argnames="return_statistics")
def run(made, x, return_statistics=False):
    return made(x, return_statistics=return_statistics)


@pytest.mark.parametrize("stacked", [True, False])
def test_layer_is_the_loop_over_its_parameters(stacked):
    made, x = filled(stacked=stacked)
    y, statistics = run(made, x.reshape(2, 4, 6), return_statistics=True)
    assert_close(y, looped(*weights_of(8, 6, 8, 10), k=2).reshape(2, 4, 6))
    assert_close(statistics.load.sum(), 1.0)


def test_stacked_and_separate_weights_start_alike():
    both, pair = layer(), layer(stacked=False)
    np.testing.assert_array_equal(both.gate_up[...], nn.from_pair(pair.gate[...], pair.up[...]))
    np.testing.assert_array_equal(both.down[...], pair.down[...])


@pytest.mark.slow
def test_each_expert_starts_as_a_layer_of_its_own():
    made = nn.MoE(64, 96, num_experts=4, experts_per_token=2, rngs=nnx.Rngs(0))
    for stack, inputs in ((made.gate_up[...], 64), (made.down[...], 96)):
        stack = np.asarray(stack)
        matrices = [stack[:, :, 0], stack[:, :, 1]] if stack.ndim == 4 else [stack]
        for matrix in [m[e] for m in matrices for e in range(4)]:
            assert abs(float(matrix.std()) * inputs**0.5 - 1) < 0.06  # lecun_normal
    assert not np.allclose(made.down[0], made.down[1])


@pytest.mark.slow
def test_dtypes_are_those_of_flax_layers():
    half = layer(dtype=jnp.bfloat16)
    assert half.down[...].dtype == jnp.float32
    assert nnx.eval_shape(run, half, jnp.ones((3, 6))).dtype == jnp.bfloat16
    stored = layer(param_dtype=jnp.bfloat16)
    assert nnx.eval_shape(run, stored, jnp.ones((3, 6), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.slow
def test_router_dtype_is_that_of_the_routers_product():
    x = normal((64, 6), "bfloat16")
    made = layer(dtype=jnp.bfloat16, router_dtype=jnp.float32)
    _, statistics = run(made, x, return_statistics=True)
    wide = jax.jit(lambda x, w: moe.route(x @ w, 2))(x.astype(jnp.float32), made.router[...])
    assert_close(statistics, wide.statistics)


@nnx.jit
def gradient_of(made, x):
    def loss(made):
        y, statistics = made(x, return_statistics=True)
        return (y**2).sum() + moe.load_balancing_loss(statistics), y

    return nnx.grad(loss, has_aux=True)(made)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
def test_experts_over_a_mesh_are_the_layer_of_one_device(exchange):
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    here, x = filled()
    there, _ = filled(
        stacked=False, expert_axis="expert", token_axes=("data", "expert"), exchange=exchange
    )
    x = x.reshape(8, 1, 6)
    expected, y = gradient_of(here, x)
    with jax.set_mesh(mesh):
        gradient, spread = gradient_of(there, x)
    assert_close(spread, y)
    assert_close(gradient.router[...], expected.router[...])
    assert_close(gradient.down[...], expected.down[...])
    pair = nn.from_pair(gradient.gate[...], gradient.up[...])
    assert_close(pair, expected.gate_up[...])


@pytest.mark.slow
def test_one_token_axis_need_not_be_in_a_tuple():
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    here, x = filled()
    axes = {"expert_axis": "expert", "token_axes": "expert", "mesh": mesh}
    assert_close(run(filled(**axes)[0], x), run(here, x))
    params = {name: getattr(here, name)[...] for name in ("router", "gate_up", "down")}
    twin = ours_linen.MoE(10, **SIZES, **axes)
    assert_close(jax.jit(twin.apply)({"params": params}, x), run(here, x))


@pytest.mark.slow
def test_explicit_axes_shard_tokens_and_experts():
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    made, x = filled()
    expected = run(made, x)
    with jax.set_mesh(mesh):
        x = jax.reshard(x, P("data"))
        for parameter in (made.gate_up, made.down):
            parameter.set_value(jax.reshard(parameter[...], P("expert")))
        y = run(made, x)
        assert jax.typeof(y) == jax.typeof(x)
        assert_close(y, expected)
        twin = ours_linen.MoE(10, **SIZES)
        y, variables = jax.jit(twin.init_with_output)(jax.random.key(0), x)
        assert jax.typeof(y) == jax.typeof(x)
        assert_close(jax.jit(twin.apply)(variables, x), y)


@pytest.mark.slow
@pytest.mark.parametrize("is_set", [True, False])
def test_on_explicit_axes_experts_are_resharded(is_set):
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)

    def results(made, x):
        parts = nnx.split(made)

        def forward(x):
            y = nnx.merge(*parts)(x)
            return y.sum(), y

        return jax.jit(jax.value_and_grad(forward, has_aux=True))(x)

    expected = results(*filled())
    axes = {"expert_axis": "expert", "token_axes": ("data", "expert")}
    with jax.set_mesh(mesh) if is_set else nullcontext():
        found = results(*filled(**axes, mesh=None if is_set else mesh))
    ((_, y), gradient), ((_, expected_y), expected_gradient) = found, expected
    assert jax.typeof(y).sharding.spec == P(("data", "expert"), None)
    assert_close(y, expected_y)
    assert_close(gradient, expected_gradient)


@pytest.mark.slow
def test_a_layer_inside_of_shard_map_takes_its_own_experts():
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    here, x = filled()
    graph, state = nnx.split(filled(expert_axis="expert")[0])
    specs = jax.tree.map(lambda a: P() if a.ndim == 2 else P("expert"), state)
    spread = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=mesh, in_specs=(specs, P("expert")), out_specs=P("expert"),
    )  # fmt: skip
    assert_close(jax.jit(spread)(state, x), run(here, x))


@pytest.mark.slow
def test_training_lowers_the_loss_and_balances_the_load():
    optax = pytest.importorskip("optax")
    model = nn.MoE(4, 16, num_experts=4, experts_per_token=1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x = normal((128, 4))
    target = np.roll(np.sin(2 * np.asarray(x)), 1, axis=1)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            y, statistics = model(x, return_statistics=True)
            error = jnp.mean((y - target) ** 2)
            return error + 0.01 * moe.load_balancing_loss(statistics), (error, statistics.load)

        gradients, aux = nnx.grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return aux

    errors, loads = zip(*(step(model, optimizer) for _ in range(80)), strict=True)
    assert errors[-1] < 0.35 * errors[0]
    assert loads[-1].min() > 0.05


@pytest.mark.slow
def test_linen_layer_agrees_with_nnx():
    here, x = filled(scale=2.0)
    twin = ours_linen.MoE(10, scale=2.0, **SIZES)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(twin.init, jax.random.key(0), x)["params"])
    params = {name: getattr(here, name)[...] for name in ("router", "gate_up", "down")}
    assert shapes == jax.tree.map(jnp.shape, params)
    y, sown = jax.jit(partial(twin.apply, mutable="intermediates"))({"params": params}, x)
    (statistics,) = sown["intermediates"]["statistics"]
    expected = run(here, x, return_statistics=True)
    jax.tree.map(np.testing.assert_array_equal, (y, statistics), expected)


def test_linen_annotations_gain_the_experts_axis():
    init = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,))
    for stacked in (True, False):
        made = ours_linen.MoE(
            10, kernel_init=init, router_init=linen.initializers.zeros, expert_axis="expert",
            stacked=stacked, mesh=mesh, **SIZES,
        )  # fmt: skip
        variables = jax.eval_shape(made.init, jax.random.key(0), jnp.ones((2, 6)))
        specs = linen.get_partition_spec(variables)["params"]
        assert specs["down"] == P("expert", "embed", "mlp")
        if stacked:
            assert specs["gate_up"] == P("expert", "embed", None, "mlp")
        else:
            assert specs["gate"] == specs["up"] == P("expert", "embed", "mlp")


@pytest.mark.slow
def test_gradients_leave_the_selection_bias_alone():
    made, x = filled(use_selection_bias=True, score="sigmoid")
    assert "selection_bias" not in nnx.state(made, nnx.Param)
    assert made.selection_bias is not None
    made.selection_bias[...] = jnp.zeros(8).at[3].set(5.0)
    _, statistics = run(made, x, return_statistics=True)
    assert statistics.load[3] == 0.5
    twin = ours_linen.MoE(10, use_selection_bias=True, score="sigmoid", **SIZES)
    variables = jax.jit(twin.init)(jax.random.key(0), x)
    np.testing.assert_array_equal(variables["moe"]["selection_bias"], np.zeros(8))


# Checkpoints.


def mixtral(names=("w1", "w3", "w2"), prefix="model.layers.0.block_sparse_moe."):
    """Returns x, tensors as such checkpoints name them, and what the layer makes of x."""
    x, router, gate_up, down = weights_of(5, 6, 8, 10)
    state = {f"{prefix}gate.weight": np.asarray(router).T}
    for e in range(8):
        matrices = (gate_up[e, :, 0], gate_up[e, :, 1], down[e])
        for name, matrix in zip(names, matrices, strict=True):
            state[f"{prefix}experts.{e}.{name}.weight"] = np.asarray(matrix).T
    return x, state, looped(x, router, gate_up, down, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, False])
def test_parameters_of_mixtral_load_and_go_back(stacked):
    x, state, expected = mixtral()
    prefix = "model.layers.0.block_sparse_moe."
    params = nn.from_huggingface({**state, "lm_head.weight": x}, prefix=prefix, stacked=stacked)
    made = layer(stacked=stacked)
    nnx.update(made, params)
    assert_close(run(made, x), expected)
    assert_equal(nn.to_huggingface(params, names="mixtral", prefix=prefix), state)


def test_parameters_of_qwen_and_packed_ones_load_and_go_back():
    x, state, expected = mixtral(("gate_proj", "up_proj", "down_proj"), "mlp.")
    state["mlp.gate.e_score_correction_bias"] = np.arange(8.0, dtype=np.float32)  # DeepSeek
    params = nn.from_huggingface(state, prefix="mlp.")
    assert_equal(nn.to_huggingface(params, names="qwen", prefix="mlp."), state)
    packed = nn.to_huggingface(params, names="packed")
    assert packed["experts.gate_up_proj"].shape == (8, 20, 6)
    np.testing.assert_array_equal(
        packed["experts.gate_up_proj"][3, 10:], state["mlp.experts.3.up_proj.weight"]
    )
    assert_equal(nn.from_huggingface(packed), params)


@pytest.mark.parametrize("stacked", [True, False])
def test_parameters_of_maxtext_load_and_go_back(stacked):
    x, router, gate_up, down = weights_of(5, 6, 8, 10)
    theirs = {
        "gate": {"kernel": router, "bias": np.arange(8, dtype=np.float32)},
        "wi_0": gate_up[:, :, 0],
        "wi_1": gate_up[:, :, 1],
        "wo": down,
    }
    params = nn.from_maxtext(theirs, stacked=stacked)
    assert_equal(nn.to_maxtext(params), theirs)
    made = layer(stacked=stacked, use_selection_bias=True)
    nnx.update(made, params)
    expected = looped(x, router, gate_up, down, 2, bias=np.arange(8.0))
    assert_close(run(made, x), expected)


# Errors.


def on(mesh_shape, names, **options):
    mesh = jax.make_mesh(mesh_shape, names, axis_types=(AxisType.Auto,) * len(names))
    return layer(mesh=mesh, **options)(jnp.ones((8, 6)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer(expert_axis="e")(jnp.ones((8, 6))), r"there is no mesh: pass mesh="),
        (lambda: on((4,), ("x",), expert_axis="e"), r"'e' came .* one of the mesh: \('x',\)"),
        (
            lambda: on((2, 2), ("x", "y"), expert_axis=cast(Any, ("x", "y"))),
            r"'y'\) came as an axis",
        ),
        (lambda: on((2, 2), ("x", "e"), expert_axis="e", token_axes=("x",)), "expected 'e' among"),
        (lambda: on((3,), ("e",), expert_axis="e"), "that 3 devices .* divide evenly: pad"),
        (lambda: on((4,), ("e",), expert_axis="e", num_experts=6), "is 6, .* of the 4 devices on"),
        (lambda: on((4,), ("e",)), "mesh came without expert_axis, the mesh axis that shards"),
        (lambda: on((4,), ("e",), token_axes=("e",)), "mesh and token_axes came without expert_"),
        (lambda: nn.from_maxtext({"wi_0": 1, "wo": 1}), "from_maxtext: gate, wi_1 missing"),
        (lambda: nn.from_huggingface({}, prefix="a."), "from_huggingface: a.gate.weight missing"),
        (
            lambda: nn.from_huggingface({"b.gate.weight": 0}, prefix="a."),
            r"a.gate.weight missing, given are \['b.gate.weight'\]",
        ),
        (
            lambda: nn.from_huggingface({"gate.weight": np.ones((8, 6))}),
            "no experts after prefix '': expected experts.0.w1.weight",
        ),
        (
            lambda: nn.from_huggingface(
                {"gate.weight": np.ones((2, 6)), "experts.0.w1.weight": np.ones((10, 6))}
            ),
            "experts.1.w1.weight, .* and 2 more missing",
        ),
        (
            lambda: nn.to_huggingface({}, names=cast(Any, "llama")),
            "names is 'llama', expected 'mixtral'",
        ),
        (lambda: nn.to_maxtext({"router": 1, "gate": 1}), "to_maxtext: up, down missing"),
    ],
)
def test_errors_say_what_came_and_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
