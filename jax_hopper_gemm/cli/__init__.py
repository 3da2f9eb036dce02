"""The command line: each command is a module with `add_parser` and a function that runs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax_hopper_gemm

from . import bench, build, cache, demo, explain, tune
from .report import CommandError

COMMANDS = (explain, build, tune, bench, cache)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 wrong arguments.

    A failure is one line on stderr.
    """
    args = make_parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # the reader, such as `head`, has all it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    # What the package and JAX say of a machine, a file or a variable that cannot be used.
    except (CommandError, OSError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split()) or repr(error)
        print(f"error: {text}", file=sys.stderr)
        return 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}. See {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m jax_hopper_gemm",
        description="Matrix products for JAX on NVIDIA Hopper GPUs. Without a command: what this "
        "machine has, then a jitted product with gradients, checked.",
    )
    version = f"jax-hopper-gemm {jax_hopper_gemm.__version__}"
    parser.add_argument("--version", action="version", version=version)
    demo.add_arguments(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
