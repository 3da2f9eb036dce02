"""Free variables: those that depend on no accumulator, built from the operands on demand.

A free variable has no place in D by itself: an operand of shape (384,) may run along M or N, which
shows only where it meets the product. So `value` decides, for each use.
"""

from __future__ import annotations

from contextlib import suppress

from ..gemm.epilogue_graph import Operand
from . import op_table
from .axes import REDUCTIONS, Axes, Place, is_layout, moved, moved_back
from .flatten import Atom, Constant, Equation, Variable
from .graph_builder import Builder, Leaf
from .op_table import Uncovered
from .segments import GroupedProgram


class FreeVariables:
    """The free variables of a program.

    An operand used in several broadcast forms is one operand of the graph for each set of letters
    that it varies along.
    """

    def __init__(self, place: Place, builder: Builder, grouped: GroupedProgram | None):
        self._place, self._builder, self._grouped = place, builder, grouped
        self._varies: dict[Variable, tuple[bool, ...]] = {}
        self._producers: dict[Variable, Equation] = {}
        self._operands: dict[Variable, int] = {}
        self._values: dict[tuple[Variable, Axes, str | None], int] = {}

    def __contains__(self, atom: Atom) -> bool:
        return isinstance(atom, Constant) or atom in self._varies

    def add_operand(self, variable: Variable) -> None:
        self._operands[variable] = len(self._operands)
        self._varies[variable] = tuple(extent > 1 for extent in variable.shape)

    def follow(self, equation: Equation) -> None:
        """Adds the outputs of an equation whose inputs are all free."""
        for variable in equation.outputs:
            self._producers[variable] = equation
            varies = tuple(extent > 1 for extent in variable.shape)
            if is_layout(equation):
                names = tuple("?" if v else None for v in self.varies(equation.inputs[0]))
                with suppress(Uncovered):
                    varies = tuple(map(bool, moved(equation, names)))
            elif self._grouped and self._grouped.is_segment_broadcast(equation):
                groups = len(self._grouped.rows.axes_of(equation))
                columns = self.varies(equation.inputs[0])[groups:]
                varies = (*varies[: len(varies) - len(columns)], *columns)
            elif self._grouped and self._grouped.is_segment_mask(equation):
                varies = self.varies(equation.inputs[0])
            elif op_table.covered(equation.name):
                inputs = [self.varies(x) for x in equation.inputs if x.shape]
                varies = tuple(map(any, zip(*inputs, strict=True))) if inputs else varies
            self._varies[variable] = varies

    def varies(self, atom: Atom) -> tuple[bool, ...]:
        """Returns for each dimension whether the array may vary along it."""
        return self._varies[atom] if isinstance(atom, Variable) else (False,) * len(atom.shape)

    def value(self, atom: Atom, axes: Axes, cast: str | None = None) -> int:
        """Returns the value of a variable that lies at `axes`, or of a constant.

        It is converted to the dtype `cast`, if graphs do not hold its own. Raises Uncovered where
        it needs an operation that no kernel computes.
        """
        if isinstance(atom, Constant):
            if atom.dtype.name not in op_table.HELD:
                raise Uncovered(f"{atom.dtype.name} constant")
            return self._builder.constant(atom.value)
        varies = self._varies[atom]
        axes = tuple(axis if v else None for axis, v in zip(axes, varies, strict=True))
        key = (atom, axes, cast)
        if key not in self._values:
            if atom in self._operands:
                self._values[key] = self._operand(atom, axes, cast)
            else:
                self._values[key] = self._computed(self._producers[atom], axes, cast)
        return self._values[key]

    def row_statistic(self, equation: Equation, value: int) -> int:
        """Returns a sum, maximum or minimum over whole rows as a value of the graph."""
        builder = self._builder
        op = "row_sum" if equation.name == "reduce_sum" else "row_max"
        negated = equation.name == "reduce_min"
        value = builder.node("neg", value) if negated else value
        row = builder.row_reduction(op, value, self._place.all_n)
        row = builder.node("neg", row) if negated else row
        dtype = equation.outputs[0].dtype.name
        narrow = dtype in op_table.NARROW
        return builder.node("convert", row, params=(dtype,)) if narrow else row

    def _computed(self, equation: Equation, axes: Axes, cast: str | None) -> int:
        name, inputs = equation.name, equation.inputs
        if is_layout(equation):
            return self.value(inputs[0], moved_back(equation, axes), cast)
        if grouped := self._grouped:
            if grouped.is_segment_mask(equation):
                self._place.check_rows(equation, axes)
                return self.value(inputs[0], axes, cast)
            if grouped.is_segment_broadcast(equation):
                self._place.check_rows(equation, axes)
                groups = grouped.rows.axes_of(equation)
                columns = axes[len(axes) - (len(inputs[0].shape) - len(groups)) :]
                return self.value(inputs[0], (*groups, *columns), cast)
        if name in REDUCTIONS and not cast:
            return self._reduced(equation, axes)
        if cast or equation.kept or len(equation.outputs) != 1 or not op_table.covered(name):
            raise Uncovered(name)
        if name == "convert_element_type" and inputs[0].dtype.name not in op_table.HELD:
            return self.value(inputs[0], axes, equation.outputs[0].dtype.name)
        values = [self.value(x, axes if x.shape else ()) for x in inputs]
        return op_table.apply(self._builder, equation, values)

    def _reduced(self, equation: Equation, axes: Axes) -> int:
        """Returns a reduction over whole rows; the input's rows must lie where D's do."""
        x, place = equation.inputs[0], self._place
        dims, kept = {int(d) for d in equation.params["axes"]}, iter(axes)
        if (
            len(x.shape) != len(place.out)
            or any(x.shape[d] != place.extents[place.out[d]] for d in dims)
            or {place.out[d] for d in dims} & place.long != place.n
            or not (place.n and place.row_fits)
            or x.dtype.name not in op_table.NUMBERS
        ):
            raise Uncovered(equation.name)
        places = tuple(place.out[d] if d in dims else next(kept) for d in range(len(x.shape)))
        return self.row_statistic(equation, self.value(x, places))

    def _operand(self, variable: Variable, axes: Axes, cast: str | None) -> int:
        """Returns the value of an operand, converted to a dtype that kernels read.

        XLA converts other dtypes before the kernel: scalars to float32, rows and columns of
        integers and the like to the dtype that the function converts them to.
        """
        index, dtype = self._operands[variable], variable.dtype.name
        labels = "".join(axis for axis in axes if axis)
        kind, read = self._place.kind(labels), cast or dtype
        if read not in op_table.HELD or (cast and kind == "matrix"):
            raise Uncovered("convert_element_type" if cast else f"{dtype} operand")
        if kind != "scalar":
            return self._builder.operand(Leaf(index, labels, Operand(kind, read)))
        if cast and cast != "float32":  # it would be rounded twice
            raise Uncovered("convert_element_type")
        value = self._builder.operand(Leaf(index, labels, Operand(kind, "float32")))
        if dtype == "bool":
            return self._builder.node("ne", value, self._builder.constant(0.0))
        return value
