"""A kernel in the cache or among those prebuilt, and a process that knows none."""

from __future__ import annotations

from support.cubin_samples import (
    SPEC,
    sample_cubin,
    sample_manifest,
)

from jax_hopper_gemm.cubin import digest_of, lookup

DIGEST = digest_of(SPEC)


def forget(monkeypatch):
    """Makes this process as ignorant as a fresh one."""
    monkeypatch.setattr(lookup, "_known", {})


def write_entry(kind: str, code: bytes) -> bytes:
    """Puts a kernel for SPEC into the prebuilt folder or the cache; returns the cubin."""
    content = sample_cubin(code=code)
    target = lookup.prebuilt() if kind == "prebuilt" else lookup.user_cache()
    target.write(DIGEST, content, sample_manifest(cubin=content))
    return content
