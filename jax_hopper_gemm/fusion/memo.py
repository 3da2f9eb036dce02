"""Memory of what was computed of jaxprs: layers of a model ask the same again and again.

`memoised` remembers by value, a jaxpr standing for itself; `interned` gives one jaxpr for all that
compute the same. Every memory is bounded, serves all threads, and holds no array: what a jaxpr
closes over may be a tracer of a trace that has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import numpy as np
from jax.api_util import debug_info
from jax.extend import linear_util
from jax.extend.core import Literal

Function = TypeVar("Function", bound=Callable[..., Any])

ENTRIES = 4096  # that a memory holds, the latest used


class _Context:
    """The memories of one setting of JAX. JAX alone refers to it, and they go with it."""

    def __init__(self) -> None:
        self.token = object()  # for others' keys, which must not keep the memories
        self.memories: dict[Callable[..., Any], Callable[..., Any]] = {}  # by function


@linear_util.cache
def _context(function: linear_util.WrappedFun) -> _Context:
    return _Context()


_KEY = linear_util.wrap_init(_context, debug_info=debug_info("memo", _context, (), {}))


def trace_context() -> object:
    """Returns an object that is the same while the settings are that JAX's own traces depend on.

    After `jax.clear_caches` it is another one.
    """
    return _context(_KEY).token


def memoised(function: Function) -> Function:
    """Remembers what a function of jaxprs, abstract values and plain data returned.

    Lists among the arguments are taken as tuples. A call with a jaxpr that holds arrays is not
    remembered. The function has no effects, and nobody changes what it returns.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        for x in (*args, *named.values()):
            if getattr(x, "consts", ()):
                return function(*args, **named)
        memories = _context(_KEY).memories
        if function not in memories:
            memories.setdefault(function, lru_cache(maxsize=ENTRIES)(function))
        named = {name: tuple(x) if isinstance(x, list) else x for name, x in named.items()}
        return memories[function](*[tuple(x) if isinstance(x, list) else x for x in args], **named)

    return cast(Function, call)


@dataclass(frozen=True)
class _Written:
    """A jaxpr, equal to all of the same structure."""

    structure: Any
    closed: Any = field(compare=False)


_first_of = memoised(lambda written: written.closed)
_lock = threading.Lock()


def interned(closed: Any) -> Any:
    """Returns a jaxpr that computes the same: one object for all that do.

    Equations, parameters and abstract values are compared, not names of variables or lines of
    source. None for a jaxpr that holds arrays, has effects or calls what cannot be compared, such
    as the rules of a `jax.custom_vjp`.
    """
    if (written := structure(closed)) is None:
        return None
    with _lock:
        return _first_of(_Written(written, closed))


class _Incomparable(Exception):
    """A jaxpr is known by its identity alone."""


def structure(closed: Any) -> Any:
    """Returns a hashable value, equal for jaxprs that compute the same; None for other jaxprs."""
    try:
        return None if closed.consts else _Structure().of_jaxpr(closed)
    except _Incomparable:
        return None


class _Structure:
    """Writes a jaxpr down as tuples, its variables numbered in order."""

    def __init__(self) -> None:
        self._rules: list[Any] = []  # of `jax.custom_jvp`, those that are being written down

    def of_jaxpr(self, closed: Any) -> Any:
        jaxpr = getattr(closed, "jaxpr", closed)
        numbers: dict[Any, int] = {}

        def defined(variables: Any) -> tuple[Any, ...]:
            first = len(numbers)  # which grows with each one
            numbers.update((variable, first + i) for i, variable in enumerate(variables))
            return tuple(variable.aval for variable in variables)

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return atom.aval, self._of_value(atom.val)
            return numbers[atom]

        inputs = defined([*jaxpr.constvars, *jaxpr.invars])
        equations = []
        for equation in jaxpr.eqns:
            if equation.effects:
                raise _Incomparable
            arguments = tuple(map(read, equation.invars))
            params = self._of_params(equation.primitive.name, equation.params)
            outputs = defined(equation.outvars)
            equations.append((equation.primitive, equation.ctx, params, arguments, outputs))
        consts = tuple(map(self._of_value, getattr(closed, "consts", ())))
        return inputs, tuple(equations), tuple(map(read, jaxpr.outvars)), consts

    def _of_params(self, name: str, params: dict[str, Any]) -> tuple[Any, ...]:
        rule = ()
        if name == "custom_jvp_call" and not params["symbolic_zeros"]:
            rule = (self._of_rule(**params),)
            params = {key: x for key, x in params.items() if key != "jvp_jaxpr_fun"}
        return *((key, self._of_value(params[key])) for key in sorted(params)), *rule

    def _of_rule(
        self, call_jaxpr: Any, jvp_jaxpr_fun: Any, num_consts: int, symbolic_zeros: bool
    ) -> Any:
        """Returns what tells the rule of a `jax.custom_jvp`, a new object in each trace.

        That is its place in the source and what it computes where all inputs move. A rule may call
        the function that it belongs to.
        """
        place = getattr(jvp_jaxpr_fun.debug_info, "func_src_info", None)
        source = self.of_jaxpr(call_jaxpr), place
        if source in self._rules:
            return source
        inputs = len(call_jaxpr.in_avals) - num_consts
        try:
            jaxpr, consts, zeros = jvp_jaxpr_fun.call_wrapped(*[False] * inputs)
        except Exception as error:  # the user's, and none of a program without derivatives
            raise _Incomparable from error
        if consts:
            raise _Incomparable
        self._rules.append(source)
        written = self.of_jaxpr(jaxpr)
        self._rules.pop()
        return source, written, tuple(zeros)

    def _of_value(self, value: Any) -> Any:
        """Returns what tells a parameter or number from others; 1, 1.0 and True are three."""
        kind = type(value)
        if hasattr(value, "eqns"):
            return kind, self.of_jaxpr(value)
        if kind in (tuple, list):
            return kind, tuple(map(self._of_value, value))
        if kind is dict:
            return kind, tuple((key, self._of_value(value[key])) for key in sorted(value, key=str))
        if isinstance(value, np.ndarray | np.generic):
            return kind, value.dtype, value.shape, value.tobytes()
        if isinstance(value, float | complex):  # 0.0 equals -0.0, and a NaN nothing
            return kind, repr(value)
        if isinstance(value, MethodType | partial | linear_util.WrappedFun) or (
            isinstance(value, FunctionType) and value.__closure__
        ):
            raise _Incomparable  # it may hold arrays
        try:
            hash(value)
        except TypeError:
            raise _Incomparable from None
        return kind, value
