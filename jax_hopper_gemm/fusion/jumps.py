"""Jumps of a function: comparisons, signs and the like, whose results rounding may change.

A comparison of rounded values gives the same if all are multiples of one value, the factors
depending on its sign alone: `z > 0`, `z == max(z, 0)`, `0.1 * z < z`. Rounding keeps the sign.

Rounding to fewer digits than values were rounded to jumps too. To as many it is as good as before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from .flatten import MOVES
from .jaxprs import CALLS, is_inexact
from .op_table import COMPARISONS, SAME

_STEPS = {"sign", "floor", "ceil", "round", "rem"}
_KINKS = {"clamp", "max", "min"}  # operations whose derivative jumps
_ROUNDING = {"convert_element_type", "reduce_precision"}
_BITS = {"bitcast_convert_type", "and", "or"}  # of a float that is split in two
_KEEPING = {"convert_element_type", "live_rows", *MOVES, *SAME}
_HOMOGENEOUS = {"abs", "max", "min", "neg", *_KEEPING}  # f(s * x, 0) = s * f(x, 0) for s > 0


def read_across_a_jump(
    equations: Sequence[Any],
    rounded: Mapping[Any, Any],
    kinks: bool = False,
    tangents: Container[Any] = (),
) -> set[Any]:
    """Returns those of the `rounded` variables whose rounding may change the result of a jump.

    Args:
      rounded: the dtype that each is rounded to, or None: then no rounding of results counts.
      kinks: whether the derivative's jumps count, too.
      tangents: variables whose own rounding is no jump.
    """
    search = _Search(rounded, kinks, tangents)
    search.follow(equations)
    return search.changing


class _Search:
    def __init__(self, rounded: Mapping[Any, Any], kinks: bool, tangents: Container[Any]):
        self._rounded, self._tangents = rounded, tangents
        self._kinks = _KINKS if kinks else set[str]()
        self.changing: set[Any] = set()
        # By variable, the rounded ones that it depends on, and the one that it is a multiple of.
        self._sources: dict[Any, frozenset[Any]] = {x: frozenset({x}) for x in rounded}
        self._multiple_of: dict[Any, Any] = {x: x for x in self._sources}
        self._zeros: set[Any] = set()

    def follow(self, equations: Sequence[Any]) -> None:
        for equation in equations:
            name, atoms = equation.primitive.name, equation.invars
            sources = frozenset().union(*map(self._sources_of, atoms))
            if name in _KEEPING and self._is_zero(atoms[0]):
                self._zeros.update(equation.outvars)
            elif not sources:
                continue
            elif name in CALLS:
                jaxpr = equation.params[CALLS[name]].jaxpr
                self._pass(atoms, jaxpr.invars)
                self.follow(jaxpr.eqns)
                self._pass(jaxpr.outvars, equation.outvars)
            else:
                jumps = _jumps(equation) or self._rounds(equation, sources)
                if (jumps or name in self._kinks) and not self._is_kept(equation):
                    self.changing |= sources
                if not jumps:
                    self._sources |= dict.fromkeys(equation.outvars, sources)
                    if (source := self._multiple(name, atoms)) is not None:
                        self._multiple_of[equation.outvars[0]] = source

    def _pass(self, atoms: Sequence[Any], variables: Sequence[Any]) -> None:
        for atom, variable in zip(atoms, variables, strict=True):
            self._sources[variable] = self._sources_of(atom)
            self._multiple_of[variable] = self._common([atom])
            if self._is_zero(atom):
                self._zeros.add(variable)

    def _multiple(self, name: str, atoms: Sequence[Any]) -> Any:
        """Returns the variable that a result is a multiple of, or None."""
        rounded = [x for x in atoms if self._sources_of(x)]
        if name == "select_n":
            return None if self._sources_of(atoms[0]) else self._common(atoms[1:])
        if name in ("mul", "div"):
            scaled = rounded == [atoms[0]] or (name == "mul" and len(rounded) == 1)
            return self._common(rounded) if scaled else None
        return self._common(atoms) if name in _HOMOGENEOUS else None

    def _common(self, atoms: Sequence[Any]) -> Any:
        """Returns the one variable that all are multiples of, zeros left out, or None."""
        sources = {
            None if isinstance(x, Literal) else self._multiple_of.get(x)
            for x in atoms
            if not self._is_zero(x)
        }
        return sources.pop() if len(sources) == 1 else None

    def _is_kept(self, equation: Any) -> bool:
        """Whether the result of a jump is that of the values before they were rounded."""
        name, atoms = equation.primitive.name, equation.invars
        is_nan_test = name in COMPARISONS and atoms[0] is atoms[1]
        if is_nan_test or tests_for_infinity(equation):
            return True
        homogeneous = name == "sign" or name in _KINKS or name in COMPARISONS
        return homogeneous and self._common(atoms) is not None

    def _rounds(self, equation: Any, sources: Iterable[Any]) -> bool:
        """Whether the result has fewer digits than one of its sources."""
        name, out = equation.primitive.name, equation.outvars[0]
        if name not in _ROUNDING or out in self._tangents:
            return False
        digits = equation.params.get("mantissa_bits", jnp.finfo(out.aval.dtype).nmant)
        kept = (self._rounded[x] for x in sources)
        return any(dtype is not None and digits < jnp.finfo(dtype).nmant for dtype in kept)

    def _sources_of(self, atom: Any) -> frozenset[Any]:
        return frozenset() if isinstance(atom, Literal) else self._sources.get(atom, frozenset())

    def _is_zero(self, atom: Any) -> bool:
        if isinstance(atom, Literal):
            return bool(np.all(np.asarray(atom.val) == 0))
        return atom in self._zeros


def _jumps(equation: Any) -> bool:
    """Whether the results may jump: they are no floats, or those of a loop or a branch.

    Bits of a float count as one: `erfc` of JAX adds up functions of its leading and other ones.
    """
    if equation.primitive.name in _BITS:
        return False
    return (
        equation.primitive.name in _STEPS
        or not all(is_inexact(x.aval) for x in equation.outvars)
        or any(True for _ in jaxprs_in_params(equation.params))
    )


def tests_for_infinity(equation: Any) -> bool:
    if equation.primitive.name not in COMPARISONS:
        return equation.primitive.name == "is_finite"
    numbers = (np.asarray(x.val, complex) for x in equation.invars if isinstance(x, Literal))
    return any(np.all(np.isinf(x)) for x in numbers)
