"""`explain`: which kernel runs a product on this GPU, or on another, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from .. import dispatch, ops
from ..gemm.problem import GemmProblem
from ..reports import explain
from . import products
from .report import json_option, say


@click.command("explain")
@click.argument("extents", type=products.ExtentsType(), metavar="MxNxK")
@products.options
@click.option("--groups", type=products.POSITIVE, metavar="G", help="Matrices B [none].")
@click.option(
    "--implementation", type=click.Choice(["hopper", "xla"]), help="As in matmul [the faster one]."
)
@json_option
def command(
    extents: products.Extents, groups: int | None, implementation: Any, **described: Any
) -> dict[str, Any]:
    """Show what a jitted product runs on this machine's GPU, and why.

    Without a GPU: on the one that JAX_HOPPER_GEMM_GPU names, else on an H200. D is (M, N), A and B
    are contracted over K. With --groups the rows of A are in groups, each with a B of its own, as
    in ragged_dot.
    """
    import jax

    from ..testing import shapes

    problem = GemmProblem.dense(*extents, **described)
    a, b = (shapes.operand_shape(problem, operand) for operand in ("a", "b"))
    function: Any = ops.dot_general
    numbers: Any = shapes.dimension_numbers(problem)
    sizes: tuple[Any, ...] = ()
    if groups:
        if described["a_major"] == "m":
            raise click.UsageError("--groups takes A stored (M, K): XLA would copy one (K, M).")
        lead = len(a) - 2  # axes of a batch, after which A has its rows and B its groups
        b = (*b[:lead], groups, *b[lead:])
        ((a_k,), (b_k,)), batch = numbers
        numbers = jax.lax.RaggedDotDimensionNumbers((([a_k], [b_k + 1]), batch), [lead], [lead])
        function = ops.ragged_dot_general
        sizes = (jax.ShapeDtypeStruct((groups,), "int32"),)
    answer = explain(
        function,
        jax.ShapeDtypeStruct(a, problem.a_dtype), jax.ShapeDtypeStruct(b, problem.b_dtype),
        *sizes, numbers, preferred_element_type=problem.d_dtype, implementation=implementation,
    )  # fmt: skip
    here = any(device.platform == "gpu" for device in jax.local_devices())
    if not here:
        say(f"no GPU here; as an {dispatch.absent_device().gpu}")
    say(str(answer))
    kernel = answer.spec.name if answer.spec else None
    return {"device_is_here": here} | asdict(answer) | {"kernel": kernel}
