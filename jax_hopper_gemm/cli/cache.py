"""`cache show`, `cache clear`: the kernels compiled on this machine."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import click
from rich.table import Table

from .. import cubin
from .report import bytes_text, json_option, say


@click.group("cache", no_args_is_help=False)
@json_option
def command() -> None:
    """Show or clear the cache of compiled kernels."""


@command.command()
@json_option
def show() -> dict[str, Any]:
    """List the kernels in the cache."""
    cache = cubin.user_cache()
    entries = [
        {"digest": digest, "name": kernel.manifest.name, "nbytes": len(kernel.cubin)}
        for digest, kernel in cache.entries().items()
    ]
    entries.sort(key=itemgetter("name", "digest"))
    size = bytes_text(sum(entry["nbytes"] for entry in entries))
    say(f"{len(entries)} kernels, {size}, in {cache.folder}")
    if entries:
        table = Table("digest", "size", "kernel", box=None, pad_edge=False)
        for entry in entries:
            table.add_row(entry["digest"][:16], bytes_text(entry["nbytes"]), entry["name"])
        say(table)
    return {"folder": str(cache.folder), "entries": entries}


@command.command()
@json_option
def clear() -> dict[str, Any]:
    """Delete them; they are compiled again when needed."""
    folder, freed = cubin.cache_dir(), cubin.clear_cache()
    say(f"freed {bytes_text(freed)} in {folder}")
    return {"folder": str(folder), "freed_bytes": freed}
