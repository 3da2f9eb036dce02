"""`explain`: which kernel runs a product on this GPU, or on an H200, and why."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from typing import Any

from .. import ops
from ..reports import explain
from . import products
from .report import print_json


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = (
        "Shows what a jitted product runs on this machine's GPU, or on an H200 where it has none: "
        "the kernel, or XLA, and why. D is (M, N), A and B are contracted over K. With --groups "
        "the rows of A are in groups, each with a B of its own, as in ragged_dot."
    )
    parser = commands.add_parser("explain", help="show what a product runs", description=text)
    for extent in ("M", "N", "K"):
        parser.add_argument(extent, type=products.positive)
    products.add_arguments(parser)
    parser.add_argument("--groups", type=products.positive, metavar="G", help="matrices B [none]")
    parser.add_argument(
        "--implementation", choices=("hopper", "xla"), help="as in matmul [the faster one]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    import jax

    from ..testing import shapes

    problem = products.problem((args.M, args.N, args.K), args)
    a, b = (shapes.operand_shape(problem, operand) for operand in ("a", "b"))
    function: Any = ops.dot_general
    numbers: Any = shapes.dimension_numbers(problem)
    groups: tuple[Any, ...] = ()
    if args.groups:
        if args.a_major == "m":
            parser.error("--groups takes A stored (M, K): XLA would copy one stored (K, M)")
        lead = len(a) - 2
        b = (*b[:lead], args.groups, *b[lead:])
        function, numbers = ops.ragged_dot_general, _ragged(numbers, lead)
        groups = (jax.ShapeDtypeStruct((args.groups,), "int32"),)
    answer = explain(
        function,
        jax.ShapeDtypeStruct(a, problem.a_dtype), jax.ShapeDtypeStruct(b, problem.b_dtype),
        *groups, numbers, preferred_element_type=problem.d_dtype,
        implementation=args.implementation,
    )  # fmt: skip
    if args.json:
        print_json(asdict(answer) | {"kernel": answer.spec.name if answer.spec else None})
    else:
        print(answer)
    return 0


def _ragged(numbers: Any, lead: int) -> Any:
    """Returns a product's dimension numbers with A's rows in groups and an axis of them in B.

    Args:
      numbers: those of `dot_general`, A being stored (M, K).
      lead: batch axes, after which A has its rows and B its groups.
    """
    from jax import lax

    ((a_k,), (b_k,)), batch = numbers
    return lax.RaggedDotDimensionNumbers((([a_k], [b_k + 1]), batch), [lead], [lead])
