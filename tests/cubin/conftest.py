"""Fixtures of where kernels come from: folders, and compilers that are not there."""

from __future__ import annotations

import sys
import time
import types

import pytest
from support.cubin_samples import (
    places_of,
    sample_cubin,
)
from support.cubin_store import forget

from jax_hopper_gemm.cubin import CubinError, compiler, lookup


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Gives each test an empty cache, no prebuilt kernels and a process that knows none."""
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prebuilt").mkdir()
    monkeypatch.setenv("JAX_HOPPER_GEMM_CUBINS", str(tmp_path / "prebuilt"))
    forget(monkeypatch)
    monkeypatch.setattr(lookup, "_told_of_unwritable_cache", False)


@pytest.fixture
def compiles(monkeypatch):
    """Replaces kernels/; returns the list of specs that were compiled."""
    compiled = []

    def compile_cubin(spec, workdir):
        compiled.append(spec)
        time.sleep(0.05)
        return sample_cubin(threads=spec.threads, places=places_of(spec))

    kernels = types.SimpleNamespace(compile_cubin=compile_cubin)
    monkeypatch.setitem(sys.modules, "jax_hopper_gemm.kernels", kernels)
    monkeypatch.setattr("jax_hopper_gemm.kernels", kernels, raising=False)
    monkeypatch.setattr(compiler, "require_compiler", lambda: None)
    return compiled


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse():
        raise CubinError("nvidia-cutlass-dsl is not installed; run pip")

    monkeypatch.setattr(compiler, "require_compiler", refuse)
