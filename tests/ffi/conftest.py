"""Fixtures of the FFI library, run by XLA's CPU runtime over a stand-in of the CUDA driver.

`fake_driver/fake_cuda.cc` plays libcuda.so.1 and writes down every call; `stream_shim.cc` gives
the execute stage the stream that a CPU has not. Each test works on a private copy of the library,
so nothing of this reaches the one that a GPU test in the same process uses.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_driver.harness import Driver, Launcher


@pytest.fixture(scope="session")
def folder(fake_libraries) -> Path:
    return fake_libraries


@pytest.fixture(scope="session")
def shared(folder) -> tuple[Launcher, Driver]:
    return Launcher(folder, folder / "fake_cuda.so"), Driver(folder / "fake_cuda.so")


@pytest.fixture
def driver(shared) -> Driver:
    shared[1].reset()
    return shared[1]


@pytest.fixture
def launcher(shared, driver) -> Launcher:
    from support.launches import PLAN  # has arrays: not before JAX is configured

    launcher = shared[0]
    launcher.resolved.clear()
    launcher.resolve = lambda digest, spec: driver.add_kernel(PLAN)
    return launcher


@pytest.fixture
def digest(request) -> str:
    """A digest no other test uses: a process resolves each one once."""
    return request.node.name
