"""`explain`: which kernel runs a product on this GPU, or on an H200, and why."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from .. import ops
from . import products
from .report import print_json


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = (
        "Shows what a jitted product runs on this machine's GPU, or on an H200 where it has none: "
        "the kernel, or XLA, and why. D is (M, N), A and B are contracted over K."
    )
    parser = commands.add_parser("explain", help="show what a product runs", description=text)
    for extent in ("M", "N", "K"):
        parser.add_argument(extent, type=products.positive)
    products.add_arguments(parser)
    parser.add_argument(
        "--implementation", choices=("hopper", "xla"), help="as in matmul [the faster one]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import jax

    from ..testing import shapes

    problem = products.problem((args.M, args.N, args.K), args)
    a, b = (
        jax.ShapeDtypeStruct(shapes.operand_shape(problem, operand), problem.ab_dtype)
        for operand in ("a", "b")
    )
    found = ops.explain(
        a,
        b,
        dimension_numbers=shapes.dimension_numbers(problem),
        preferred_element_type=problem.d_dtype,
        implementation=args.implementation,
    )
    if args.json:
        print_json(asdict(found) | {"kernel": found.spec.name if found.spec else None})
    else:
        print(found)
    return 0
