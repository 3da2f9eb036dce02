"""Whole models with `accelerate`: the numbers of a training step, and where its FLOPs run."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import model_programs
import numpy as np
import pytest
from model_parameters import Size
from model_programs import FAMILIES, Model
from support.covering import ALL
from support.program_inspection import equations, normal, operations, products_of

import jax_hopper_gemm as jhg
from jax_hopper_gemm.reports import ProductReport

# The programs are long; what of JAX `accelerate` depends on, shorter tests try in all versions.
pytestmark = pytest.mark.pure

# Of bfloat16. Where a result is rounded once, both programs have errors up to half of it.
EPSILON = float(jnp.finfo(jnp.bfloat16).eps)
# The plain program rounds after each equation, ours where a kernel stores: errors are of the same
# size, and by chance one is larger. Twice the plain one's is more than chance in a norm of many.
TIMES_PLAIN = 2
LARGEST_ERROR = 0.1  # of the plain program; with a larger one it would be no measure

# A bias of keys adds the same to all logits of a query: its gradient is nothing but rounding.
BIAS_OF_KEYS = re.compile(r"\['k'\]\['b'\]|\['key'\]\['bias'\]")
LAYERS = {"llama": 2}  # elsewhere one
IN_NNX = ["llama", "gemma", "gpt2", "t5", "vit"]
FUSED = {"llama": 31, "gemma": 18, "gpt2": 20, "t5": 41, "vit": 21, "mixtral": 19, "qwen3": 19}

# The least part of all FLOPs of products that kernels run in a training step of the real size.
# The others are in attention, where heads share keys, and where XLA's product is measured to be
# faster, or not likely enough to be slower by the fit of its time.
SHARES = {
    ("llama", "small"): 0.83, ("llama", "large"): 0.97, ("gemma", "small"): 0.8,
    ("gemma", "large"): 0.99, ("gpt2", "small"): 0.77, ("gpt2", "large"): 0.87,
    ("t5", "small"): 0.75, ("t5", "large"): 0.92, ("vit", "small"): 0.8, ("vit", "large"): 0.7,
    ("mixtral", "small"): 0.89, ("mixtral", "large"): 0.98, ("qwen3", "small"): 0.88,
    ("qwen3", "large"): 0.78,
}  # fmt: skip
# What may be left of a dense model's FLOPs that XLA is not expected to run as fast.
LARGEST_REST = 0.05
IN_ATTENTION = re.compile(
    r"\((attention|rotary_attend|written_out|dot_product_attention|Attention\.__call__)\)$"
)
BY_THE_COST_MODEL = re.compile(
    "XLA is faster|XLA splits|wait for the last of|matrix-vector product|our best kernel"
)


def tiny(family: str, layers: int = 1) -> Model:
    """Returns a model of a few layers, in which arrays have different extents."""
    large, adam = FAMILIES[family].sizes["large"], FAMILIES[family].adam
    size = Size(
        layers=layers, batch=2, length=5 if family == "vit" else 16, width=64, hidden=96, heads=4,
        vocabulary=80, kv_heads=2 if large.kv_heads else 0, experts=min(large.experts, 4),
        active=min(large.active, 2), gated=large.gated,
    )  # fmt: skip
    return Model(family, size, rate=0.1 if adam else 3.0)  # changes are as large as parameters


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])  # each goes through its layers itself
def test_a_scan_over_stacks_is_the_layers_one_after_the_other(family):
    model = replace(tiny(family, 2), dtype=jnp.float32)
    scanned, batch = replace(model, scanned=True), model.batch()
    results = [jax.jit(x.forward)(x.state()["parameters"], batch) for x in (model, scanned)]
    assert operations(scanned.loss, scanned.state()["parameters"], batch)["scan"]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


def fused_kernels(function: Any, *args: Any) -> int:
    """Returns how many products have an epilogue."""
    found = equations(function, *args)
    return sum(products_of(e) for e in found if "jaxpr" in e.params or e.params.get("functions"))


def differences(results: Any, others: Any) -> Any:
    return jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y), results, others)


def assert_as_good(ours: Any, plain: Any, exact: Any) -> None:
    """Asserts that errors, in norm relative to each exact array, are about those of `plain`."""

    def error(x: Any, y: Any) -> float:
        return float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y))

    def check(path: Any, mine: float, theirs: float) -> None:
        name = jax.tree_util.keystr(path)
        if not BIAS_OF_KEYS.search(name):
            assert theirs < LARGEST_ERROR, f"{name}: the plain program's error is {theirs}"
            assert mine <= TIMES_PLAIN * max(theirs, EPSILON), f"{name}: {mine}, plain {theirs}"

    errors = (jax.tree.map(error, results, exact) for results in (ours, plain))
    jax.tree_util.tree_map_with_path(check, *errors)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_is_as_good_as_the_plain_one(family: str, all_fused: None):
    model = tiny(family, LAYERS.get(family, 1))
    widely = replace(model, dtype=jnp.float32)
    state, batch = model.state(), model.batch()
    if "mean" in state:  # the update is smooth in the gradients, and no moment outweighs them
        state["mean"] = jax.tree.map(lambda x: x * 1e-3, state["mean"])
        state["square"] = jax.tree.map(lambda x: x + 1, state["square"])
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), state)

    def changes(step: Any, state: Any) -> tuple[Any, jax.Array]:
        new, loss = jax.jit(step)(state, batch)
        new.pop("count", None)
        return differences(new, {name: wide[name] for name in new}), loss

    ours = jhg.accelerate(model.step)
    exact = changes(widely.step, wide)
    assert_as_good(changes(ours, state), changes(model.step, state), exact)
    assert fused_kernels(ours, state, batch) >= FUSED[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", IN_NNX if ALL else ["llama", "t5"])  # gated; two stacks
def test_a_training_step_in_nnx_is_as_good_as_the_plain_one(family: str, all_fused: None):
    nnx: Any = pytest.importorskip("flax.nnx", reason="needs the extra `flax`")
    import nnx_programs

    from jax_hopper_gemm import nn

    model = replace(tiny(family), rate=3.0)
    batch = model.batch()
    initial = nnx.to_pure_dict(nnx.state(nnx_programs.module(model)))

    def changes(step: Any, model: Model) -> tuple[Any, jax.Array]:
        module = nnx_programs.module(model)
        loss = nnx.jit(step)(module, nnx_programs.optimizer(model, module), batch)
        return differences(nnx.to_pure_dict(nnx.state(module)), initial), loss

    exact = changes(nnx_programs.step, replace(model, dtype=jnp.float32))
    plain = changes(nnx_programs.step, model)
    assert_as_good(changes(nn.accelerate(nnx_programs.step), model), plain, exact)


def assert_on_kernels(report: ProductReport, share: float, dense: bool) -> None:
    assert report.kernel_share >= share, report
    others = [x for x in report.products if x.path != "hopper"]
    left = [x for x in others if not BY_THE_COST_MODEL.search(x.reason)]
    if dense:
        assert sum(x.flops for x in left) <= LARGEST_REST * report.flops, report
    left = [x for x in left if not IN_ATTENTION.search(x.line)]
    assert sum(x.flops for x in left) <= 1e-4 * report.flops, ProductReport(tuple(left))


@pytest.mark.parametrize("family, size", SHARES)
def test_kernels_run_all_but_attention_and_what_is_no_slower_by_xla(family: str, size: str):
    model = Model(family, FAMILIES[family].sizes[size])
    state, batch = jax.eval_shape(model.state), jax.eval_shape(model.batch)
    report, dense = jhg.explain(model.step, state, batch), FAMILIES[family].kind == "dense"
    assert_on_kernels(report, SHARES[family, size], dense)


@pytest.mark.slow
@pytest.mark.parametrize("family", IN_NNX)
def test_kernels_run_as_much_of_nnx(family: str):
    nnx: Any = pytest.importorskip("flax.nnx", reason="needs the extra `flax`")
    import nnx_programs

    from jax_hopper_gemm import nn

    model = Model(family, FAMILIES[family].sizes["large"])
    module = nnx.eval_shape(partial(nnx_programs.module, model))
    optimizer = nnx.eval_shape(partial(nnx_programs.optimizer, model), module)
    report = nn.explain(nnx_programs.step, module, optimizer, jax.eval_shape(model.batch))
    assert_on_kernels(report, SHARES[family, "large"], dense=True)


@pytest.mark.slow
def test_the_benchmark_finds_the_kernels_of_its_programs():
    models: Any = pytest.importorskip("models")
    for framework in models.FRAMEWORKS:
        for what in models.WHAT:
            assert models.Program("vit", "large", framework, what).specs()


def test_an_excerpt_is_a_product_with_what_follows_it_up_to_the_next_one():
    excerpts: Any = pytest.importorskip("excerpts")

    def function(x: jax.Array, w: jax.Array, v: jax.Array, b: jax.Array) -> Any:
        y = jax.lax.dot(x.T, w)  # (8, 16)
        hidden = jnp.tanh(y + b)
        z = jax.lax.dot(hidden, v)  # depends on y by a product, as all does that reads it
        return z * hidden, jnp.sum(y, axis=0), y.T

    x, w, v, b = (normal(shape) for shape in ((4, 8), (4, 16), (16, 16), (16,)))
    jaxpr = jax.make_jaxpr(function)(x, w, v, b).jaxpr
    first, second = (i for i, e in enumerate(jaxpr.eqns) if excerpts.is_product(e))
    cut = excerpts.excerpt(jaxpr, first)
    names = [e.primitive.name for e in excerpts.computing(cut)]
    assert sorted(names) == ["add", "dot_general", "reduce_sum", "tanh"]
    y = x.T @ w
    results = excerpts.by(cut, "xla")(x, w, b)  # x as it lies; y.T is y to XLA
    for result, exact in zip(results, (jnp.tanh(y + b), y.sum(0), y), strict=True):
        np.testing.assert_allclose(result, exact, rtol=1e-6)
    cut = excerpts.excerpt(jaxpr, second)
    assert [e.primitive.name for e in excerpts.computing(cut)] == ["dot_general", "mul"]


@pytest.mark.slow
def test_models_are_what_their_names_say():
    assert model_programs.relative_buckets(4, both_ways=False).tolist() == [
        [0, 0, 0, 0], [1, 0, 0, 0], [2, 1, 0, 0], [3, 2, 1, 0],
    ]  # fmt: skip
    assert model_programs.relative_buckets(3, both_ways=True)[0].tolist() == [0, 17, 18]
    x = normal((1, 4, 1, 8))
    turned = model_programs.rotated(x)
    np.testing.assert_allclose(jnp.sum(turned**2, -1), jnp.sum(x**2, -1), rtol=1e-5)
    turned = model_programs.rotated(jnp.broadcast_to(x[:, :1], x.shape))[0, :, 0]
    near, far = (jnp.sum(turned[i] * turned[i + 1]) for i in (0, 2))
    np.testing.assert_allclose(near, far, rtol=1e-5)  # distances alone count
