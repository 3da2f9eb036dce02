"""Origins: what a kernel could read in place of an operand that XLA would write for it.

The rules are the same for values of MLIR, while a program is lowered (`MlirValues`), and for those
of a jaxpr, where `reports` tells beforehand what lowering does: each is a `World` that knows the
operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from jax.extend.mlir import ir
from jax.interpreters import mlir

from ..fusion.op_table import COMPARISONS
from ..gemm.dtypes import DTYPES, converts

WIDENED = "jax_hopper_gemm.widened"  # of numbers that became 16-bit floats; see `mark_widened`
# Operations that compute each element from one of every operand of their shape: their names in
# StableHLO, by those in `jax.lax`.
_OF_ONE_NAME = (
    "abs", "add", "and", "clamp", "log", "logistic", "not", "or", "rsqrt", "sign", "sqrt", "tanh",
    "xor",
)  # fmt: skip
ELEMENTWISE = {name: name for name in _OF_ONE_NAME} | {
    **dict.fromkeys(COMPARISONS, "compare"),
    "convert_element_type": "convert", "div": "divide", "exp": "exponential", "max": "maximum",
    "min": "minimum", "mul": "multiply", "neg": "negate", "pow": "power", "select_n": "select",
    "sub": "subtract",
}  # fmt: skip
MOST_STEPS = 64  # from an operand to what it is computed from
ROWS = "jax_hopper_gemm.rows"  # of rows that indices pick, zeros where there is none
_DTYPES = {row.mlir: row.name for row in DTYPES.values()} | {"ui8": "uint8"}


@dataclass(frozen=True)
class Widened:
    """An array of 8 or 4 bits that became one of 16-bit floats."""

    dtype: str
    axis: int = 0  # counted from the end, along which `group` numbers share a scale
    group: int = 0  # 0: there are no scales


@dataclass(frozen=True)
class Step:
    """The operation that made a value, of those that kernels can do without.

    A "slice" is a part of an array that begins at a dynamic index along its first axis and at 0
    along others; "rows" are picked of a matrix by indices, zeros where there is none; "widen" makes
    16-bit floats of fewer bits, times their scales.
    """

    kind: Literal["transpose", "reshape", "slice", "rows", "widen"]
    source: Any  # the value that it reads
    permutation: tuple[int, ...] = ()  # of a transpose
    indices: Any = None  # of a slice, one () int32; of rows (T, 1) int32
    widened: Widened | None = None  # what is widened; `source` may be int4 as `packed` uint8
    scale: Any = None  # of groups; float32


class World(Protocol):
    """How values are asked for what made them."""

    def step(self, value: Any) -> Step | None:
        """Returns the operation that made a value; None for all others."""
        ...

    def element_sources(self, value: Any) -> list[Any]:
        """Returns the arrays of the same shape that each element of a value is computed from."""
        ...

    def shape(self, value: Any) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class Origin:
    """What an operand is made of, as far as it decides how a product runs; None: not of that."""

    permutation: tuple[int, ...] | None = None  # it is that transpose of an array
    picked_of: int | None = None  # that array is rows which are picked of another one, of so many
    stack: int | None = None  # that array is one of so many in another one
    widened: Widened | None = None  # that array is made of such a one
    # Its axes, outermost first, as they lie in the array that it is computed from, element by
    # element; they lie otherwise in it.
    layout: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Source:
    """An operand's origin, with its values."""

    origin: Origin
    stored: Any  # the array that the operand is a transpose of, or the operand
    array: Any = None  # what `stored` is picked of, or the stack that it is in; or None
    indices: Any = None  # by which it is
    narrow: Any = None  # what `stored` is widened from; or None
    scale: Any = None  # by which it is multiplied; or None


def source_of(value: Any, world: World, *, ordered: bool) -> Source:
    """Returns where an operand comes from.

    Args:
      ordered: whether to look for its `Origin.layout`, which is a long way back.
    """
    stored, permutation, step = value, None, world.step(value)
    if step and step.kind == "transpose":
        stored, permutation = step.source, step.permutation
        step = world.step(stored)
    if step and step.kind == "widen":
        origin = Origin(permutation, widened=step.widened)
        return Source(origin, stored, narrow=step.source, scale=step.scale)
    if rows := _picking(stored, step, world):
        origin = Origin(permutation, picked_of=world.shape(rows.source)[0])
        return Source(origin, stored, rows.source, rows.indices)
    if part := _indexing(stored, step, world):
        origin = Origin(permutation, stack=world.shape(part.source)[0])
        return Source(origin, stored, part.source, part.indices)
    return Source(Origin(permutation, layout=_layout(value, world) if ordered else None), stored)


def _layout(value: Any, world: World) -> tuple[int, ...] | None:
    """Returns the axes of a value in the order in which what it is computed from has them.

    XLA writes the value in that order, too, where nothing asks for another one. None where one of
    these arrays has the value's own order, or the rows themselves would be transposed. Arrays that
    are fewer operations away are asked first: a sum over all layers is not followed to the first.
    """
    own: tuple[int, ...] = tuple(range(len(world.shape(value))))
    if not own[2:]:
        return None
    orders: list[tuple[int, ...]] = []
    pending, seen = deque((x, own) for x in world.element_sources(value)), set[Any]()
    while pending and len(seen) < MOST_STEPS:
        x, order = pending.popleft()
        if (x, order) in seen:
            continue
        seen.add((x, order))
        if sources := world.element_sources(x):
            pending += [(source, order) for source in sources]
        elif (step := world.step(x)) and step.kind == "transpose":
            order = tuple(order[step.permutation.index(axis)] for axis in own)
            pending.append((step.source, order))
        elif order == own:
            return None
        else:
            orders.append(order)
    if not orders or orders[0][-1] != own[-1]:
        return None
    return orders[0]


def _picking(value: Any, step: Step | None, world: World) -> Step | None:
    """Returns the step that picks the rows which a value is, if it is such.

    `jax.vmap` may have given them further axes, and taken these away again.
    """
    if step is None:
        return None
    shape = world.shape(value)
    while step and step.kind == "reshape":
        value = step.source
        step = world.step(value)
        if world.shape(value) == shape:
            break
    return step if step and step.kind == "rows" and world.shape(value) == shape else None


def _indexing(value: Any, reshape: Step | None, world: World) -> Step | None:
    """Returns the step that cuts the one array that a value is out of a stack, as `stack[i]`."""
    if reshape is None or reshape.kind != "reshape":
        return None
    part = world.step(reshape.source)
    if part is None or part.kind != "slice":
        return None
    _, *one = world.shape(part.source)
    cut, shape = world.shape(reshape.source), world.shape(value)
    return part if cut == (1, *one) and shape == tuple(one) else None


# Values of MLIR.

SPREAD = ("stablehlo.broadcast_in_dim", "stablehlo.constant")

_ELEMENTWISE = frozenset(f"stablehlo.{name}" for name in ELEMENTWISE.values())


class _Inner(NamedTuple):
    """A value in a function that is called."""

    value: Any
    calls: tuple[Any, ...]  # of functions, the outermost first


class MlirValues:
    """The `World` of a program that is being lowered."""

    def step(self, value: Any) -> Step | None:
        if isinstance(value, _Inner):
            step = self.step(value.value)
            return step and replace(step, source=value._replace(value=step.source))
        operation = value.owner
        attributes = getattr(operation, "attributes", None)
        if attributes is None:  # a block, of which the value is an argument
            return None
        if ROWS in attributes:
            return _picked_by(operation)
        if WIDENED in attributes:
            return _widened_by(operation)
        name = operation.name
        if name == "stablehlo.convert":
            return _converted_by(operation)
        if name == "stablehlo.transpose":
            return Step("transpose", operation.operands[0], tuple(attributes["permutation"]))
        if name == "stablehlo.reshape":
            return Step("reshape", operation.operands[0])
        if name == "stablehlo.dynamic_slice":
            return _sliced_by(operation)
        return None

    def element_sources(self, value: Any) -> list[Any]:
        value, calls = value if isinstance(value, _Inner) else (value, ())
        operation = value.owner
        name = getattr(operation, "name", None)
        if name == "func.call":
            returned = _returned(operation, ir.OpResult(value).result_number)
            return [_Inner(returned, (*calls, operation))] if returned is not None else []
        if calls and isinstance(operation, ir.Block):
            *outer, call = calls
            operand = call.operands[ir.BlockArgument(value).arg_number]
            return [_Inner(operand, tuple(outer)) if outer else operand]
        if name not in _ELEMENTWISE:
            return []
        values, shape = list(operation.operands), self.shape(value)
        alike = (x for x in values[name == "stablehlo.select" :] if self.shape(x) == shape)
        found = [x for x in alike if getattr(x.owner, "name", None) not in SPREAD]
        return [_Inner(x, calls) for x in found] if calls else found

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple((value.value if isinstance(value, _Inner) else value).type.shape)


def _returned(call: Any, number: int) -> Any:
    """Returns the value that a called function returns; None while the call is in no module yet."""
    module = call.operation
    while module.parent is not None:
        module = module.parent
    if module.name != "builtin.module":
        return None
    function = ir.SymbolTable(module)[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
    (block,) = function.regions[0].blocks
    return list(block.operations)[-1].operands[number]


def _converted_by(operation: Any) -> Step | None:
    source, value = (x.type.element_type for x in (operation.operands[0], operation.results[0]))
    narrow, wide = _DTYPES.get(str(source)), _DTYPES.get(str(value))
    if narrow is None or wide is None or not converts(wide, narrow):
        return None
    return Step("widen", operation.operands[0], widened=Widened(narrow))


def _widened_by(operation: Any) -> Step:
    """Walks back, first operand by first operand, as often as `mark_widened` says."""
    to_product, to_values, to_scale, axis, group = operation.attributes[WIDENED]
    product = _back(operation.results[0], to_product)
    values, scale = _back(product, to_values), None
    if group:
        scale = _back(product.owner.operands[1], to_scale)
    dtype = _DTYPES[str(values.type.element_type)]
    return Step(
        "widen", values, widened=Widened("int4" if dtype == "uint8" else dtype, axis, group),
        scale=scale,
    )  # fmt: skip


def _back(value: Any, steps: int) -> Any:
    for _ in range(steps):
        value = value.owner.operands[0]
    return value


def mark_widened(value: Any, sources: Sequence[Any], axis: int, group: int) -> None:
    """Says of an MLIR value from what `hopper_widen` made it: values, and the scale of groups.

    Nothing is said where an operation too few lies between them, as for a constant.
    """
    marked, numbers = value, []
    if group:
        numbers.append(_steps_to(value, lambda x: x.owner.name == "stablehlo.multiply"))
        if numbers[0] is not None:
            value = _back(value, numbers[0])
            scaled = value.owner.operands[1]
            numbers += [_steps_to(value, sources[0].__eq__), _steps_to(scaled, sources[1].__eq__)]
    else:
        numbers = [0, _steps_to(value, sources[0].__eq__), 0]
    if None not in numbers and any(numbers):
        attribute = ir.DenseI64ArrayAttr.get([*numbers, axis, group])
        marked.owner.attributes[WIDENED] = attribute


def _steps_to(value: Any, is_sought: Callable[[Any], bool]) -> int | None:
    """Returns how many operations back, first operand by first operand, a value is found."""
    steps = 0
    while not is_sought(value):
        operation = value.owner
        if not hasattr(operation, "attributes") or not len(operation.operands):
            return None
        value, steps = operation.operands[0], steps + 1
    return steps


def _picked_by(operation: Any) -> Step | None:
    """What fills in zeros is a choice between the picked rows and zeros."""
    if operation.name == "stablehlo.select":
        operation = operation.operands[1].owner
    if getattr(operation, "name", None) != "stablehlo.gather":
        return None
    array, indices = operation.operands
    return Step("rows", array, indices=indices)


def _sliced_by(operation: Any) -> Step | None:
    stack, index, *_ = operation.operands  # whole axes begin at 0, whatever the other indices are
    is_int32 = index.type.element_type == ir.IntegerType.get_signless(32)
    if not is_int32 or not stack.type.has_static_shape:
        return None
    return Step("slice", stack, indices=index)


def mark_rows(value: Any) -> None:
    """Says of an MLIR value that it is rows of an array, as `lax.gather` picks and fills them."""
    value.owner.attributes[ROWS] = mlir.ir_attribute(True)
