"""Products of ours where Qwix, or another library, has replaced `jax.lax.dot_general`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from support.program_inspection import integers, products

import jax_hopper_gemm as jhg
from jax_hopper_gemm import nn

X, W = integers((16, 32), "bfloat16"), integers((32, 16), "bfloat16")
LAST_BY_FIRST = (((1,), (0,)), ((), ()))

CALLS = {
    "dot_general": lambda **o: jhg.dot_general(X, W, LAST_BY_FIRST, **o),
    "matmul": lambda **o: jhg.matmul(X, W, **o),
    "epilogue": lambda **o: jhg.matmul(X, W, bias=W[0], activation="relu", **o),
    "gated": lambda **o: jhg.gated_linear_unit(X, (W, W), activation="relu", **o),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_replaced_product_is_used_and_nothing_of_it_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    call = CALLS[name]
    ours = call()  # JAX keeps this trace
    original, seen = lax.dot_general, []

    def tripled(lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        seen.append((lhs, rhs))
        return original(3 * lhs, rhs, *args, **options)

    monkeypatch.setattr(lax, "dot_general", tripled)
    replaced = call()
    assert any(lhs is X and rhs is W for lhs, rhs in seen)  # no tracers
    with pytest.raises(NotImplementedError, match=r"'hopper', but jax.lax.dot_general is repl"):
        call(implementation="hopper")
    monkeypatch.undo()
    np.testing.assert_array_equal(call(), ours)
    assert products(call) == (1, 0)
    assert replaced.dtype == ours.dtype and np.any(replaced != ours)
    product = 3 * np.asarray(X @ W)
    plain = {
        "epilogue": np.maximum(product + np.asarray(W)[0], 0),
        "gated": np.maximum(product, 0) * product,
    }
    np.testing.assert_array_equal(replaced, plain.get(name, 3 * np.asarray(ours)))


class Model(nnx.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        options |= {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        self.up, self.down = kind(32, 64, **options), kind(64, 16, **options)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.relu(self.up(x)))


def call(model: Model, x: Any) -> Any:
    return model(x)


def loss(model: Model, x: Any) -> Any:
    return jnp.sum(model(x).astype(jnp.float32) ** 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax, by Qwix
@pytest.mark.parametrize("provider", ["QtProvider", "PtqProvider"])
def test_products_that_qwix_quantizes_become_ours_around_the_model_alone(provider: str):
    qwix = pytest.importorskip("qwix", reason="needs the extra `test`")
    rule = qwix.QuantizationRule(module_path="up", weight_qtype=jnp.int8, act_qtype=jnp.int8)

    def quantized(model: Model) -> Any:
        return qwix.quantize_model(model, getattr(qwix, provider)([rule]), X)

    theirs = quantized(Model(nnx.Linear))
    expected = theirs(X)
    assert np.any(expected != Model(nnx.Linear)(X))

    # Around the model: what Qwix has made of 8 bits becomes ours, too.
    assert products(jhg.accelerate(call), theirs, X) == (2, 0)
    np.testing.assert_array_equal(jhg.accelerate(call, fuse=False)(theirs, X), expected)
    # Scales and relu run in float32 in the kernel, where Qwix rounds each step to bfloat16.
    largest = np.abs(np.float32(expected)).max()
    fused = np.float32(jhg.accelerate(call)(theirs, X))
    np.testing.assert_allclose(fused, np.float32(expected), rtol=0, atol=2.0**-6 * largest)
    assert not jhg.explain(call, theirs, X).left

    # Inside of it: Qwix has them all.
    for model in (Model(nnx.Linear, dot_general=jhg.dot_general), Model(nn.Linear)):
        model(X)
        ours = quantized(model)
        assert products(call, ours, X) == (0, 2)
        np.testing.assert_array_equal(ours(X), expected)
        assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(theirs))

    if provider == "QtProvider":
        unfused = jhg.accelerate(loss, fuse=False)
        found, wanted = (nnx.jit(nnx.grad(f))(theirs, X) for f in (unfused, loss))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert products(nnx.grad(jhg.accelerate(loss)), theirs, X) == (6, 0)


def test_grouped_products_are_traced_without_the_replacement(monkeypatch: pytest.MonkeyPatch):
    """Its results may have another dtype: Qwix's have that of the operands."""

    def theirs(*_: Any, **__: Any) -> Any:
        raise AssertionError("called")

    weights = jnp.stack((W, W)), jnp.stack((W, W))
    call = partial(jhg.gated_linear_unit, preferred_element_type=jnp.float32)
    monkeypatch.setattr(lax, "dot_general", theirs)
    assert jax.eval_shape(call, X, weights, group_sizes=jnp.array([10, 5])).dtype == jnp.float32
