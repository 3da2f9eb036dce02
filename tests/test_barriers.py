"""Launches in loops are behind barriers, and so is an index that they read."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.programs import PROGRAMS

import jax_hopper_gemm as jhg
from jax_hopper_gemm.launch.ffi_target import TARGET
from jax_hopper_gemm.lowering.call import custom_calls
from jax_hopper_gemm.testing.lowered import specs_of

pytestmark = pytest.mark.usefixtures("launcher")

X, W = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 256)))
STACK = jax.ShapeDtypeStruct((4, 256, 256), jnp.bfloat16)
BARRIER = "stablehlo.optimization_barrier"
LOOPS = [name for name in PROGRAMS if name.startswith(("layers", "batches"))]


class Launch(NamedTuple):
    """What surrounds a launch in a program for CUDA: names of operations."""

    readers: set[str]  # of its results
    makers: list[str | None]  # of its operands; None: an argument


def launches(function, *args) -> list[Launch]:
    fresh = jax.jit(lambda *args: function(*args))
    lowered = fresh.trace(*args).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    return [
        Launch(
            {use.owner.operation.name for result in call.results for use in result.uses},
            [getattr(x.owner, "name", None) for x in call.operands],
        )
        for call in custom_calls(module, TARGET)
    ]


def product(x, w):
    return jhg.matmul(x, w, implementation="hopper")


@pytest.mark.parametrize("name", LOOPS)
def test_barriers_alone_read_what_a_launch_in_a_loop_writes(name):
    program = PROGRAMS[name]
    found = launches(program.ours, *program.arguments())
    assert len(found) == program.launches
    assert all(launch.readers == {BARRIER} for launch in found)


def test_an_index_comes_from_a_barrier():
    program = PROGRAMS["layers, the last one first"]
    (launch,) = launches(program.ours, *program.arguments())
    assert launch.makers[2] == BARRIER


def test_barriers_alone_read_what_quantizes_in_a_loop():
    def quantized(xs):
        def step(_, x):
            return None, jhg.quantize(x, jnp.float8_e4m3fn, block=(128, 128))

        return lax.scan(step, None, xs)[1]

    (launch,) = launches(quantized, STACK)
    assert launch.readers == {BARRIER}


def test_there_are_no_barriers_outside_of_functions():
    (launch,) = launches(product, X, W)
    assert BARRIER not in launch.readers


def test_a_derivative_takes_the_place_of_a_product_in_a_loop():
    """That of the first activation is the epilogue of the gradient that the second product has."""

    def layer(x, w):
        for _ in range(2):
            x = jhg.matmul(x, w, activation="gelu", implementation="hopper")
        return x

    def loss(x, ws):
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        return jnp.sum(x.astype(jnp.float32))

    specs = specs_of(jax.grad(loss, (0, 1)), X, STACK)
    assert sum(bool(spec.graph.operands) for spec in specs) == 1
