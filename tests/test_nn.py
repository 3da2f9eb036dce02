"""Layers for nnx: parameters interchangeable with Flax's own, results and gradients equal.

Inputs and parameters are small integers, whose results are exact in any order of summation, so
ours and Flax's must be equal wherever an activation is exact too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import integers, normal, run_fresh
from support.trees import assert_equal

import jax_hopper_gemm as jhg

flax = pytest.importorskip("flax", reason="needs the extra `flax`")

from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jax_hopper_gemm import nn  # noqa: E402
from jax_hopper_gemm.nn import linen as ours_linen  # noqa: E402


def test_linen_is_an_attribute_that_is_imported_where_it_is_asked_for():
    source = (
        "import sys\n"
        "from jax_hopper_gemm import nn\n"
        "name = 'jax_hopper_gemm.nn.linen'\n"
        "print(name in sys.modules, nn.linen.Dense.__module__ == name)\n"
    )
    assert run_fresh(source) == "False True\n"
    with pytest.raises(AttributeError, match="has no attribute 'lines'"):
        _ = nn.lines


def fill(layer):
    """Gives every parameter of an nnx layer integers; the same to equally named ones."""
    state = nnx.state(layer)
    nnx.update(layer, jax.tree.map(lambda x: integers(x.shape, x.dtype, seed=x.ndim), state))
    return layer


def sharding_of(parameter: Any) -> P:
    return parameter[...].sharding.spec


def loss(layer, x):
    return (layer(x).astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_state_of_nnx_linear_loads_into_ours_and_back(use_bias):
    theirs = nnx.Linear(8, 5, use_bias=use_bias, rngs=nnx.Rngs(0))
    ours = nn.Linear(8, 5, use_bias=use_bias, rngs=nnx.Rngs(1))
    x = integers((3, 8))
    nnx.update(ours, nnx.state(theirs))
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    assert_equal(nnx.state(fill(ours)), nnx.state(fill(theirs)))
    nnx.update(theirs, jax.tree.map(lambda leaf: leaf + 1, nnx.state(ours)))
    nnx.update(ours, nnx.state(theirs))
    assert_equal(ours(x), theirs(x))


def test_linear_starts_as_flax_does():
    options: dict[str, Any] = {"bias_init": nnx.initializers.normal(), "param_dtype": jnp.bfloat16}
    layers = [kind(8, 5, rngs=nnx.Rngs(3), **options) for kind in (nn.Linear, nnx.Linear)]
    assert_equal(*map(nnx.state, layers))
    assert layers[0].kernel.dtype == jnp.bfloat16


@nnx.jit
def results_and_gradients(layer, x):
    return layer(x), nnx.grad(loss)(layer, x), jax.grad(lambda x: loss(layer, x))(x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, None])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8)])
def test_linear_gives_flax_results_and_gradients(shape, dtype):
    ours, theirs = (fill(k(8, 5, dtype=dtype, rngs=nnx.Rngs(0))) for k in (nn.Linear, nnx.Linear))
    x = integers(shape, "bfloat16")
    assert_equal(*(results_and_gradients(layer, x) for layer in (ours, theirs)))


def test_linear_applies_its_activation_and_adds_the_residual_last():
    theirs = fill(nnx.Linear(8, 5, rngs=nnx.Rngs(0)))
    ours = fill(nn.Linear(8, 5, activation="relu", rngs=nnx.Rngs(0)))
    x, residual = integers((3, 8)), integers((3, 5), seed=4)
    assert (np.asarray(theirs(x)) < 0).any()
    assert_equal(ours(x), jax.nn.relu(theirs(x)))
    assert_equal(ours(x, residual=residual), jax.nn.relu(theirs(x)) + residual)
    squared = fill(nn.Linear(8, 5, activation=lambda y: y * y, rngs=nnx.Rngs(0)))
    assert_equal(squared(x), theirs(x) ** 2)


def test_linear_keeps_flax_options():
    x = integers((3, 8), "bfloat16")
    options: dict[str, Any] = {
        "dtype": jnp.bfloat16,
        "preferred_element_type": jnp.float32,
        "use_bias": False,
    }
    ours, theirs = (fill(k(8, 5, rngs=nnx.Rngs(0), **options)) for k in (nn.Linear, nnx.Linear))
    assert ours(x).dtype == jnp.float32
    assert_equal(ours(x), theirs(x))

    def no_promotion(arrays, *, dtype):
        raise RuntimeError("called")

    with pytest.raises(RuntimeError, match="called"):
        nn.Linear(8, 5, promote_dtype=no_promotion, rngs=nnx.Rngs(0))(x)


@pytest.mark.slow
def test_annotations_of_sharding_are_kept():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        options: dict[str, Any] = {
            "kernel_metadata": {"out_sharding": (None, "model")},
            "bias_metadata": {"out_sharding": ("model",)},
            "rngs": nnx.Rngs(0),
        }
        linear, gated = nn.Linear(8, 4, **options), nn.GatedLinear(8, 4, **options)
        assert sharding_of(linear.kernel) == P(None, "model")
        assert gated.kernel.get_metadata()["out_sharding"] == (None, None, "model")
        assert sharding_of(gated.kernel) == P(None, None, "model")
        assert sharding_of(gated.bias) == P(None, "model")
        gate, _ = nn.to_pair(nnx.state(gated))
        assert jax.tree.structure(gate) == jax.tree.structure(nnx.state(linear))


@pytest.mark.parametrize(("kind", "first"), [(nn.MLP, "up"), (nn.GatedMLP, "gate_up")])
def test_down_contracts_a_sharded_axis_into_the_sharding_asked_for(kind, first):
    mlp, x = fill(kind(8, 6, activation="relu", rngs=nnx.Rngs(0))), integers((4, 8))
    expected, up, down = mlp(x, residual=x), getattr(mlp, first).kernel, mlp.down.kernel
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        up.set_value(jax.reshard(up[...], P(*[None] * (up.ndim - 1), "model")))
        down.set_value(jax.reshard(down[...], P("model")))
        y = mlp(x, P("model"), residual=jax.reshard(x, P("model")))
        assert jax.typeof(y).sharding.spec == P("model", None)
        assert_equal(y, expected)


def test_gated_linear_starts_as_two_linears_do():
    options: dict[str, Any] = {"bias_init": nnx.initializers.normal()}
    rngs = nnx.Rngs(0)
    gate, up = (nnx.Linear(8, 5, rngs=rngs, **options) for _ in range(2))
    gated = nn.GatedLinear(8, 5, rngs=nnx.Rngs(0), **options)
    assert gated.kernel.shape == (8, 2, 5) and gated.bias is not None and gated.bias.shape == (2, 5)
    assert_equal(nn.to_pair(nnx.state(gated)), (nnx.state(gate), nnx.state(up)))


@pytest.mark.parametrize("shape", [(), (6,), (8, 3, 6), (2, 8, 6)])
def test_parameters_that_are_no_gate_and_up_are_refused(shape):
    with pytest.raises(ValueError, match="to_pair: an array is .*, expected an axis of length 2"):
        nn.to_pair({"kernel": jnp.zeros(shape)})
    with pytest.raises(ValueError, match="from_pair: gate is .* and up is .*, expected equal shap"):
        nn.from_pair({"bias": jnp.zeros(shape)}, {"bias": jnp.zeros(shape and (*shape, 2))})


@pytest.mark.slow
@pytest.mark.parametrize("use_bias", [True, False])
def test_gated_mlp_takes_the_three_layers_of_a_model(use_bias):
    options: dict[str, Any] = {"use_bias": use_bias, "rngs": nnx.Rngs(0)}
    gate, up, down = (fill(nnx.Linear(*e, **options)) for e in ((8, 6), (8, 6), (6, 8)))
    nnx.update(up, jax.tree.map(lambda leaf: 1 - leaf, nnx.state(up)))  # not gate's values
    mlp = nn.GatedMLP(8, 6, activation="relu", **options)
    pair = nn.from_pair(nnx.state(gate), nnx.state(up))
    nnx.update(mlp.gate_up, pair)
    nnx.update(mlp.down, nnx.state(down))

    def theirs(x):
        return down(jax.nn.relu(gate(x)) * up(x))

    x = integers((4, 8))
    assert np.any(theirs(x))
    assert_equal(mlp(x), theirs(x))
    assert_equal(mlp(x, residual=x), theirs(x) + x)
    assert_equal(nn.to_pair(nnx.state(mlp.gate_up)), (nnx.state(gate), nnx.state(up)))

    of_theirs = nnx.grad(lambda layers, x: loss(lambda x: theirs_of(layers, x), x))
    by_model = nnx.jit(of_theirs)(nnx.List([gate, up, down]), x)
    by_ours = nnx.jit(nnx.grad(loss))(mlp, x)
    assert_equal(nn.to_pair(by_ours.gate_up), (by_model[0], by_model[1]))
    assert_equal(by_ours.down, by_model[2])


def theirs_of(layers, x):
    gate, up, down = layers
    return down(jax.nn.relu(gate(x)) * up(x))


def test_mlp_is_two_linears():
    up, down = (fill(nnx.Linear(*extents, rngs=nnx.Rngs(0))) for extents in ((8, 6), (6, 3)))
    mlp = nn.MLP(8, 6, 3, activation="relu", rngs=nnx.Rngs(1))
    nnx.update(mlp.up, nnx.state(up))
    nnx.update(mlp.down, nnx.state(down))
    x = integers((4, 8))
    assert_equal(mlp(x), down(jax.nn.relu(up(x))))
    assert nn.MLP(8, 6, rngs=nnx.Rngs(0)).down.out_features == 8


def test_down_takes_options_of_its_own():
    for kind in (nn.MLP, nn.GatedMLP):
        mlp = kind(8, 6, use_bias=True, down_options={"use_bias": False}, rngs=nnx.Rngs(0))
        assert mlp.down.bias is None and jax.tree.leaves(nnx.state(mlp))[0] is not None
        assert mlp(integers((2, 8))).shape == (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.MLP, nn.GatedMLP])
def test_training_lowers_the_loss(kind):
    optax = pytest.importorskip("optax")
    model = kind(8, 32, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x = normal((64, 8))
    y = np.sin(x).sum(axis=1, keepdims=True)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.slow
def test_layers_pass_through_flax_transforms():
    model = nn.GatedMLP(8, 6, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    x = integers((3, 8))
    assert_equal(nnx.merge(graph, state)(x), model(x))
    assert_equal(nnx.jit(lambda m, x: m(x))(model, x), jax.jit(lambda x: model(x))(x))
    stack = nnx.vmap(lambda rngs: nn.Linear(8, 5, activation="gelu", rngs=rngs))(
        nnx.Rngs(0).split(4)
    )
    assert stack.kernel.shape == (4, 8, 5)
    shape = nnx.eval_shape(lambda: nn.GatedMLP(8, 6, rngs=nnx.Rngs(0)))
    assert shape.gate_up.kernel.shape == (8, 2, 6)


@pytest.mark.parametrize(
    "make, wanted",
    [
        (lambda: nn.Linear(8, 5, dot_general=jhg.dot_general, rngs=nnx.Rngs(0)), "nnx.Linear"),
        (lambda: nn.GatedMLP(8, 5, dot_general=jhg.dot_general, rngs=nnx.Rngs(0)), "nnx.Linear"),
        (
            lambda: ours_linen.Dense(5, dot_general_cls=lambda: jhg.dot_general).init(
                jax.random.key(0), integers((3, 8))
            ),
            "flax.linen.Dense",
        ),
    ],
)
def test_a_foreign_dot_general_is_refused_with_the_way_out(make, wanted):
    with pytest.raises(TypeError, match=rf"dot_general.* came, .* use {wanted}\(dot_general"):
        make()


@pytest.mark.parametrize("option", ["implementation", "save_preactivation", "recipe"])
@pytest.mark.parametrize("kind", [nn.MLP, nn.GatedMLP, ours_linen.MLP, ours_linen.GatedMLP])
def test_options_of_the_product_reach_it(kind: Any, option: str):
    def call(**options):
        x = integers((3, 8))
        if kind in (nn.MLP, nn.GatedMLP):
            return kind(8, 6, rngs=nnx.Rngs(0), **options)(x)
        return kind(6, **options).init_with_output(jax.random.key(0), x)

    good = {
        "implementation": "xla", "save_preactivation": False,
        "recipe": jhg.recipes.BlockScaling(),
    }  # fmt: skip
    call(**{option: good[option]})
    with pytest.raises((ValueError, TypeError), match=f"{option} is 'nonsense', expected"):
        call(**{option: "nonsense"})
