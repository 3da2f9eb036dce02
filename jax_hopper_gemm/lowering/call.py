"""Calls: products in a program that is being lowered, and the MLIR values that they read.

A call is made by the lowering rule of a product, or read from what was emitted for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.lax import DotAlgorithmPreset, Precision

from ..dispatch import Device
from ..gemm.bf16_parts import PRESETS
from ..gemm.dtypes import DTYPES
from ..gemm.groups import GroupedAxis, Groups
from ..gemm.problem import GemmProblem
from ..gemm.product import Options
from ..gemm.subscripts import Subscripts
from ..launch.ffi_target import TARGET, launcher_violation
from .barriers import before_barrier
from .canonical import rounds_operands
from .decide import Decision, decide
from .devices import current_device, lowers_shard, platforms_of
from .forms import Form, forms_of, reads_in_order
from .origins import MlirValues, Origin, Source, source_of
from .request import Request
from .route import Route, route

# Attributes of a launch that say which bare product it holds.
PRODUCT = "jax_hopper_gemm.product"  # subscripts, of the call's operands in their order
SPANS = "jax_hopper_gemm.spans"  # fields of `Groups`; the sizes are the call's third operand
GATHERED = "jax_hopper_gemm.gathered"  # as in `GroupedAxis`; indices are the fourth operand
MAX_SMS = "jax_hopper_gemm.max_sms"  # as in `Product`
BATCH_INVARIANT = "jax_hopper_gemm.batch_invariant"  # there if the product is
INDEXED = "jax_hopper_gemm.indexed"  # as in `GemmProblem`; the index is the call's third operand
PROMOTED = "jax_hopper_gemm.promoted"  # there if sums have all digits of float32
BF16_TERMS = "jax_hopper_gemm.bf16_terms"  # as in `GemmProblem`, if there are some
CUT = "jax_hopper_gemm.cut"  # of a launch that cuts an operand of a product into bfloat16 parts
MLIR_DTYPES = {row.mlir: row.name for row in DTYPES.values() if row.name != "bool"}


@dataclass(frozen=True)
class Call:
    """A product in the program that is being lowered, and the MLIR values that it reads."""

    request: Request
    values: tuple[Any, ...]  # the left operand, the right one or gate and up
    operands: tuple[Any, ...] = ()  # what the epilogue reads, in its order
    avals: tuple[Any, ...] = ()  # abstract values of these
    # Of the first results, the operand whose memory each takes, if a matrix like it.
    in_place: tuple[int | None, ...] = ()
    sizes: Any = None  # of a ragged product, what cuts its rows into groups; int32
    rows: Any = None  # where the product gathers rows of an operand, their indices; int32
    index: Any = None  # where an operand is one array of a stack in `values`, which; () int32
    # Block scales of the left and of the right operand, or those along K of each right one, if any.
    scales: tuple[Any, ...] = ()

    @property
    def insists(self) -> bool:
        """Whether the user takes a kernel or an error."""
        return self.request.options.insists is not None

    def route(self, ctx: mlir.LoweringRuleContext, *, kernel_only: bool) -> Route:
        return route(self.request, device_of(ctx), kernel_only=kernel_only)

    def left_to_xla(self, ctx: mlir.LoweringRuleContext) -> bool:
        """Whether no kernel could run the product, or none can be launched at all."""
        if platforms_of(ctx) != ("cuda",):
            return False
        route = self.route(ctx, kernel_only=self.insists)
        return not route.supported or launcher_violation() is not None

    def decided(self, ctx: mlir.LoweringRuleContext) -> tuple[Call, Decision]:
        """Returns the decision how the product runs, and the call of its form."""
        sources = self._sources(ordered=reads_in_order(self.request))
        origins = [source.origin for source in sources]
        decision = decide(self.request, origins, device_of(ctx), kernel_only=self.insists)
        return self._in_form(decision.form, sources), decision

    def readable(self, ctx: mlir.LoweringRuleContext) -> Call:
        """Returns the same product of the arrays that the operands are transposes of.

        Or of the operands themselves, where a kernel runs the product of these alone. What each
        device multiplies in TF32 decides whether it transposes that.
        """
        sources = self._sources(ordered=False)
        origins = [Origin(source.origin.permutation) for source in sources]
        decision = decide(self.request, origins, device_of(ctx), kernel_only=self.insists)
        transposed_each = rounds_operands(self.request) and decision.form.copied
        if decision.route.supported and not transposed_each:
            return self._in_form(decision.form, sources)
        return self._in_form(forms_of(self.request, origins)[0], sources)

    def _sources(self, *, ordered: bool) -> list[Source]:
        return [source_of(value, MlirValues(), ordered=ordered) for value in self.values]

    def _in_form(self, form: Form, sources: Sequence[Source]) -> Call:
        """Returns the call of a form of the product, whose operands come from `sources`."""
        if form == Form(self.request):
            return self
        request, values = form.request, list(self.values)
        for i in form.stored:
            values[i] = sources[i].stored
        for i, axes in form.copied:
            permutation = ir.DenseI64ArrayAttr.get(axes)
            values[i] = stablehlo.transpose(values[i], permutation)
        named: dict[str, Any] = {}
        for i in form.widened:
            values[i] = sources[i].narrow
        if request.k_group:
            named["scales"] = tuple(sources[i].scale for i in form.widened)
        for name, operand, before in (
            ("rows", request.gathered, self.request.gathered),
            ("index", request.indexed, self.request.indexed),
        ):
            if operand and not before:
                i = "ab".index(operand)
                values[i], named[name] = sources[i].array, sources[i].indices
        return replace(self, request=request, values=tuple(values), **named)


def device_of(ctx: mlir.LoweringRuleContext) -> Device:
    """Returns the kind of GPU that the program is for, and what else runs on it."""
    assigned = getattr(ctx.module_context.axis_context, "device_assignment", None) or ()
    device = current_device(assigned)
    return replace(device, comm_overlap=True) if lowers_shard() else device


# Written into a program, and read from it.


def mark_product(operation: Any, request: Request, problem: GemmProblem, *, swap_ab: bool) -> None:
    """Says of a launch which bare product it holds, its operands in their order."""
    subscripts, groups = request.subscripts, request.groups
    words: dict[str, Any] = {PRODUCT: str(subscripts.swapped() if swap_ab else subscripts)}
    if groups:
        words[SPANS] = ",".join(map(str, astuple(groups.rule)))
        if groups.gathered:
            words[GATHERED] = groups.gathered
    if problem.promoted or problem.simt:
        words[PROMOTED] = "float32"
    if problem.bf16_terms:
        words[BF16_TERMS] = problem.bf16_terms
    if request.indexed:
        words[INDEXED] = "a" if (request.indexed == "a") != swap_ab else "b"
    for name, word in words.items():
        operation.attributes[name] = mlir.ir_attribute(word)


def mark_options(call: Call, results: Any) -> Any:
    """Returns what a bare product gave; says of it which options derivatives need."""
    if (limit := call.request.options.max_sms) is not None:
        before_barrier(list(results)[0]).owner.attributes[MAX_SMS] = mlir.ir_attribute(limit)
    if call.request.options.batch_invariant:
        before_barrier(list(results)[0]).owner.attributes[BATCH_INVARIANT] = ir.UnitAttr.get()
    return results


def product_at(value: Any) -> Call | None:
    """Returns the bare product that an MLIR value is the result of, if it is one.

    It is a launch of ours or a product of XLA's. Nothing else may use the value yet: the
    product would be computed for that as well.
    """
    made = before_barrier(value)
    operation = made.owner
    if not hasattr(operation, "results"):  # a block, of which the value is an argument
        return None
    uses = len(list(value.uses)), len(list(made.uses))
    if made != operation.results[0] or uses != (0, int(made != value)):
        return None
    found, precision = operation.attributes, None
    if PRODUCT in found:
        subscripts = Subscripts.parse(found[PRODUCT].value)
        if BF16_TERMS in found:
            precision = DotAlgorithmPreset[PRESETS[found[BF16_TERMS].value]]
        elif PROMOTED in found:
            precision = Precision.HIGHEST
    elif operation.name == "stablehlo.dot_general":
        subscripts = _subscripts(operation)
        precision = _precision(operation)
    else:
        return None
    limit, gathered, indexed, spans = (
        found[name].value if name in found else None for name in (MAX_SMS, GATHERED, INDEXED, SPANS)
    )
    invariant, rule = BATCH_INVARIANT in found, spans and Groups(*map(int, spans.split(",")))
    options = Options(precision=precision, max_sms=limit, batch_invariant=invariant)
    whole = [  # before they were cut into parts, if they were
        x.owner.operands[0] if CUT in getattr(x.owner, "attributes", ()) else x
        for x in operation.operands
    ]
    return call_between(
        subscripts, options, whole, value, rule=rule, gathered=gathered, indexed=indexed
    )


def call_between(
    subscripts: Subscripts, options: Options, operands: Sequence[Any], out: Any, *,
    rule: Groups | None = None, gathered: Literal["a", "b"] | None = None,
    indexed: Literal["a", "b"] | None = None,
) -> Call | None:  # fmt: skip
    """Returns the bare product of MLIR values; None for dtypes that no kernel stores.

    Args:
      operands: the left one, the right one; sizes where `rule` says which runs belong to groups,
        behind them indices where rows are gathered; or the index of a matrix.
      out: the product.
      gathered, indexed: as in `Request`; that operand is given whole.
    """
    lhs, rhs, *others = operands
    names = [str(x.type.element_type) for x in (lhs, rhs, out)]
    if not MLIR_DTYPES.keys() >= {*names}:
        return None
    a, b, d = (MLIR_DTYPES[name] for name in names)
    shapes = {"a": tuple(lhs.type.shape), "b": tuple(rhs.type.shape)}
    asked, read = dict[str, Any](), dict[str, Any]()
    if rule:
        read["sizes"], *rows = others
        groups = GroupedAxis.of(subscripts, rule, read["sizes"].type.shape[0])
        if gathered:
            read["rows"], (source_rows, *row) = rows[0], shapes[gathered]
            shapes[gathered] = (rows[0].type.shape[0], *row)
            groups = replace(groups, gathered=gathered, source_rows=source_rows)
        asked["groups"] = groups
    elif indexed:
        stack, *matrix = shapes[indexed]
        shapes[indexed] = tuple(matrix)
        asked, read = {"indexed": indexed, "stack": stack}, {"index": others[0]}
    request = Request(subscripts, shapes["a"], a, shapes["b"], b, d, options, **asked)
    return Call(request, (lhs, rhs), **read)


def is_launch(value: Any) -> bool:
    """Whether an MLIR value that `product_at` knows is the result of a kernel of ours."""
    return PRODUCT in before_barrier(value).owner.attributes


def _precision(operation: Any) -> Any:
    """Returns a precision that asks for the kernel of a stablehlo.dot_general.

    That may ask that sums of 8-bit floats keep all digits, or for products of bfloat16 parts.
    """
    attributes = operation.attributes
    if "algorithm" in attributes:
        algorithm = str(attributes["algorithm"])
        found = re.search(r"_type = bf16.*num_primitive_operations = (\d+)", algorithm)
        if found and (preset := PRESETS.get(int(found[1]))):
            return DotAlgorithmPreset[preset]
        promoted = "allow_imprecise_accumulation = true" not in algorithm
    else:
        precisions = attributes["precision_config"] if "precision_config" in attributes else []
        promoted = any("DEFAULT" not in str(precision) for precision in precisions)
    return Precision.HIGHEST if promoted else None


def _subscripts(operation: Any) -> Subscripts:
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    contracting = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    batch = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    ranks = (len(operand.type.shape) for operand in operation.operands)
    return Subscripts.of_dot_general((contracting, batch), *ranks)


@dataclass(frozen=True)
class Launch:
    """The attributes of one FFI call."""

    digest: str  # of the kernel, when the program was lowered
    spec: str  # `GemmSpec.to_json()` of that version
    name: str  # what errors call it
    plan: tuple[int, ...]  # the encoded `LaunchPlan`


def launches_in(module: Any) -> list[Launch]:
    """Returns the launches of a StableHLO module, in its order."""
    found = []
    for call in custom_calls(module, TARGET):
        config = call.attributes["mhlo.backend_config"]
        digest, spec, name = (config[field].value for field in ("digest", "spec", "name"))
        found.append(Launch(digest, spec, name, tuple(config["plan"])))
    return found


def custom_calls(module: Any, target: str) -> Iterator[Any]:
    for operation in _operations(module.operation):
        is_call = operation.name == "stablehlo.custom_call"
        if is_call and operation.attributes["call_target_name"].value == target:
            yield operation


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)
