"""The JAX primitive `hopper_dot` and the FFI call that it becomes on a GPU.

`hopper_dot` multiplies two arrays by subscripts such as "bmk,bkn->bmn". It is
`jax.lax.dot_general` with the order of the result's axes left free: so the product, both of its
gradients and its `vmap` are again `hopper_dot`s, with the letters arranged anew and no array
transposed. It is bilinear: JAX derives forward and reverse mode of every order from two rules.

Only lowering for CUDA decides between a kernel and XLA. Elsewhere, and where XLA is the answer,
the product lowers to `jax.lax.dot_general`.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from . import config, native
from .contraction import split
from .dot_general import (
    DotGeneral,
    from_subscripts,
    padded_partitions,
    with_partitions,
)
from .routing import Product, Route, current_device, route

TARGET = "jax_hopper_gemm.v1.launch"

hopper_dot_p = Primitive("hopper_dot")


def hopper_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    subscripts: str,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
    implementation: str | None,
) -> jax.Array:
    """Returns the product of two arrays.

    Args:
      lhs, rhs: the operands.
      subscripts: as in `contraction.as_gemm`.
      precision, preferred_element_type: parameters of `lax.dot_general_p`, already canonical.
      out_sharding: likewise, for the axes of the result.
      implementation: None or "hopper".
    """
    return hopper_dot_p.bind(
        lhs,
        rhs,
        subscripts=subscripts,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        implementation=implementation,
    )


@hopper_dot_p.def_impl
def _eager(*operands: Any, **params: Any) -> Any:
    return xla.apply_primitive(hopper_dot_p, *operands, **params)


def _dot_general(*, implementation: str | None, **params: Any) -> DotGeneral:
    del implementation  # decides at lowering; the product is the same
    return from_subscripts(**params)


def as_dot_general_params(**params: Any) -> dict[str, Any]:
    """Returns the parameters of the `lax.dot_general_p` that a `hopper_dot_p` stands for."""
    return _dot_general(**params).params


def product_of(lhs: Any, rhs: Any, out: Any, params: dict[str, Any]) -> Product:
    """Returns what a `hopper_dot_p` between these abstract values asks for."""
    return Product(
        params["subscripts"], lhs.shape, lhs.dtype.name, rhs.shape, rhs.dtype.name,
        out.dtype.name, params["precision"],
    )  # fmt: skip


def _abstract_eval(lhs: Any, rhs: Any, **params: Any) -> Any:
    """Shape, dtype, sharding and varying axes are those of `lax.dot_general`."""
    dot = _dot_general(**params)
    operands = (rhs, lhs) if dot.swapped else (lhs, rhs)
    out, _ = lax.dot_general_p.abstract_eval(*operands, **dot.params)
    return lax.transpose_p.abstract_eval(out, permutation=dot.permutation)[0]


hopper_dot_p.def_abstract_eval(_abstract_eval)


def _reference(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """The product as XLA computes it."""
    dot = _dot_general(**params)
    operands = (rhs, lhs) if dot.swapped else (lhs, rhs)
    return lax.transpose(lax.dot_general_p.bind(*operands, **dot.params), dot.permutation)


# Derivatives and vmap: the letters change places.


def _transpose_lhs(cotangent: Any, lhs: Any, rhs: Any, *, subscripts: str, **params: Any) -> Any:
    lhs_labels, rhs_labels, out_labels = split(subscripts)
    gradient = f"{out_labels},{rhs_labels}->{lhs_labels}"
    return _cotangent_of(lhs.aval, cotangent, rhs, subscripts=gradient, **params)


def _transpose_rhs(cotangent: Any, lhs: Any, rhs: Any, *, subscripts: str, **params: Any) -> Any:
    lhs_labels, rhs_labels, out_labels = split(subscripts)
    gradient = f"{out_labels},{lhs_labels}->{rhs_labels}"
    return _cotangent_of(rhs.aval, cotangent, lhs, subscripts=gradient, **params)


def _cotangent_of(primal: Any, cotangent: Any, other: Any, **params: Any) -> Any:
    params["out_sharding"] = None if primal.sharding.mesh.empty else primal.sharding
    gradient = hopper_dot_p.bind(cotangent, other, **params)
    complex_types = [np.issubdtype(x.dtype, np.complexfloating) for x in (primal, gradient)]
    if complex_types == [False, True]:
        gradient = lax.real(gradient)
    return lax.convert_element_type(gradient, primal.dtype)


ad.defbilinear(hopper_dot_p, _transpose_lhs, _transpose_rhs)


def _batch(
    axis_data: Any, operands: Any, axes: Any, *, subscripts: str, out_sharding: Any, **params: Any
) -> tuple[Any, int | None]:
    """Adds a letter: a batch index where both operands have it, else a free one."""
    mapped = any(axis is not None for axis in axes)  # JAX also asks when nothing is
    if mapped:
        lhs, rhs, out = split(subscripts)
        new = next(x for x in string.ascii_letters if x not in subscripts)
        lhs, rhs = (
            labels if axis is None else labels[:axis] + new + labels[axis:]
            for labels, axis in zip((lhs, rhs), axes, strict=True)
        )
        subscripts = f"{lhs},{rhs}->{new}{out}"
        if out_sharding is not None:
            partitions = padded_partitions(out_sharding, len(out))
            partitions = (axis_data.explicit_mesh_axis, *partitions)
            out_sharding = with_partitions(out_sharding, partitions)
    product = hopper_dot_p.bind(
        *operands, subscripts=subscripts, out_sharding=out_sharding, **params
    )
    return product, 0 if mapped else None


batching.fancy_primitive_batchers[hopper_dot_p] = _batch


# Lowering.

_lower_to_xla = mlir.lower_fun(_reference, multiple_results=False)


def _lower(ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, **params: Any) -> Any:
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    on_host = getattr(ctx.jaxpr_eqn_ctx, "compute_type", None) == "device_host"
    if platforms == ("cuda",) and not on_host:
        return _lower_for_cuda(ctx, lhs, rhs, **params)
    if params["implementation"] == "hopper":
        raise NotImplementedError(
            "implementation='hopper': the kernels run on CUDA, and this program is lowered for "
            "another platform. With implementation=None it runs on either."
        )
    lower = _lower_for_each if "cuda" in platforms and not on_host else _lower_to_xla
    return lower(ctx, lhs, rhs, **params)


def _for_each(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    on_cuda, elsewhere = partial(on_cuda_p.bind, **params), partial(_reference, **params)
    return lax.platform_dependent(lhs, rhs, cuda=on_cuda, default=elsewhere)


_lower_for_each = mlir.lower_fun(_for_each, multiple_results=False)


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, **params: Any) -> Any:
    kernel_only = params["implementation"] == "hopper"
    device = current_device(_assigned_devices(ctx))
    (lhs_aval, rhs_aval), (out_aval,) = ctx.avals_in, ctx.avals_out
    given = Call(product_of(lhs_aval, rhs_aval, out_aval, params), (lhs, rhs))
    call = given.untransposed()
    found = route(call.product, device, kernel_only=kernel_only)
    if not found.supported:
        call, found = given, route(given.product, device, kernel_only=kernel_only)
    found = found.unless(_partition_violation(ctx) or launcher_violation())
    if found.path == "hopper":
        return call.launch(ctx, found)
    if kernel_only:
        raise NotImplementedError(
            f"implementation='hopper': no kernel runs {given.product}: {found.reason}"
        )
    if not found.supported:
        config.report_fallback(f"XLA runs {given.product}: {found.reason}")
    return _lower_to_xla(ctx, lhs, rhs, **params)


@dataclass(frozen=True)
class Call:
    """A product in the program that is being lowered, and the MLIR values it multiplies."""

    product: Product
    values: tuple[Any, Any]

    def untransposed(self) -> Call:
        """Returns the same product of the arrays that the operands are transposes of.

        XLA folds a transpose into its own products, but would copy the operand of a custom call.
        """
        product = self.product
        lhs, rhs, out = split(product.subscripts)
        lhs_value, lhs, lhs_shape = _beneath_transpose(self.values[0], lhs, product.lhs_shape)
        rhs_value, rhs, rhs_shape = _beneath_transpose(self.values[1], rhs, product.rhs_shape)
        product = replace(
            product, subscripts=f"{lhs},{rhs}->{out}", lhs_shape=lhs_shape, rhs_shape=rhs_shape
        )
        return Call(product, (lhs_value, rhs_value))

    def launch(self, ctx: mlir.LoweringRuleContext, found: Route) -> Any:
        """Emits the FFI call: A and B in, D and the workspaces out, everything row-major."""
        from .cubin import digest_of  # brings cuda-python with it

        assert found.gemm and found.spec and found.plan
        product, problem = self.product, found.gemm.problem
        operands = [
            (self.values[0], ShapedArray(product.lhs_shape, product.lhs_dtype)),
            (self.values[1], ShapedArray(product.rhs_shape, product.rhs_dtype)),
        ]
        values, avals = zip(*reversed(operands) if found.gemm.swapped else operands, strict=True)
        workspaces = [ShapedArray((w.nbytes,), np.uint8) for w in found.plan.workspaces]
        results = jax.ffi.ffi_lowering(TARGET)(
            ctx.replace(avals_in=avals, avals_out=[*ctx.avals_out, *workspaces]),
            *values,
            digest=digest_of(found.spec),
            spec=found.spec.to_json(),
            name=f"{found.spec.name} M={problem.m} N={problem.n} K={problem.k} L={problem.l}",
            plan=np.array(found.plan.encode(), np.int64),
        )
        return results[:1]


def _beneath_transpose(
    value: Any, labels: str, shape: tuple[int, ...]
) -> tuple[Any, str, tuple[int, ...]]:
    """Returns the array that `value` is a transpose of, or `value`, with its letters and shape."""
    operation = value.owner
    if getattr(operation, "name", None) != "stablehlo.transpose":  # a block has no name
        return value, labels, shape
    axis_of = {source: i for i, source in enumerate(operation.attributes["permutation"])}
    order = [axis_of[source] for source in range(len(labels))]
    return operation.operands[0], "".join(labels[i] for i in order), tuple(shape[i] for i in order)


def _partition_violation(ctx: mlir.LoweringRuleContext) -> str | None:
    """Returns why no kernel runs in a program that XLA partitions over devices."""
    context: Any = ctx.module_context.axis_context
    devices = getattr(context, "num_devices", 1)
    if (manual := getattr(context, "manual_axes", None)) is not None:  # inside shard_map
        shape = context.mesh.shape
        devices = prod(extent for axis, extent in shape.items() if axis not in manual)
    if devices == 1:
        return None
    return (
        f"XLA partitions this program over {devices} devices and would gather a kernel's operands "
        "on each; call it inside jax.shard_map over all mesh axes"
    )


def launcher_violation() -> str | None:
    """Returns why this process can launch no kernel."""
    try:
        native.library()
    except native.NativeLibraryError as error:
        return str(error)
    return None


def _assigned_devices(ctx: mlir.LoweringRuleContext) -> tuple[Any, ...]:
    return getattr(ctx.module_context.axis_context, "device_assignment", None) or ()


# One rule for all platforms, and not cacheable: a cached lowering becomes a function of its own,
# whose arguments hide the transposes that they come from.
mlir.register_lowering(hopper_dot_p, _lower, cacheable=False)

# The branch for CUDA of a program for several platforms; it exists while that is lowered.
on_cuda_p = Primitive("hopper_dot_on_cuda")
on_cuda_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(on_cuda_p, _lower_for_cuda, cacheable=False)


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the `disabled_checks` that `jax.export.export` wants for our products.

    JAX keeps exported programs to custom calls whose stability it vouches for. The target of this
    library carries a version in its name, and its attributes hold all that a launch needs. The
    process that runs the program on a GPU must `import jax_hopper_gemm`, which registers it.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(TARGET)]


def _register_target() -> None:
    """Makes the FFI target known to JAX, so that saved executables find it in a new process."""
    try:
        library = native.library()
    except native.NativeLibraryError:
        return  # lowering gives the reason, where a kernel is wanted
    state: Any = {
        "type_id": jax.ffi.pycapsule(library.JhgLaunchTypeId()),
        "type_info": jax.ffi.pycapsule(library.JhgLaunchTypeInfo()),
    }
    handlers = {
        "instantiate": jax.ffi.pycapsule(library.JhgLaunchInstantiate),
        "execute": jax.ffi.pycapsule(library.JhgLaunchExecute),
    }
    jax.ffi.register_ffi_type(f"{TARGET}_state", state, platform="CUDA")
    jax.ffi.register_ffi_target(TARGET, handlers, platform="CUDA")


_register_target()
