"""`bench`: times our kernels and XLA's on this GPU."""

from __future__ import annotations

import argparse

from .report import CommandError


def add_parser(commands: argparse._SubParsersAction) -> None:
    from ..testing import benchmark

    text = "time products beside XLA's and Pallas's, in alternation; needs a Hopper GPU"
    parser = commands.add_parser("bench", help="time products beside XLA's", description=text)
    benchmark.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..testing import benchmark

    try:
        return benchmark.main(args)
    except (RuntimeError, ValueError) as error:
        raise CommandError(str(error)) from error
