"""Functions that follow a product, equal where they compute the same.

JAX looks compiled programs up by the identity of the functions that they were traced from, so a
new lambda in each call would be compiled in each. A settled function is the jaxpr of the user's:
one object for all that compute the same. Arrays that it closes over become operands.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from ..fusion.memo import Memory, interned
from . import checks
from .activations import ACTIVATIONS
from .steps import Gate, Steps, evaluate

_STABLE = frozenset(map(id, ACTIVATIONS.values()))  # found by identity, at no cost
_lock = threading.Lock()


@dataclass(frozen=True)
class Settled:
    """What `Steps` or `Gate` compute.

    Attributes:
      named: as in `Steps`.
      closed: the jaxpr, of the products, the operands and the arrays it had closed over. Equal
        functions have the same object.
      several: whether it returns a tuple.
    """

    op: str
    named: tuple[str, ...]
    closed: Any
    several: bool

    def __call__(self, *arrays: jax.Array) -> Any:
        results = jaxpr_as_fun(self.closed)(*arrays)
        return tuple(results) if self.several else results[0]


def settled(
    op: str,
    function: Steps | Gate,
    products: Callable[[], Sequence[Any]],
    operands: tuple[Any, ...],
    *,
    eager: bool,
) -> tuple[Steps | Gate | Settled, tuple[Any, ...]]:
    """Returns a function that is equal for all that compute the same, and its operands.

    Comes back as it is: a function without any of the user's, and one that calls what cannot be
    compared, as the rules of a `jax.custom_vjp`. A warning says once what the latter costs.

    Args:
      op: what the user called.
      products: gives abstract values or `jax.ShapeDtypeStruct`s.
      operands: the function's.
      eager: whether the product runs at once, so that a program may be compiled for it alone.
    """
    users = {name: getattr(function, name, None) for name in ("activation", "epilogue")}
    users = {name: x for name, x in users.items() if x is not None and id(x) not in _STABLE}
    if not users:
        return function, operands
    seen = tuple(products())
    memory = _memory_of(users)
    names = dict.fromkeys(users)
    key = (op, tuple(names), replace(function, **names), seen, tuple(map(jax.typeof, operands)))
    if memory is not None and (before := memory.get(key)) is not None:
        own, consts = before
        return own, (*operands, *consts)
    own, consts = _traced(op, function, seen, operands)
    if own is None:
        if eager:
            _warn_of_compiling(op, tuple(users.values()))
        return function, operands
    if memory is not None and not any(isinstance(x, Tracer) for x in consts):
        memory.put(key, (own, consts))
    return own, (*operands, *consts)


_by_function: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()


def _memory_of(users: dict[str, Any]) -> Memory | None:
    """Returns what is remembered of the one function of the user's, as long as that exists."""
    one, *others = users.values()
    if others:
        return None
    try:
        with _lock:
            return _by_function.setdefault(one, Memory())
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return None


def _traced(
    op: str, function: Any, products: Sequence[Any], operands: tuple[Any, ...]
) -> tuple[Settled | None, tuple[Any, ...]]:
    """Returns a function settled and the arrays that it closes over; None if it cannot be."""
    several = []

    def flat(*args: Any) -> tuple[Any, ...]:
        out = function(*args)
        several.append(isinstance(out, tuple))
        return checks.results(op, out)

    closed, consts = jax.make_jaxpr(flat)(*products, *operands), ()
    if closed.consts:
        consts = tuple(closed.consts)
        inputs = len(closed.in_avals)
        closed = jax.make_jaxpr(partial(evaluate, closed, inputs))(*closed.in_avals, *consts)
    if (closed := interned(closed)) is None:
        return None, ()
    return Settled(op, getattr(function, "named", ()), closed, several[-1]), consts


# The warning.

_functions: OrderedDict[Any, weakref.ref[Any]] = OrderedDict()  # by code
_warned = False


def _warn_of_compiling(op: str, users: Sequence[Callable[..., Any]]) -> None:
    """Warns once if the code of a function came before, as another function."""
    global _warned
    with _lock:
        again = [x for x in users if _is_new_of_same_code(x)]
        if _warned or not again:
            return
        _warned = True
    name = getattr(again[0], "__qualname__", "a function")
    warnings.warn(
        f"{op}: {name} is a new function at each call and cannot be compared with those before "
        "(it calls a jax.custom_vjp function, a callback or the like), so each call outside of "
        "jax.jit compiles a program. Make it once, outside of the loop, or call inside jax.jit.",
        stacklevel=4,
    )


def _is_new_of_same_code(function: Callable[..., Any]) -> bool:
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    before = _functions.get(code)
    _functions[code] = weakref.ref(function)
    while len(_functions) > 64:
        _functions.popitem(last=False)
    return before is not None and before() is not function
