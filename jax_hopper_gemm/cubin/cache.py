"""The user's cache of compiled kernels: where it is, what it holds, how it is emptied."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from .store import Store

_ENTRY_FILE = re.compile(r"[0-9a-f]{64}\.(cubin|json|lock)(\.[0-9a-f]+\.tmp)?")


@dataclass(frozen=True)
class CacheEntry:
    """A kernel in the cache: its digest, the name of its spec, the size of its cubin."""

    digest: str
    name: str
    nbytes: int


def cache_dir() -> Path:
    """Returns the folder of the cache, which need not exist.

    `JAX_HOPPER_GEMM_CACHE` names it; else it is `jax_hopper_gemm` under `XDG_CACHE_HOME`
    (`~/.cache`).
    """
    if chosen := os.environ.get("JAX_HOPPER_GEMM_CACHE"):
        return Path(chosen)
    parent = os.environ.get("XDG_CACHE_HOME")
    return (Path(parent) if parent else Path.home() / ".cache") / "jax_hopper_gemm"


def user_cache() -> Store:
    return Store(cache_dir(), "cache")


def cache_entries() -> list[CacheEntry]:
    """Returns the intact entries, by name."""
    found = [
        CacheEntry(digest, entry.manifest.name, len(entry.cubin))
        for digest, entry in user_cache().entries().items()
    ]
    return sorted(found, key=lambda entry: (entry.name, entry.digest))


def clear_cache() -> int:
    """Deletes every entry, damaged ones too, and nothing else; returns the bytes freed."""
    freed = 0
    for path in cache_dir().glob("*"):
        if _ENTRY_FILE.fullmatch(path.name):
            freed += path.stat().st_size
            path.unlink()
    return freed
