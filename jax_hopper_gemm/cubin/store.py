"""Folders of compiled kernels: the user's cache, and kernels built ahead of time.

An entry is two files named by the digest: `.cubin`, the code, and `.json`, its manifest and a
checksum over digest, code and manifest. Each is written under a temporary name and renamed, so a
reader never sees half a file. A pair that does not fit its checksum counts as absent, and so does
a kernel of another spec than the one asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .digest import CubinError, check_digest, is_digest
from .manifest import Manifest, as_text

_log = logging.getLogger(__name__)

_ENTRY_FILE = re.compile(r"[0-9a-f]{64}\.(cubin|json|lock)(\.[0-9a-f]+\.tmp)?")


@dataclass(frozen=True)
class Compiled:
    """A kernel as bytes."""

    cubin: bytes  # the ELF file
    manifest: Manifest  # its facts
    origin: str  # where it came from: "prebuilt FOLDER", "cache FOLDER" or "compiled"


@dataclass(frozen=True)
class Store:
    """One folder; it need not exist."""

    folder: Path  # where the entries lie
    kind: str  # what the folder is: "prebuilt" or "cache"

    def __str__(self) -> str:
        return f"{self.kind} {self.folder}"

    def read(self, digest: str, spec_json: str | None = None) -> Compiled | None:
        """Returns the entry, or None where it is absent, damaged, unreadable or of another spec.

        Args:
          spec_json: `GemmSpec.to_json()` of what is asked for; None where that is not known.

        Raises:
          CubinError: `digest` is none.
        """
        cubin_path, manifest_path = self._path(digest, "cubin"), self._path(digest, "json")
        try:
            cubin, text = cubin_path.read_bytes(), manifest_path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            _log.warning("%s: cannot read %s, doing without it: %s", self, digest, error)
            return None
        manifest = _intact_manifest(digest, cubin, text)
        if manifest is None:
            _log.warning("%s: the entry %s is damaged, doing without it", self, digest)
            return None
        if spec_json is not None and not manifest.is_of(spec_json):
            _log.warning(
                "%s: the entry %s is of %s, doing without it: asked for was %s",
                self, digest, manifest.spec, spec_json,
            )  # fmt: skip
            return None
        _warn_of_writers(self)
        return Compiled(cubin, manifest, str(self))

    def write(self, digest: str, cubin: bytes, manifest: Manifest) -> None:
        """Writes an entry, over a damaged one if need be.

        Raises:
          CubinError: `digest` is none.
          OSError: the folder cannot be written, or the disk is full.
        """
        cubin_path, manifest_path = self._path(digest, "cubin"), self._path(digest, "json")
        self.folder.mkdir(parents=True, exist_ok=True)
        _warn_of_writers(self)
        text = manifest.to_json()
        entry = {"manifest": json.loads(text), "checksum": _checksum(digest, cubin, text)}
        _replace(cubin_path, cubin)
        _replace(manifest_path, json.dumps(entry, indent=2).encode())

    @contextlib.contextmanager
    def locked(self, digest: str) -> Iterator[None]:
        """Holds off other threads and processes that want to build the same entry.

        Where the folder cannot be written or its file system has no locks, it lets everyone
        through: they do the same work twice and no harm.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self._path(digest, "lock"), "ab"))
                fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it
            yield

    def entries(self) -> dict[str, Compiled]:
        """Returns the intact entries by digest."""
        digests = filter(is_digest, sorted(path.stem for path in self.folder.glob("*.json")))
        found = {digest: self.read(digest) for digest in digests}
        return {digest: entry for digest, entry in found.items() if entry}

    def _path(self, digest: str, suffix: str) -> Path:
        """NOTE: programs bring digests, and one that is none would name a file anywhere."""
        check_digest(digest)
        return self.folder / f"{digest}.{suffix}"


@functools.cache
def _warn_of_writers(store: Store) -> None:
    """Warns once a process of a folder that others may write: the GPU runs what lies there."""
    try:
        status = store.folder.stat()
    except OSError:
        return
    writers = []
    if status.st_uid not in (0, os.geteuid()):
        writers.append(f"user {status.st_uid}, whose it is,")
    if status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid():
        writers.append(f"group {status.st_gid}")
    if status.st_mode & stat.S_IWOTH:
        writers.append("everybody")
    if writers:
        _log.warning(
            "%s: %s may write there, and what lies there runs on the GPU as yours. Take the "
            "permission away (chmod go-w), or name a folder of your own. See SECURITY.md.",
            store, " and ".join(writers),
        )  # fmt: skip


def _intact_manifest(digest: str, cubin: bytes, text: str) -> Manifest | None:
    """Returns the manifest in `text`; None unless it, `digest` and `cubin` fit the checksum."""
    try:
        entry = json.loads(text)
        fields = as_text(entry["manifest"])  # all of them: another version may have more
        intact = entry["checksum"] == _checksum(digest, cubin, fields)
        manifest = Manifest.from_json(fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return manifest if intact else None


def _checksum(digest: str, cubin: bytes, manifest: str) -> str:
    return hashlib.sha256(digest.encode() + cubin + manifest.encode()).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Puts `content` at `path` in one step."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def cache_dir() -> Path:
    """Returns the folder of the cache, which need not exist.

    `JAX_HOPPER_GEMM_CACHE` names it; else it is `jax_hopper_gemm` under `XDG_CACHE_HOME`
    (`~/.cache`). A user without a home has none: nothing is kept, and a warning says so.

    Raises:
      CubinError: the variable names something else than a folder.
    """
    if chosen := os.environ.get("JAX_HOPPER_GEMM_CACHE"):
        if os.path.exists(chosen) and not os.path.isdir(chosen):
            raise CubinError(
                f"JAX_HOPPER_GEMM_CACHE is {chosen!r}, which is no folder; expected a folder, "
                "which need not exist. Name one, or unset the variable."
            )
        return Path(chosen)
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent) / "jax_hopper_gemm"
    try:
        return Path.home() / ".cache" / "jax_hopper_gemm"
    except RuntimeError:  # no HOME, and a user id without a name, as containers have
        return Path(os.devnull) / "jax_hopper_gemm"  # holds nothing and cannot be written


def user_cache() -> Store:
    return Store(cache_dir(), "cache")


def clear_cache() -> int:
    """Deletes every entry, damaged ones too, and nothing else; returns the bytes freed."""
    freed = 0
    for path in cache_dir().glob("*"):
        if _ENTRY_FILE.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another process clears it, too
                size = path.stat().st_size
                path.unlink()
                freed += size
    return freed
