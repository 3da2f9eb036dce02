"""Layers for linen: parameters interchangeable with Flax's own, results equal to theirs.

As in `test_nn`, inputs and parameters are small integers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import integers
from support.trees import assert_equal

flax = pytest.importorskip("flax", reason="needs the extra `flax`")

import flax.linen as linen  # noqa: E402
from flax import nnx  # noqa: E402
from flax.core import meta  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jax_hopper_gemm import nn  # noqa: E402
from jax_hopper_gemm.nn import linen as ours_linen  # noqa: E402


def run(module: Any, variables: Any, x: Any, **options: Any) -> Any:
    """Applies a linen module."""
    return module.apply(variables, x, **options)


@pytest.mark.parametrize("use_bias", [True, False])
def test_parameters_of_linen_dense_load_into_ours_and_back(use_bias):
    theirs, ours = linen.Dense(5, use_bias=use_bias), ours_linen.Dense(5, use_bias=use_bias)
    x = integers((3, 8))
    variables = theirs.init(jax.random.key(0), x)
    assert_equal(ours.init(jax.random.key(0), x), variables)
    variables = jax.tree.map(lambda leaf: integers(leaf.shape, seed=leaf.ndim), variables)
    assert_equal(run(ours, variables, x), run(theirs, variables, x))
    relu = ours_linen.Dense(5, use_bias=use_bias, activation="relu")
    assert_equal(run(relu, variables, x), jax.nn.relu(run(theirs, variables, x)))


@pytest.mark.parametrize("kind", [ours_linen.Dense, ours_linen.MLP])
def test_float32_logits_of_linen_have_16_bit_gradients(kind):
    x = (integers((3, 8)) / 7).astype(jnp.bfloat16)
    logits: dict[str, Any] = {
        "preferred_element_type": jnp.float32, "param_dtype": jnp.bfloat16, "use_bias": False,
        "activation": None,
    }  # fmt: skip
    variables = kind(5, **logits).init(jax.random.key(0), x)

    def entering(layer):
        def loss(x):
            y = layer.apply(variables, x)
            assert y.dtype == jnp.float32
            return jnp.sum(y**3)

        program = jax.make_jaxpr(jax.grad(loss))(x)
        last = [e for e in program.eqns if e.primitive.name == "hopper_dot"][-1]
        return {v.aval.dtype.name for v in last.invars}

    assert entering(kind(5, **logits, cotangent_dtype=jnp.bfloat16)) == {"bfloat16"}
    assert "float32" in entering(kind(5, **logits))


def test_linen_layers_are_named_as_flax_names_them():
    def model(dense):
        class Model(linen.Module):
            @linen.compact
            def __call__(self, x):
                return dense(4)(dense(5)(x))

        return Model()

    trees = [model(d).init(jax.random.key(0), integers((3, 8))) for d in (ours_linen, linen)
             for d in (d.Dense,)]  # fmt: skip
    assert_equal(*trees)


def test_linen_gated_mlp_agrees_with_nnx_and_with_three_dense():
    x = integers((4, 8))
    mlp = ours_linen.GatedMLP(6, activation="relu", use_bias=True)
    dense = {"gate_proj": linen.Dense(6), "up_proj": linen.Dense(6), "down_proj": linen.Dense(8)}
    hidden = integers((4, 6))
    params = {
        name: jax.tree.map(
            lambda leaf, i=i: integers(leaf.shape, seed=leaf.ndim + 2 * i),
            layer.init(jax.random.key(0), hidden if name == "down_proj" else x)["params"],
        )
        for i, (name, layer) in enumerate(dense.items())
    }

    def theirs(name, x):
        return run(dense[name], {"params": params[name]}, x)

    stacked = {
        "gate_up": nn.from_pair(params["gate_proj"], params["up_proj"]),
        "down": params["down_proj"],
    }
    expected = theirs("down_proj", jax.nn.relu(theirs("gate_proj", x)) * theirs("up_proj", x))
    assert_equal(run(mlp, {"params": stacked}, x), expected)
    shapes = jax.eval_shape(mlp.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, stacked)

    twin = nn.GatedMLP(8, 6, activation="relu", use_bias=True, rngs=nnx.Rngs(0))
    for name, layer in (("gate_up", twin.gate_up), ("down", twin.down)):
        for parameter, value in stacked[name].items():
            getattr(layer, parameter)[...] = value
    assert_equal(twin(x), expected)


def test_linen_mlp_is_two_dense():
    x = integers((4, 8))
    variables = ours_linen.MLP(6, 3).init(jax.random.key(0), x)
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes == {
        "up": {"kernel": (8, 6), "bias": (6,)},
        "down": {"kernel": (6, 3), "bias": (3,)},
    }
    variables = jax.tree.map(lambda leaf: integers(leaf.shape, seed=leaf.ndim), variables)
    up = run(linen.Dense(6), {"params": variables["params"]["up"]}, x)
    expected = run(linen.Dense(3), {"params": variables["params"]["down"]}, jax.nn.relu(up))
    residual = integers((4, 3), seed=9)
    mlp = ours_linen.MLP(6, 3, activation="relu")
    assert_equal(run(mlp, variables, x, residual=residual), expected + residual)
    seen = []
    wide = ours_linen.MLP(6, promote_dtype=lambda *arrays, dtype: seen.append(dtype) or arrays)
    wide.init(jax.random.key(0), x)
    assert seen == [None, None]


def test_gate_and_up_start_apart_in_linen():
    variables = ours_linen.GatedDense(64).init(jax.random.key(0), jnp.zeros((1, 256)))
    gate, up = nn.to_pair(variables["params"]["kernel"])
    assert not np.allclose(gate, up)
    for kernel in (gate, up):  # lecun_normal of 256 inputs
        assert abs(float(kernel.std()) * 16 - 1) < 0.05


def test_linen_annotations_gain_and_lose_the_stacked_axis():
    init = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
    layer = ours_linen.GatedDense(6, use_bias=False, kernel_init=init)
    variables = layer.init(jax.random.key(0), integers((4, 8)))
    specs = linen.get_partition_spec(variables)
    assert specs["params"]["kernel"] == P("embed", None, "mlp")
    gate, _ = nn.to_pair(variables["params"])
    assert isinstance(gate["kernel"], meta.Partitioned)
    assert gate["kernel"].names == ("embed", "mlp") and gate["kernel"].value.shape == (8, 6)
