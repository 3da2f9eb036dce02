"""Fuzzers of what lies in files: cubins, caches, tables, the names in programs (`fuzz.py`)."""

from __future__ import annotations

import copy
import json
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cubin_samples import SPEC, sample_cubin, sample_manifest, start_python

from jax_hopper_gemm.cubin import CubinError, lookup, store
from jax_hopper_gemm.cubin.elf import read_kernel
from jax_hopper_gemm.cubin.manifest import as_text
from jax_hopper_gemm.cubin.store import Store

Trial = Callable[[int], None]
DIGEST = "a" * 64
JUNK: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2**31, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "x", "m",
    "\ud800", [], {}, [1], [[1]], {"a": 1},
)  # fmt: skip


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Returns bytes of which some are others, gone, or new."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, how = rng.randrange(len(found) + 1), rng.random()
        junk = rng.choice((b"\xff" * 8, bytes(8), rng.randbytes(rng.randint(1, 8)), b"[" * 2000))
        if how < 0.6:
            found[at : at + len(junk)] = junk
        elif how < 0.8:
            found[at:at] = rng.choice((junk, b"9" * 400, bytes([rng.choice(b'019-.e"[]{},:')])))
        else:
            del found[at : at + rng.choice((1, 8, len(found)))]
    return bytes(found)


def tampered(rng: random.Random, document: Any) -> Any:
    """Returns a JSON document of which some values are others, or gone."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 2, 3))):
        within = document
        while True:
            keys = list(within if isinstance(within, dict) else range(len(within)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(within[key], dict | list) and rng.random() < 0.85:
                within = within[key]
                continue
            if rng.random() < 0.15:
                del within[key]
            else:
                within[key] = copy.deepcopy(rng.choice(JUNK))
            break
    return document


def elf(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Damaged cubins are errors of their own kind."""
    cubin = sample_cubin()

    def trial(seed: int) -> None:
        try:
            read_kernel(damaged(random.Random(seed), cubin))
        except CubinError:
            pass

    return trial


def entries(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Damaged entries of a cache count as absent; those with a right checksum raise nothing."""
    cache = Store(folder / "cache", "cache")
    cache.write(DIGEST, sample_cubin(), sample_manifest())
    right, cubin = cache.read(DIGEST), sample_cubin()
    code, facts = cache.folder / f"{DIGEST}.cubin", cache.folder / f"{DIGEST}.json"
    intact = facts.read_bytes()

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        kind = rng.choice(("code", "facts", "forged"))
        if kind == "forged":
            entry = tampered(rng, json.loads(intact))
            if isinstance(entry.get("manifest"), dict | list):
                checksum = store._checksum(DIGEST, cubin, as_text(entry["manifest"]))
                entry["checksum"] = checksum
            facts.write_text(json.dumps(entry))
        elif kind == "code":
            code.write_bytes(damaged(rng, cubin))
        else:
            facts.write_bytes(damaged(rng, intact))
        found = cache.read(DIGEST, SPEC.to_json())
        list(cache.entries().values())
        if kind != "forged":
            assert found in (None, right)
        elif found:
            assert found.manifest.is_of(SPEC.to_json()) and found.manifest.name
        code.write_bytes(cubin)
        facts.write_bytes(intact)

    return trial


def names(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Programs whose digest or spec is tampered with get the kernel that they name, or an error."""
    lookup.user_cache().write(DIGEST, sample_cubin(), sample_manifest())
    spec = SPEC.to_json()
    patch.setattr(lookup, "compile_spec", lambda spec: 1 / 0)

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        patch.setattr(lookup, "_known", {})
        named, asked = DIGEST, spec
        if rng.random() < 0.5:
            named = damaged(rng, DIGEST.encode()).decode("latin1")
        if rng.random() < 0.5:
            asked = json.dumps(tampered(rng, json.loads(spec)))
        elif rng.random() < 0.5:
            asked = damaged(rng, spec.encode()).decode("latin1")
        try:
            found = lookup.resolve(named, asked)
        except CubinError:
            return
        assert named == DIGEST and found.manifest.is_of(asked), (named, asked)

    return trial


def tables(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Damaged tables of dispatch are errors of their own kind."""
    from jax_hopper_gemm.dispatch.table import PACKAGED, TableError, read_table

    document = json.loads((PACKAGED / "h200_132.json").read_text())
    plain = [e for e in document["entries"] if not e.get("grouped")]
    document["entries"] = plain[:2] + [e for e in document["entries"] if e.get("grouped")][:2]
    content, path = json.dumps(document).encode(), folder / "table.json"

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            path.write_text(json.dumps(tampered(rng, document)))
        else:
            path.write_bytes(damaged(rng, content))
        try:
            read_table(path)
        except TableError:
            pass

    return trial


WRITER = """
    import os
    from pathlib import Path
    from support.cubin_samples import sample_cubin, sample_manifest
    from jax_hopper_gemm.cubin.store import Store

    cache = Store(Path(os.environ["FOLDER"]), "cache")
    cubin, manifest = sample_cubin(), sample_manifest()
    print("ready", flush=True)
    while True:
        for digest in ("a" * 64, "b" * 64):
            with cache.locked(digest):
                cache.write(digest, cubin, manifest)
"""


def kills(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Processes killed while they write a cache leave entries that are whole, and no lock."""
    right = sample_cubin()

    def trial(seed: int) -> None:
        rng, cache = random.Random(seed), lookup.user_cache()
        writers = [start_python(WRITER, FOLDER=str(cache.folder)) for _ in range(2)]
        for writer in writers:
            assert writer.stdout and writer.stdout.readline()
        for writer in writers:
            time.sleep(rng.random() / 20)
            for entry in cache.entries().values():
                assert entry.cubin == right
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        with cache.locked(DIGEST):
            cache.write(DIGEST, right, sample_manifest())
        found = cache.read(DIGEST)
        assert found and found.cubin == right

    return trial


def disks(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """A disk that is full at any byte leaves the old entry and the old table, and nothing else."""
    from jax_hopper_gemm.dispatch import H200
    from jax_hopper_gemm.dispatch.table import Table, read_table, write_table

    cache, table, code = lookup.user_cache(), Table.of(H200, [], "empty"), (b"\0" * 64, b"\1" * 64)
    path = cache.folder / "table"
    cubins = [sample_cubin(code=part) for part in code]
    entries = [(cubin, sample_manifest(cubin=cubin)) for cubin in cubins]

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        old, new = rng.sample(entries, 2)
        cache.write(DIGEST, *old)
        write_table(table, path)
        before = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(4000), limits[1]))
        try:
            for write in (lambda: cache.write(DIGEST, *new), lambda: write_table(table, path)):
                try:
                    write()
                except OSError:
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        found = cache.read(DIGEST)
        assert found is None or (found.cubin, found.manifest) in entries
        assert path.read_bytes() == before and read_table(path)
        left = {x.name for x in cache.folder.iterdir()}
        assert left == {f"{DIGEST}.cubin", f"{DIGEST}.json", "table"}, left

    return trial


FUZZERS = elf, entries, names, tables, kills, disks
