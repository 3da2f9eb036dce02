"""Tests that need a Hopper GPU. Elsewhere the whole folder is skipped, and says why.

A run without a failure writes `verified.json`: the cubins whose results it has checked. So does one
that is interrupted, as by `timeout -s INT`, of the tests that it has come to.

With `--ptx` the CPU runs the kernels' PTX in place of a GPU (`support.ptx`), in tests that launch
kernels themselves; others are skipped, and nothing counts as verified.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from support import verified
from support.gpu import CudaError, Gpu
from support.ptx.gpu import PtxGpu

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx", action="store_true", help="run kernels' PTX on the CPU")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    on_ptx = config.getoption("--ptx", False)
    reason = why_not() if ours and not on_ptx else None
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif on_ptx and "gpu" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="XLA runs it, on a GPU"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CHECKED] = {}


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    checked = session.config.stash[CHECKED]
    done = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED)
    done = done and not session.testsfailed
    if checked and done and not session.config.getoption("--ptx", False):
        verified.merge(VERIFIED, checked, Gpu().name)


def _lifetime(fixture_name: str, config: pytest.Config) -> Literal["session", "function"]:
    """The interpreter keeps all memory that was ever its own, so each test has one."""
    return "function" if config.getoption("--ptx", False) else "session"


@pytest.fixture(scope=_lifetime)
def gpu(request: pytest.FixtureRequest) -> Gpu | PtxGpu:
    return PtxGpu() if request.config.getoption("--ptx", False) else Gpu()


@pytest.fixture
def checked(request: pytest.FixtureRequest) -> Callable[[KernelSpec], None]:
    """A function that a test calls with each spec whose results it has found right."""

    def note(spec: KernelSpec) -> None:
        sha256 = cubin.get(spec).manifest.cubin_sha256
        request.config.stash[CHECKED][sha256] = spec.name

    return note
