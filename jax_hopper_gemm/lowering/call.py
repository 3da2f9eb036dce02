"""Products in a program that is being lowered, and the FFI call that they become on a GPU.

Only lowering for CUDA decides between a kernel and XLA; a primitive hands in what it asks for and
what it means in plain JAX. A call that holds a bare product says so in an attribute of its
operation, so that what reads its result can take the product's place, with an epilogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

from ..dispatch import Device
from ..gemm.epilogue_graph import Result
from ..gemm.grid import result_shapes
from ..launch import ffi_library
from ..launch.ffi_target import TARGET, launcher_violation
from . import fallback
from .decide import Form, decide, forms_of
from .devices import devices_of, lowers_shard
from .finish_reductions import finish_partials
from .mlir_values import (
    GATHERED,
    INDEXED,
    MAX_SMS,
    PRODUCT,
    SPANS,
    MlirValues,
)
from .origins import Origin, Source, source_of
from .route import Product, Route, current_device, route
from .shardings import with_partitions


@dataclass(frozen=True)
class Call:
    """A product in the program that is being lowered, and the MLIR values that it reads.

    Attributes:
      product: what is asked.
      values: the left operand, the right one or gate and up.
      operands, avals: what the epilogue reads, in its order, and their abstract values.
      in_place: the operand whose memory the first result takes, if it is a matrix like it.
      sizes: of a ragged product, what cuts its rows into groups; int32.
      rows: where the product gathers rows of an operand, their indices; int32.
      index: where an operand is one array of a stack, which; () int32. `values` then has the stack.
    """

    product: Product
    values: tuple[Any, ...]
    operands: tuple[Any, ...] = ()
    avals: tuple[Any, ...] = ()
    in_place: int | None = None
    sizes: Any = None
    rows: Any = None
    index: Any = None

    def lower(self, ctx: mlir.LoweringRuleContext, implementation: str | None) -> list[Any] | None:
        """Emits the launch, if a kernel is the answer.

        Raises:
          NotImplementedError: none runs the product, and `implementation` is "hopper" or the user
            wants an error.
          ForkedError: the process was forked from one that had kernels loaded.
        """
        kernel_only = implementation == "hopper"
        sources = self._sources()
        origins = [source.origin for source in sources]
        decision = decide(self.product, origins, _device(ctx), kernel_only=kernel_only)
        chosen = decision.route.unless(_partition_violation(ctx) or launcher_violation())
        if chosen.path == "hopper":
            ffi_library.refuse_fork()
            return self._in_form(decision.form, sources).launch(ctx, chosen)
        if kernel_only:
            raise NotImplementedError(
                f"implementation='hopper': no kernel runs {self.product}: {chosen.reason}"
            )
        if not chosen.supported:
            fallback.report_fallback(f"XLA runs {self.product}: {chosen.reason}")
        return None

    def route(self, ctx: mlir.LoweringRuleContext, *, kernel_only: bool) -> Route:
        return route(self.product, _device(ctx), kernel_only=kernel_only)

    def readable(self, ctx: mlir.LoweringRuleContext, *, kernel_only: bool) -> Call:
        """Returns the same product of the arrays that the operands are transposes of.

        Or of the operands themselves, where a kernel runs the product of these alone.
        """
        sources = self._sources()
        origins = [Origin(source.origin.permutation) for source in sources]
        decision = decide(self.product, origins, _device(ctx), kernel_only=kernel_only)
        form = decision.form if decision.route.supported else forms_of(self.product, origins)[0]
        return self._in_form(form, sources)

    def _sources(self) -> list[Source]:
        return [source_of(value, MlirValues()) for value in self.values]

    def _in_form(self, form: Form, sources: Sequence[Source]) -> Call:
        """Returns the call of a form of the product, whose operands come from `sources`."""
        product, values = form.product, list(self.values)
        for i in form.stored:
            values[i] = sources[i].stored
        named: dict[str, Any] = {}
        if (operand := product.gathered) and not self.product.gathered:
            i = "ab".index(operand)
            values[i], named["rows"] = sources[i].array, sources[i].indices
        if (operand := product.indexed) and not self.product.indexed:
            i = "ab".index(operand)
            values[i], named["index"] = sources[i].array, sources[i].indices
        return replace(self, product=product, values=tuple(values), **named)

    def gathered_by(self, operand: Literal["a", "b"], rows: Any) -> Call:
        """Returns the same product where an operand is rows, given whole, that indices pick."""
        product, length = self.product, rows.type.shape[0]
        assert product.groups
        field = "lhs_shape" if operand == "a" else "rhs_shape"
        source_rows, *row = getattr(product, field)
        shape: dict[str, Any] = {field: (length, *row)}
        groups = replace(product.groups, gathered=operand, source_rows=source_rows)
        product = replace(product, groups=groups, **shape)
        return replace(self, product=product, rows=rows)

    def launch(self, ctx: mlir.LoweringRuleContext, found: Route) -> list[Any]:
        """Emits the FFI call, everything row-major, and what XLA does with its results.

        In go A, B, up, the epilogue's operands, sizes, indices of rows or the index of a matrix;
        out come its results and the workspaces.
        """
        from ..cubin import digest_of  # brings cuda-python with it

        assert found.gemm and found.spec and found.plan
        product, problem, groups = self.product, found.gemm.problem, self.product.groups
        shapes = [(product.lhs_shape, product.lhs_dtype)]
        shapes += [(product.rhs_shape, product.rhs_dtype)] * product.rights
        if groups and groups.gathered:
            index = "ab".index(groups.gathered)
            (_, *row), dtype = shapes[index]
            shapes[index] = ((groups.source_rows, *row), dtype)
        if product.indexed:
            index = "ab".index(product.indexed)
            shape, dtype = shapes[index]
            shapes[index] = ((product.stack, *shape), dtype)
        inputs = [(v, ShapedArray(*s)) for v, s in zip(self.values, shapes, strict=True)]
        if found.gemm.swap_ab:
            inputs.reverse()
        aliases: dict[int, int] = {}
        outputs = list(ctx.avals_out)
        if fusion := found.fusion:
            outputs = self._results(found)
            for index, operand in zip(fusion.operands, fusion.graph.operands, strict=True):
                value, aval = self.operands[index], self.avals[index]
                if index == self.in_place and operand.kind == "matrix":
                    if (aval.shape, aval.dtype) == (outputs[0].shape, outputs[0].dtype):
                        aliases = {len(inputs): 0}
                if aval.dtype.name != operand.dtype:
                    value, aval = _converted(ctx, value, aval, operand.dtype)
                inputs.append((value, aval))
        if groups:
            inputs.append((self.sizes, ShapedArray((groups.num_sizes,), np.dtype("int32"))))
        if groups and groups.gathered:
            inputs.append((self.rows, ShapedArray(self.rows.type.shape, np.dtype("int32"))))
        if product.indexed:
            inputs.append((self.index, ShapedArray((), np.dtype("int32"))))
        values, avals = zip(*inputs, strict=True)
        workspaces = [ShapedArray((w.nbytes,), np.uint8) for w in found.plan.workspaces]
        results = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases)(
            ctx.replace(avals_in=avals, avals_out=[*outputs, *workspaces]),
            *values,
            digest=digest_of(found.spec),
            spec=found.spec.to_json(),
            name=f"{found.spec.name} M={problem.m} N={problem.n} K={problem.k} L={problem.l}",
            plan=np.array(found.plan.encode(), np.int64),
        )
        results = list[Any](results)[: len(outputs)]
        if fusion is None:
            subscripts = product.subscripts
            in_order = subscripts.swapped() if found.gemm.swap_ab else subscripts
            operation: Any = results[0].owner
            operation.attributes[PRODUCT] = mlir.ir_attribute(str(in_order))
            if groups:
                fields = ",".join(map(str, astuple(groups.rule)))
                operation.attributes[SPANS] = mlir.ir_attribute(fields)
            if groups and groups.gathered:
                operation.attributes[GATHERED] = mlir.ir_attribute(groups.gathered)
            if product.indexed:
                left = (product.indexed == "a") != found.gemm.swap_ab
                operation.attributes[INDEXED] = mlir.ir_attribute("a" if left else "b")
            return self.marked(results)
        finish = mlir.lower_fun(partial(self._finished, found), multiple_results=True)
        assert product.function
        varying = [_varying_like(product.function.in_avals[0], x) for x in outputs]
        context = ctx.replace(avals_in=[*varying, *self.avals])
        return list(finish(context, *results, *self.operands))

    def marked(self, results: Any) -> Any:
        """Returns what a bare product gave; says of it which limit of SMs the product has."""
        if self.product.max_sms is not None:
            operation: Any = list(results)[0].owner
            operation.attributes[MAX_SMS] = mlir.ir_attribute(self.product.max_sms)
        return results

    def _results(self, found: Route) -> list[ShapedArray]:
        """Returns the arrays that the kernel writes: matrices with the axes of the result."""
        assert found.gemm and found.spec and found.roles
        extents, out = self.product.extents, self.product.subscripts.out
        columns = len(out.rstrip(found.roles.n))
        arrays = []
        whole = [r for r in found.gemm.problem.graph.results if r.plane == 0]
        written = result_shapes(found.gemm.problem, found.spec)
        for result, (shape, dtype) in zip(whole, written, strict=True):
            if result.kind == "matrix":
                sizes = [extents[letter] for letter in out]
                planes = [result.planes] if result.planes > 1 else []
                shape = (*sizes[:columns], *planes, *sizes[columns:])
            arrays.append(ShapedArray(shape, np.dtype(jnp.dtype(dtype))))
        return arrays

    def _finished(self, found: Route, *arrays: jax.Array) -> list[jax.Array]:
        """Returns the function's outputs from what the kernel wrote and the function's operands."""
        assert found.fusion
        whole = [result for result in found.fusion.graph.results if result.plane == 0]
        finished: list[jax.Array] = []
        for result, array in zip(whole, arrays[: len(whole)], strict=True):
            if result.kind == "matrix":
                finished.append(array)
                continue
            parts = finish_partials(result, array)
            parts = parts if isinstance(parts, tuple | list) else (parts,)
            finished += [self._shaped(found, result, part) for part in parts]
        return found.fusion.finish(*finished, *arrays[len(whole) :])

    def _shaped(self, found: Route, result: Result, array: jax.Array) -> jax.Array:
        """Returns a finished reduction, (L, M, ...) or (L, N), with the axes of the result."""
        assert found.roles
        if result.kind == "max":
            return jnp.max(array)
        axes, extents = found.roles, self.product.extents
        letters = axes.batch + (axes.n if result.kind == "column_sum" else axes.m)
        trailing = array.shape[2:]
        array = array.reshape([extents[letter] for letter in letters] + list(trailing))
        order = [letters.index(x) for x in self.product.subscripts.out if x in letters]
        return lax.transpose(array, (*order, *range(len(letters), array.ndim)))


def _varying_like(aval: Any, array: ShapedArray) -> ShapedArray:
    """Returns an abstract value like `array` that varies over the mesh axes that `aval` does."""
    if aval.sharding.mesh.empty:
        return array
    whole = with_partitions(aval.sharding, (None,) * array.ndim)
    return aval.update(shape=array.shape, dtype=array.dtype, weak_type=False, sharding=whole)


def _converted(
    ctx: mlir.LoweringRuleContext, value: Any, aval: Any, dtype: str
) -> tuple[Any, ShapedArray]:
    converted = ShapedArray(aval.shape, np.dtype(jnp.dtype(dtype)))
    convert = mlir.lower_fun(lambda x: x.astype(dtype), multiple_results=False)
    (value,) = convert(ctx.replace(avals_in=[aval], avals_out=[converted]), value)
    return value, converted


def _partition_violation(ctx: mlir.LoweringRuleContext) -> str | None:
    """Returns why no kernel is launched for a whole product that XLA partitions over devices."""
    devices = devices_of(ctx)
    if devices == 1:
        return None
    return (
        f"XLA partitions this program over {devices} devices and would gather a kernel's operands "
        "on each; call it inside jax.shard_map over all mesh axes"
    )


def _device(ctx: mlir.LoweringRuleContext) -> Device:
    """Returns the kind of GPU that the program is for, and what else runs on it."""
    assigned = getattr(ctx.module_context.axis_context, "device_assignment", None) or ()
    return replace(current_device(assigned), comm_overlap=lowers_shard())
