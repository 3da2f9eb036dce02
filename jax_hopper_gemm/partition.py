"""Products in a program that XLA partitions over devices: each device gets its share as a program.

What a device's share is, XLA knows only when it partitions, long after lowering. So lowering emits
a custom call that says in words what is asked (`TARGET`, its configuration is JSON), with Shardy's
rule of how shardings go through it. XLA's partitioner comes back with the shardings that it has
found. The answer is a program for one device: the product of the shards, lowered like any other
program for one device, and a reduction where a contracted axis is sharded.

Nothing in the custom call belongs to a process, so the persistent compilation cache and
`jax.export` take such programs. The executable holds no call of `TARGET` any more.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jaxlib import xla_client

from .contraction import split
from .shares import Axes, Mesh, Share, choose_share, is_plain

TARGET = "jax_hopper_gemm.v1.partition"
PLATFORMS = [("cuda",)]  # what a program is lowered for, where products are partitioned here

# Lowering: the custom call.


def applies(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether XLA partitions the whole program over devices, and this JAX lets us take part.

    A program inside `jax.shard_map` over some of the mesh axes is not for us.
    """
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    shardy = jax.config.jax_use_shardy_partitioner
    return devices > 1 and platforms_of(ctx) in PLATFORMS and _registered and shardy


def platforms_of(ctx: mlir.LoweringRuleContext) -> tuple[str, ...]:
    return tuple(ctx.platforms or ctx.module_context.platforms)


def lower(
    ctx: mlir.LoweringRuleContext,
    lhs: Any,
    rhs: Any,
    *,
    subscripts: str,
    precision: Any,
    preferred_element_type: Any,
    implementation: str | None,
    max_sms: int | None,
) -> list[Any] | None:
    """Emits the custom call that XLA's partitioner replaces; None where XLA's product must do.

    The parameters are those of `hopper_dot`; the result's sharding is its abstract value's.
    """
    (out_aval,) = ctx.avals_out
    sharding = out_aval.sharding
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if not all(x is None or isinstance(x, lax.Precision) for x in precisions):
        return None
    if getattr(sharding.spec, "unreduced", None):
        return None
    platforms = platforms_of(ctx)
    preferred = None if preferred_element_type is None else np.dtype(preferred_element_type).name
    config = {
        "subscripts": subscripts,
        "precision": None if precision is None else [x.name for x in precisions],
        "preferred_element_type": preferred,
        "implementation": implementation,
        "platforms": platforms,
    }
    if max_sms is not None:
        config["max_sms"] = max_sms
    call = stablehlo.CustomCallOp(
        [ir.RankedTensorType.get(out_aval.shape, mlir.dtype_to_ir_type(out_aval.dtype))],
        [lhs, rhs],
        call_target_name=ir.StringAttr.get(TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(json.dumps(config)),
    )
    extents = dict(
        zip(subscripts.replace(",", ""), [*lhs.type.shape, *rhs.type.shape], strict=False)
    )
    call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(sharding_rule(subscripts, extents))
    (result,) = call.results
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return [result]
    constrain = mlir.lower_fun(
        partial(lax.with_sharding_constraint, shardings=sharding), multiple_results=False
    )
    return list(constrain(ctx.replace(avals_in=[out_aval]), result))


def sharding_rule(subscripts: str, extents: dict[str, int]) -> str:
    """Returns Shardy's rule of a product: which dimensions are the same letter."""
    names = dict(zip(extents, _factor_names(), strict=False))
    lhs, rhs, out = ("[" + ", ".join(names[x] for x in part) + "]" for part in split(subscripts))
    sizes = ", ".join(f"{names[letter]}={extent}" for letter, extent in extents.items())
    _, _, out_labels = split(subscripts)
    contracted = ", ".join(names[letter] for letter in extents if letter not in out_labels)
    reduction = f" reduction={{{contracted}}}" if contracted else ""
    return f"#sdy.op_sharding_rule<({lhs}, {rhs})->({out}) {{{sizes}}}{reduction}, custom>"


def _factor_names() -> Iterable[str]:
    yield from "ijklmnopqrstuvwxyz"
    yield from (f"z_{i}" for i in itertools.count(1))


# XLA's partitioner comes back.

_product: Callable[..., Any] | None = None


def _partition(
    arg_shapes: Any, arg_shardings: Any, result_shape: Any, result_sharding: Any, config: bytes
) -> tuple[bytes, list[Any], Any]:
    """Returns the program of one device, how it wants its operands and gives its result."""
    shardings = (*arg_shardings, result_sharding)
    mesh = Mesh.of(shardings)
    arrays = tuple(
        (tuple(shape.dimensions()), shape.numpy_dtype()) for shape in (*arg_shapes, result_shape)
    )
    given = tuple(
        tuple(mesh.axes_of(sharding)) if is_plain(sharding) else ((),) * len(shape)
        for sharding, (shape, _) in zip(shardings, arrays, strict=True)
    )
    program, axes = _answer(mesh, arrays, given, config, jax.config.jax_enable_x64)
    lhs, rhs, out = map(mesh.sharding, axes)
    return program, [lhs, rhs], out


@lru_cache(maxsize=4096)  # layers of a model ask the same again
def _answer(
    mesh: Mesh, arrays: tuple[Any, ...], given: tuple[Any, ...], config: bytes, x64: bool
) -> tuple[bytes, list[list[Axes]]]:
    """Returns the program of one device, and the axes of its two operands and its result."""
    params = {"max_sms": None} | json.loads(config)
    platforms = tuple(params.pop("platforms"))
    labels = split(params["subscripts"])
    shapes, dtypes = zip(*arrays, strict=True)
    extents = {x: n for names, shape in zip(labels, shapes, strict=True)
               for x, n in zip(names, shape, strict=True)}  # fmt: skip
    itemsizes = tuple(dtype.itemsize for dtype in dtypes)
    share = choose_share(mesh, params["subscripts"], extents, itemsizes, given)
    shards = [
        jax.ShapeDtypeStruct([extents[x] // mesh.count(share.axes[x]) for x in names], dtype)
        for names, dtype in zip(labels[:2], dtypes, strict=False)
    ]
    module = _lowered_product(shards, params, platforms, x64)
    program = _reduced(module, mesh, share, labels[2])
    operands = [[share.axes[x] for x in names] for names in labels[:2]]
    return program, [*operands, [share.result(x) for x in labels[2]]]


def _lowered_product(shards: list[Any], params: Any, platforms: tuple[str, ...], x64: bool) -> Any:
    assert _product
    if (names := params["precision"]) is not None:
        pair = tuple(lax.Precision[name] for name in names)
        params["precision"] = pair if len(pair) == 2 else pair[0]
    params["out_sharding"] = None
    if (preferred := params["preferred_element_type"]) is not None:
        params["preferred_element_type"] = np.dtype(jax.numpy.dtype(preferred))
    product = partial(_product, **params)
    function = jax.jit(lambda *operands: product(*operands), keep_unused=True)

    def lowered() -> Any:
        with jax.enable_x64(x64):
            lowering = function.trace(*shards).lower(lowering_platforms=platforms)
            return lowering.compiler_ir("stablehlo")

    # In a thread of its own: a mesh that the user has set is one for all devices.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lowered).result()


def _reduced(module: Any, mesh: Mesh, share: Share, out: str) -> bytes:
    """Returns the module, the result of its main function summed over devices, as bytecode."""
    with module.context, ir.Location.unknown():
        (main,) = (f for f in module.body.operations if str(f.name).strip('"') == "main")
        (end,) = (op for op in main.body.blocks[0].operations if op.operation.name == "func.return")
        value = end.operands[0]
        with ir.InsertionPoint(end):
            for letter, axes in share.scattered.items():
                value = _reduce(value, mesh.groups(axes), out.index(letter))
            if share.summed:
                value = _reduce(value, mesh.groups(share.summed))
        end.operation.operands[0] = value
        kind = ir.FunctionType.get(main.type.inputs, [value.type])
        main.attributes["function_type"] = ir.TypeAttr.get(kind)
        written = io.BytesIO()
        module.operation.write_bytecode(written)
    return written.getvalue()


def _reduce(value: Any, groups: list[list[int]], dimension: int | None = None) -> Any:
    """Emits the sum over each group of devices, of which each keeps a part along `dimension`."""
    shared = {
        "replica_groups": ir.DenseIntElementsAttr.get(np.array(groups, np.int64)),
        "channel_handle": stablehlo.ChannelHandle.get(1, 1),
        "use_global_device_ids": ir.BoolAttr.get(True),
    }
    element = value.type.element_type
    if dimension is None:
        operation = stablehlo.AllReduceOp([value.type], [value], **shared)
    else:
        shape = list(value.type.shape)
        shape[dimension] //= len(groups[0])
        index = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dimension)
        kind = ir.RankedTensorType.get(shape, element)
        operation = stablehlo.ReduceScatterOp(kind, value, scatter_dimension=index, **shared)
    scalar = ir.RankedTensorType.get([], element)
    block = operation.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.ReturnOp([stablehlo.AddOp(*block.arguments).result])
    return operation.results[0]


def _propagate(*args: Any) -> Any:
    raise NotImplementedError("shardings go through a product by Shardy's rule")


_registered = False


def register(product: Callable[..., Any]) -> None:
    """Makes `TARGET` known to XLA's partitioner.

    Args:
      product: binds the product of two arrays; takes the parameters of `hopper_dot`.
    """
    global _product, _registered
    _product = product
    try:
        # JAX has no public way to register with the plugin of a GPU.
        from jax._src.xla_bridge import register_plugin_callbacks

        enter = xla_client.register_custom_call_partitioner
    except (ImportError, AttributeError):
        return
    params: Any = {
        "name": TARGET,
        "prop_user_sharding": _propagate,
        "partition": _partition,
        "infer_sharding_from_operands": _propagate,
    }
    enter(**params)
    register_plugin_callbacks(partial(enter, **params))
    _registered = True
