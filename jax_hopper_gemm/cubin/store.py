"""A folder of compiled kernels: the user's cache, or kernels built ahead of time.

An entry is two files named by the digest: `.cubin`, the code, and `.json`, its manifest and a
checksum over both. Each is written under a temporary name and renamed, so a reader never sees
half a file; a pair that does not fit its checksum counts as absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .manifest import Manifest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """A kernel as bytes.

    Attributes:
      cubin: the ELF file.
      manifest: its facts.
      origin: where it came from: "prebuilt FOLDER", "cache FOLDER" or "compiled".
    """

    cubin: bytes
    manifest: Manifest
    origin: str


@dataclass(frozen=True)
class Store:
    """One folder; it need not exist.

    Attributes:
      folder: where the entries lie.
      kind: what the folder is: "prebuilt" or "cache".
    """

    folder: Path
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} {self.folder}"

    def read(self, digest: str) -> Compiled | None:
        """Returns the entry, or None where it is absent, damaged or unreadable."""
        cubin_path, manifest_path = self._paths(digest)
        try:
            cubin, text = cubin_path.read_bytes(), manifest_path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            _log.warning("%s: cannot read %s, doing without it: %s", self, digest, error)
            return None
        manifest = _intact_manifest(cubin, text)
        if manifest is None:
            _log.warning("%s: the entry %s is damaged, doing without it", self, digest)
            return None
        return Compiled(cubin, manifest, str(self))

    def write(self, digest: str, cubin: bytes, manifest: Manifest) -> None:
        """Writes an entry, over a damaged one if need be.

        Raises:
          OSError: the folder cannot be written, or the disk is full.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        cubin_path, manifest_path = self._paths(digest)
        entry = {
            "manifest": json.loads(manifest.to_json()),
            "checksum": _checksum(cubin, manifest),
        }
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
                file = stack.enter_context(open(self.folder / f"{digest}.lock", "ab"))
                fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it
            yield

    def entries(self) -> dict[str, Compiled]:
        """Returns the intact entries by digest."""
        found = {path.stem: self.read(path.stem) for path in sorted(self.folder.glob("*.json"))}
        return {digest: entry for digest, entry in found.items() if entry}

    def _paths(self, digest: str) -> tuple[Path, Path]:
        return self.folder / f"{digest}.cubin", self.folder / f"{digest}.json"


def _intact_manifest(cubin: bytes, text: str) -> Manifest | None:
    """Returns the manifest in `text`; None unless it and `cubin` fit the checksum."""
    try:
        entry = json.loads(text)
        manifest = Manifest.from_json(json.dumps(entry["manifest"]))
        intact = entry["checksum"] == _checksum(cubin, manifest)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if intact else None


def _checksum(cubin: bytes, manifest: Manifest) -> str:
    return hashlib.sha256(cubin + manifest.to_json().encode()).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Puts `content` at `path` in one step."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
