"""Checks of layers over products: mixtures of experts and collective GEMMs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arguments import (
    COMPLEX,
    activation_problems,
    as_arrays,
    implementation_problems,
    is_array,
    kind,
    not_numbers,
)
from .wording import describe, differ, each_text, fail

SCORES = ("softmax", "sigmoid")
EXCHANGES = ("gather", "all_to_all", "ragged_all_to_all")


def check_route(logits: Any, choosing: tuple[Any, ...], experts: Any) -> None:
    """Checks arguments of `route`; `choosing` as in `check_mixture`."""
    k, *_, bias = choosing
    problems = _real_problems(logits=logits)
    if logits.ndim != 2:
        problems.append(
            f"logits are {describe(logits)}, expected (tokens, experts): reshape leading axes"
        )
    else:
        problems += _choosing_problems(logits.shape[1], *choosing)
        if experts is not None:
            wanted, dtype = (logits.shape[0], k), jnp.result_type(experts)
            if np.shape(experts) != wanted or not jnp.issubdtype(dtype, jnp.integer):
                problems.append(f"experts are {describe(experts)}, expected int32{[*wanted]}")
            if bias is not None:
                problems.append("experts and selection_bias came: the bias would choose nothing")
    fail("route", problems)


def check_route_tokens(x: Any, kernel: Any, choosing: tuple[Any, ...]) -> None:
    """Checks arguments of `route_tokens`; `choosing` as in `check_mixture`."""
    problems = []
    if x.ndim != 2:
        problems.append(f"x is {describe(x)}, expected (tokens, features): reshape leading axes")
    problems += _router_problems(x, "kernel", kernel)
    if x.ndim == kernel.ndim == 2:
        problems += _choosing_problems(kernel.shape[1], *choosing)
    fail("route_tokens", problems)


def _router_problems(x: Any, name: str, kernel: Any) -> list[str]:
    problems = _real_problems(x=x, **{name: kernel})
    if kernel.ndim != 2:
        problems.append(f"{name} is {describe(kernel)}, expected (features, experts)")
    elif x.ndim and x.shape[-1] != kernel.shape[0]:
        hint = f". Is it stored (experts, features)? Pass {name}.T"
        problems.append(
            f"features differ: x is {describe(x)}, {name} is {describe(kernel)}"
            f"{hint if x.shape[-1] == kernel.shape[1] else ''}"
        )
    return problems


def check_grouped_mlp(
    x: Any, rights: tuple[Any, ...], down: Any, sizes: Any, weights: Any, activation: Any
) -> None:
    problems = _weight_problems(rights, down)
    if x.ndim != 2:
        problems.append(f"x is {describe(x)}, expected (rows, features)")
    if not problems and x.shape[1] != rights[0].shape[1]:
        problems.append(
            f"features differ: x is {describe(x)}, gate_up is {each_text(rights)}, "
            "expected (experts, features, 2, hidden) or a pair (experts, features, hidden)"
        )
    if down.ndim == 3 and sizes.shape != down.shape[:1]:
        problems.append(
            f"group_sizes are {describe(sizes)}, expected one for each expert of down, "
            f"{describe(down)}"
        )
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        problems.append(f"group_sizes are {describe(sizes)}, expected integers")
    if weights is not None and weights.shape != x.shape[:1]:
        problems.append(
            f"row_weights are {describe(weights)}, expected one for each row of x, {describe(x)}"
        )
    named, mistyped = activation_problems(activation)
    fail("grouped_mlp", problems + named, mistyped)


def check_named(op: str, name: str, x: Any, kind: type, source: str) -> None:
    """Checks that an argument is a named tuple of ours; `source` says where one comes from."""
    if not isinstance(x, kind):
        what = describe(x) if is_array(x) else f"a {type(x).__name__}"
        fail(op, [], [f"{name} is {what}, expected a {kind.__name__}: {source}"])


def check_rows(op: str, name: str, x: Any, count: int, what: str) -> Any:
    """Returns an array, checked to have a row for each token, or sorted row, of a routing."""
    (x,) = as_arrays(op, **{name: x})
    if np.ndim(x) < 1 or differ(np.shape(x)[0], count):
        fail(
            op, [f"{name} is {describe(x)}, expected {count} rows, one for each {what} of routing"]
        )
    return jnp.asarray(x)


def check_mixture(
    x: Any,
    kernel: Any,
    rights: tuple[Any, ...],
    down: Any,
    devices: int,
    exchange: Any,
    choosing: tuple[Any, ...],
) -> None:
    """Checks arguments whose errors inside the parts would be less clear.

    Args:
      devices: number of devices that share the experts; 1 without sharding.
      choosing: experts_per_token, score, normalize, scale and selection_bias.
    """
    problems = _weight_problems(rights, down)
    if x.ndim < 1:
        problems.append(f"x is {describe(x)}, expected (..., features)")
    if exchange not in EXCHANGES:
        problems.append(f"exchange is {exchange!r}, expected one of {', '.join(EXCHANGES)}")
    problems += _router_problems(x, "router_kernel", kernel)
    if not problems:
        problems += _choosing_problems(kernel.shape[1], *choosing)
        here, all_of_them = down.shape[0], kernel.shape[1]
        if here * devices != all_of_them:
            problems.append(
                f"the router chooses among {all_of_them} experts, and {here} have weights"
                + (f" on each of {devices} devices: shard the experts' first axis over them evenly"
                   if devices > 1 else
                   ": pass expert_axis inside jax.shard_map if others are on other devices")
            )  # fmt: skip
    fail("mixture_of_experts", problems)


def _weight_problems(rights: tuple[Any, ...], down: Any) -> list[str]:
    problems = []
    if down.ndim != 3:
        problems.append(f"down is {describe(down)}, expected (experts, hidden, features)")
    if len(rights) not in (1, 2):
        problems.append(f"gate_up has {len(rights)} arrays, expected one or the pair (gate, up)")
    elif len(rights) == 2:
        if rights[0].shape != rights[1].shape or rights[0].ndim != 3:
            problems.append(
                f"gate and up are {each_text(rights)}, expected equal (experts, features, hidden)"
            )
    elif rights[0].ndim != 4 or rights[0].shape[2] != 2:
        hint = ". Gate and up side by side? Pass gate_up.reshape(E, D, 2, F)"
        problems.append(
            f"gate_up is {describe(rights[0])}, expected (experts, features, 2, hidden)"
            f"{hint if rights[0].ndim == 3 else ''}"
        )
    if problems:
        return problems
    experts, hidden, features = down.shape
    if (rights[0].shape[0], rights[0].shape[1], rights[0].shape[-1]) != (experts, features, hidden):
        problems.append(
            f"gate_up is {each_text(rights)} and down is {describe(down)}: expected equal experts, "
            "features and hidden in (experts, features, 2, hidden) and (experts, hidden, features)"
        )
    return problems


def _choosing_problems(
    experts: int, k: Any, score: Any, normalize: Any, scale: Any, bias: Any
) -> list[str]:
    problems = []
    if not isinstance(k, int | np.integer) or not 1 <= k <= experts:
        problems.append(f"experts_per_token is {k!r}, expected an int from 1 to {experts}")
    if scale is not None and not (
        not not_numbers(scale) and np.ndim(scale) == 0 and kind(scale) < COMPLEX
    ):
        problems.append(f"scale is {scale!r}, expected a real number or None")
    if not isinstance(normalize, bool):
        problems.append(f"normalize is {normalize!r}, expected True or False")
    if score not in SCORES:
        problems.append(f"score is {score!r}, expected {' or '.join(map(repr, SCORES))}")
    if bias is not None and np.shape(bias) != (experts,):
        problems.append(f"selection_bias is {describe(bias)}, expected one for each expert")
    return problems + ([] if bias is None else _real_problems(selection_bias=bias))


def _real_problems(**arrays: Any) -> list[str]:
    return [
        f"{name} is {describe(x)}, expected real numbers: experts are chosen by their order"
        for name, x in arrays.items()
        if kind(x) == COMPLEX
    ]


def check_all_gather_matmul(
    x: Any, w: Any, axis_name: Any, bias: Any, activation: Any, implementation: Any
) -> None:
    op = "all_gather_matmul"
    count_devices(op, "axis_name", axis_name)
    problems = _operand_problems(x, w, "(..., m, K)") + implementation_problems(implementation)
    if bias is not None and w.ndim == 2 and np.shape(bias) not in ((), (w.shape[1],)):
        problems.append(f"bias is {describe(bias)}, expected ({w.shape[1]},), one value a column")
    if bias is not None and kind(bias) == COMPLEX > max(kind(x), kind(w)):
        problems.append(f"bias is {describe(bias)}, and the product is not complex")
    named, mistyped = activation_problems(activation)
    fail(op, problems + named, mistyped)


def check_matmul_reduce_scatter(x: Any, w: Any, axis_name: Any, implementation: Any) -> None:
    op = "matmul_reduce_scatter"
    devices = count_devices(op, "axis_name", axis_name)
    problems = _operand_problems(x, w, "(..., M, K)") + implementation_problems(implementation)
    if x.ndim >= 2 and x.shape[-2] % devices:
        problems.append(
            f"x is {describe(x)}, whose {x.shape[-2]} rows cannot be divided among the {devices} "
            f"devices along {axis_name!r}: pad them to a multiple of {devices}"
        )
    fail(op, problems)


def count_devices(op: str, argument: str, axes: Any) -> int:
    """Returns how many devices lie along a mesh axis, or several, that an argument names."""
    names: Any = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    try:
        ring = argument == "axis_name"  # which takes no axis of `jax.vmap`
        known = jax.sharding.get_abstract_mesh().manual_axes if ring else names
        if len(set(names)) < len(names) or any(isinstance(x, int) or x not in known for x in names):
            raise TypeError("a mesh axis is named, and named once")
        return lax.axis_size(names)
    except (NameError, TypeError) as error:
        raise ValueError(
            f"{op}: {argument} is {axes!r}, expected an axis of the mesh over which the program is "
            "mapped: call it inside jax.shard_map over that axis"
        ) from error


def _operand_problems(x: Any, w: Any, rows: str) -> list[str]:
    problems = []
    if x.ndim < 2:
        problems.append(f"x is {describe(x)}, expected {rows}")
    if w.ndim != 2:
        problems.append(f"w is {describe(w)}, expected (K, N)")
    if not problems and x.shape[-1] != w.shape[0]:
        hint = ". Is w stored (N, K)? Pass w.T" if x.shape[-1] == w.shape[1] else ""
        problems.append(f"K differs: x is {describe(x)}, w is {describe(w)}{hint}")
    return problems
