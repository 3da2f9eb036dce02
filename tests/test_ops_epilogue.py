"""What follows a product: values and dtypes are those of jnp."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.epilogue_reference import (
    BIAS,
    RESIDUAL,
    A,
    B,
    C,
    K,
    M,
    N,
    assert_close,
    assert_same,
    reference,
)
from support.program_inspection import integers

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.dtypes import RESULTS
from jax_hopper_gemm.ops import dense_run
from jax_hopper_gemm.ops.activations import ACTIVATIONS

ARGUMENTS: dict[str, dict[str, Any]] = {
    "bias": dict(bias=BIAS),
    "bias of every row": dict(bias=integers((M, 1), seed=5)),
    "residual": dict(residual=RESIDUAL),
    "residual of every row": dict(residual=BIAS),
    "activation": dict(activation="gelu"),
    "alpha": dict(alpha=0.5),
    "alpha one": dict(alpha=1),
    "c": dict(c=C),
    "c and beta": dict(c=C, beta=-3),
    "c broadcast": dict(c=BIAS, beta=jnp.float32(2)),
    "alpha zero": dict(alpha=0.0, c=C, beta=1.0),
    "epilogue": dict(epilogue=jnp.sin),
    "epilogue of operands": dict(
        epilogue=lambda y, s, t: y * s + t, epilogue_operands=(BIAS, integers((M, 1), seed=6))
    ),
    "bias and activation": dict(bias=BIAS, activation="silu"),
    "activation and residual": dict(activation="tanh", residual=RESIDUAL),
    "all": dict(
        bias=BIAS, residual=RESIDUAL, activation="gelu", alpha=jnp.float32(0.5), beta=2.0, c=C,
        epilogue=lambda y, s: (y, y * s, jnp.max(jnp.abs(y))), epilogue_operands=(BIAS,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", RESULTS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_follows_jnp(name, dtype, implementation):
    ours = applied(partial(jhg.matmul, implementation=implementation), name, dtype)
    assert_close(ours, reference_applied(name, dtype))


def applied(matmul: Any, name: str, dtype: str) -> Any:
    options = jax.tree.map(
        lambda x: x.astype(dtype) if isinstance(x, jax.Array) else x, ARGUMENTS[name]
    )
    return jax.jit(partial(matmul, **options))(A.astype(dtype), B.astype(dtype))


@cache
def reference_applied(name: str, dtype: str) -> Any:
    return applied(reference, name, dtype)


@pytest.mark.parametrize("name", ["bias", "all"])
def test_arguments_need_no_jit(name):
    assert_close(jhg.matmul(A, B, **ARGUMENTS[name]), reference(A, B, **ARGUMENTS[name]))
    with jax.disable_jit():
        assert_close(jhg.matmul(A, B, **ARGUMENTS[name]), reference(A, B, **ARGUMENTS[name]))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_goes_by_its_name(name):
    own = {
        "softsign": jax.nn.soft_sign,
        "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
        "relu_squared": lambda x: jnp.maximum(x, 0) ** 2,
        "identity": lambda x: x,
    }
    function = own.get(name) or getattr(jax.nn, name)
    a = A * 0.25
    assert_close(jhg.matmul(a, B, activation=name), reference(a, B, activation=function))
    assert_close(jhg.matmul(a, B, activation=function), reference(a, B, activation=function))


SHAPES = [
    ((4,), (4,)), ((4,), (4, 5)), ((6, 4), (4,)), ((2, 6, 4), (4, 5)), ((2, 6, 4), (2, 4, 5)),
    ((7, 2, 6, 4), (2, 4, 5)), ((6, 4), (2, 4, 5)), ((4,), (2, 4, 5)), ((2, 6, 4), (4,)),
    ((1, 6, 4), (4, 5)), ((1, 6, 4), (1, 4, 5)), ((1, 6, 4), (2, 4, 5)), ((2, 6, 4), (1, 4, 5)),
    ((2, 1, 6, 4), (1, 3, 4, 5)), ((1, 1, 6, 4), (1, 1, 4, 5)), ((1, 2, 6, 4), (1, 2, 4, 5)),
    ((0, 4), (4, 5)), ((6, 0), (0, 5)),
]  # fmt: skip


@pytest.mark.parametrize("a_shape, b_shape", SHAPES)
def test_operands_broadcast_against_every_result(a_shape, b_shape):
    a, b = integers(a_shape), integers(b_shape, seed=1)
    shape = np.matmul(a, b).shape
    row, column = shape[-1:], (*shape[-2:-1], 1) if len(shape) > 1 else ()
    batch = (*shape[:-2], 1, 1) if len(shape) > 2 else ()
    options: Any = dict(
        bias=integers(row, seed=2), residual=integers(shape, seed=3), activation="relu",
        c=integers(column, seed=4), beta=2.0, epilogue=lambda y, s, t: y * s + t,
        epilogue_operands=(integers(row, seed=5), integers(batch, seed=6)),
    )  # fmt: skip
    assert_same(jhg.matmul(a, b, **options), jax.jit(partial(reference, **options))(a, b))


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every fused product that `matmul` and its like ask for."""
    calls: list[dict[str, Any]] = []
    fused_dot = dense_run.fused_dot

    def recorded(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return fused_dot(*args, **options)

    monkeypatch.setattr(dense_run, "fused_dot", recorded)
    traced: Any = dense_run._traced_steps
    traced.clear_cache()  # or a call that was traced before would not be seen
    return calls


@pytest.mark.parametrize("a_shape, b_shape", [s for s in SHAPES if 0 not in s[0]])
def test_every_result_of_matmul_is_fused(a_shape, b_shape, fused_calls):
    a, b = integers(a_shape), integers(b_shape, seed=1)
    jax.eval_shape(lambda a, b: jhg.matmul(a, b, epilogue=lambda y: y + 1), a, b)
    assert len(fused_calls) == 1


def test_without_arguments_the_product_stands_alone():
    jaxpr = jax.make_jaxpr(lambda a, b: jhg.matmul(a, b, alpha=1, activation="identity"))(A, B)
    assert str(jaxpr) == str(jax.make_jaxpr(jhg.matmul)(A, B))
    assert [e.primitive.name for e in jaxpr.eqns] == ["hopper_dot"]


# What an epilogue returns.


def test_results_have_their_own_dtypes():
    a, b = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)

    def f(y):
        return y, y.astype(jnp.float16), jnp.sum(y, 0), jnp.max(jnp.abs(y)), y > 0

    out = jhg.matmul(a, b, epilogue=f)
    assert [x.dtype.name for x in out] == ["bfloat16", "float16", "float32", "float32", "bool"]
    assert_same(out, jax.tree.map(lambda x, y: x.astype(y.dtype), f(A @ B), out))


def test_preferred_element_type_names_the_dtype_of_each_result():
    a, b = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)
    dtypes = (jnp.float32, "bfloat16", np.dtype("float16"))
    out = jhg.matmul(a, b, epilogue=lambda y: (y, 2 * y, y.sum(1)), preferred_element_type=dtypes)
    y = A @ B
    assert_same(out, (y, (2 * y).astype(jnp.bfloat16), y.sum(1).astype(jnp.float16)))
    (only,) = jhg.matmul(a, b, epilogue=lambda y: (y,), preferred_element_type=[jnp.float32])
    assert_same(only, y)
    wishes: Any = None, jnp.float16, None
    own = jhg.matmul(a, b, epilogue=lambda y: (y, y, y.sum(1)), preferred_element_type=wishes)
    assert [x.dtype.name for x in own] == ["bfloat16", "float16", "float32"]


def test_a_dtype_for_all_is_that_of_the_results_left_in_float32():
    a, b = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)
    out = jhg.matmul(
        a, b, bias=BIAS, epilogue=lambda y: (y, y.astype(jnp.bfloat16)),
        preferred_element_type=jnp.float16,
    )  # fmt: skip
    y = A @ B + BIAS
    assert_same(out, (y.astype(jnp.float16), y.astype(jnp.bfloat16)))


@pytest.mark.parametrize("f", [
    jax.nn.softmax, lambda y: jax.nn.logsumexp(y, -1), lambda y: lax.top_k(y, 2)[1],
    lambda y: tuple(lax.top_k(jax.nn.softmax(y), 2)), lambda y: jnp.sort(y, -1),
    lambda y: (y.sum(), y.mean(0), y.max(-1)), lambda y: y[:, ::2], jnp.cumsum,
    jnp.frexp, lambda y: jnp.digitize(y, jnp.arange(3.0)),  # JAX 0.12 replaces parts of these
])  # fmt: skip
def test_an_epilogue_may_be_any_function(f):
    assert_close(jhg.matmul(A, B, epilogue=f), jax.jit(f)(A @ B))


@pytest.mark.parametrize("number", [3, 2.5, True, 1j, np.float32(2)])
def test_a_result_may_be_a_number(number):
    y, same = jhg.matmul(A, B, epilogue=lambda y: (y, number))
    assert same.shape == () and same.dtype == jnp.result_type(number)
    assert np.asarray(same) == number
    assert_close(y, A @ B)


@pytest.mark.parametrize("a_dtype, b_dtype, preferred", [
    ("int8", "int8", None), ("int8", "int8", "int32"), ("int32", "float32", None),
    ("complex64", "complex64", None), ("complex64", "float32", None), ("float16", "bfloat16", None),
    ("bfloat16", "float32", None), ("bool", "bool", None),
])  # fmt: skip
def test_other_products_keep_their_dtype(a_dtype, b_dtype, preferred):
    a, b = integers((3, 8), a_dtype), integers((8, 5), b_dtype, seed=1)
    plain = np.asarray(jnp.matmul(a, b, preferred_element_type=preferred))
    ours = jhg.matmul(a, b, residual=plain, preferred_element_type=preferred)
    assert_same(ours, plain + plain)
    assert_same(jhg.matmul(a, b, epilogue=lambda y: y, preferred_element_type=preferred), plain)


def test_named_steps_end_in_the_dtype_asked_for():
    a, b, half = integers((3, 8), "int8"), integers((8, 5), "int8", seed=1), jnp.float32(0.5)
    options: Any = {"bias": half, "preferred_element_type": "int32"}
    whole = jnp.matmul(a, b, preferred_element_type="int32")
    weights, sizes = b[None], jnp.array([3])
    grouped: Any = {"preferred_element_type": "int32", "activation": jnp.float32}
    assert_same(jhg.matmul(a, b, **options), jnp.trunc(whole + half).astype("int32"))
    assert_same(jhg.matmul(a, b, alpha=half, c=whole), jnp.trunc(1.5 * whole).astype("int32"))
    assert_same(jhg.ragged_dot(a, weights, sizes, **grouped), whole)
    assert_same(jhg.gated_linear_unit(a, (b, b), **grouped), whole * whole)
    assert jhg.matmul(a, b, bias=half).dtype == jnp.float32
    for factor in (1.0, 2.0, 1, 2):  # as of arrays: 1.0 makes floats of integers, 1 does not
        assert_same(jhg.matmul(a, b, alpha=factor), factor * jnp.matmul(a, b))


def test_an_epilogue_may_close_over_arrays():
    scale = BIAS + 3.0

    def loss(scale, matmul):
        return matmul(A, B, epilogue=lambda y: jnp.sin(y) * scale + np.arange(5.0)).sum()

    ours, theirs = (
        jax.jit(jax.value_and_grad(partial(loss, matmul=f)))(scale) for f in (jhg.matmul, reference)
    )
    assert_close(ours, theirs)
    assert_close(jax.grad(partial(loss, matmul=jhg.matmul))(scale), theirs[1])


def test_equal_calls_are_traced_once():
    traced = []

    def f(y):
        traced.append(y)
        return y + 1

    call = partial(jhg.matmul, A, B, bias=BIAS, activation="gelu", epilogue=f)
    first = call()
    count = len(traced)
    assert_same(call(), first)
    assert count == len(traced) > 0


# c: the result is added to it.


def test_the_result_takes_the_dtype_of_c():
    a, b = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)
    assert_same(jhg.matmul(a, b, c=C), C + A @ B)
    assert_same(
        jhg.matmul(a, b, c=C, preferred_element_type=jnp.bfloat16), (C + A @ B).astype(jnp.bfloat16)
    )
    number: Any = 1.0
    assert_same(jhg.matmul(a, b, c=number), (1 + A @ B).astype(jnp.bfloat16))


def test_c_is_handed_over_where_the_result_fits_in_its_memory(fused_calls):
    a, b = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)
    half = C.astype(jnp.bfloat16)
    jhg.matmul(a, b, c=C, alpha=0.5)
    jhg.matmul(a, b, c=half)
    jhg.matmul(a, b, c=C, epilogue=lambda y: (y, y.sum(0)))
    assert [call["in_place"] for call in fused_calls] == [(1,), (0,), (0,)]
    fused_calls.clear()
    jhg.matmul(a, b, c=C, preferred_element_type=jnp.bfloat16)
    jhg.matmul(a, b, c=BIAS)
    jhg.matmul(a, b, c=C, epilogue=lambda y: (y.sum(0), y))
    jhg.matmul(a, b, residual=half)
    assert [call["in_place"] for call in fused_calls] == [()] * 4


def test_accumulation_in_a_loop_follows_jnp():
    a, b = integers((3, M, K), "bfloat16"), integers((3, K, N), "bfloat16", seed=1)
    step = jax.jit(lambda c, ab: (jhg.matmul(*ab, c=c), None), donate_argnums=0)
    total, _ = lax.scan(step, C + 0, (a, b))
    assert_same(total, C + jnp.einsum("lmk,lkn->mn", a, b, preferred_element_type=jnp.float32))


# Other products.


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("lhs_shape, rhs_shape, dimension_numbers", [
    ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    ((4, 3), (5, 4), (((0,), (1,)), ((), ()))),
    ((3, 2, 4), (4, 5, 2), (((2,), (0,)), ((1,), (2,)))),
    ((3,), (4,), (((), ()), ((), ()))),
    ((2, 3), (2, 3), (((0, 1), (0, 1)), ((), ()))),
])  # fmt: skip
def test_dot_general_takes_an_epilogue(lhs_shape, rhs_shape, dimension_numbers, implementation):
    lhs, rhs = integers(lhs_shape), integers(rhs_shape, seed=1)
    product = np.asarray(lax.dot_general(lhs, rhs, dimension_numbers))
    operand = integers(product.shape, seed=2)

    def f(y, x):
        return y * x, abs(y).max()

    ours = jhg.dot_general(
        lhs, rhs, dimension_numbers, epilogue=f, epilogue_operands=[operand],
        implementation=implementation,
    )  # fmt: skip
    assert_same(ours, f(product, np.asarray(operand)))


@pytest.mark.parametrize("subscripts, lhs_shape, rhs_shape, fused", [
    ("mk,kn->mn", (3, 4), (4, 5), 1), ("mk,kn->nm", (3, 4), (4, 5), 1),
    ("bthd,hde->bthe", (2, 3, 4, 5), (4, 5, 6), 1), ("ij,jk->i", (3, 4), (4, 5), 1),
    ("...mk,...kn->...mn", (2, 1, 3, 4), (7, 4, 5), 1), ("mk,kn->mn", (3, 1), (1, 5), None),
])  # fmt: skip
def test_einsum_takes_an_epilogue(subscripts, lhs_shape, rhs_shape, fused, fused_calls):
    lhs, rhs = integers(lhs_shape, "bfloat16"), integers(rhs_shape, "bfloat16", seed=1)
    product = np.einsum(subscripts, *(np.asarray(x, np.float32) for x in (lhs, rhs)))
    operand = np.asarray(integers(product.shape[-1:], seed=2))
    ours = jhg.einsum(
        subscripts, lhs, rhs, epilogue=lambda y, x: (y * x, y.sum(0)), epilogue_operands=(operand,)
    )
    assert_same(ours, ((product * operand).astype(jnp.bfloat16), product.sum(0)))
    assert fused is None or len(fused_calls) == fused


def test_a_function_that_does_not_end_with_its_product_is_finished_by_xla(fused_calls):
    matmul = jnp.matmul

    def halved(a, b, **options):
        return matmul(a, b, **options) / 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnp, "matmul", halved)
        ours = jhg.matmul(A, B, bias=BIAS, activation="relu")
    assert_same(ours, jax.nn.relu(A @ B / 2 + BIAS))
    assert fused_calls == []


def test_the_xla_implementation_has_none_of_our_primitives():
    options: Any = dict(ARGUMENTS["all"], implementation="xla")
    program = str(jax.make_jaxpr(lambda a, b: jhg.matmul(a, b, **options))(A, B))
    program += str(jax.make_jaxpr(
        lambda x, w: jhg.gated_linear_unit(x, w, implementation="xla"))(A, jnp.stack((B, B), 1))
    )  # fmt: skip
    assert "dot_general" in program and "hopper" not in program


# Several devices.


def test_shard_map_takes_an_epilogue():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def call(a, b, bias):
        return jhg.matmul(
            a, b, bias=bias, activation="relu", epilogue=lambda y: (y, y.max()[None, None])
        )

    f = jax.shard_map(
        call, mesh=mesh, in_specs=(P("x", None), P(None, "y"), P("y")),
        out_specs=(P("x", "y"), P("x", "y")),
    )  # fmt: skip
    shapes = (4, 8), (8, 6), (6,)
    a, b, bias = (np.asarray(integers(shape, seed=i)) for i, shape in enumerate(shapes))
    y = np.maximum(a @ b + bias, 0)
    assert_same(jax.jit(f)(a, b, bias), (y, y.reshape(2, 2, 2, 3).max((1, 3))))
    gradient = jax.jit(jax.grad(lambda *x: (f(*x)[0] ** 2).sum(), (0, 1, 2)))(a, b, bias)
    theirs = jax.grad(lambda a, b, bias: (jax.nn.relu(a @ b + bias) ** 2).sum(), (0, 1, 2))
    assert_same(gradient, jax.jit(theirs)(a, b, bias))


def test_explicit_mesh_axes_go_through_an_epilogue():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        a = jax.device_put(integers((4, 8)), P("x", None))
        b = jax.device_put(integers((8, 6), seed=1), P(None, "y"))
        bias = jax.device_put(integers((6,), seed=2), P("y"))
        call = partial(jhg.matmul, bias=bias, activation="relu")
        out = jax.jit(call)(a, b)
        assert jax.typeof(out).sharding.spec == P("x", "y")
    np.testing.assert_array_equal(np.asarray(out), jax.nn.relu(
        np.asarray(a) @ np.asarray(b) + np.asarray(bias)))  # fmt: skip
