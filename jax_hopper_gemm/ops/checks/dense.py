"""Checks of dense products: ranks, extents, axes, and the arguments of `matmul`'s epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from operator import index
from typing import Any

import numpy as np
from opt_einsum.parser import parse_einsum_input

from ...gemm.subscripts import Subscripts
from .arguments import COMPLEX, activation_problems, bits, is_array, kind, strong_dtype
from .wording import counted, describe, differ, fail


def check_matmul(a: Any, b: Any, terms: Mapping[str, Any], activation: Any, preferred: Any) -> None:
    """Checks ranks, K and batch axes by the rules of `jnp.matmul`, then the epilogue.

    `terms` are bias, residual, c, alpha and beta by name, without those that are None.
    """
    misshapen, problems = _matmul_problems(a, b), []
    if not misshapen:
        problems += _broadcasting_problems(_matmul_shape(np.shape(a), np.shape(b)), terms)
        problems += kind_problems(a, b, terms, preferred)
    named, mistyped = activation_problems(activation)
    problems += factor_problems(terms, "(a @ b)") + named
    fail("matmul", problems, mistyped, misshapen)


def _matmul_problems(a: Any, b: Any) -> list[str]:
    scalars = [
        f"{name} is a scalar, {describe(x)}, expected at least one axis: scale with *"
        for name, x in (("a", a), ("b", b))
        if np.ndim(x) == 0
    ]
    if scalars:
        return scalars
    a_shape, b_shape, found = np.shape(a), np.shape(b), []
    k_a, k_b = a_shape[-1], b_shape[max(len(b_shape) - 2, 0)]
    if differ(k_a, k_b):
        hint = ". Is b stored (N, K)? Contract it with dot_general(a, b, (((1,), (1,)), ((), ())))"
        transposed = len(a_shape) == len(b_shape) == 2 and not differ(k_a, b_shape[1])
        found.append(("K differs", hint if transposed else ""))
    batches = zip(reversed(a_shape[:-2]), reversed(b_shape[:-2]), strict=False)
    if any(differ(x, y) and 1 not in (x, y) for x, y in batches):
        found.append((f"batch axes {a_shape[:-2]} and {b_shape[:-2]} do not broadcast", ""))
    return [f"{what}: a is {describe(a)}, b is {describe(b)}{hint}" for what, hint in found]


def _matmul_shape(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the shape of a product of arrays of these shapes, which fit."""
    batches = zip_longest(reversed(a[:-2]), reversed(b[:-2]), fillvalue=1)
    batch = [y if isinstance(x, int) and x == 1 else x for x, y in batches]
    return (*reversed(batch), *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def _broadcasting_problems(shape: tuple[Any, ...], terms: Mapping[str, Any]) -> list[str]:
    """Returns which of bias, residual and c do not broadcast to the result's shape."""
    problems = []
    for name in ("bias", "residual", "c"):
        if name not in terms:
            continue
        own = np.shape(terms[name])
        fits = len(own) <= len(shape) and not any(
            differ(x, y) and x != 1 for x, y in zip(reversed(own), reversed(shape), strict=False)
        )
        if not fits:
            for_rows = len(own) == 1 and len(shape) > 1 and own[0] == shape[-2]
            hint = f". Is it one value a row? Pass {name}[:, None]" if for_rows else ""
            problems.append(
                f"{name} is {describe(terms[name])}, which does not broadcast to the result's "
                f"shape {shape}{hint}"
            )
    return problems


def factor_problems(terms: Mapping[str, Any], product: str) -> list[str]:
    """Returns the problems of alpha and beta, factors of a product of this name and of c."""
    problems = [
        f"{name} is {describe(terms[name])}, expected a number or a scalar array"
        for name in ("alpha", "beta")
        if name in terms and np.ndim(terms[name]) > 0
    ]
    if "beta" in terms and "c" not in terms:
        problems.append(
            f"beta came without c: it is the factor of c in alpha * {product} + beta * c"
        )
    return problems


def kind_problems(a: Any, b: Any, terms: Mapping[str, Any], preferred: Any) -> list[str]:
    """Returns the operands whose kind of number does not fit the product, as problems."""
    single = preferred is not None and not isinstance(preferred, tuple | list)
    c = terms.get("c")
    decides = c is not None and not single and strong_dtype(c) is not None
    product = kind(np.result_type(preferred)) if single else max(kind(a), kind(b))
    problems = []
    narrow = decides and product == 0 and bits(c) < max(bits(a), bits(b))  # JAX cuts no integers
    if narrow or (decides and kind(c) < product):
        problems.append(
            f"c is {describe(c)}, whose dtype the result takes and which cannot hold the product "
            f"of {describe(a)} and {describe(b)}: convert c, or pass preferred_element_type"
        )
    elif decides:
        product = kind(c)
    for name, x in terms.items():
        if kind(x) == COMPLEX > product:
            problems.append(
                f"{name} is {describe(x)}, which is complex, and the product is not: convert one "
                "of them, or pass preferred_element_type"
            )
    return problems


def matmul_axes(a: Any, b: Any) -> Any:
    """Returns the dimension numbers of a matmul whose batch axes do not broadcast."""
    a_ndim, b_ndim = np.ndim(a), np.ndim(b)
    batch = tuple(range(b_ndim - 2))
    fits = a_ndim >= 2 and b_ndim >= 2 and (not batch or np.shape(a)[:-2] == np.shape(b)[:-2])
    if not fits:
        raise NotImplementedError(
            f"matmul: what is multiplied in 8 bits is {describe(a)} and {describe(b)}, expected "
            "(..., M, K) by (K, N), or matrices in equal batches: reshape them"
        )
    return ((a_ndim - 1,), (b_ndim - 2,)), (batch, batch)


def checked_axes(op: str, lhs: Any, rhs: Any, dimension_numbers: Any) -> Any:
    """Returns `dimension_numbers` as nested tuples of plain integers; None stays None.

    Checks that axes exist, appear once, and have equal extents in both operands.
    """
    if dimension_numbers is None:
        return None
    try:
        checked = tuple(
            tuple(tuple(map(index, np.ravel(axes))) for axes in pair) for pair in dimension_numbers
        )
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = checked
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: dimension_numbers is {dimension_numbers!r}, expected "
            "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), each an axis or several"
        ) from None
    problems = _axes_problems("lhs", lhs, lhs_contracting + lhs_batch)
    problems += _axes_problems("rhs", rhs, rhs_contracting + rhs_batch)
    for role, pair in zip(("contracting", "batch"), checked, strict=True):
        text = f"{role} axes {pair[0]} and {pair[1]}"
        if len(pair[0]) != len(pair[1]):
            problems.append(f"{text} do not pair up")
        elif not problems:
            extents = [
                tuple(np.shape(x)[i] for i in axes)
                for x, axes in zip((lhs, rhs), pair, strict=True)
            ]
            if any(map(differ, *extents)):
                problems.append(
                    f"{text} have extents {extents[0]} and {extents[1]}: lhs is {describe(lhs)}, "
                    f"rhs is {describe(rhs)}"
                )
    fail(op, [], misshapen=problems)
    return checked


def _axes_problems(name: str, x: Any, axes: tuple[int, ...]) -> list[str]:
    if any(not 0 <= axis < np.ndim(x) for axis in axes):
        limits = f"between 0 and {np.ndim(x) - 1}"
        return [f"{name} axes {axes} are not all {limits}: {name} is {describe(x)}"]
    if len(set(axes)) < len(axes):
        return [f"{name} axes {axes} repeat: each is contracted or batched once"]
    return []


def one_product(text: str, operands: Sequence[Any]) -> Subscripts:
    """Returns the subscripts of an einsum that is one product, checked by `check_einsum`.

    Raises:
      NotImplementedError: it is not one product.
    """
    shapes = map(np.shape, operands)
    inputs, out, _ = parse_einsum_input((text, *shapes), shapes=True)  # spells an ellipsis out
    terms = inputs.split(",")
    once = all(len(set(x)) == len(x) for x in (*terms, out))
    alone = "".join(x for x in inputs if inputs.count(x) == 1 and x != ",")
    if len(terms) != 2 or not once or set(alone) - set(out):
        raise NotImplementedError(
            f"einsum: subscripts {text!r} of quantized arrays, or by a recipe, are not those of "
            "one product, such as '...mk,kn->...mn': write them so, dequantize the arrays, or "
            "leave the recipe out"
        )
    return Subscripts(terms[0], terms[1], out)


def check_einsum(subscripts: Any, operands: Sequence[Any], epilogue: Any = None) -> None:
    """Checks what must hold before `jnp.einsum` parses the subscripts."""
    if not isinstance(subscripts, str):
        raise TypeError(
            f"einsum: subscripts is a {type(subscripts).__name__}, expected a string such as "
            "'mk,kn->mn'"
        )
    named, _, out = subscripts.replace(" ", "").partition("->")
    inputs, came = named.split(","), counted(operands, "operand")
    strange = sorted({*out} - {*named, *".->"})
    problems = [f"{x!r} in {subscripts!r} is an axis of the result alone" for x in strange]
    if len(inputs) != len(operands):
        problems.append(f"subscripts {subscripts!r} name {counted(inputs, 'operand')}, {came} came")
    if epilogue is not None and len(operands) != 2:
        problems.append(f"{came} came with an epilogue, which follows a product of two")
    extents: dict[str, Any] = {}
    for labels, x in zip(inputs, operands, strict=False):
        if "." in labels or not is_array(getattr(x, "values", x)):
            continue  # jnp.einsum checks what an ellipsis stands for, `as_arrays` what is an array
        if len(labels) != np.ndim(x):
            problems.append(
                f"subscripts {labels!r} name {len(labels)} axes of an operand that is {describe(x)}"
            )
            continue
        for label, extent in zip(labels, np.shape(x), strict=True):
            first = extents.setdefault(label, extent)
            if first == 1:
                extents[label] = extent
            elif differ(first, extent) and extent != 1:
                problems.append(f"{label!r} in {subscripts!r} is {first} and {extent}")
    fail("einsum", problems)
