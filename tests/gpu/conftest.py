"""Tests that need a Hopper GPU. Elsewhere the whole folder is skipped, and says why.

A green run writes `verified.json`: the cubins whose results it has checked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import verified
from support.gpu import CudaError, Gpu

from jax_hopper_gemm import cubin
from jax_hopper_gemm.gemm.kernel_params import KernelSpec

HERE = Path(__file__).parent
VERIFIED = HERE / "verified.json"
CHECKED = pytest.StashKey[dict[str, str]]()


def why_not() -> str | None:
    """Returns why these tests cannot run here; None if they can."""
    try:
        gpu = Gpu()
    except CudaError as error:
        return str(error)
    if gpu.device.compute_capability != (9, 0):
        return f"{gpu.name} is no Hopper GPU"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    reason = why_not() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CHECKED] = {}


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    checked = session.config.stash[CHECKED]
    if exitstatus == 0 and checked:
        verified.merge(VERIFIED, checked, Gpu().name)


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def checked(request: pytest.FixtureRequest) -> Callable[[KernelSpec], None]:
    """A function that a test calls with each spec whose results it has found right."""

    def note(spec: KernelSpec) -> None:
        sha256 = cubin.get(spec).manifest.cubin_sha256
        request.config.stash[CHECKED][sha256] = spec.name

    return note
