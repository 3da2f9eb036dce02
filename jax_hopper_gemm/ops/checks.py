"""Every error that a user's arguments can cause: what came, what was expected, the way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..routing import array_text, short_dtype
from .activations import ACTIVATIONS

IMPLEMENTATIONS = (None, "hopper", "xla")
PREACTIVATIONS = ("save", "recompute")
SCALARS = (bool, int, float, complex)


def as_arrays(op: str, **operands: Any) -> list[Any]:
    """Returns the operands, those with a `__jax_array__` method as the array it gives.

    Raises:
      TypeError: an operand is neither an array nor a scalar.
    """
    arrays = [
        convert() if (convert := getattr(x, "__jax_array__", None)) else x
        for x in operands.values()
    ]
    problems = [
        f"{name} is a {type(x).__name__}, expected an array: convert it with jnp.asarray"
        for name, x in zip(operands, arrays, strict=True)
        if not _is_array(x)
    ]
    if problems:
        raise TypeError(f"{op}: {'; '.join(problems)}")
    return arrays


def check_matmul(a: Any, b: Any, given: Mapping[str, Any], activation: Any, preferred: Any) -> None:
    """Checks ranks, K and batch axes by the rules of `jnp.matmul`, then what follows the product.

    Args:
      a, b: the operands.
      given: by name, those of bias, residual, c, alpha and beta that are given.
      activation, preferred: as the user gave them, `preferred` being preferred_element_type.
    """
    problems = _matmul_problems(a, b)
    if not problems:
        problems += _broadcasting_problems(_matmul_shape(np.shape(a), np.shape(b)), given)
        problems += _kind_problems(a, b, given, preferred)
    problems += _factor_problems(given) + _name_problems(activation)
    _fail("matmul", problems, _function_problems("activation", activation))


def _matmul_problems(a: Any, b: Any) -> list[str]:
    problems = [
        f"{name} is a scalar, {describe(x)}, expected at least one axis: scale with *"
        for name, x in (("a", a), ("b", b))
        if np.ndim(x) == 0
    ]
    if problems:
        return problems
    a_shape, b_shape = np.shape(a), np.shape(b)
    given = f"a is {describe(a)}, b is {describe(b)}"
    k_a, k_b = a_shape[-1], b_shape[max(len(b_shape) - 2, 0)]
    if _differ(k_a, k_b):
        hint = ""
        if len(a_shape) == len(b_shape) == 2 and not _differ(k_a, b_shape[1]):
            hint = (
                ". Is b stored (N, K)? Contract it with dot_general(a, b, (((1,), (1,)), ((), ())))"
            )
        problems.append(f"K differs: {given}{hint}")
    for x, y in zip(reversed(a_shape[:-2]), reversed(b_shape[:-2]), strict=False):
        if _differ(x, y) and 1 not in (x, y):
            problems.append(
                f"batch axes {a_shape[:-2]} and {b_shape[:-2]} do not broadcast: {given}"
            )
            break
    return problems


def _matmul_shape(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the shape of a product of arrays of these shapes, which fit."""
    batches = zip_longest(reversed(a[:-2]), reversed(b[:-2]), fillvalue=1)
    batch = [y if isinstance(x, int) and x == 1 else x for x, y in batches]
    return (*reversed(batch), *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def _broadcasting_problems(shape: tuple[Any, ...], given: Mapping[str, Any]) -> list[str]:
    """Returns which of bias, residual and c do not broadcast to the result's shape."""
    problems = []
    for name in ("bias", "residual", "c"):
        if name not in given:
            continue
        own = np.shape(given[name])
        fits = len(own) <= len(shape) and not any(
            _differ(x, y) and x != 1 for x, y in zip(reversed(own), reversed(shape), strict=False)
        )
        if not fits:
            hint = ""
            if len(own) == 1 and len(shape) > 1 and own[0] == shape[-2]:
                hint = f". Is it one value a row? Pass {name}[:, None]"
            problems.append(
                f"{name} is {describe(given[name])}, which does not broadcast to the result's "
                f"shape {shape}{hint}"
            )
    return problems


def _factor_problems(given: Mapping[str, Any]) -> list[str]:
    problems = [
        f"{name} is {describe(given[name])}, expected a number or a scalar array"
        for name in ("alpha", "beta")
        if name in given and np.ndim(given[name]) > 0
    ]
    if "beta" in given and "c" not in given:
        problems.append("beta came without c: it is the factor of c in alpha * (a @ b) + beta * c")
    return problems


def _kind_problems(a: Any, b: Any, given: Mapping[str, Any], preferred: Any) -> list[str]:
    """Returns which operand is of a kind of number that does not go with the product."""
    single = preferred is not None and not isinstance(preferred, tuple | list)
    c = given.get("c")
    decides = c is not None and not single and strong_dtype(c) is not None
    product = _kind(np.result_type(preferred)) if single else max(_kind(a), _kind(b))
    problems = []
    if decides and _kind(c) < product:
        problems.append(
            f"c is {describe(c)}, whose dtype the result takes and which cannot hold the product "
            f"of {describe(a)} and {describe(b)}: convert c, or pass preferred_element_type"
        )
    elif decides:
        product = _kind(c)
    for name, x in given.items():
        if _kind(x) == COMPLEX > product:
            problems.append(
                f"{name} is {describe(x)}, which is complex, and the product is not: convert one "
                "of them, or pass preferred_element_type"
            )
    return problems


COMPLEX = 2


def _kind(x: Any) -> int:
    """Returns 0 for integers and truth values, 1 for floats, 2 for complex numbers."""
    dtype = x if isinstance(x, np.dtype) else jax.dtypes.result_type(x)
    if jnp.issubdtype(dtype, np.complexfloating):
        return COMPLEX
    return int(jnp.issubdtype(dtype, np.floating))


def _name_problems(activation: Any) -> list[str]:
    if not isinstance(activation, str) or activation in ACTIVATIONS:
        return []
    return [f"activation is {activation!r}, expected a function or one of {', '.join(ACTIVATIONS)}"]


def _function_problems(name: str, function: Any) -> list[str]:
    """Returns why an activation or an epilogue is none, as far as its type tells."""
    if function is None or (name == "activation" and isinstance(function, str)):
        return []
    if not callable(function):
        return [f"{name} is a {type(function).__name__}, expected a function"]
    try:
        hash(function)
    except TypeError:
        return [
            f"{name} is a {type(function).__name__}, which cannot be hashed: pass a function, and "
            "the arrays that it needs as epilogue_operands"
        ]
    return []


def check_steps(
    op: str,
    epilogue: Any,
    operands: Any,
    plain: bool,
    preactivation: Any,
    preferred: Any,
    implementation: Any,
) -> tuple[Any, ...]:
    """Checks what products of every form take, and returns the operands of the epilogue.

    Args:
      op: what the user called.
      epilogue, operands, preactivation, preferred, implementation: as the user gave them.
      plain: whether nothing at all follows the product.
    """
    problems, mistyped = [], _function_problems("epilogue", epilogue)
    if not isinstance(operands, tuple | list):
        mistyped.append(
            f"epilogue_operands is a {type(operands).__name__}, expected a tuple of arrays: (x,)"
        )
        operands = ()
    elif operands and epilogue is None:
        problems.append(
            f"{len(operands)} epilogue_operands came without an epilogue, the function that takes "
            "them after the product"
        )
    if plain and isinstance(preferred, tuple | list):
        problems.append(
            f"preferred_element_type is {_dtypes_text(preferred)}, expected one dtype: only the "
            "results of an epilogue have one each"
        )
    problems += _choice_problems(preactivation, implementation)
    _fail(op, problems, mistyped)
    return tuple(as_arrays(op, **{f"epilogue_operands[{i}]": x for i, x in enumerate(operands)}))


def _choice_problems(preactivation: Any, implementation: Any) -> list[str]:
    problems = []
    if preactivation not in PREACTIVATIONS:
        problems.append(f"preactivation is {preactivation!r}, expected 'save' or 'recompute'")
    if implementation not in IMPLEMENTATIONS:
        problems.append(f"implementation is {implementation!r}, expected None, 'hopper' or 'xla'")
    return problems


def call(op: str, name: str, function: Callable[..., Any], *arrays: Any) -> Any:
    """Returns `function(*arrays)`, a function of the user's, while it is traced.

    Raises:
      TypeError or ValueError: it raised an exception, which is the cause.
    """
    try:
        return function(*arrays)
    except Exception as error:
        given = ", ".join(map(describe, arrays))
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{op}: {name} failed when it was traced with ({given}): "
            f"{type(error).__name__}: {error}"
        ) from error


def check_activated(op: str, out: Any, y: Any) -> None:
    """Checks that an activation returned one array of the shape that it was given."""
    if not _is_array(out):
        raise TypeError(
            f"{op}: activation returned a {type(out).__name__}, expected an array: a function of "
            "several results is an epilogue"
        )
    if np.shape(out) != np.shape(y):
        _fail(
            op,
            [
                f"activation returned {describe(out)} for {describe(y)}, expected the same shape: "
                "a function that is not elementwise is an epilogue"
            ],
        )


def results(op: str, out: Any) -> tuple[Any, ...]:
    """Returns what an epilogue returned as a tuple of arrays.

    Raises:
      TypeError: it returned something else.
    """
    found = out if isinstance(out, tuple) else (out,)
    wrong = [type(x).__name__ for x in found if not _is_array(x)]
    if not found or wrong:
        got = "an empty tuple" if not found else f"a {wrong[0]}"
        if found and isinstance(out, tuple):
            got = f"a tuple with a {wrong[0]}"
        hint = ". Has it a return statement?" if out is None else ""
        raise TypeError(
            f"{op}: epilogue returned {got}, expected an array or a tuple of arrays{hint}"
        )
    return found


def check_result_dtypes(op: str, out: Sequence[Any], preferred: Any) -> None:
    """Checks that a tuple of dtypes has one for each result."""
    if preferred is not None and len(preferred) != len(out):
        returned = ", ".join(map(describe, out))
        _fail(
            op,
            [
                f"preferred_element_type has {_counted(preferred, 'dtype')}, "
                f"{_dtypes_text(preferred)}, and there {'is' if len(out) == 1 else 'are'} "
                f"{_counted(out, 'result')}, {returned}: expected one for each"
            ],
        )


def check_gated(
    x: Any,
    weights: Any,
    bias: Any,
    row_scale: Any,
    activation: Any,
    preactivation: Any,
    implementation: Any,
    sizes: Any = None,
    offset: Any = None,
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Checks a gated linear unit; with `sizes` one of rows in groups.

    Returns:
      x; the weights: one array or gate and up; the biases: none or gate's and up's; the scale of
      rows: none or one.
    """
    op = "gated_linear_unit"
    named = {"x": x}
    for name, given in (("weights", weights), ("bias", bias), ("row_scale", row_scale)):
        if isinstance(given, tuple | list):
            if len(given) != 2:
                _fail(op, [f"{name} is {len(given)} arrays, expected one or the pair (gate, up)"])
            named |= {f"{name}[{i}]": each for i, each in enumerate(given)}
        elif name == "weights" or given is not None:
            named[name] = given
    arrays = dict(zip(named, as_arrays(op, **named), strict=True))
    x = arrays["x"]
    rights = tuple(arrays[name] for name in arrays if name.startswith("weights"))
    biases = tuple(arrays[name] for name in arrays if name.startswith("bias"))
    scale = tuple(arrays[name] for name in arrays if name == "row_scale")
    problems = []
    for s in scale:
        rows = np.shape(x)[:-1]
        if np.ndim(s) != len(rows) or any(map(_differ, np.shape(s), rows)):
            problems.append(f"row_scale is {describe(s)}, expected {rows}: one for each row of x")
    lead = () if sizes is None else ("G",)
    if np.ndim(x) == 0:
        problems.append(f"x is a scalar, {describe(x)}, expected (..., K)")
    elif lead and np.ndim(x) != 2:
        problems.append(f"x is {describe(x)}, expected (M, K): its rows are in groups")
    problems += _weight_problems(rights, lead)
    if not problems:
        *groups, k, n = (np.shape(rights[0])[i] for i in (*range(len(lead)), len(lead), -1))
        if _differ(np.shape(x)[-1], k):
            names = ", ".join((*lead, "K, 2, N" if len(rights) == 1 else "K, N"))
            problems.append(
                f"K differs: x is {describe(x)}, weights is {_each_text(rights)}, expected "
                f"{'(M, K)' if lead else '(..., K)'} and ({names})"
                f"{'' if len(rights) == 1 else ' twice'}"
            )
        if sizes is not None and np.ndim(sizes) != 1:
            problems.append(f"group_sizes is {describe(sizes)}, expected (G,)")
        elif sizes is not None:
            problems += _group_problems(groups[0], rights[0], sizes, offset, "weights")
        expected = (*groups, n) if len(biases) == 2 else (*groups, 2, n)
        if any(
            np.ndim(b) != len(expected) or any(map(_differ, np.shape(b), expected)) for b in biases
        ):
            problems.append(f"bias is {_each_text(biases)}, expected {expected}")
        if max(map(_kind, biases), default=0) == COMPLEX > max(_kind(x), _kind(rights[0])):
            problems.append(f"bias is {_each_text(biases)}, and the products are not complex")
    if offset is not None and not lead:
        problems.append("group_offset came without group_sizes")
    problems += _name_problems(activation) + _choice_problems(preactivation, implementation)
    mistyped = _function_problems("activation", activation)
    if lead:
        _fail_ragged(op, problems, sizes, offset, None, mistyped)
    _fail(op, problems, mistyped)
    if len(biases) == 1:
        biases = (biases[0][..., 0, :], biases[0][..., 1, :])
    return x, rights, biases, scale


def _weight_problems(rights: tuple[Any, ...], lead: tuple[str, ...]) -> list[str]:
    pair, both = (f"({', '.join((*lead, *own))})" for own in (("K", "N"), ("K", "2", "N")))
    if len(rights) == 2:
        problems = [
            f"weights[{i}] is {describe(w)}, expected {pair}"
            for i, w in enumerate(rights)
            if np.ndim(w) != 2 + len(lead)
        ]
        gate, up = map(describe, rights)
        if not problems and gate != up:
            problems.append(f"gate and up differ: weights[0] is {gate}, weights[1] is {up}")
        return problems
    (weights,) = rights
    if np.ndim(weights) == 3 + len(lead) and not _differ(np.shape(weights)[-2], 2):
        return []
    if lead:
        hint = "stack gate and up with jnp.stack((gate, up), 2), or pass the pair (gate, up)"
        return [f"weights is {describe(weights)}, expected {both}: {hint}"]
    hint = "stack gate and up with jnp.stack((gate, up), 1), or pass the pair (gate, up)"
    if np.ndim(weights) == 2:
        hint = "reshape (K, 2 * N) to (K, 2, N), or pass the pair (gate, up)"
    elif np.ndim(weights) == 3 and np.shape(weights)[0] == 2:
        hint = "is it (2, K, N)? Pass the pair (weights[0], weights[1])"
    return [f"weights is {describe(weights)}, expected {both}: {hint}"]


def check_dot_general(lhs: Any, rhs: Any, dimension_numbers: Any) -> Any:
    """Returns `dimension_numbers` as nested tuples of plain integers; None stays None.

    Checks that axes exist, appear once, and have equal extents in both operands.
    """
    return (
        None
        if dimension_numbers is None
        else _checked_axes("dot_general", lhs, rhs, dimension_numbers)
    )


def _checked_axes(op: str, lhs: Any, rhs: Any, dimension_numbers: Any) -> Any:
    """Returns `dimension_numbers` as nested tuples of plain integers, checked."""
    try:
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = (
            tuple(tuple(int(axis) for axis in axes) for axes in pair) for pair in dimension_numbers
        )
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: dimension_numbers is {dimension_numbers!r}, expected "
            "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), each a sequence of axes"
        ) from None
    problems = []
    for name, x, axes in (
        ("lhs", lhs, lhs_contracting + lhs_batch),
        ("rhs", rhs, rhs_contracting + rhs_batch),
    ):
        if any(not 0 <= axis < np.ndim(x) for axis in axes):
            problems.append(
                f"{name} axes {axes} are not all between 0 and {np.ndim(x) - 1}: "
                f"{name} is {describe(x)}"
            )
        elif len(set(axes)) < len(axes):
            problems.append(f"{name} axes {axes} repeat: each is contracted or batched once")
    for kind, lhs_axes, rhs_axes in (
        ("contracting", lhs_contracting, rhs_contracting),
        ("batch", lhs_batch, rhs_batch),
    ):
        if len(lhs_axes) != len(rhs_axes):
            problems.append(f"{kind} axes {lhs_axes} and {rhs_axes} do not pair up")
        elif not problems:
            lhs_extents = tuple(np.shape(lhs)[axis] for axis in lhs_axes)
            rhs_extents = tuple(np.shape(rhs)[axis] for axis in rhs_axes)
            if any(map(_differ, lhs_extents, rhs_extents)):
                problems.append(
                    f"{kind} axes {lhs_axes} and {rhs_axes} have extents {lhs_extents} and "
                    f"{rhs_extents}: lhs is {describe(lhs)}, rhs is {describe(rhs)}"
                )
    _fail(op, problems)
    return (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)


def check_ragged_dot(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    offset: Any,
    implementation: Any,
    bias: Any = None,
    activation: Any = None,
) -> None:
    """Checks what `ragged_dot` takes: ranks, K, and the number of groups."""
    op, problems = "ragged_dot", []
    for name, x, expected in (
        ("lhs", lhs, ("M", "K")), ("rhs", rhs, ("G", "K", "N")), ("group_sizes", sizes, ("G",)),
    ):  # fmt: skip
        if np.ndim(x) != len(expected):
            text = f"({expected[0]},)" if len(expected) == 1 else f"({', '.join(expected)})"
            hint = ": other axes are ragged_dot_general's" if np.ndim(x) > len(expected) else ""
            problems.append(f"{name} is {describe(x)}, expected {text}{hint}")
    if not problems:
        k = np.shape(lhs)[1]
        if _differ(k, np.shape(rhs)[1]):
            hint = ""
            if not _differ(k, np.shape(rhs)[2]):
                hint = ". Is rhs stored (G, N, K)? Pass jnp.swapaxes(rhs, 1, 2)"
            problems.append(f"K differs: lhs is {describe(lhs)}, rhs is {describe(rhs)}{hint}")
        problems += _group_problems(np.shape(rhs)[0], rhs, sizes, offset)
        if bias is not None:
            problems += _group_bias_problems(bias, rhs)
            if _kind(bias) == COMPLEX > max(_kind(lhs), _kind(rhs)):
                problems.append(f"bias is {describe(bias)}, and the product is not complex")
    problems += _name_problems(activation)
    mistyped = _function_problems("activation", activation)
    _fail_ragged(op, problems, sizes, offset, implementation, mistyped)


def _group_bias_problems(bias: Any, rhs: Any) -> list[str]:
    expected = (np.shape(rhs)[0], np.shape(rhs)[-1])
    if np.ndim(bias) == 2 and not any(map(_differ, np.shape(bias), expected)):
        return []
    hint = ""
    if np.ndim(bias) == 1 and not _differ(np.shape(bias)[0], expected[1]):
        hint = ". One for all groups? Pass jnp.broadcast_to(bias, (G, N)), or add it in epilogue"
    return [
        f"bias is {describe(bias)}, expected {expected}, a row for each matrix of rhs, "
        f"{describe(rhs)}{hint}"
    ]


def check_group_operands(op: str, operands: Sequence[Any], rhs: Any) -> None:
    """Checks that an operand with an axis of groups has as many as the weights."""
    groups = np.shape(rhs)[0]
    _fail(
        op,
        [
            f"epilogue_operands[{i}] is {describe(x)}, expected ({groups}, 1, N) or "
            f"({groups}, 1, 1), an entry for each group of {describe(rhs)}, or at most two axes, "
            "which broadcast to (M, N)"
            for i, x in enumerate(operands)
            if np.ndim(x) > 3
            or (np.ndim(x) == 3 and (_differ(np.shape(x)[0], groups) or np.shape(x)[1] != 1))
        ],
    )


def _group_problems(groups: Any, rhs: Any, sizes: Any, offset: Any, name: str = "rhs") -> list[str]:
    """Returns whether sizes and groups of weights are not as many."""
    given = np.shape(sizes)[-1]
    if offset is None:
        if not _differ(groups, given):
            return []
        hint = ""
        if _less(groups, given):
            hint = f". Does {name} hold some of the groups? Say from which one on with group_offset"
    elif _less(given, groups):
        hint = ": group_sizes are those of all groups"
    else:
        return []
    return [f"G differs: {name} is {describe(rhs)}, group_sizes is {describe(sizes)}{hint}"]


def _fail_ragged(
    op: str,
    problems: list[str],
    sizes: Any,
    offset: Any,
    implementation: Any,
    mistyped: Sequence[str] = (),
) -> None:
    """Raises for all problems, with those that sizes and offset have by themselves."""
    mistyped = list(mistyped)
    for name, x in (("group_sizes", sizes), ("group_offset", offset)):
        if x is not None and not jnp.issubdtype(jax.dtypes.result_type(x), np.integer):
            mistyped.append(f"{name} is {describe(x)}, expected integers")
    if not mistyped and isinstance(sizes, np.ndarray) and (least := np.min(sizes, initial=0)) < 0:
        problems.append(f"group_sizes has a negative size, {least}: expected 0 or more")
    if offset is not None:
        if np.shape(offset) not in ((), (1,)):
            problems.append(f"group_offset is {describe(offset)}, expected a scalar or (1,)")
        elif not mistyped and isinstance(offset, int | np.ndarray | np.generic):
            first, groups = int(np.reshape(offset, ())), np.shape(sizes)[-1:]
            if first < 0 or (groups and _less(groups[0], first)):
                problems.append(
                    f"group_offset is {first}, expected the number of a group: group_sizes is "
                    f"{describe(sizes)}"
                )
    if implementation not in IMPLEMENTATIONS:
        problems.append(f"implementation is {implementation!r}, expected None, 'hopper' or 'xla'")
    _fail(op, problems, mistyped)


def check_ragged_dot_general(
    lhs: Any, rhs: Any, sizes: Any, numbers: Any, offset: Any, implementation: Any
) -> lax.RaggedDotDimensionNumbers:
    """Returns the dimension numbers as tuples of plain integers, which then are valid."""
    op = "ragged_dot_general"
    expected = "ragged_dot_dimension_numbers"
    if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
        raise TypeError(
            f"{op}: {expected} is a {type(numbers).__name__}, expected a "
            "jax.lax.RaggedDotDimensionNumbers"
        )
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = _checked_axes(
        op, lhs, rhs, numbers.dot_dimension_numbers
    )
    ragged = tuple(map(int, numbers.lhs_ragged_dimensions))
    groups = tuple(map(int, numbers.rhs_group_dimensions))
    problems = []
    if len(ragged) != 1 or not 0 <= ragged[0] < np.ndim(lhs):
        problems.append(
            f"lhs_ragged_dimensions is {ragged}, expected one axis of lhs, {describe(lhs)}"
        )
        _fail(op, problems)
    free = ragged[0] not in (*lhs_contracting, *lhs_batch)
    taken = (*rhs_contracting, *rhs_batch)
    if free and (len(groups) != 1 or groups[0] in taken or not 0 <= groups[0] < np.ndim(rhs)):
        problems.append(
            f"rhs_group_dimensions is {groups}, expected one axis of rhs, {describe(rhs)}, that is "
            "neither contracted nor a batch axis: the ragged axis is a free one of lhs"
        )
    elif not free and groups:
        problems.append(
            f"rhs_group_dimensions is {groups}, expected none: the ragged axis is a "
            f"{'batch' if ragged[0] in lhs_batch else 'contracted'} one"
        )
    if offset is not None and not free:
        problems.append("group_offset came, and rhs has no axis of groups that it could be into")
    if np.ndim(sizes) == 0:
        problems.append(f"group_sizes is a scalar, {describe(sizes)}, expected (G,)")
    elif not problems:
        lead = _axes_of_sizes(np.ndim(lhs), ragged[0], lhs_contracting, lhs_batch)
        outer = tuple(np.shape(lhs)[axis] for axis in lead)
        own = np.shape(sizes)[:-1]
        if own and (len(own) != len(outer) or any(map(_differ, own, outer))):
            shape = ", ".join([*map(str, outer), "G"])
            ways = "(G,)" if not outer else f"(G,) or ({shape})"
            problems.append(
                f"group_sizes is {describe(sizes)}, expected {ways}: lhs is {describe(lhs)}"
            )
        if free:
            problems += _group_problems(np.shape(rhs)[groups[0]], rhs, sizes, offset)
    _fail_ragged(op, problems, sizes, offset, implementation)
    return lax.RaggedDotDimensionNumbers(
        ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), ragged, groups
    )


def _axes_of_sizes(
    ndim: int, ragged: int, contracting: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the axes of the left operand that sizes may have before that of groups."""
    if ragged in batch:
        return batch[: batch.index(ragged)]
    free = tuple(axis for axis in range(ndim) if axis not in contracting + batch)
    kind = contracting if ragged in contracting else free
    return batch + kind[: kind.index(ragged)]


def check_explained_dot_general(named: Mapping[str, Any]) -> None:
    """Checks that no argument is given that only `matmul` has; `named` has them all by name."""
    given = [name for name, x in named.items() if x is not None]
    if given:
        raise TypeError(
            f"explain: {', '.join(given)} came with dimension_numbers, and dot_general has no such "
            "argument: write it into epilogue"
        )


def check_einsum(subscripts: Any, operands: Sequence[Any]) -> None:
    """Checks what must hold before `jnp.einsum` parses the subscripts."""
    if not isinstance(subscripts, str):
        raise TypeError(
            f"einsum: subscripts is a {type(subscripts).__name__}, expected a string such as "
            "'mk,kn->mn'"
        )
    if len(operands) != 2:
        _fail(
            "einsum",
            [f"{len(operands)} operands came, expected two: use jnp.einsum, or chain products"],
        )
    inputs = subscripts.replace(" ", "").split("->")[0].split(",")
    problems = []
    if len(inputs) != 2:
        problems.append(f"subscripts {subscripts!r} name {len(inputs)} operands, expected two")
    extents: dict[str, Any] = {}
    for labels, x in zip(inputs, operands, strict=False):
        if "." in labels:  # jnp.einsum checks what an ellipsis stands for
            continue
        if len(labels) != np.ndim(x):
            problems.append(
                f"subscripts {labels!r} name {len(labels)} axes of an operand that is {describe(x)}"
            )
            continue
        for label, extent in zip(labels, np.shape(x), strict=True):
            known = extents.setdefault(label, extent)
            if known == 1:
                extents[label] = extent
            elif _differ(known, extent) and extent != 1:
                problems.append(f"{label!r} in {subscripts!r} is {known} and {extent}")
    _fail("einsum", problems)


def describe(x: Any) -> str:
    """Returns an array as JAX prints it: "bf16[128,4096]"."""
    return array_text(np.shape(x), jax.dtypes.result_type(x).name)


def strong_dtype(x: Any) -> Any:
    """Returns the dtype of an array; None for None and for numbers, which take any."""
    if x is None or isinstance(x, SCALARS) or jax.typeof(x).weak_type:
        return None
    return jax.dtypes.result_type(x)


def _is_array(x: Any) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, SCALARS)


def _each_text(arrays: Sequence[Any]) -> str:
    return " and ".join(map(describe, arrays))


def _counted(things: Sequence[Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _dtypes_text(dtypes: Sequence[Any]) -> str:
    """Returns dtypes as JAX prints them: "(bf16, f32)"."""
    names = (short_dtype(jnp.dtype(x).name) if x is not None else "None" for x in dtypes)
    return f"({', '.join(names)})"


def _differ(x: Any, y: Any) -> bool:
    """Whether two extents are known and unequal; symbolic ones are JAX's to compare."""
    return isinstance(x, int) and isinstance(y, int) and x != y


def _less(x: Any, y: Any) -> bool:
    """Whether two extents are known and the first is the smaller one."""
    return isinstance(x, int) and isinstance(y, int) and x < y


def _fail(op: str, problems: Sequence[str], mistyped: Sequence[str] = ()) -> NoReturn | None:
    """Raises one error for all problems: TypeError if a type is among them, else ValueError."""
    if problems or mistyped:
        error = TypeError if mistyped else ValueError
        raise error(f"{op}: {'; '.join([*mistyped, *problems])}")
    return None
