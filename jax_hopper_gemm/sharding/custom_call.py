"""The custom call of a product that XLA partitions, and the program that each device gets for it.

What a device's shard is, XLA knows only when it partitions, long after lowering. So lowering emits
a custom call that says in words what is asked (`TARGET`, its configuration is JSON), with Shardy's
rule of how shardings go through it. XLA's partitioner comes back with the shardings that it has
found. The answer is a program for one device: the product of the shards, lowered like any other
program for one device, and a sum over devices where a contracted axis is sharded.

Nothing in the custom call belongs to a process, so the persistent compilation cache and
`jax.export` take such programs. The executable holds no call of `TARGET` any more.

A module with products of its own takes part in two steps: on import it calls `register`; where
`applies(ctx)`, its lowering rule returns `emit(ctx, "its name", values, letters, params)`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jaxlib import xla_client

from ..lowering.devices import axes_left, devices_of, lowering_shard, platforms_of
from .choose_shards import Factors, choose_shard, sharding_rule
from .mesh import Axes, Mesh, is_plain
from .shard import ShardContext

TARGET = "jax_hopper_gemm.v1.partition"
VERSION = 1  # of a call's configuration, which exported programs hold
CONFIG: Any = jax.config  # of which not every version of JAX has types
PLATFORMS = [("cuda",)]  # what a program is lowered for, where products are partitioned here

Program = Callable[..., Sequence[Any]]  # (context, *shards, **params)
Reader = Callable[[Any, Sequence[Any], dict[str, Any]], Any]  # of a call's result

# Lowering: the custom call.


def applies(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether XLA partitions the program over devices, and this JAX lets us take part.

    Inside `jax.shard_map` over some mesh axes, where one other is left. XLA tells the shardings
    there by numbers within the group of devices that has the others, in an order that it keeps to
    itself: along one axis there is one.
    """
    shardy = CONFIG.jax_use_shardy_partitioner
    possible = platforms_of(ctx) in PLATFORMS and _registered and shardy
    return possible and devices_of(ctx) > 1 and len(axes_left(ctx) or [None]) == 1


def emit(
    ctx: mlir.LoweringRuleContext,
    name: str,
    operands: Sequence[Any],
    letters: Factors,
    params: dict[str, Any],
    *,
    avals_out: Sequence[Any] | None = None,
    sum_dtype: Any = None,
) -> list[Any] | None:
    """Emits the custom call that XLA's partitioner replaces; None where XLA's product must do.

    Args:
      name: of a registered program.
      operands: values of the factors, then of the other operands.
      params: keyword arguments of the program; JSON.
      avals_out: abstract values of the results, with shardings where axes are Explicit; None: those
        of `ctx`.
      sum_dtype: in which products of shards are summed; None: that of the first result.
    """
    results = list(ctx.avals_out if avals_out is None else avals_out)
    if any(getattr(x.sharding.spec, "unreduced", None) for x in results):
        return None
    config = {
        "version": VERSION,
        "name": name,
        "labels": asdict(letters),
        "sum_dtype": np.dtype(sum_dtype or results[0].dtype).name,
        "platforms": platforms_of(ctx),
        "axis": (axes_left(ctx) or [None])[0],
        "params": params,
    }
    call = stablehlo.CustomCallOp(
        [ir.RankedTensorType.get(x.shape, mlir.dtype_to_ir_type(x.dtype)) for x in results],
        list(operands),
        call_target_name=ir.StringAttr.get(TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(json.dumps(config)),
    )
    shapes = [*(x.type.shape for x in operands), *(x.shape for x in results)]
    rule = sharding_rule(letters, letters.extents(shapes))
    call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)
    return constrained(ctx, call.results, results)


def product_at(value: Any) -> Any:
    """Returns the bare product that an MLIR value is the result of, as its module reads the call.

    None for another value. Nothing else may use it yet. Between it and the call may lie the
    sharding of its type.
    """
    result, uses = value, 0
    while getattr(value.owner, "name", None) == "sdy.sharding_constraint":
        if len(list(value.uses)) != uses:
            return None
        value, uses = value.owner.operands[0], 1
    call = value.owner
    if getattr(call, "name", None) != "stablehlo.custom_call" or len(list(value.uses)) != uses:
        return None
    if call.attributes["call_target_name"].value != TARGET:
        return None
    config = json.loads(call.attributes["backend_config"].value)
    _, reader = _calls.get(config["name"], (None, None))
    return reader and reader(result, list(call.operands), config["params"])


def constrained(
    ctx: mlir.LoweringRuleContext, values: Sequence[Any], avals: Sequence[Any]
) -> list[Any]:
    """Emits the shardings that types with Explicit axes name."""
    found = []
    for value, aval in zip(values, avals, strict=True):
        sharding = aval.sharding
        if not sharding.mesh.empty and sharding.mesh.explicit_axes:
            reshard = partial(jax.reshard, out_shardings=sharding)
            constrain = mlir.lower_fun(reshard, multiple_results=False)
            (value,) = constrain(ctx.replace(avals_in=[aval], avals_out=[aval]), value)
        found.append(value)
    return found


# XLA's partitioner comes back.


_calls: dict[str, tuple[Program, Reader | None]] = {}  # by name


def register(name: str, program: Program, reader: Reader | None = None) -> None:
    """Says what the calls of a name are: each device runs `program(context, *shards, **params)`.

    That is a JAX function of the operands' shards, in which `context.sum` adds a product of shards
    up over devices. It returns a list of the results' shards. `reader(value, operands, params)`
    gives the bare product that a call computes, or None.
    """
    _calls[name] = program, reader


def _partition(
    arg_shapes: Any, arg_shardings: Any, result_shape: Any, result_sharding: Any, config: bytes
) -> tuple[bytes, list[Any], Any]:
    """Returns the program of one device, how it wants its operands and gives its results."""
    several = result_shape.is_tuple()
    result_shapes = result_shape.tuple_shapes() if several else [result_shape]
    result_shardings = result_sharding.tuple_elements() if several else [result_sharding]
    shardings = (*arg_shardings, *result_shardings)
    mesh = Mesh.of(shardings)
    arrays = tuple(
        (tuple(shape.dimensions()), shape.numpy_dtype()) for shape in (*arg_shapes, *result_shapes)
    )
    given = tuple(
        tuple(mesh.axes_of(sharding)) if is_plain(sharding) else ((),) * len(shape)
        for sharding, (shape, _) in zip(shardings, arrays, strict=True)
    )
    program, axes = _answer(mesh, arrays, given, config, CONFIG.jax_enable_x64)
    found = [mesh.sharding(each) for each in axes]
    wanted, results = found[: len(arg_shapes)], found[len(arg_shapes) :]
    if several:
        return program, wanted, xla_client.HloSharding.tuple_sharding(result_shape, results)
    return program, wanted, results[0]


@lru_cache(maxsize=4096)  # layers of a model ask the same again
def _answer(
    mesh: Mesh, arrays: tuple[Any, ...], given: tuple[Any, ...], config: bytes, x64: bool
) -> tuple[bytes, list[list[Axes]]]:
    """Returns the program of one device, and the axes of its operands and results."""
    asked = json.loads(config)
    if asked["version"] != VERSION:
        raise ValueError(
            f"the product to partition has version {asked['version']}, and this jax_hopper_gemm "
            f"reads version {VERSION}: another one made the program. Trace and export it again "
            "with this one, or run it with that one."
        )
    tuples = {key: tuple(x) for key, x in asked["labels"].items() if isinstance(x, list)}
    letters = Factors(**asked["labels"] | tuples)
    axis = asked["axis"] and tuple(asked["axis"])
    if axis and not all(map(mesh.is_along_one, given)):
        given = tuple(((),) * len(each) for each in given)
    shapes, dtypes = zip(*arrays, strict=True)
    extents = letters.extents(shapes)
    itemsizes = [x.itemsize for x in (*dtypes, jax.numpy.dtype(asked["sum_dtype"]))]
    shard = choose_shard(mesh, letters, extents, itemsizes, given)
    axes = shard.arrays(letters)
    shards = [
        jax.ShapeDtypeStruct(
            [extent // mesh.count(along) for extent, along in zip(shape, each, strict=True)], dtype
        )
        for (shape, dtype), each in zip(arrays, axes, strict=True)
    ]
    operands = shards[: len(shards) - len(letters.results)]
    context = ShardContext(mesh, letters, shard, asked["sum_dtype"], axis)
    (run, _), params = _calls[asked["name"]], asked["params"]
    program: Program = partial(run, context, **params)
    try:
        return _lowered(program, operands, tuple(asked["platforms"]), x64), axes
    except NotImplementedError as error:  # XLA raises an error of its own, with this one's text
        wholes = [jax.ShapeDtypeStruct(*x) for x in arrays[: len(operands)]]
        whole, part = (
            " and ".join(f"{x.dtype}{list(x.shape)}" for x in found) for found in (wholes, operands)
        )
        raise NotImplementedError(
            f"{error}\nIt is one device's shard: {part} of {whole}. Shard another dimension, or "
            "over fewer devices; with implementation=None XLA runs what no kernel can."
        ) from None


def _lowered(
    program: Program, shards: Sequence[Any], platforms: tuple[str, ...], x64: bool
) -> bytes:
    """Returns the bytecode of a program of one device."""

    def lowered() -> Any:
        with jax.enable_x64(x64), lowering_shard():
            function = jax.jit(lambda *operands: list(program(*operands)), keep_unused=True)
            lowering = function.trace(*shards).lower(lowering_platforms=platforms)
            return lowering.compiler_ir("stablehlo")

    # In a thread of its own: a mesh that the user has set is one for all devices.
    with ThreadPoolExecutor(1) as thread:
        module = thread.submit(lowered).result()
    written = io.BytesIO()
    with module.context:
        module.operation.write_bytecode(written)
    return written.getvalue()


def _propagate(*args: Any) -> Any:
    raise NotImplementedError("shardings go through a product by Shardy's rule")


def _register_target() -> bool:
    """Makes `TARGET` known to XLA's partitioner, and returns whether this JAX has a way to."""
    try:
        # JAX has no public way to register with the plugin of a GPU.
        from jax._src.xla_bridge import register_plugin_callbacks

        enter: Any = partial(
            xla_client.register_custom_call_partitioner, name=TARGET, partition=_partition,
            prop_user_sharding=_propagate, infer_sharding_from_operands=_propagate,
        )  # fmt: skip
    except (ImportError, AttributeError):
        return False
    enter()
    register_plugin_callbacks(enter)
    return True


_registered = _register_target()
