"""Calls: products in a program that is being lowered, and the MLIR values that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.interpreters import mlir

from ..dispatch import Device
from .decide import Decision, Form, decide, forms_of
from .devices import lowers_shard
from .origins import MlirValues, Origin, Source, source_of
from .route import Request, Route, current_device, route


@dataclass(frozen=True)
class Call:
    """A product in the program that is being lowered, and the MLIR values that it reads."""

    request: Request
    values: tuple[Any, ...]  # the left operand, the right one or gate and up
    operands: tuple[Any, ...] = ()  # what the epilogue reads, in its order
    avals: tuple[Any, ...] = ()  # abstract values of these
    in_place: int | None = None  # operand whose memory the first result takes, if a matrix like it
    sizes: Any = None  # of a ragged product, what cuts its rows into groups; int32
    rows: Any = None  # where the product gathers rows of an operand, their indices; int32
    index: Any = None  # where an operand is one array of a stack in `values`, which; () int32

    @property
    def insists(self) -> bool:
        """Whether the user takes a kernel or an error."""
        return self.request.options.implementation == "hopper"

    def route(self, ctx: mlir.LoweringRuleContext, *, kernel_only: bool) -> Route:
        """Returns how the product of these operands runs; see `route`."""
        return route(self.request, _device(ctx), kernel_only=kernel_only)

    def decided(self, ctx: mlir.LoweringRuleContext) -> tuple[Call, Decision]:
        """Returns the decision how the product runs, and the call of its form."""
        sources = self._sources()
        origins = [source.origin for source in sources]
        decision = decide(self.request, origins, _device(ctx), kernel_only=self.insists)
        return self._in_form(decision.form, sources), decision

    def readable(self, ctx: mlir.LoweringRuleContext) -> Call:
        """Returns the same product of the arrays that the operands are transposes of.

        Or of the operands themselves, where a kernel runs the product of these alone.
        """
        sources = self._sources()
        origins = [Origin(source.origin.permutation) for source in sources]
        decision = decide(self.request, origins, _device(ctx), kernel_only=self.insists)
        form = decision.form if decision.route.supported else forms_of(self.request, origins)[0]
        return self._in_form(form, sources)

    def _sources(self) -> list[Source]:
        return [source_of(value, MlirValues()) for value in self.values]

    def _in_form(self, form: Form, sources: Sequence[Source]) -> Call:
        """Returns the call of a form of the product, whose operands come from `sources`."""
        request, values = form.request, list(self.values)
        for i in form.stored:
            values[i] = sources[i].stored
        named: dict[str, Any] = {}
        for name, operand, before in (
            ("rows", request.gathered, self.request.gathered),
            ("index", request.indexed, self.request.indexed),
        ):
            if operand and not before:
                i = "ab".index(operand)
                values[i], named[name] = sources[i].array, sources[i].indices
        return replace(self, request=request, values=tuple(values), **named)

    def gathered_by(self, operand: Literal["a", "b"], rows: Any) -> Call:
        """Returns the same product where an operand is rows, given whole, that indices pick."""
        request, length = self.request, rows.type.shape[0]
        assert request.groups
        field = "lhs_shape" if operand == "a" else "rhs_shape"
        source_rows, *row = getattr(request, field)
        shape: dict[str, Any] = {field: (length, *row)}
        groups = replace(request.groups, gathered=operand, source_rows=source_rows)
        return replace(self, request=replace(request, groups=groups, **shape), rows=rows)


def _device(ctx: mlir.LoweringRuleContext) -> Device:
    """Returns the kind of GPU that the program is for, and what else runs on it."""
    assigned = getattr(ctx.module_context.axis_context, "device_assignment", None) or ()
    return replace(current_device(assigned), comm_overlap=lowers_shard())
