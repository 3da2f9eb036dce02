"""Times dense products: ours, XLA's and Pallas's, taking turns on the same random inputs.

`python -m jax_hopper_gemm bench` and `benchmarks/dense.py` are the command lines.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import dispatch, ops
from ..dispatch import Device
from ..gemm.grid import result_shapes
from ..gemm.problem import GemmProblem
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from ..launch.ffi_target import TARGET
from ..launch.plan import make_plan
from ..lowering.devices import current_device
from ..lowering.launch_operands import cut_along, product_attributes
from . import shapes, timing
from .results import Row

# Makes a jitted function of (a, b) for a problem and its sets of inputs; None: cannot run it.
Maker = Callable[[GemmProblem, Sequence[tuple]], Callable | None]

REGIMES = ("burst", "sustained")
_RATE = 5e14  # FLOP/s that a pause between bursts is reckoned with


def product_by(dot_general: Callable) -> Maker:
    """Returns the maker of a problem's product by `dot_general`, ours or JAX's."""

    def make(problem: GemmProblem, input_sets: Sequence[tuple]) -> Callable:
        dims = shapes.dimension_numbers(problem)
        dtype = jnp.dtype(problem.d_dtype)
        return jax.jit(lambda a, b: dot_general(a, b, dims, preferred_element_type=dtype))

    return make


def pallas(problem: GemmProblem, input_sets: Sequence[tuple]) -> Callable | None:
    """jax's own Hopper kernel, in the best of three configurations; whole tiles only."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as mgpu

    converts = problem.d_dtype != problem.a_dtype
    if problem.l > 1 or converts or shapes.layout_name(problem) != "MK,KN":
        return None
    rows, columns = mgpu.MatmulDimension.M, mgpu.MatmulDimension.N
    functions = {}
    for tile_m, tile_n, split in ((128, 128, columns), (128, 128, rows), (64, 128, rows)):
        cta_m = tile_m * (2 if split is rows else 1)
        cta_n = tile_n * (2 if split is columns else 1)
        if problem.m % cta_m or problem.n % cta_n or problem.k % 64:
            continue
        config = mgpu.TuningConfig(
            tile_m=tile_m, tile_n=tile_n, tile_k=64, max_concurrent_steps=4, grid_tile_width=8,
            wg_dimension=split,
        )  # fmt: skip
        functions[f"{cta_m}x{cta_n}"] = jax.jit(
            functools.partial(mgpu.matmul, c=None, config=config)
        )
    if len(functions) < 2:
        return next(iter(functions.values()), None)
    measured = timing.alternate(
        {name: timing.burst(f, input_sets) for name, f in functions.items()}, rounds=1
    )
    return functions[min(measured, key=lambda name: measured[name].median)]


def one_kernel(
    problem: GemmProblem, spec: GemmSpec, raster_order: RasterOrder, num_sms: int
) -> Callable:
    """Returns the jitted product by `spec`'s kernel, whatever dispatch would choose.

    It is one of (a, b), and of what else a plain kernel reads, as it is stored. Float32 is cut into
    the parts that a kernel reads.
    """
    plan = make_plan(problem, spec, raster_order, num_sms)
    results = [jax.ShapeDtypeStruct(*result) for result in result_shapes(problem, spec)]
    workspaces = [jax.ShapeDtypeStruct((nbytes,), "uint8") for nbytes in plan.workspaces]
    launch = jax.ffi.ffi_call(TARGET, [*results, *workspaces])
    attributes = product_attributes(problem, spec, plan)

    def run(*inputs: jax.Array) -> jax.Array:
        if spec.reads_parts and not problem.reads_parts:
            majors = problem.a.major, problem.b.major
            ends = (x.ndim - (major != "k") for x, major in zip(inputs, majors, strict=True))
            inputs = tuple(
                cut_along(x, end - 1, end, spec.bf16_terms)
                for x, end in zip(inputs, ends, strict=True)
            )
        return launch(*inputs, **attributes)[0]

    return jax.jit(run)


MAKERS: dict[str, Maker] = {
    "hopper": product_by(functools.partial(ops.dot_general, implementation="hopper")),
    "auto": product_by(ops.dot_general),
    "xla": product_by(jax.lax.dot_general),
    "pallas": pallas,
}


def run(
    problems: Iterable[GemmProblem],
    regimes: Sequence[str],
    makers: Mapping[str, Maker],
    rounds: int = 5,
    report: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Times every candidate on every problem; one row for each problem and regime.

    Args:
      makers: the candidates, by name.
      rounds: turns of each candidate; 2 at most in the sustained regime.
      report: called with each row as it is done.
    """
    device = this_device()
    rows = []
    for problem in problems:
        forced = dispatch.choose(problem, device, kernel_only=True)
        free = dispatch.choose(problem, device)
        kernel = forced.spec.name if forced.spec else ""
        auto = free.spec.name if free.spec else "XLA"
        chosen = dict(makers)
        if not kernel:
            chosen.pop("hopper", None)
        # Where they are the same program, it is timed once and shown twice.
        same = (free.spec, free.raster_order) == (forced.spec, forced.raster_order)
        if same and "hopper" in chosen:
            chosen.pop("auto", None)
        input_sets = random_inputs(problem)
        functions = {name: make(problem, input_sets) for name, make in chosen.items()}
        functions = {name: f for name, f in functions.items() if f is not None}
        for function in functions.values():
            jax.block_until_ready(function(*input_sets[0]))  # compiles
        for regime in regimes:
            timings = timed(functions, input_sets, regime, rounds, problem.flops)
            if same and "auto" in makers and "hopper" in timings:
                timings["auto"] = timings["hopper"]
            rows.append(Row(problem, regime, kernel, auto, timings))
            report(rows[-1])
    return rows


def this_device() -> Device:
    """Returns jax's first GPU as dispatch sees it.

    Raises:
      RuntimeError: jax has no Hopper GPU.
    """
    gpu = jax.devices()[0]
    if gpu.platform != "gpu" or not str(gpu.compute_capability).startswith("9."):
        raise RuntimeError(f"timing needs a Hopper GPU; jax's first device is {gpu}")
    return current_device([gpu])


def random_inputs(problem: GemmProblem) -> list[tuple[jax.Array, jax.Array]]:
    """Returns enough sets of normal random A and B to keep them out of L2."""
    return drawn_inputs(problem, drawing(problem))


def input_shapes(problem: GemmProblem) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of one of the `random_inputs`."""
    a = jax.ShapeDtypeStruct(shapes.operand_shape(problem, "a"), jnp.dtype(problem.a_dtype))
    b = jax.ShapeDtypeStruct(shapes.operand_shape(problem, "b"), jnp.dtype(problem.b_dtype))
    return a, b


def drawing(problem: GemmProblem) -> Any:
    """Returns the jitted function of a seed, uint32, that draws one set of inputs."""

    @jax.jit
    def draw(seed: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed, impl="rbg"))
        pairs = zip(keys, input_shapes(problem), strict=True)
        return tuple(jax.random.normal(key, x.shape, x.dtype) for key, x in pairs)

    return draw


def drawn_inputs(problem: GemmProblem, draw: Callable) -> list[tuple[jax.Array, jax.Array]]:
    """Returns `random_inputs` by what `drawing` returned, compiled or not."""
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in input_shapes(problem))
    seeds = range(timing.sets_to_rotate(nbytes))
    return [jax.block_until_ready(draw(jnp.uint32(seed))) for seed in seeds]


def environment() -> dict[str, Any]:
    """Returns what a figure depends on: GPU and versions."""
    gpu = jax.devices()[0]
    return {
        "device": gpu.device_kind,
        "sms": gpu.core_count,
        "platform": gpu.client.platform_version,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def timed(
    functions: Mapping[str, Callable],
    input_sets: Sequence[tuple],
    regime: str,
    rounds: int,
    flops: int,
) -> dict[str, timing.Timing]:
    """Returns times of jitted functions, in turns as in `run`, of calls of so many operations."""
    if regime == "sustained":
        loops = {name: timing.sustained(f, input_sets) for name, f in functions.items()}
        return timing.alternate(loops, min(rounds, 2))
    bursts = {name: timing.burst(f, input_sets) for name, f in functions.items()}
    pause = min(1.0, 20 * flops / _RATE)  # twice as long as ten calls, so that the card is cool
    return timing.alternate(bursts, rounds, rest=functools.partial(time.sleep, pause))
