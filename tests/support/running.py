"""Ways to run a program, and to lower it for CUDA on any machine: of a program and its operands.

All take what is known of the function, too, and leave aside what they do not need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AxisType, NamedSharding
from support.transformed_functions import Function, M

from jax_hopper_gemm.sharding.export import export_disabled_checks

Program = Callable[..., Any]


def jitted(program: Program, args: list[jax.Array], function: Function) -> Any:
    return jax.jit(program)(*args)


def lowered(program: Program, args: list[jax.Array], function: Function) -> str:
    return jax.jit(program).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def eager(program: Program, args: list[jax.Array], function: Function) -> Any:
    return program(*args)


def without_jit(program: Program, args: list[jax.Array], function: Function) -> Any:
    with jax.disable_jit():
        return jax.jit(program)(*args)


def debugged(program: Program, args: list[jax.Array], function: Function) -> Any:
    """Runs it under `jax.debug_nans`: no NaN is found where there is none, and one where it is.

    Raises:
      AssertionError: a NaN in the first operand goes unnoticed.
    """
    bad = args[0].at[(0,) * args[0].ndim].set(jnp.nan)
    with jax.debug_nans(True):
        results = jax.block_until_ready(jax.jit(program)(*args))
        try:
            jax.block_until_ready(jax.jit(program)(bad, *args[1:]))
        except FloatingPointError:
            return results
    raise AssertionError("debug_nans let a NaN pass")


def poisoned(args: list[jax.Array], function: Function) -> list[jax.Array]:
    """Returns the operands with NaNs in rows of no group, and in what belongs to empty groups."""
    used = sum(function.sizes)
    empty = np.flatnonzero(np.array(function.sizes) == 0)
    floats = [
        x.at[used:].set(jnp.nan) if x.shape[0] == M else x.at[empty].set(jnp.nan)
        for x in args[: len(function.floats)]
    ]
    return [*floats, *args[len(floats) :]]


def begun(args: list[jax.Array], function: Function) -> jax.Array:
    """Returns an array like the result."""
    out = jax.eval_shape(function.plain, *args)
    return jnp.ones(out.shape, out.dtype)


def donated(program: Program, args: list[jax.Array], function: Function) -> Any:
    """Runs it on a further first operand, whose memory it takes.

    Raises:
      AssertionError: that operand is still there.
    """
    y = begun(args, function)
    result = jax.block_until_ready(jax.jit(program, donate_argnums=0)(y, *args))
    assert y.is_deleted()
    return result


def lowered_donated(program: Program, args: list[jax.Array], function: Function) -> str:
    y = begun(args, function)
    traced = jax.jit(program, donate_argnums=0).trace(y, *args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _export(f: Program, args: Any, platforms: tuple[str, ...]) -> Any:
    make = export.export(jax.jit(f), platforms=platforms, disabled_checks=export_disabled_checks())
    return make(*args)


def exported(f: Program, function: Function) -> Program:
    """Returns the function written out and read back; on a machine without GPU one for both."""
    platforms = ("cpu", "cuda") if jax.default_backend() == "cpu" else ("cuda",)

    def call(*args: jax.Array) -> jax.Array:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        written = _export(f, shapes, platforms).serialize(vjp_order=1)
        return export.deserialize(written).call(*args)

    return call


def lowered_export(program: Program, args: list[jax.Array], function: Function) -> str:
    return str(_export(program, args, ("cuda",)).mlir_module())


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def mapped(f: Program, function: Function) -> Program:
    """Returns the function of which each of two devices computes its share."""
    operands, result = function.specs("x")
    return jax.shard_map(f, mesh=_mesh(), in_specs=tuple(operands), out_specs=result)


def _placed(args: list[jax.Array], function: Function) -> list[jax.Array]:
    """Returns the operands on two devices."""
    mesh, (specs, _) = _mesh(), function.specs("x")
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]


def partitioned(program: Program, args: list[jax.Array], function: Function) -> Any:
    """Runs it where the operands lie on two devices, and XLA partitions it."""
    return jitted(program, _placed(args, function), function)


def lowered_partitioned(program: Program, args: list[jax.Array], function: Function) -> str:
    return lowered(program, _placed(args, function), function)
