"""The command line: each command is a module with `add_parser` and a function that runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import bench, build, cache, demo, explain, tune
from .report import CommandError

COMMANDS = (explain, build, tune, bench, cache)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 wrong arguments."""
    args = make_parser().parse_args(argv)
    try:
        return args.run(args)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_hopper_gemm",
        description="Matrix products for JAX on NVIDIA Hopper GPUs. Without a command: what this "
        "machine has, then a jitted product with gradients, checked.",
    )
    demo.add_arguments(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
