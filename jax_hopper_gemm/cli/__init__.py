"""The command line: each command is a module whose `command` returns what JSON holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

import jax_hopper_gemm

from . import bench, build, cache, demo, explain, tune
from .report import CommandError, json_option, print_json, say

PROGRAM = "python -m jax_hopper_gemm"


@click.group(
    invoke_without_command=True,
    epilog="Exit status: 0 done, 1 failed, 2 wrong arguments, 130 interrupted. A failure is one "
    "line on stderr; with --json the object on stdout has it as well.",
)
@click.version_option(
    jax_hopper_gemm.__version__, prog_name="jax-hopper-gemm", message="%(prog)s %(version)s"
)
@json_option
@click.pass_context
def cli(context: click.Context) -> dict[str, Any] | None:
    """Matrix products for JAX on NVIDIA Hopper GPUs.

    Without a command: what this machine has, then a jitted product with gradients, checked.
    """
    return demo.run() if context.invoked_subcommand is None else None


for module in (explain, build, tune, bench, cache):
    cli.add_command(module.command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    say.silent = "--json" in words
    result, error, status = None, None, 0
    try:
        with cli.make_context(PROGRAM, [*words]) as context:
            result = cli.invoke(context)
    except click.exceptions.Exit as done:  # --help or --version
        return done.exit_code
    except BrokenPipeError:
        return _nobody_reads()
    except click.UsageError as wrong:
        command = wrong.ctx.command_path if wrong.ctx else PROGRAM
        error, status = f"{wrong.format_message().rstrip('.')}. See {command} --help", 2
    except KeyboardInterrupt:
        error, status = "interrupted", 130
    # What the package and JAX say of a machine, a file or a variable that cannot be used.
    except (CommandError, OSError, RuntimeError, ValueError) as failure:
        error, status = " ".join(str(failure).split()) or repr(failure), 1
        result = getattr(failure, "result", None)
    if say.silent:
        try:
            print_json(command_in(words), status, result, error)
        except BrokenPipeError:
            return _nobody_reads()
        except OSError as failure:  # a full disk
            _nobody_reads()
            error, status = error or str(failure), status or 1
    if error:
        print(f"error: {error}", file=sys.stderr)
    return status


def _nobody_reads() -> int:
    """Drops what is left to print: the reader, such as `head`, has all it wants."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def command_in(words: Sequence[str]) -> str:
    """Returns the command that is typed, as "cache show"; "" for none."""
    command: click.Command = cli
    path = []
    for word in words:
        if isinstance(command, click.Group) and word in command.commands:
            command = command.commands[word]
            path.append(word)
    return " ".join(path)
