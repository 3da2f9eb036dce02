"""A plan for the FFI library, arrays for it, and launches of random programs."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from fake_driver.harness import Driver, Launcher
from support.launches_on_cpu import parameter_bytes
from support.plans import clearing
from support.random_calls import Call

from jax_hopper_gemm.launch import ffi_target
from jax_hopper_gemm.launch.plan import Int32, LaunchPlan, Pointer, TensorMap
from jax_hopper_gemm.lowering.call import custom_calls

CPU = jax.devices("cpu")[0]
A = jax.device_put(jnp.arange(64 * 32, dtype=jnp.float32).reshape(64, 32), CPU)
B = jax.device_put(jnp.ones((32, 16), jnp.float32), CPU)
D = jax.ShapeDtypeStruct((64, 16), jnp.float32)
COUNTER = jax.ShapeDtypeStruct((8,), jnp.uint8)

PLAN = LaunchPlan(
    grid=(4, 2, 1),
    cluster=(2, 1, 1),
    threads=384,
    smem_bytes=1024,
    params=(
        TensorMap(0, "float32", (32, 64), (128,), (32, 64), 128),
        TensorMap(1, "float32", (16, 32), (64,), (16, 32), 64),
        TensorMap(2, "float32", (16, 64), (64,), (16, 64), 0),
        Int32(7),
        Int32(-3),
        Pointer(3),
    ),
    workspaces=(8,),
)
CLEARING = clearing(PLAN.encode(), 3, 8)

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32", "ui8": "uint8"}


def load(launcher, words, digest, operands=(A, B), results=(D, COUNTER)):
    """Returns the program of one call, loaded: its instantiate stage has run."""
    return launcher.load(words, digest, operands, results)


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def launched_arrays(call: Call) -> Iterator[tuple[list[int], list, list]]:
    """Yields of each launch in a program for CUDA its plan, and the arrays that it has."""

    def arrays(values):
        for type_ in (value.type for value in values):
            yield jax.ShapeDtypeStruct(tuple(type_.shape), DTYPES[str(type_.element_type)])

    traced = jax.jit(lambda *args: call.function(*args)).trace(*call.arguments)
    try:
        lowered = traced.lower(lowering_platforms=("cuda",))
    except NotImplementedError:  # implementation="hopper", and no kernel runs it
        return
    for launch in custom_calls(lowered.compiler_ir("stablehlo"), ffi_target.TARGET):
        plan = list(launch.attributes["mhlo.backend_config"]["plan"])
        yield plan, [*arrays(launch.operands)], [*arrays(launch.results)]


def run_launches(launcher: Launcher, driver: Driver, call: Call, digest: str) -> int:
    """Loads and runs each launch of a call, on arrays of the sizes that it has; counts them."""
    count = 0
    for count, (plan, operands, results) in enumerate(launched_arrays(call), 1):
        sizes = parameter_bytes(plan)
        launcher.resolve = lambda digest, spec, sizes=sizes: driver.add_kernel_of(sizes)
        zeros = [jax.device_put(jnp.zeros(x.shape, x.dtype), CPU) for x in operands]
        program = load(launcher, plan, f"{digest}_{count}", zeros, results)
        jax.block_until_ready(program(*zeros))
    return count
