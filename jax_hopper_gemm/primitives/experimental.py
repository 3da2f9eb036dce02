"""Rules of JAX's interpreters that few programs import: jet, checkify, sparsify, roofline.

A rule is made where its module is imported, which JAX does not do itself: at the first equation of
this library that a program with it binds. NOTE: so a function that `jax.jit` has traced before the
import is traced anew only if it is called with other arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from jax.extend.core import Primitive, jaxprs_in_params

from ..fusion.jaxprs import lowered
from ..gemm.groups import GROUP
from ..lowering.request import Request

Function = Callable[..., Any]


def flops_of(request: Request) -> int:
    """Returns the multiplications and additions of a product of known extents, else 0."""
    extents = request.extents
    if request.groups:  # each row belongs to one group
        extents = {letter: extent for letter, extent in extents.items() if letter != GROUP}
    if not all(isinstance(extent, int) for extent in extents.values()):
        return 0
    return 2 * prod(extents.values()) * request.num_b


def _for_jet(jet: Any, primitive: HopperPrimitive) -> None:
    def rule(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
        function = partial(primitive.reference, **params)
        return jet.jet(function, tuple(primals), tuple(series), factorial_scaled=False)

    def bilinear(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
        """Multiplies two power series."""
        lhs, rhs = ([primals[i], *series[i]] for i in (0, 1))
        terms = [
            sum(primitive.bind(lhs[i], rhs[k - i], *primals[2:], **params) for i in range(k + 1))
            for k in range(len(lhs))
        ]
        return terms[0], terms[1:]

    jet.jet_rules[primitive] = bilinear if primitive.linear_in[:2] == (0, 1) else rule


def _for_checkify(checkify: Any, primitive: HopperPrimitive) -> None:
    def of_program(*args: Any, call_jaxpr: Any) -> Any:
        count = len(args) - len(call_jaxpr.in_avals)
        *context, error, enabled = args[:count]  # JAX 0.12 has a context
        return checkify.checkify_jaxpr(*context, call_jaxpr, enabled, error, *args[count:])

    each = of_program if primitive.is_program else partial(checkify.nan_error_check, primitive)
    checkify.error_checks[primitive] = each


def _for_sparsify(transform: Any, primitive: HopperPrimitive) -> None:
    def rule(spenv: Any, *values: Any, **params: Any) -> Any:
        return transform.sparsify_raw(partial(primitive.reference, **params))(spenv, *values)[0]

    transform.sparse_rules_bcoo[primitive] = rule


def _for_roofline(roofline: Any, primitive: HopperPrimitive) -> None:
    """Counts a product's own operations: those that follow it are in its kernel."""
    if (request_of := primitive.request_of) is None:
        return

    def rule(context: Any, *_: Any, **params: Any) -> Any:
        avals = *context.avals_in, *context.avals_out
        nbytes = sum(roofline.RooflineShape.from_aval(x).bytes for x in avals)
        flops = flops_of(request_of(context.avals_in, context.avals_out, **params))
        return roofline.RooflineResult(
            flops=flops, unfused_flops=flops, hbm_bytes=nbytes, unfused_hbm_bytes=nbytes
        )

    roofline.register_roofline(primitive)(rule)


# By the module whose table they fill.
_MAKERS = {
    "jax.experimental.jet": _for_jet,
    "jax._src.checkify": _for_checkify,
    "jax.experimental.sparse.transform": _for_sparsify,
    "jax.experimental.roofline": _for_roofline,
}
_waiting: dict[str, list[HopperPrimitive]] = {name: [] for name in _MAKERS}


class HopperPrimitive(Primitive):
    """A primitive that gives rules to the modules imported by the time it is bound.

    Its arguments are those of `define_primitive`.
    """

    is_program = False  # whether it stands for the equations of its parameter `call_jaxpr`

    def __init__(
        self,
        name: str,
        reference: Function,
        linear_in: tuple[int, ...],
        request_of: Callable[..., Request] | None,
    ):
        super().__init__(name)
        self.reference, self.linear_in, self.request_of = reference, linear_in, request_of
        for waiting in _waiting.values():
            waiting.append(self)

    def is_high(self, *_: Any, **params: Any) -> bool:
        """Whether a parameter has equations that JAX replaces before it lowers a program."""
        return any(jaxpr.is_high for jaxpr in jaxprs_in_params(params))

    def to_lojax(self, *args: Any, **params: Any) -> Any:
        """Binds the primitive without such equations; JAX asks for it where none are left."""

        def low(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(low, value))
            return lowered(value) if getattr(value, "is_high", False) else value

        return self.bind(*args, **{name: low(value) for name, value in params.items()})

    def bind(self, *args: Any, **params: Any) -> Any:
        for name in _waiting:
            if name in sys.modules and _waiting[name]:
                waiting, _waiting[name] = _waiting[name], []
                for primitive in waiting:
                    _MAKERS[name](sys.modules[name], primitive)
        return super().bind(*args, **params)
