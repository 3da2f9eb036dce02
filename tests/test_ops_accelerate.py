"""`accelerate` exchanges a function's products and nothing else; `explain` says which."""

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
from flax import linen, nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.program_inspection import LAUNCH, equations, integers, lowered, operations, products

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

REPLACED = {"hopper_dot": "dot_general", "hopper_ragged_dot": "ragged_dot_general"}

X, W = integers((16, 16), "bfloat16"), integers((16, 16), "bfloat16", seed=1)
SIZES = jnp.array([3, 0, 9])
GROUPS = integers((3, 16, 8), "bfloat16")
F32 = methodcaller("astype", "float32")
CONTRACTED = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])


def same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


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
    same(ours(a, b), function(a, b))
    assert ours(a, b).dtype == function(a, b).dtype

    def loss(function: Callable[..., Any], a: Any, b: Any) -> Any:
        return jnp.sum(function(a, b).astype("float32") * 2)

    gradient = jax.grad(partial(loss, ours), (0, 1))
    same(gradient(a, b), jax.grad(partial(loss, function), (0, 1))(a, b))
    tangents = (2 * a, 3 * b)
    same(jax.jvp(ours, (a, b), tangents), jax.jvp(function, (a, b), tangents))


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
        (product,) = jhg.explain(function, *shapes).products
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
    gradients = [jax.grad(lambda x, f=f: jnp.sum(f(x, W) ** 2))(X) for f in (ours, dense)]
    same(*gradients)


@jax.custom_jvp
def with_jvp(x: Any, w: Any) -> Any:
    return x @ w


# Not its derivative: what is found must come from here.
with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 2 * tangents[0] @ primals[1]))


@jax.custom_vjp
def with_vjp(x: Any, w: Any) -> Any:
    return x @ w


with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, ct: (3 * ct @ saved[1].T, None))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_symbolic_zeros(scale: int, x: Any, w: Any) -> Any:
    return x @ w, scale * w


def _forward(scale: int, x: Any, w: Any) -> Any:
    return (x.value @ w.value, scale * w.value), (x.value, w.value, x.perturbed)


def _backward(scale: int, saved: Any, cts: Any) -> Any:
    x, w, _ = saved
    zero = jax.custom_derivatives.SymbolicZero
    assert any(isinstance(ct, zero) for ct in cts)
    return 5 * cts[0] @ w.T, scale * x.T @ cts[0]


with_symbolic_zeros.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.custom_vjp
def with_optimized_remat(x: Any, w: Any) -> Any:
    return jnp.sign(x @ w)


with_optimized_remat.defvjp(
    lambda x, w: (jnp.sign(x @ w), (x @ w, w)),
    lambda saved, ct: ((ct * saved[0]) @ saved[1].T, None),
    optimize_remat=True,
)


@jax.custom_batching.custom_vmap
def with_vmap(x: Any, w: Any) -> Any:
    return x @ w


@with_vmap.def_vmap
def _mapped(axis_size: int, in_batched: Any, x: Any, w: Any) -> Any:
    return jnp.zeros((axis_size, *x.shape[-2:]), x.dtype), True


@partial(jax.jit, donate_argnums=0, keep_unused=True)
def jitted(x: Any, w: Any) -> Any:
    return x @ w


def scanned(x: Any, w: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return jnp.sign(carry @ w) + row, carry @ row

    return lax.scan(body, x, x, reverse=True, unroll=2)


def looped(x: Any, w: Any) -> Any:
    return lax.while_loop(
        lambda state: jnp.sum(state[1] @ w) * 0 + state[0] < 3,
        lambda state: (state[0] + 1, jnp.sign(state[1] @ w)),
        (0, x),
    )[1]


def branched(x: Any, w: Any) -> Any:
    return lax.switch(x[0, 0].astype(int) % 3, [jnp.matmul, lambda x, w: w @ x, jnp.add], x, w)


def mapped_over_devices(x: Any, w: Any) -> Any:
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    spec = P("i", None)
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, P()), out_specs=spec)(x, w)


SAVING = jax.checkpoint_policies.dots_saveable

symbolic: Any = with_symbolic_zeros  # JAX's types lose that it gives a tuple

# Each with the number of products that it traces to.
NESTED: dict[str, tuple[Callable[..., Any], int]] = {
    "jit": (jitted, 1),
    "checkpoint": (jax.checkpoint(lambda x, w: jnp.sin(x @ w)), 1),
    "checkpoint with a policy": (jax.checkpoint(lambda x, w: jnp.sin(x @ w), policy=SAVING), 1),
    "scan": (scanned, 2),
    "map": (lambda x, w: lax.map(lambda row: row @ w, x), 1),
    "while": (looped, 2),
    "cond": (branched, 2),
    "custom_jvp": (with_jvp, 1),
    "custom_vjp": (with_vjp, 1),
    "custom_vmap": (with_vmap, 1),
    "symbolic zeros": (lambda x, w: symbolic(7, x, w)[0], 1),
    "optimized remat": (with_optimized_remat, 1),
    "optimized remat in checkpoint": (jax.checkpoint(with_optimized_remat), 1),
    "shard_map": (mapped_over_devices, 1),
    "deep": (lambda x, w: jax.jit(jax.checkpoint(scanned))(x, with_jvp(x, w)), 3),
}


@pytest.mark.parametrize("name", NESTED)
def test_products_inside_of_other_programs_become_ours(name: str):
    function, number = NESTED[name]
    ours = jhg.accelerate(function)
    assert products(function, X, W) == (0, number)
    assert products(ours, X, W) == (number, 0)
    same(jax.jit(ours)(X, W), jax.jit(function)(X, W))
    same(ours(jnp.copy(X), W), function(jnp.copy(X), W))


@pytest.mark.parametrize("name", NESTED)
def test_nothing_but_the_products_changes(name: str):
    function, _ = NESTED[name]
    theirs = list(equations(function, X, W))
    ours = list(equations(jhg.accelerate(function, fuse=False), X, W))
    assert len(ours) == len(theirs)
    for old, new in zip(theirs, ours, strict=True):
        assert REPLACED.get(new.primitive.name, new.primitive.name) == old.primitive.name
        assert [x.aval for x in old.outvars] == [x.aval for x in new.outvars]
        assert str(old.source_info.name_stack) == str(new.source_info.name_stack)
        if new.primitive.name in REPLACED:
            continue
        for key, value in old.params.items():
            if isinstance(value, str | int | bool | tuple) and not list(
                jaxprs_in_params({key: value})
            ):
                assert str(new.params[key]) == str(value), (old.primitive, key)


@pytest.mark.parametrize("name", [x for x in NESTED if x not in ("while", "custom_vmap")])
def test_gradients_inside_and_outside_are_those_of_jax(name: str):
    function, _ = NESTED[name]

    def loss(function: Callable[..., Any], x: Any, w: Any) -> Any:
        return sum(jnp.sum(y.astype("float32")) for y in jax.tree.leaves(function(x, w)))

    theirs = jax.grad(partial(loss, function))
    outside = jax.grad(partial(loss, jhg.accelerate(function)))
    inside = jhg.accelerate(theirs)
    number = sum(products(theirs, X, W))
    plain = jhg.accelerate(theirs, fuse=False)
    unfused = jax.grad(partial(loss, jhg.accelerate(function, fuse=False)))
    assert products(unfused, X, W) == products(plain, X, W)
    assert sum(products(plain, X, W)) == number
    assert "0 not replaced" in str(jhg.explain(theirs, X, W))
    # Without those that nothing reads; dispatch leaves some small ones to XLA.
    assert products(inside, X, W)[1] <= products(plain, X, W)[1] <= 1
    expected = jax.jit(theirs)(X, W)
    assert np.any(expected)
    same(jax.jit(outside)(X, W), expected)
    same(jax.jit(inside)(X, W), expected)


@pytest.mark.parametrize("name", [x for x in NESTED if x != "shard_map"])
def test_vmap_of_nested_programs_is_that_of_jax(name: str):
    function, _ = NESTED[name]
    xs = jnp.stack([X, -X])
    theirs = jax.vmap(function, (0, None))
    ours = jax.vmap(jhg.accelerate(function), (0, None))
    same(jax.jit(ours)(xs, W), jax.jit(theirs)(xs, W))
    left = products(ours, xs, W)[1]
    assert left == 0


@jax.custom_vjp
def quantized(x: Any, w: Any) -> Any:
    return jnp.matmul(x.astype("int16"), w.astype("int16"), preferred_element_type=x.dtype)


quantized.defvjp(
    lambda x, w: (quantized(x, w), (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct)
)


def test_derivatives_are_taken_of_products_that_stay():
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(quantized(x, w) ** 2)

    gradients = jax.grad(loss, (0, 1))
    for ours in (jax.grad(jhg.accelerate(loss), (0, 1)), jhg.accelerate(gradients)):
        assert products(ours, X, W) == (2, 1)
        same(jax.jit(ours)(X, W), jax.jit(gradients)(X, W))


def test_second_derivatives_follow():
    def function(x: Any) -> Any:
        return jnp.sum(jnp.square(lax.scan(lambda c, _: (c @ W, None), x, None, 2)[0]))

    x = X[0]
    ours = jhg.accelerate(function)
    expected = jax.jit(jax.hessian(function))(x)
    same(jax.jit(jax.hessian(ours))(x), expected)
    same(jax.jit(jhg.accelerate(jax.hessian(function)))(x), expected)


@pytest.mark.parametrize("policy", [None, SAVING, jax.checkpoint_policies.nothing_saveable])
def test_policies_of_checkpoint_judge_our_products_as_dots(policy: Any):
    def function(x: Any, w: Any) -> Any:
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(x @ w), policy=policy)(x, w))

    number = operations(jax.grad(function, (0, 1)), X, W)["dot_general"]
    assert number == (3 if policy is SAVING else 4)
    assert products(jax.grad(jhg.accelerate(function), (0, 1)), X, W) == (number, 0)


def test_ragged_products_with_shared_weights_can_be_mapped():
    xs = jnp.stack([X, -X])
    mapped = jax.vmap(jhg.accelerate(lambda x: lax.ragged_dot(x, GROUPS, SIZES)))
    same(mapped(xs), jnp.stack([lax.ragged_dot(x, GROUPS, SIZES) for x in xs]))


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
        if e.primitive.name in ("jit", "pjit")
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


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        options: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, **options)
        self.linear = nnx.Linear(16, 8, **options)

    def __call__(self, x: Any) -> Any:
        return self.linear(self.attention(x))


@pytest.mark.slow
def test_products_of_nnx_modules_become_ours():
    model = Attention(nnx.Rngs(0))
    x = integers((2, 4, 16), "bfloat16")

    def loss(model: Any, x: Any) -> Any:
        return jnp.sum(model(x).astype("float32") ** 2)

    ours = jhg.accelerate(loss)
    on_kernels, on_xla = products(ours, model, x)
    assert on_kernels + on_xla == sum(products(loss, model, x)) and on_kernels > on_xla
    same(nnx.jit(ours)(model, x), nnx.jit(loss)(model, x))
    found, expected = (nnx.jit(nnx.grad(function))(model, x) for function in (ours, loss))
    for gradients in (found, expected):  # adds one number to a query's logits: it is nothing but
        del gradients["attention"]["key"]["bias"]  # what is lost by rounding

    def close(found: Any, expected: Any) -> None:  # XLA fuses, and so rounds, at other places
        expected = np.asarray(expected, np.float32)
        bound = 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=bound)

    jax.tree.map(close, found, expected)
    assert all(np.any(x) for x in jax.tree.leaves(found["linear"]))


@pytest.mark.slow
def test_state_of_an_nnx_module_comes_back_where_it_is_returned():
    def steps(change: Callable[[Any], Any]) -> Any:
        model = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        graph, state = nnx.split(model)

        def call(state: Any, x: Any) -> Any:
            model = nnx.merge(graph, state)
            return model(x @ W), nnx.state(model)

        y, state = change(call)(state, X)
        nnx.update(model, state)
        return y, model.mean[...]

    found, expected = steps(jhg.accelerate), steps(lambda call: call)
    same(found, expected)
    assert np.any(found[1])


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        options: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        x = linen.Dense(16, **options)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.DenseGeneral((2, 4), **options)(x)


@pytest.mark.slow
def test_products_of_linen_modules_become_ours_and_state_comes_back():
    model = Normed()
    variables = model.init(jax.random.key(0), X, train=False)
    options = {"train": True, "mutable": ["batch_stats"], "rngs": {"dropout": jax.random.key(1)}}
    ours = jhg.accelerate(model.apply)
    y, state = ours(variables, X, **options)
    expected, new = model.apply(variables, X, **options)
    same((y, state), (expected, new))
    assert np.any(jax.tree.leaves(state)[0] != jax.tree.leaves(variables["batch_stats"])[0])
    report = jhg.explain(model.apply, variables, X, train=False)
    assert len(report.taken) == 2 and not report.left


def test_programs_are_exported_with_our_products():
    exported = jax.export.export(jax.jit(jhg.accelerate(scanned)))(X, W)
    copy = jax.export.deserialize(exported.serialize())
    same(copy.call(X, W), jax.jit(scanned)(X, W))


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


# Lowered for CUDA and reported


def bf16(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.bfloat16)


def block(x: Any, w: Any, hashes: Any) -> Any:
    h = jnp.einsum("bk,kn->nb", x, w).T
    scores = x.astype("int16") @ hashes

    def step(carry: Any, _: Any) -> Any:
        return jnp.tanh(carry @ w), None

    return lax.scan(step, h, length=3)[0], scores


SHAPES = bf16(4096, 4096), bf16(4096, 4096), jax.ShapeDtypeStruct((4096, 8), jnp.int16)


@pytest.mark.usefixtures("launcher")
def test_the_report_says_where_each_product_is_and_what_runs_it():
    report = jhg.explain(block, *SHAPES, fuse=False)
    first, scores, second = report.products
    assert [x.taken for x in report.products] == [True, False, True]
    assert (report.taken, report.left) == ((first, second), (scores,))
    lines = [x.line for x in report.products]
    start = block.__code__.co_firstlineno
    for line, number in zip(lines, (1, 2, 5), strict=True):
        assert f"{__file__.rsplit('/', 1)[-1]}:{start + number}:" in line
    assert (first.within, second.within) == ((), ("scan of 3",))
    expected = jhg.explain(jhg.matmul, *SHAPES[:2])
    assert second.explanation == expected
    assert (second.path, second.reason) == (expected.path, expected.reason)
    text = str(report)
    assert text.startswith("3 products: ") and "1 not replaced" in text
    for word in ("i16[4096,4096] x i16[4096,8]", "scan of 3 > ", "no kernel multiplies int16"):
        assert word in text


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("precision", "kernels"), [(None, 1), ("highest", 0), ("BF16_BF16_F32_X6", 3)]
)
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_a_product_of_float32_runs_as_that_of_matmul(b_major: str, precision: Any, kernels: int):
    """In TF32 one of three lies along K: the product if B is stored (N, K), else A's gradient."""

    def step(multiply: Callable[..., Any], a: Any, b: Any) -> Any:
        def loss(a: Any, b: Any) -> Any:
            return jnp.sum(multiply(a, b.T if b_major == "k" else b) ** 2)

        with jax.default_matmul_precision(precision):
            return jax.value_and_grad(loss, (0, 1))(a, b)

    shapes = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 2
    specs = specs_of(partial(step, jhg.matmul), *shapes)
    assert len(specs) == kernels
    assert specs_of(jhg.accelerate(partial(step, jnp.matmul), fuse=False), *shapes) == specs


def test_a_ragged_product_is_found_where_the_user_asks_for_it():
    def function(x: Any) -> Any:
        return lax.ragged_dot(x, GROUPS, SIZES)

    (found,) = jhg.explain(function, X).taken
    assert f":{function.__code__.co_firstlineno + 1}:" in found.line
    assert __file__.rsplit("/", 1)[-1] in found.line
    assert found.product.endswith("rows in 3 groups")


def test_a_transpose_of_a_product_becomes_part_of_it():
    def function(x: Any, w: Any) -> Any:
        y = x @ w
        return (y @ w).T, y.T, y  # the second is not the only user of its product

    assert operations(jhg.accelerate(function), X, W) == {"hopper_dot": 2, "transpose": 1}


@pytest.mark.usefixtures("launcher")
def test_the_report_agrees_with_lowering():
    report = jhg.explain(block, *SHAPES, implementation="hopper")
    program = lowered(jhg.accelerate(block, implementation="hopper"), *SHAPES)
    assert program.count(LAUNCH) == sum(x.path == "hopper" for x in report.products) == 2
    assert "stablehlo.transpose" not in program


def test_the_report_knows_what_is_ours_already():
    def function(x: Any, w: Any) -> Any:
        return jhg.matmul(x, w, activation="gelu") @ w

    report = jhg.explain(function, *SHAPES[:2])
    assert [x.taken for x in report.products] == [True, True]
    assert "with an epilogue" in report.products[0].product
    again = jhg.explain(jhg.accelerate(function), *SHAPES[:2])
    assert [x.product for x in again.products] == [x.product for x in report.products]


@pytest.mark.usefixtures("launcher")
def test_hopper_insists_and_names_the_product():
    odd = bf16(64, 5, 7), bf16(5, 7, 64)
    product = partial(jnp.tensordot, axes=2)
    function = jhg.accelerate(product, implementation="hopper")
    with pytest.raises(NotImplementedError, match="implementation='hopper'"):
        lowered(function, *odd)
    assert LAUNCH not in lowered(jhg.accelerate(product), *odd)
    (found,) = jhg.explain(product, *odd).products
    assert (found.taken, found.path) == (True, "xla")
    text = str(jhg.explain(product, *odd))
    assert text.startswith("1 product: 0 on kernels, 1 on XLA, 0 not replaced")


@pytest.mark.parametrize(
    ("name", "within"),
    [("jit", "jit(jitted)"), ("checkpoint", "checkpoint"), ("while", "while cond"),
     ("cond", "cond branch 0"), ("custom_vjp", "custom_vjp_call"), ("shard_map", "shard_map")],
)  # fmt: skip
def test_the_report_names_what_is_around_a_product(name: str, within: str):
    function, number = NESTED[name]
    report = jhg.explain(function, X, W)
    assert len(report.products) == number
    assert report.products[0].within[0] == within
    assert f"at {within} > " in str(report)
