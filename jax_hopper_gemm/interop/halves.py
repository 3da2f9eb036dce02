"""Gates whose weights are the two halves of one array, as `w[0]` and `w[1]`, which kernels read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax import lax

from ..dispatch import Device
from ..lowering.route import route
from ..primitives.define import request_of


def of_one_array(launch: Any, makers: dict[Any, Any], device: Device) -> Any:
    """Returns a launch; of a gate of both halves of one array, in order, one that reads the array.

    XLA would copy the halves for a kernel.

    Args:
      launch: a `hopper_fused` equation.
      makers: by variable, the equation that makes it.
    """
    product, params = launch.params["product"], launch.params
    if params["num_b"] != 2 or product.groups or product.options.recipe:
        return launch
    lhs, *halves = launch.invars[:3]
    first, second = (_half(x, makers) for x in halves)
    if first is None or second != (*first[:2], 1) or first[2]:
        return launch
    array, axis, _ = first
    of, letters = product.subscripts, product.subscripts.rhs
    letters = letters[:axis] + next(of.fresh_letters()) + letters[axis:]
    product = replace(product, subscripts=replace(of, rhs=letters))
    params, invars = {**params, "product": product, "num_b": 1}, [lhs, array, *launch.invars[3:]]
    whole = launch.replace(params=params, invars=invars)
    found = route(request_of(whole), device, kernel_only=True)
    return whole if found.path == "hopper" and not found.uncovered else launch


def _half(x: Any, makers: dict[Any, Any]) -> tuple[Any, int, int] | None:
    """Returns the array that a variable is a half of, along which axis of extent 2, and which.

    None where it is none.
    """
    squeeze: Any = makers.get(x)
    cut = makers.get(squeeze.invars[0]) if squeeze else None
    if cut is None or (squeeze.primitive, cut.primitive) != (lax.squeeze_p, lax.slice_p):
        return None
    (array,), axes = cut.invars, squeeze.params["dimensions"]
    shape, kept = array.aval.shape, cut.outvars[0].aval.shape
    cuts = tuple(i for i, extent in enumerate(shape) if extent != kept[i])
    if cuts != tuple(axes) or [shape[i] for i in cuts] != [2]:
        return None
    return array, cuts[0], cut.params["start_indices"][cuts[0]]
