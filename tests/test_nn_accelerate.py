"""`nn.accelerate` changes an nnx module as its function does; `accelerate` refuses to lose that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.program_inspection import integers, products

import jax_hopper_gemm as jhg
from jax_hopper_gemm import nn

BF16: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
X = integers((16, 16), "bfloat16")


class Model(nnx.Module):
    """Layers that share weights, and all kinds of state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs, **BF16)
        self.norm = nnx.BatchNorm(16, rngs=rngs, **BF16)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.again = self.first
        self.last = nnx.Linear(16, 8, rngs=rngs, **BF16)

    def __call__(self, x: Any) -> Any:
        x = self.norm(self.again(self.first(x)))
        self.normed = nnx.Intermediate(jnp.sum(x))  # a variable that was not there before
        return self.last(self.dropout(x))


def loss_of(model: Model, x: Any) -> Any:
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def train_step(model: Model, optimizer: Any, *, x: Any, mode: str = "train") -> Any:
    assert mode == "train"
    loss, gradients = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, gradients)
    return {"loss": loss, "mode": mode}


def jit_of(step: Callable[..., Any]) -> Callable[..., Any]:
    assert step.__name__ == "train_step"
    return nnx.jit(lambda model, optimizer, x: step(model, optimizer, x=x)["loss"])


def made() -> tuple[Model, Any]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def state_of(*objects: Any) -> Any:
    """Returns all arrays, random keys as numbers."""

    def data(x: Any) -> Any:
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return jax.tree.map(data, nnx.to_pure_dict(nnx.state(objects)))


@pytest.mark.slow
def test_training_changes_model_and_optimizer_as_without_it():
    (model, optimizer), (theirs, their_optimizer) = made(), made()
    steps = jit_of(nn.accelerate(train_step, fuse=False)), jit_of(train_step)
    for i in range(2):
        found, expected = steps[0](model, optimizer, X), steps[1](theirs, their_optimizer, X)
        assert_same(found, expected)
        assert model.again is model.first
        assert model.dropout.rngs is not None and model.dropout.rngs.count[...] == i + 1
        assert_same(state_of(model, optimizer), state_of(theirs, their_optimizer))
    assert isinstance(model.normed, nnx.Intermediate) and optimizer.step[...] == 2


@pytest.mark.slow
@pytest.mark.parametrize("order", ["nnx.jit outside", "nnx.jit inside"])
def test_it_goes_together_with_nnx_jit(order: str):
    def call(model: Model, x: Any) -> Any:
        return model(x)

    both = {
        "nnx.jit outside": nnx.jit(nn.accelerate(call)),
        "nnx.jit inside": nn.accelerate(nnx.jit(call)),
    }
    (model, _), (theirs, _) = made(), made()
    ours, jitted = both[order], nnx.jit(call)
    for _ in range(2):
        assert_same(ours(model, X), jitted(theirs, X))
    assert_same(state_of(model), state_of(theirs))
    number = products(lambda x: call(made()[0], x), X)[1]
    assert products(lambda x: ours(made()[0], x), X) == (number, 0)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["gradient outside", "gradient inside"])
def test_gradients_are_those_of_nnx(order: str):
    both = {
        "gradient outside": nnx.grad(nn.accelerate(loss_of, fuse=False)),
        "gradient inside": nn.accelerate(nnx.grad(loss_of), fuse=False),
    }
    (model, _), (theirs, _) = made(), made()
    found = nnx.jit(both[order])(model, X)
    expected = nnx.jit(nnx.grad(loss_of))(theirs, X)
    assert_same(nnx.to_pure_dict(found), nnx.to_pure_dict(expected))
    assert_same(state_of(model), state_of(theirs))


@pytest.mark.slow
def test_modules_that_are_made_inside_come_out():
    def make(x: Any) -> Any:
        model = made()[0]
        return model, model(x)

    model, y = nn.accelerate(make)(X)
    theirs, expected = make(X)
    assert isinstance(model, Model) and model.again is model.first
    assert_same(y, expected)
    assert_same(state_of(model), state_of(theirs))


def test_the_report_leaves_the_model_as_it_is():
    model, optimizer = made()
    before = state_of(model, optimizer)
    report = nn.explain(train_step, model, optimizer, x=X)
    assert_same(state_of(model, optimizer), before)
    assert (len(report.taken), report.left) == (8, ())
    none = nn.explain(train_step, model, optimizer, x=X, implementation="xla")
    assert (none.taken, len(none.left)) == ((), 8)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, nnx.grad])
def test_changes_that_would_be_lost_are_refused(wrap: Callable[[Any], Any]):
    model, _ = made()
    with pytest.raises(ValueError, match=r"changes a Model that .* use jax_hopper_gemm.nn.accel"):
        wrap(jhg.accelerate(loss_of))(model, X)


@pytest.mark.slow
def test_changes_that_are_returned_are_not_refused():
    graph, state = nnx.split(made()[0])

    def call(state: Any, x: Any, notes: dict[str, Any]) -> Any:
        model = nnx.merge(graph, state)
        notes["more"] = x  # of Python's own containers, the function is given copies
        return model(x), nnx.state(model)

    found = jhg.accelerate(call)(state, X, {})
    expected = call(nnx.split(made()[0])[1], X, {})
    assert_same(found[0], expected[0])
    model, _ = made()
    model.eval()
    assert_same(jhg.accelerate(lambda m, x: m.last(x))(model, X), model.last(X))


def test_what_is_no_function_and_unknown_choices_are_refused():
    wrong: Any = "cuda"
    for call in (nn.accelerate, nn.explain):
        with pytest.raises(TypeError, match="function is a .*, expected a function"):
            call(wrong)
        with pytest.raises(ValueError, match="implementation is 'cuda', expected None"):
            call(train_step, implementation=wrong)
    assert nn.accelerate(train_step, implementation="xla") is train_step
