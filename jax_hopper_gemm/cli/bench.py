"""`bench`: times our kernels and XLA's on this GPU."""

from __future__ import annotations

import argparse

from .report import CommandError, check_file


def add_parser(commands: argparse._SubParsersAction) -> None:
    from ..testing import benchmark

    text = "time products beside XLA's and Pallas's, in alternation; needs a Hopper GPU"
    parser = commands.add_parser("bench", help="time products beside XLA's", description=text)
    benchmark.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..testing import benchmark

    if args.rounds < 1:
        raise CommandError(f"--rounds is {args.rounds}; expected at least 1")
    if unknown := sorted(set(args.without) - benchmark.MAKERS.keys()):
        names = ", ".join(benchmark.MAKERS)
        raise CommandError(f"--without: no candidate is called {unknown[0]!r}; there are {names}")
    if not benchmark.MAKERS.keys() - set(args.without):
        raise CommandError("--without leaves out every candidate; keep one to time")
    check_file(args.json, "--json")
    check_file(args.plot, "--plot")
    return benchmark.main(args)
