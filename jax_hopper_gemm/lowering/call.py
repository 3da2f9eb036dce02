"""Products in a program that is being lowered, and the FFI call that they become on a GPU.

Only lowering for CUDA decides between a kernel and XLA; a primitive hands in what it asks for and
what it means in plain JAX. A call that holds a bare product says so in an attribute of its
operation, so that what reads its result can take the product's place, with an epilogue.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

from ..fusion.jaxprs import traced
from ..gemm.epilogue_graph import Result
from ..gemm.grid import result_shapes
from ..gemm.groups import is_contraction, weights_in_order
from ..gemm.subscripts import split, with_partitions
from ..launch import ffi_library
from ..launch.ffi_target import TARGET, launcher_violation
from . import fallback
from .devices import devices_of, lowers_shard
from .finish_reductions import finish_partials
from .mlir_values import (
    GATHERED,
    INDEXED,
    MAX_SMS,
    PRODUCT,
    SPANS,
    look_through_gather,
    look_through_index,
    look_through_transpose,
)
from .route import Product, Route, current_device, route
from .traced import lower_jaxpr


@dataclass(frozen=True)
class Call:
    """A product in the program that is being lowered, and the MLIR values that it reads.

    Attributes:
      product: what is asked.
      values: the left operand, the right one or gate and up.
      operands, avals: what the epilogue reads, in its order, and their abstract values.
      in_place: the operand whose memory the first result takes, if it is a matrix like it.
      sizes: of a ragged product, what cuts its rows into spans; int32.
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
        direct = self.untransposed()
        call = direct.indexing().gathering()
        found = call.route(ctx, kernel_only=kernel_only)
        for other in (direct, self):
            if found.supported:
                break
            if other is not call:
                call, found = other, other.route(ctx, kernel_only=kernel_only)
        found = found.unless(_partition_violation(ctx) or launcher_violation())
        if found.path == "hopper":
            ffi_library.refuse_fork()
            return call.launch(ctx, found)
        if kernel_only:
            raise NotImplementedError(
                f"implementation='hopper': no kernel runs {self.product}: {found.reason}"
            )
        if not found.supported:
            fallback.report_fallback(f"XLA runs {self.product}: {found.reason}")
        return None

    def route(self, ctx: mlir.LoweringRuleContext, *, kernel_only: bool) -> Route:
        device = current_device(_assigned_devices(ctx))
        device = replace(device, comm_overlap=lowers_shard())
        return route(self.product, device, kernel_only=kernel_only)

    def readable(self, ctx: mlir.LoweringRuleContext, *, kernel_only: bool) -> Call:
        """Returns `untransposed`, unless a kernel runs the product of these operands alone."""
        direct = self.untransposed()
        if direct.route(ctx, kernel_only=kernel_only).supported:
            return direct
        return self if self.route(ctx, kernel_only=kernel_only).supported else direct

    def untransposed(self) -> Call:
        """Returns the same product of the arrays that the operands are transposes of.

        XLA folds a transpose into its own products, but would copy the operand of a custom call.
        """
        product = self.product
        if product.indexed or (product.spans and is_contraction(product.subscripts)):
            return self
        lhs_labels, rhs_labels, out = split(product.subscripts)
        lhs, lhs_shape = self.values[0], product.lhs_shape
        if not product.spans:
            lhs, lhs_labels, lhs_shape = look_through_transpose(lhs, lhs_labels, lhs_shape)
        rights = [look_through_transpose(x, rhs_labels, product.rhs_shape) for x in self.values[1:]]
        ((rhs_labels, rhs_shape), *others) = {(labels, shape) for _, labels, shape in rights}
        if others:  # gate and up lie differently
            return self
        if product.spans and not weights_in_order(rhs_labels, product.subscripts):
            return self
        if lhs is self.values[0] and all(
            x is y for (x, *_), y in zip(rights, self.values[1:], strict=True)
        ):
            return self
        product = replace(
            product,
            subscripts=f"{lhs_labels},{rhs_labels}->{out}",
            lhs_shape=lhs_shape,
            rhs_shape=rhs_shape,
        )
        return replace(self, product=product, values=(lhs, *(value for value, *_ in rights)))

    def gathering(self) -> Call:
        """Returns the same product that gathers the rows which an operand picks of another array.

        Of a ragged product; of two such operands the left one is gathered.
        """
        product = self.product
        if product.spans is None or product.gathered:
            return self
        count = 2 if is_contraction(product.subscripts) and len(self.values) == 2 else 1
        for i, value in enumerate(self.values[:count]):
            if (found := look_through_gather(value)) is not None:
                array, rows = found
                product = replace(product, gathered="ab"[i], source=array.type.shape[0])
                values = (*self.values[:i], array, *self.values[i + 1 :])
                return replace(self, product=product, values=values, rows=rows)
        return self

    def indexing(self) -> Call:
        """Returns the same product that reads an operand, one array of a stack, within the stack.

        XLA would copy it for a custom call. Of two such operands it is the larger one.
        """
        product = self.product
        if product.spans or product.indexed or len(self.values) > 2:
            return self
        found = {i: one for i, x in enumerate(self.values) if (one := look_through_index(x))}
        if not found:
            return self
        i = max(found, key=lambda i: prod((product.lhs_shape, product.rhs_shape)[i]))
        stack, index = found[i].stack, found[i].index
        product = replace(product, indexed="ab"[i], stack=stack.type.shape[0])
        values = (*self.values[:i], stack, *self.values[i + 1 :])
        return replace(self, product=product, values=values, index=index)

    def gathered_by(self, operand: Literal["a", "b"], rows: Any) -> Call:
        """Returns the same product where an operand is rows, given whole, that indices pick."""
        product, length = self.product, rows.type.shape[0]
        field = "lhs_shape" if operand == "a" else "rhs_shape"
        source, *row = getattr(product, field)
        shape: dict[str, Any] = {field: (length, *row)}
        product = replace(product, gathered=operand, source=source, **shape)
        return replace(self, product=product, rows=rows)

    def launch(self, ctx: mlir.LoweringRuleContext, found: Route) -> list[Any]:
        """Emits the FFI call, everything row-major, and what XLA does with its results.

        In go A, B, up, the epilogue's operands, sizes, indices of rows or the index of a matrix;
        out come its results and the workspaces.
        """
        assert found.gemm and found.plan
        product = self.product
        shapes = [(product.lhs_shape, product.lhs_dtype)]
        shapes += [(product.rhs_shape, product.rhs_dtype)] * product.rights
        if product.gathered:
            index = "ab".index(product.gathered)
            (_, *row), dtype = shapes[index]
            shapes[index] = ((product.source, *row), dtype)
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
        if product.spans:
            inputs.append((self.sizes, ShapedArray((product.sizes,), np.dtype("int32"))))
        if product.gathered:
            inputs.append((self.rows, ShapedArray(self.rows.type.shape, np.dtype("int32"))))
        if product.indexed:
            inputs.append((self.index, ShapedArray((), np.dtype("int32"))))
        values, avals = zip(*inputs, strict=True)
        workspaces = [ShapedArray((w.nbytes,), np.uint8) for w in found.plan.workspaces]
        results = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases)(
            ctx.replace(avals_in=avals, avals_out=[*outputs, *workspaces]),
            *values,
            **found.launch_attributes,
        )
        results = list[Any](results)[: len(outputs)]
        if fusion is None:
            lhs, rhs, out = split(product.subscripts)
            in_order = f"{rhs},{lhs}->{out}" if found.gemm.swap_ab else product.subscripts
            operation: Any = results[0].owner
            operation.attributes[PRODUCT] = mlir.ir_attribute(in_order)
            if product.spans:
                fields = ",".join(map(str, astuple(product.spans)))
                operation.attributes[SPANS] = mlir.ir_attribute(fields)
            if product.gathered:
                operation.attributes[GATHERED] = mlir.ir_attribute(product.gathered)
            if product.indexed:
                left = (product.indexed == "a") != found.gemm.swap_ab
                operation.attributes[INDEXED] = mlir.ir_attribute("a" if left else "b")
            return self.marked(results)
        assert product.function
        varying = [_varying_like(product.function.in_avals[0], x) for x in outputs]
        avals = (*varying, *self.avals)
        if (finish := found.finishes.get(avals)) is None:
            finish = found.finishes.put(avals, traced(partial(self._finished, found), *avals))
        return list(lower_jaxpr(ctx.replace(avals_in=avals), finish, *results, *self.operands))

    def marked(self, results: Any) -> Any:
        """Returns what a bare product gave; says of it which limit of SMs the product has."""
        if self.product.max_sms is not None:
            operation: Any = list(results)[0].owner
            operation.attributes[MAX_SMS] = mlir.ir_attribute(self.product.max_sms)
        return results

    def _results(self, found: Route) -> list[ShapedArray]:
        """Returns the arrays that the kernel writes: matrices with the axes of the result."""
        assert found.gemm and found.spec and found.roles
        _, _, out = split(self.product.subscripts)
        extents, columns = self.product.extents, len(out.rstrip(found.roles.n))
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
        _, _, out = split(self.product.subscripts)
        order = [letters.index(letter) for letter in out if letter in letters]
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


def _assigned_devices(ctx: mlir.LoweringRuleContext) -> tuple[Any, ...]:
    return getattr(ctx.module_context.axis_context, "device_assignment", None) or ()
