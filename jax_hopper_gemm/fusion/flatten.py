"""A jaxpr as one flat list of equations: calls inlined, constants recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from .jaxprs import CALLS, varying_together

# Nobody differentiates the list, so these are no more than their jaxpr either.
_CALLS = CALLS | {"remat2": "jaxpr", "custom_vjp_call": "call_jaxpr"}


class NotFusable(ValueError):
    """No kernel can take part in computing a function; the message says why."""


@dataclass(frozen=True, eq=False)
class Variable:
    """An array that is an input or computed; compared by identity."""

    shape: tuple[int, ...]
    dtype: Any  # as in the jaxpr; None of what is no array


@dataclass(frozen=True, eq=False)
class Constant:
    """An array whose elements are all `value`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    value: Any  # a NumPy scalar

    @property
    def array(self) -> Any:
        """The array; in a trace an operation, since programs that hold arrays are traced anew."""
        value = np.asarray(self.value, self.dtype)
        return lax.broadcast(value, self.shape) if self.shape else value


Atom = Variable | Constant
MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose")  # operations that move elements
VARYING = ("pvary",)  # operations that say over which mesh axes an array varies


@dataclass(frozen=True, eq=False)
class Equation:
    """One operation of a jaxpr, in the context that it was traced in."""

    primitive: Any
    params: dict[str, Any]
    context: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[Variable, ...]
    kept: bool  # it has effects and must run

    @property
    def name(self) -> str:
        return self.primitive.name

    def evaluate(self, *arrays: Any) -> Sequence[Any]:
        if self.name in VARYING:
            return arrays
        params = self.primitive.get_bind_params(self.params)
        with self.context.manager:  # constants vary over no axis, whatever JAX made of them before
            results = self.primitive.bind(*varying_together(*arrays), **params)
        return results if self.primitive.multiple_results else (results,)


@dataclass(frozen=True)
class Program:
    """A function as a list of equations, each using only what comes before it."""

    inputs: tuple[Variable, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]


def flatten(closed: Any) -> Program:
    """Returns the program of a closed jaxpr.

    Equations on constants alone are computed, as far as `_FOLDED` knows how.

    Raises:
      NotFusable: the jaxpr holds an array that is not one number throughout.
    """
    equations: list[Equation] = []
    inputs = tuple(_variable(v) for v in closed.jaxpr.invars)
    outputs = _inline(closed.jaxpr, closed.consts, inputs, equations)
    return Program(inputs, tuple(equations), outputs)


def _inline(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Atom], equations: list[Equation]
) -> tuple[Atom, ...]:
    atoms: dict[Any, Atom] = {
        v: _constant(v, value) for v, value in zip(jaxpr.constvars, consts, strict=True)
    }
    atoms.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Atom:
        return _constant(atom, atom.val) if isinstance(atom, Literal) else atoms[atom]

    for eqn in jaxpr.eqns:
        arguments = tuple(map(read, eqn.invars))
        outputs: tuple[Atom, ...]
        if parameter := _CALLS.get(eqn.primitive.name):
            inner = _rewritten(eqn.params[parameter], arguments)
            opened = getattr(inner, "jaxpr", inner)
            outputs = _inline(opened, getattr(inner, "consts", ()), arguments, equations)
        elif (folded := _fold(eqn, arguments)) is not None:
            outputs = (folded,)
        else:
            outputs = tuple(_variable(v) for v in eqn.outvars)
            equations.append(
                Equation(eqn.primitive, eqn.params, eqn.ctx, arguments, outputs, bool(eqn.effects))
            )
        atoms.update(zip(eqn.outvars, outputs, strict=True))
    return tuple(map(read, jaxpr.outvars))


# Functions of JAX, by name, that have a simpler form of the same meaning. JAX computes exp(-x * x)
# with the rounding error of x * x put right; without, its relative error is x * x * 2**-24.
_REWRITTEN: dict[str, Callable[..., Any]] = {"exp_neg_sq": lambda x: lax.exp(-lax.square(x))}


def _rewritten(jaxpr: Any, arguments: Sequence[Atom]) -> Any:
    """Returns the jaxpr of a call, or a simpler one of the same meaning."""
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    name, _, place = getattr(opened.debug_info, "func_src_info", "").partition(" at ")
    known = name in _REWRITTEN and "/jax/_src/" in place  # else it is a user's function
    if not known or [x.dtype for x in arguments] != [np.float32]:
        return jaxpr
    return jax.make_jaxpr(_REWRITTEN[name])(jax.ShapeDtypeStruct(arguments[0].shape, np.float32))


def _variable(v: Any) -> Variable:
    return Variable(tuple(getattr(v.aval, "shape", ())), getattr(v.aval, "dtype", None))


def _constant(v: Any, value: Any) -> Constant:
    array = np.asarray(value, v.aval.dtype)
    flat = array.reshape(-1)
    if flat.size == 1 or (flat.size and (flat == flat[0]).all()):  # a NaN equals nothing
        return Constant(array.shape, array.dtype, flat[0])
    raise NotFusable(
        f"the function closes over an array {array.dtype.name}{list(array.shape)}; "
        "pass it among epilogue_operands"
    )


def _exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of float64; its result is rounded once."""
    return lambda *values: function(*(value.astype(np.float64) for value in values))


# Operations on constants.
_FOLDED: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "abs": np.abs, "square": np.square, "sqrt": np.sqrt,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "is_finite": np.isfinite,
    "exp": _exactly(np.exp), "exp2": _exactly(np.exp2), "log": _exactly(np.log),
    "pow": _exactly(np.power),
    "select_n": lambda which, *cases: cases[int(which)],
}  # fmt: skip
_SAME = {"convert_element_type", "copy", "stop_gradient", *VARYING}


def _fold(eqn: Any, arguments: Sequence[Atom]) -> Constant | None:
    """Returns the result of an equation on constants, if it is one number throughout."""
    constants = [atom for atom in arguments if isinstance(atom, Constant)]
    if len(constants) < len(arguments) or not constants or len(eqn.outvars) != 1:
        return None
    out, name = _variable(eqn.outvars[0]), eqn.primitive.name
    values = [np.asarray(c.value, c.dtype) for c in constants]
    with np.errstate(all="ignore"):
        if name in _SAME.union(MOVES):
            value = values[0]
        elif name == "div" and out.dtype == np.float32:
            value = values[0] / values[1]
        elif name in _FOLDED and (out.dtype != bool or values[0].dtype != bool):
            value = _FOLDED[name](*values)
        else:
            return None
        return Constant(out.shape, out.dtype, np.asarray(value).astype(out.dtype)[()])
