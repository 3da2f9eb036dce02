"""Functions that follow a product, equal where they compute the same.

JAX looks compiled programs up by the identity of the functions that they were traced from, so a
new lambda in each call would be compiled in each. A settled function is the jaxpr of the user's:
one object for all that compute the same. Arrays that it closes over become operands.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from traceback import walk_stack
from typing import Any

import jax
from jax.core import ShapedArray, Tracer
from jax.extend.core import jaxpr_as_fun

from ..fusion.memo import interned, trace_context
from ..gemm.product import Options
from . import checks
from .activations import ACTIVATIONS
from .steps import Gate, Steps, evaluate, program

_STABLE = frozenset(map(id, ACTIVATIONS.values()))  # identity finds them, at no cost
_ENTRIES = 64  # that are remembered of one function
_lock = threading.Lock()
_by_function: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Settled:
    """What `Steps` or `Gate` compute."""

    op: str
    named: tuple[str, ...]  # as in `Steps`
    # The jaxpr, of the products, the operands and the arrays it had closed over. Equal functions
    # have the same object.
    closed: Any
    several: bool  # whether it returns a tuple
    permutation: tuple[int, ...] | None  # as in `Steps`

    def __call__(self, *arrays: jax.Array) -> Any:
        results = jaxpr_as_fun(self.closed)(*arrays)
        return tuple(results) if self.several else results[0]


def settled(
    function: Steps | Gate,
    products: Callable[[], Sequence[Any]],
    operands: tuple[Any, ...],
    lhs: Any,
    options: Options,
) -> tuple[Steps | Gate | Settled, tuple[Any, ...]]:
    """Returns a function that is equal for all that compute the same, and its operands.

    Comes back as it is: a function without any of the user's, and one that calls what cannot be
    compared, as the rules of a `jax.custom_vjp`. A warning says once what the latter costs.

    Args:
      products: gives abstract values.
      operands: the function's; abstract values stand for what a kernel makes.
      lhs: of the product. If it is no tracer, that runs at once: a program may be compiled for it.
      options: of the product. Where XLA runs it, no kernel computes the function: it may have any
        effects.
    """
    users = {name: getattr(function, name, None) for name in ("activation", "epilogue")}
    users = {name: x for name, x in users.items() if x is not None and id(x) not in _STABLE}
    if not users:
        return function, operands
    seen, names = tuple(products()), dict.fromkeys(users)
    memory = _memory_of(users)
    types = tuple(x if isinstance(x, ShapedArray) else jax.typeof(x) for x in operands)
    key = trace_context(), tuple(names), replace(function, **names), seen, types
    if (settled_before := memory.get(key)) is None:
        own, consts = _traced(function, seen, operands, options)
        if own is None:
            if not isinstance(lhs, Tracer):
                _warn_of_compiling(function.op, tuple(users.values()))
            return function, operands
        settled_before = own, consts
        if not any(isinstance(x, Tracer) for x in consts):
            if len(memory) >= _ENTRIES:
                memory.clear()
            memory[key] = settled_before
    own, consts = settled_before
    return own, (*operands, *consts)


def _memory_of(users: dict[str, Any]) -> dict[Any, Any]:
    """Returns what is remembered of the one function of the user's, as long as that exists."""
    one, *others = users.values()
    try:
        with _lock:
            return {} if others else _by_function.setdefault(one, {})
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return {}


def _traced(
    function: Any, products: Sequence[Any], operands: tuple[Any, ...], options: Options
) -> tuple[Settled | None, tuple[Any, ...]]:
    """Returns a function settled and the arrays that it closes over; None if it cannot be."""
    closed, _, several = program(function, products, operands)
    if options.implementation != "xla":
        checks.check_effects(function.op, closed)
    consts = tuple(closed.consts)
    if consts:
        inputs = len(closed.in_avals)
        closed = jax.make_jaxpr(partial(evaluate, closed, inputs))(*closed.in_avals, *consts)
    if (closed := interned(closed)) is None:
        return None, ()
    return Settled(function.op, function.named, closed, several, function.permutation), consts


# The warning.

_warned = False


@lru_cache(maxsize=64)
def _latest_of(code: Any) -> list[weakref.ref[Any]]:
    """Returns a list that holds the latest function of this code, once one came."""
    del code
    return []


def _warn_of_compiling(op: str, users: Sequence[Callable[..., Any]]) -> None:
    """Warns once if the code of a function came before, as another function."""
    global _warned
    with _lock:
        again = [x for x in users if _is_new_of_same_code(x)]
        if _warned or not again:
            return
        _warned = True
    name = getattr(again[0], "__qualname__", "a function")
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(sys._getframe()))
    own = takewhile(lambda module: module.startswith("jax_hopper_gemm."), modules)
    warnings.warn(
        f"{op}: {name} is a new function at each call and cannot be compared with those before "
        "(it calls a jax.custom_vjp function, a callback or the like), so each call outside of "
        "jax.jit compiles a program. Make it once, outside of the loop, or call inside jax.jit.",
        stacklevel=1 + sum(1 for _ in own),
    )


def _is_new_of_same_code(function: Callable[..., Any]) -> bool:
    if (code := getattr(function, "__code__", None)) is None:
        return False
    latest = _latest_of(code)
    again = bool(latest) and latest[0]() is not function
    latest[:] = [weakref.ref(function)]
    return again
