"""`accelerate` exchanges a function's products and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.program_inspection import equations, integers, operations, products, same

import jax_hopper_gemm as jhg

X, W = integers((16, 16), "bfloat16"), integers((16, 16), "bfloat16", seed=1)
SIZES = jax.device_put(np.array([3, 0, 9]))
GROUPS = integers((3, 16, 8), "bfloat16")
F32 = methodcaller("astype", "float32")
CONTRACTED = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])


PRODUCTS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "matmul": (jnp.matmul, X, W),
    "batched": (jnp.matmul, integers((2, 3, 16, 8), "bfloat16"), integers((8, 16), "bfloat16")),
    "vector": (jnp.matmul, X, W[0]),
    "dot": (jnp.dot, X, W),
    "vdot": (jnp.vdot, X[0], W[0]),
    "tensordot": (jnp.tensordot, integers((4, 16, 2), "bfloat16"), W.reshape(16, 2, 8)),
    "transposed": (lambda x, w: x @ w.T, X, W),
    "einsum": (partial(jnp.einsum, "ab,cb->ca"), X, W),
    "transposed result": (lambda x, w: (x @ w).T, X, W[:, :8]),
    "einsum of three": (lambda x, w: jnp.einsum("ab,bc,cd->ad", x, w, x), X, W),
    "float16": (lambda x, w: jnp.matmul(x.astype("float16"), w.astype("float16")), X, W),
    "float32": (jnp.matmul, *map(F32, (X, W))),
    "float32, exact": (partial(jnp.matmul, precision="highest"), *map(F32, (X, W))),
    "float32, rounded": (
        partial(jnp.matmul, preferred_element_type=jnp.bfloat16), *map(F32, (X, W)),
    ),
    "float32 result": (partial(jnp.matmul, preferred_element_type=jnp.float32), X, W),
    "precision": (partial(jnp.matmul, precision="highest"), X, W),
    "elementwise": (lambda x, w: lax.dot_general(x, w, (((), ()), ((0, 1), (0, 1)))), X, W),
    "ragged": (lambda x, w: lax.ragged_dot(x, w, SIZES), X, GROUPS),
    "two ragged": (
        lambda x, w: lax.ragged_dot(x, w, SIZES) - 2 * lax.ragged_dot(x, w, SIZES[::-1]),
        X, GROUPS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_becomes_ours_with_its_value_and_derivatives(name: str):
    function, a, b = PRODUCTS[name]
    ours = jhg.accelerate(function)
    number = sum(products(function, a, b))
    assert products(ours, a, b) == (number, 0)

    def results(function: Callable[..., Any], a: Any, b: Any) -> Any:
        def loss(a: Any, b: Any) -> Any:
            return jnp.sum(function(a, b).astype("float32") * 2)

        value_and_tangent = jax.jvp(function, (a, b), (2 * a, 3 * b))
        return function(a, b), jax.grad(loss, (0, 1))(a, b), value_and_tangent

    found, expected = (jax.jit(partial(results, f))(a, b) for f in (ours, function))
    same(found, expected)
    assert found[0].dtype == expected[0].dtype


def test_a_transpose_that_ends_with_a_batch_axis_stays_outside_of_the_product():
    """Kernels write matrices whose rows are adjacent elements, wherever the batch axes lie."""

    def heads_inside(p: Any, v: Any) -> Any:
        return jnp.matmul(p, v).transpose(0, 2, 1, 3)

    def batch_inside(p: Any, v: Any) -> Any:
        return jnp.matmul(p, v).transpose(2, 0, 1, 3)

    def batch_last(p: Any, v: Any) -> Any:
        return jnp.matmul(p, v).transpose(0, 2, 3, 1)

    shapes = [jax.ShapeDtypeStruct((8, 16, 512, n), jnp.bfloat16) for n in (512, 64)]
    for function, transposes in ((heads_inside, 0), (batch_inside, 0), (batch_last, 1)):
        assert operations(jhg.accelerate(function), *shapes)["transpose"] == transposes
        ours = jhg.accelerate(function, implementation="hopper")
        (product,) = jhg.explain(ours, *shapes).products
        assert product.path == "hopper", product
    p, v = integers((2, 3, 8, 8), "bfloat16"), integers((2, 3, 8, 4), "bfloat16")
    for function in (heads_inside, batch_inside, batch_last):
        same(jhg.accelerate(function)(p, v), function(p, v))


@pytest.mark.slow
def test_ragged_contractions_become_ours_with_derivatives_that_jax_lacks():
    def theirs(x: Any, w: Any) -> Any:
        return lax.ragged_dot_general(x, w, SIZES, CONTRACTED)

    def dense(x: Any, w: Any) -> Any:
        ends = jnp.cumsum(SIZES)
        row = jnp.arange(16)
        mine = (row < ends[:, None]) & (row >= (ends - SIZES)[:, None])
        return jnp.einsum("gm,mk,mn->gkn", mine.astype(x.dtype), x, w)

    ours = jhg.accelerate(theirs)
    assert products(ours, X, W) == (1, 0)
    same(ours(X, W), theirs(X, W))
    gradients = (jax.grad(lambda x, f=f: jnp.sum(f(x, W) ** 2)) for f in (ours, dense))
    same(*(jax.jit(gradient)(X) for gradient in gradients))


def test_ragged_products_with_shared_weights_can_be_mapped():
    xs = np.stack([X, -np.asarray(X)])
    mapped = jax.vmap(jhg.accelerate(lambda x: lax.ragged_dot(x, GROUPS, SIZES)))
    same(mapped(xs), np.stack([lax.ragged_dot(x, GROUPS, SIZES) for x in xs]))


def test_arguments_and_results_of_any_kind_are_handed_on():
    def function(tree: Any, mode: str, *, train: bool = False, count: int) -> Any:
        assert mode == "mode" and count == 3
        y = tree["x"] @ tree["w"][0] if train else tree["x"]
        return {"y": y, "mode": mode, "none": None, "count": count + 1, "w": tree["w"][1]}

    ours = jhg.accelerate(function)
    tree = {"x": X, "w": (np.asarray(W), 1.5)}
    found = ours(tree, "mode", train=True, count=3)
    expected = function(tree, "mode", train=True, count=3)
    assert found.keys() == expected.keys()
    assert (found["mode"], found["none"], found["count"], found["w"]) == ("mode", None, 4, 1.5)
    same(found["y"], expected["y"])
    same(ours(tree, "mode", count=3)["y"], X)
    assert ours.__name__ == "function"


@jax.tree_util.register_dataclass
@dataclass
class Cache:
    keys: Any


def attend(cache: Cache, x: Any) -> Any:
    cache.keys = cache.keys + x
    return cache.keys @ x.T


def test_a_function_may_change_an_argument_that_a_transformation_made():
    expected = jax.jit(attend)(Cache(X), W)
    same(jax.jit(jhg.accelerate(attend))(Cache(X), W), expected)
    mapped = jax.vmap(jhg.accelerate(attend))(Cache(X[None]), W[None])
    same(mapped[0], expected)


@pytest.mark.parametrize("transformed", [lambda f: f, jax.jit])
def test_a_change_that_the_caller_could_see_is_refused(transformed: Any):
    def call(x: Any) -> Any:
        cache = Cache(x)
        return jhg.accelerate(attend)(cache, x), cache

    with pytest.raises(ValueError, match="accelerate: the function changes a Cache"):
        transformed(call)(X)
    with pytest.raises(ValueError, match="accelerate: the function changes a Cache"):
        jax.vmap(lambda x: jhg.accelerate(attend)(Cache(X), x))(X[None])

    def loss(x: Any, cache: Cache) -> Any:
        return jnp.sum(attend(cache, x))

    with pytest.raises(ValueError, match="accelerate: the function changes a Cache"):
        transformed(lambda x: jax.grad(jhg.accelerate(loss))(x, Cache(x)))(X)


def scaled(scales: dict[str, Any], x: Any, steps: int = 1, **more: Any) -> Any:
    return x if scales["of x"].sum() > steps else more["y"].item()


@pytest.mark.parametrize("call", [jhg.accelerate(scaled), jax.jit(jhg.accelerate(scaled))])
def test_errors_of_jax_name_the_function_and_its_arguments(call: Any):
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        call({"of x": X}, W, y=X)
    assert "the function scaled at" in str(raised.value)
    assert "the argument scales['of x']" in str(raised.value)


def test_tokens_are_passed_on():
    def first(x: Any) -> Any:
        return lax.create_token(x), x @ x

    def both(x: Any) -> Any:
        token, y = jhg.accelerate(first)(x)
        return jhg.accelerate(lambda token, y: (token, y @ y))(token, y)

    token, y = jax.jit(both)(X)
    same(y, (X @ X) @ (X @ X))
    assert jax.typeof(token) == jax.typeof(lax.create_token(X))


def test_arrays_that_a_function_closes_over_are_differentiated():
    def loss(w: Any) -> Any:
        return jnp.sum(jhg.accelerate(lambda x: x @ w)(X))

    same(jax.grad(loss)(W), jax.grad(lambda w: jnp.sum(X @ w))(W))


def test_a_program_that_is_used_twice_is_changed_once():
    layer = jax.jit(lambda x: x @ W)
    found = [
        e.params["jaxpr"]
        for e in equations(jhg.accelerate(lambda x: layer(layer(x))), X)
        if e.primitive.name == "jit"
    ]
    assert len(found) == 2 and found[0] is found[1]


def test_calls_without_jit_around_them_compile_inner_programs_once():
    layer = jax.jit(lambda x: jnp.tanh(x @ W))
    ours = jhg.accelerate(lambda x: layer(x) + layer(x))
    ours(X)
    with _Compilations() as found:
        ours(X)
    assert found.count == 0


class _Compilations:
    """Counts what XLA compiles."""

    def __enter__(self) -> Any:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)
        return self

    def __call__(self, event: str, *_: Any, **__: Any) -> None:
        self.count += "backend_compile" in event

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self)


def test_donated_arguments_are_donated():
    text = jax.jit(jhg.accelerate(lambda x, w: x @ w), donate_argnums=0).lower(X, W).as_text()
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text


def test_a_product_of_int8_that_wraps_stays():
    x = X.astype("int8")
    assert products(jhg.accelerate(jnp.matmul), x, x) == (0, 1)
    (found,) = jhg.explain(jnp.matmul, x, x).left
    assert found.reason == "no kernel multiplies int8 into int8"


def test_a_product_of_two_float_dtypes_stays():
    mixed = jhg.explain(lax.dot_general, X, F32(X), (((1,), (0,)), ((), ())))
    assert mixed.left[0].reason == "no kernel multiplies bfloat16 by float32"


@pytest.mark.parametrize("dtype", ["int16", "complex64"])
def test_products_of_other_dtypes_stay_and_say_so(dtype: str):
    x = X.astype(dtype)
    assert products(jhg.accelerate(jnp.matmul), x, x) == (0, 1)
    (found,) = jhg.explain(jnp.matmul, x, x).left
    assert found.reason == f"no kernel multiplies {dtype}"


def test_a_product_by_a_number_stays_where_a_kernel_is_insisted_on():
    """As in the gradient of `jnp.vdot`, which no kernel runs."""
    gradient = jhg.accelerate(jax.grad(jnp.vdot), implementation="hopper")
    x = integers((4, 8))
    np.testing.assert_array_equal(gradient(x, x), x)
    assert products(gradient, x, x) == (0, 1)


@pytest.mark.slow
def test_a_kernel_of_pallas_stays_as_it_is():
    def kernel(x: Any, w: Any, out: Any) -> None:
        out[...] = x[...] @ w[...]

    def function(x: Any, w: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, w) @ w

    assert products(jhg.accelerate(function), X, W) == (1, 1)
    same(jhg.accelerate(function)(X, W), function(X, W))
    (left,) = jhg.explain(function, X, W).left
    assert left.within == ("pallas_call",)
    assert left.reason == "it is part of pallas_call, which is left as it is"


def test_explicit_mesh_axes_keep_the_sharding_that_is_asked_for():
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, P("i", "j")), jax.device_put(W, P("j", None))

        def function(x: Any, w: Any) -> Any:
            return jnp.matmul(x, w, out_sharding=P("i", "j"))

        ours = jhg.accelerate(function)
        assert products(ours, x, w) == (1, 0)
        found, expected = jax.jit(ours)(x, w), jax.jit(function)(x, w)
        assert jax.typeof(found) == jax.typeof(expected)
        same(found, expected)
        sizes, groups = (jax.device_put(y, P()) for y in (SIZES, GROUPS))

        def ragged(x: Any) -> Any:
            return lax.ragged_dot(x, groups, sizes, out_sharding=P("i", None))

        rows = jax.device_put(X, P("i", None))
        ours = jhg.accelerate(ragged)
        assert products(ours, rows) == (1, 0)
        found = jax.jit(ours)(rows)
        assert jax.typeof(found).sharding.spec == P("i", None)
        same(found, jhg.ragged_dot(*(np.asarray(y) for y in (X, GROUPS, SIZES))))


def test_nans_are_found_within_jit():
    function = jax.jit(jhg.accelerate(lambda x: jnp.log(x @ W - 1000)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        function(X).block_until_ready()


def test_what_is_no_function_and_unknown_choices_are_refused():
    for name, call in (("accelerate", jhg.accelerate), ("explain", jhg.explain)):
        value: Any = X @ W
        with pytest.raises(TypeError, match=f"{name}: function is a .*, expected a function"):
            call(value)
        wrong: Any = "cuda"
        with pytest.raises(ValueError, match=f"{name}: implementation is 'cuda', expected None"):
            call(jnp.matmul, implementation=wrong)


def test_xla_on_request_exchanges_nothing():
    assert products(jhg.accelerate(jnp.matmul, implementation="xla"), X, W) == (0, 1)
    (found,) = jhg.explain(jnp.matmul, X, W, implementation="xla").products
    assert (found.taken, found.reason) == (False, "implementation='xla'")
