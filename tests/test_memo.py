"""Functions are known by what they compute, and what was found of them is remembered."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hopper_gemm import dot_general, einsum, gated_linear_unit, matmul, ragged_dot
from jax_hopper_gemm.fusion import memo
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.lowering.request import Request
from jax_hopper_gemm.ops import settled

A = jnp.asarray(np.linspace(-1, 1, 64 * 32).reshape(64, 32), jnp.bfloat16)
B = jnp.asarray(np.linspace(-2, 1, 32 * 16).reshape(32, 16), jnp.bfloat16)


@pytest.fixture
def compiled():
    """A list that grows by an item for each program that XLA compiles."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    "call",
    [
        lambda: matmul(A, B, epilogue=lambda y: jnp.tanh(y) * 2),
        lambda: matmul(A, B, activation=lambda y: jax.nn.relu(y) * 2),
        lambda: matmul(A, B, epilogue=lambda y: y * A[0, 0].astype(jnp.float32)),
        lambda: gated_linear_unit(
            A, B.reshape(32, 2, 8), activation=lambda y: jnp.maximum(y, 0.25)
        ),
        lambda: ragged_dot(
            A, B.reshape(2, 16, 16).repeat(2, 1), jnp.array([40, 24]), epilogue=lambda y: (y, y + 1)
        ),
    ],
    ids=["epilogue", "custom_jvp", "closure", "gated", "ragged"],
)
def test_a_new_lambda_in_each_call_compiles_once(call, compiled):
    first = call()
    before = len(compiled)
    again = [call() for _ in range(20)][-1]
    assert len(compiled) == before
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_lambdas_that_differ_in_a_number_differ():
    def scaled(number):
        return matmul(A, B, epilogue=lambda y: y * number, preferred_element_type=jnp.float32)

    exact = np.asarray(A, np.float64) @ np.asarray(B, np.float64)
    for number in (2.0, 3.0, -0.0, 0.0):
        np.testing.assert_allclose(scaled(number), exact * number, rtol=1e-5, atol=1e-5)
    zeros = scaled(0.0), scaled(-0.0)
    assert (np.signbit(zeros[0]) != np.signbit(zeros[1])).all()


def test_lambdas_that_differ_in_an_array_differ_without_another_program(compiled):
    ones = jnp.ones((16,), jnp.float32)
    results = []
    for scale in (ones, 2 * ones, ones):
        before = len(compiled)
        results.append(matmul(A, B, epilogue=lambda y, scale=scale: y * scale))
    assert len(compiled) == before
    np.testing.assert_array_equal(results[1], 2 * results[0])
    np.testing.assert_array_equal(results[2], results[0])


@pytest.mark.slow
def test_a_function_takes_its_arrays_with_it():
    def new():
        scale = jnp.full((16,), 3.0)
        return (lambda y: y * scale), weakref.ref(scale)

    function, scale = new()
    matmul(A, B, epilogue=function)
    matmul(A, B, epilogue=function)
    del function
    gc.collect()
    assert scale() is None


def test_custom_derivatives_are_part_of_a_function():
    def made(factor):
        @jax.custom_jvp
        def function(y):
            return y * 2

        @function.defjvp
        def _(primals, tangents):
            return function(*primals), tangents[0] * factor

        return function

    def gradient(factor):
        function = made(factor)
        return jax.grad(lambda a: matmul(a, B, epilogue=lambda y: function(y)).sum())(A)

    np.testing.assert_array_equal(gradient(4.0), 2 * gradient(2.0))


def test_a_function_that_cannot_be_compared_warns_once_and_is_right(monkeypatch):
    monkeypatch.setattr(settled, "_warned", False)

    @jax.custom_vjp
    def doubled(y):
        return 2 * y

    doubled.defvjp(lambda y: (2 * y, None), lambda _, ct: (2 * ct,))
    call = lambda: matmul(A, B, epilogue=lambda y: doubled(y))  # noqa: E731
    first = call()
    with pytest.warns(UserWarning, match="is a new function at each call and cannot be compared"):
        second = call()
    third = call()  # warnings are errors
    np.testing.assert_array_equal(first, matmul(A, B, epilogue=lambda y: y * 2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)


@pytest.mark.parametrize(
    "call",
    [
        lambda f: matmul(A, B, epilogue=f),
        lambda f: dot_general(A, B, (((1,), (0,)), ((), ())), epilogue=f),
        lambda f: einsum("mk,kn->mn", A, B, epilogue=f),
        lambda f: gated_linear_unit(A, (B, B), activation=f),
        lambda f: ragged_dot(A, B[None], jnp.array([len(A)]), activation=f),
    ],
    ids=["matmul", "dot_general", "einsum", "gated", "ragged"],
)
def test_that_warning_names_the_line_of_the_call(call, monkeypatch):
    monkeypatch.setattr(settled, "_warned", False)
    identity = jax.custom_vjp(lambda y: y)
    identity.defvjp(lambda y: (y, None), lambda _, ct: (ct,))
    with pytest.warns(UserWarning, match="compiles a program") as found:
        for _ in range(2):
            call(lambda y: identity(y))
    (warning,) = found
    assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno)


def test_structure_tells_numbers_by_type_and_bits():
    y = jax.ShapeDtypeStruct((2,), np.float32)
    functions = [
        lambda y: y * 0.0, lambda y: y * -0.0, lambda y: y * 1.0, lambda y: y**1, lambda y: y**2,
        lambda y: y * np.float32("nan"), lambda y: y.astype(np.float16), lambda y: y > 1,
    ]  # fmt: skip
    once = [memo.structure(jax.make_jaxpr(f)(y)) for f in functions]
    again = [memo.structure(jax.make_jaxpr(f)(y)) for f in functions]
    assert None not in once
    assert once == again
    assert len(set(once)) == len(functions)


def test_structure_tells_what_an_equation_reads():
    def reading(number):
        def function(*inputs):
            known = [*inputs, -inputs[0]]
            known += [jnp.sin(known[-1]), *jnp.frexp(known[-1])]
            return 2 * known[number]

        return function

    for count in range(1, 5):
        inputs = [np.float32(i) for i in range(count)]
        functions = [reading(number) for number in range(count + 3)]
        structures = {memo.structure(jax.make_jaxpr(f)(*inputs)) for f in functions}
        assert len(structures) == len(functions)


@pytest.mark.slow
def test_memory_is_bounded_forgets_with_jax_and_heeds_its_settings(monkeypatch):
    monkeypatch.setattr(memo, "ENTRIES", 2)
    calls = []
    function = memo.memoised(lambda key: calls.append(key) or key.upper())

    def is_remembered(key):
        before = len(calls)
        assert function(key) == key.upper()
        return len(calls) == before

    assert [is_remembered(key) for key in "abc"] == [False] * 3
    assert [is_remembered(key) for key in "cba"] == [True, True, False]
    with jax.numpy_dtype_promotion("strict"):
        assert not is_remembered("a")
    assert is_remembered("a")
    jax.clear_caches()
    assert not is_remembered("a")


def test_what_holds_arrays_is_not_remembered():
    calls = []
    function = memo.memoised(lambda closed: calls.append(closed) or True)
    array = np.arange(3.0)
    closed = jax.make_jaxpr(lambda y: y * array)(array)
    assert closed.consts
    function(closed)
    function(closed)
    assert len(calls) == 2
    assert memo.interned(closed) is None


@pytest.mark.parametrize(("holding", "asked"), [("", 1), ("function", 2), ("functions", 2)])
def test_what_is_asked_of_functions_with_arrays_is_not_remembered(holding, asked):
    calls = []
    function = memo.memoised(lambda request: calls.append(request) or True)
    array = np.arange(3.0)
    closed = jax.make_jaxpr(lambda y: y * array)(array)
    subscripts = Subscripts.parse("mk,kn->mn")
    request = Request(subscripts, (2, 4), "bfloat16", (4, 3), "bfloat16", "bfloat16")
    held = {"": {}, "function": {"function": closed}, "functions": {"functions": (closed,) * 2}}
    request = replace(request, **held[holding])
    function(request)
    function(request)
    assert len(calls) == asked


def test_equal_functions_of_many_threads_are_one_object():
    def of_thread(_):
        return memo.interned(jax.make_jaxpr(lambda y: jnp.sin(y) * 7)(np.float32(1)))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(of_thread, range(32))))) == 1
