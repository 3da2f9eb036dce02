"""Origins: what a kernel could read in place of an operand that XLA would write for it.

The rules are the same for values of MLIR, while a program is lowered (`MlirValues`), and for those
of a jaxpr, where `reports` tells beforehand what lowering does: each is a `World` that knows the
operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jax.extend.mlir import ir
from jax.interpreters import mlir

ROWS = "jax_hopper_gemm.rows"  # of rows that indices pick, zeros where there is none


@dataclass(frozen=True)
class Step:
    """The operation that made a value, of those that kernels can do without.

    A "slice" is a part of an array that begins at a dynamic index along its first axis and at 0
    along others; "rows" are picked of a matrix by indices, zeros where there is none.
    """

    kind: Literal["transpose", "reshape", "slice", "rows"]
    source: Any  # the value that it reads
    permutation: tuple[int, ...] = ()  # of a transpose
    indices: Any = None  # of a slice, one () int32; of rows (T, 1) int32


class World(Protocol):
    """How values are asked for what made them."""

    def step(self, value: Any) -> Step | None:
        """Returns the operation that made a value; None for all others."""
        ...

    def shape(self, value: Any) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class Origin:
    """What an operand is made of, as far as it decides how a product runs; None: not of that."""

    permutation: tuple[int, ...] | None = None  # it is that transpose of an array
    picked_of: int | None = None  # that array is rows which are picked of another one, of so many
    stack: int | None = None  # that array is one of so many in another one


@dataclass(frozen=True)
class Source:
    """An operand's origin, with its values."""

    origin: Origin
    stored: Any  # the array that the operand is a transpose of, or the operand
    array: Any = None  # what `stored` is picked of, or the stack that it is in; or None
    indices: Any = None  # by which it is


def source_of(value: Any, world: World) -> Source:
    """Returns where an operand comes from."""
    stored, permutation = value, None
    if (step := world.step(value)) and step.kind == "transpose":
        stored, permutation = step.source, step.permutation
    if rows := _picking(stored, world):
        origin = Origin(permutation, picked_of=world.shape(rows.source)[0])
        return Source(origin, stored, rows.source, rows.indices)
    if part := _indexing(stored, world):
        origin = Origin(permutation, stack=world.shape(part.source)[0])
        return Source(origin, stored, part.source, part.indices)
    return Source(Origin(permutation), stored)


def _picking(value: Any, world: World) -> Step | None:
    """Returns the step that picks the rows which a value is, if it is such.

    `jax.vmap` may have given them further axes, and taken these away again.
    """
    step, shape = world.step(value), world.shape(value)
    while step and step.kind == "reshape":
        value = step.source
        step = world.step(value)
        if world.shape(value) == shape:
            break
    return step if step and step.kind == "rows" and world.shape(value) == shape else None


def _indexing(value: Any, world: World) -> Step | None:
    """Returns the step that cuts the one array that a value is out of a stack, as `stack[i]`."""
    reshape = world.step(value)
    if reshape is None or reshape.kind != "reshape":
        return None
    part = world.step(reshape.source)
    if part is None or part.kind != "slice":
        return None
    _, *one = world.shape(part.source)
    cut, shape = world.shape(reshape.source), world.shape(value)
    return part if cut == (1, *one) and shape == tuple(one) else None


# Values of MLIR.


class MlirValues:
    """The `World` of a program that is being lowered."""

    def step(self, value: Any) -> Step | None:
        operation = value.owner
        if not hasattr(operation, "attributes"):  # a block, of which the value is an argument
            return None
        if ROWS in operation.attributes:
            return _picked_by(operation)
        if operation.name == "stablehlo.transpose":
            permutation = tuple(operation.attributes["permutation"])
            return Step("transpose", operation.operands[0], permutation)
        if operation.name == "stablehlo.reshape":
            return Step("reshape", operation.operands[0])
        if operation.name == "stablehlo.dynamic_slice":
            return _sliced_by(operation)
        return None

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.type.shape)


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
