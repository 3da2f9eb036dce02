"""Tracing and lowering: equal products cost once."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hopper_gemm import accelerate, dispatch, matmul
from jax_hopper_gemm.dispatch import model
from jax_hopper_gemm.fusion import jaxprs
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.interop import fuse_jaxpr, rewrite_jaxpr, wide
from jax_hopper_gemm.lowering import route
from jax_hopper_gemm.primitives import accelerated

A = jnp.asarray(np.linspace(-1, 1, 64 * 32).reshape(64, 32), jnp.bfloat16)
B = jnp.asarray(np.linspace(-2, 1, 32 * 16).reshape(32, 16), jnp.bfloat16)


def layers(count):
    """A training step's loss: so many equal layers with epilogues of new functions."""

    def loss(x, up, down, bias):
        for _ in range(count):
            hidden = matmul(x, up, bias=bias, activation="gelu")
            gate = matmul(x, up, epilogue=lambda y: jnp.tanh(y) * 2)
            x = matmul(hidden * gate, down, residual=x)
        return jnp.sum(x.astype(jnp.float32))

    shapes = (512, 256), (256, 1024), (1024, 256), (1024,)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    return step.trace(*arrays).lower(lowering_platforms=("cuda",))


def accelerated_layers(count):
    """The same in `jnp`, by `accelerate`."""

    def loss(x, up, down, bias):
        for _ in range(count):
            hidden = jax.nn.gelu(x @ up + bias)
            x = x + (hidden * (jnp.tanh(x @ up) * 2)) @ down
        return jnp.sum(x.astype(jnp.float32))

    shapes = (512, 256), (256, 1024), (1024, 256), (1024,)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    step = jax.jit(accelerate(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))))
    return step.trace(*arrays).lower(lowering_platforms=("cuda",))


@pytest.fixture
def calls(monkeypatch):
    """Returns how often a program's lowering calls functions, by their names."""
    counts = {}

    def counted(module, name):
        function = getattr(module, name)

        def call(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    def of(program, functions):
        for module, name in functions:
            counted(module, name)
        seen = []
        for count in (2, 16):
            jax.clear_caches()
            counts.clear()
            program(count)
            seen.append(dict(counts))
        return seen

    return of


@pytest.mark.slow
def test_sixteen_equal_layers_are_fused_routed_and_differentiated_as_often_as_two(calls):
    functions = (route, "fuse"), (route, "make_plan"), (dispatch, "choose"), (jaxprs, "traced")
    two, sixteen = calls(layers, functions)
    assert two == sixteen
    assert set(two) == {"fuse", "make_plan", "choose", "traced"}


@pytest.mark.slow
def test_accelerate_weighs_sixteen_equal_layers_as_often_as_two(calls):
    functions = (route, "fuse"), (route, "make_plan"), (dispatch, "choose"), (wide, "traced")
    two, sixteen = calls(accelerated_layers, functions)
    assert two == sixteen
    assert set(two) == {"fuse", "make_plan", "choose", "traced"}


@pytest.mark.slow
@pytest.mark.parametrize("program", [layers, accelerated_layers])
def test_equal_launches_of_a_program_are_emitted_once(calls, program):
    two, sixteen = calls(program, [(jax.ffi, "ffi_lowering")])
    assert two == sixteen
    assert two["ffi_lowering"] > 2


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("raises", [False, True])
def test_accelerate_pauses_the_garbage_collector_while_jax_traces(monkeypatch, enabled, raises):
    found = []

    def product(a, b):
        found.append(gc.isenabled())
        return a @ b

    def rewritten(program, rewriting):
        found.append(gc.isenabled())
        if raises:
            raise ValueError("no")
        return program

    monkeypatch.setattr(rewrite_jaxpr, "rewritten", rewritten)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        for call in (jax.jit(accelerate(product)), accelerate(product)):
            with pytest.raises(ValueError, match="no") if raises else nullcontext():
                call(A, B)
            assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    # A call outside of `jax.jit` computes: it may take long.
    assert found == [False, False, enabled, enabled]


def test_the_garbage_collector_pauses_while_a_rewritten_program_is_lowered(monkeypatch):
    found, lower = [], accelerated.lower_jaxpr

    def lowering(*args):
        found.append(gc.isenabled())
        return lower(*args)

    monkeypatch.setattr(accelerated, "lower_jaxpr", lowering)
    traced, before = jax.jit(accelerate(jnp.matmul)).trace(A, B), gc.isenabled()
    gc.enable()
    try:
        traced.lower()
        assert gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert found == [False]


def test_a_function_that_is_needed_whole_stays_the_same_object():
    closed = jaxprs.traced(lambda x, y: [x * y, jnp.tanh(x)], A, A)
    assert jaxprs.pruned(closed, [True, True])[0] is closed
    part, used = jaxprs.pruned(closed, [False, True])
    assert used == [True, False]
    assert len(part.jaxpr.eqns) == 1


def test_a_region_that_two_rounds_find_is_weighed_once(monkeypatch):
    weighed = []
    launches = fuse_jaxpr._Launches
    weigh = launches._weighed

    def weighing(self, region):
        weighed.append(region.content)
        return weigh(self, region)

    monkeypatch.setattr(launches, "_weighed", weighing)
    accelerated_layers(4)
    assert weighed and len(set(weighed)) == len(weighed)


def searched(monkeypatch, function, arguments):
    """Returns the programs in which `accelerate` searches for regions."""
    programs, search = [], fuse_jaxpr.Dependences

    def searching(program, *args):
        programs.append(program)
        return search(program, *args)

    with monkeypatch.context() as patch:
        patch.setattr(fuse_jaxpr, "Dependences", searching)
        jax.jit(accelerate(function)).trace(*arguments)
    return programs


def test_a_product_without_a_kernel_is_known_before_the_search(monkeypatch):
    def program(x, w, bias):
        return jnp.einsum("mab,bna->mn", x, w) + bias

    shapes = (64, 64, 8), (8, 64, 64), (64,)
    assert len(searched(monkeypatch, program, [jnp.ones(x, jnp.bfloat16) for x in shapes])) == 1


def test_a_kernel_is_chosen_once_for_a_problem(monkeypatch):
    weighed = []
    outlined = model.outlined
    monkeypatch.setattr(
        model, "outlined", lambda problem: weighed.append(problem) or outlined(problem)
    )
    problem = GemmProblem.dense(1032, 776, 520)
    for kernel_only in (False, True):
        dispatch.choose(problem, dispatch.H200, kernel_only=kernel_only)
    assert weighed == [problem]
