"""`cache show`, `cache clear`: the kernels compiled on this machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from .. import cubin
from .report import bytes_text, print_json, print_table


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("cache", help="show or clear the cache of compiled kernels")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("show", show, "list the kernels in the cache"),
        ("clear", clear, "delete them; they are compiled again when needed"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=run)


def show(args: argparse.Namespace) -> int:
    folder, entries = cubin.cache_dir(), cubin.cache_entries()
    if args.json:
        print_json({"folder": str(folder), "entries": [asdict(entry) for entry in entries]})
        return 0
    size = bytes_text(sum(entry.nbytes for entry in entries))
    print(f"{len(entries)} kernels, {size}, in {folder}")
    if entries:
        rows = [(entry.digest[:16], bytes_text(entry.nbytes), entry.name) for entry in entries]
        print_table(("digest", "size", "kernel"), rows)
    return 0


def clear(args: argparse.Namespace) -> int:
    folder, freed = cubin.cache_dir(), cubin.clear_cache()
    if args.json:
        print_json({"folder": str(folder), "freed_bytes": freed})
    else:
        print(f"freed {bytes_text(freed)} in {folder}")
    return 0
