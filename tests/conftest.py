"""Where tests run: on the CPU, on eight devices of it, unless the GPU's tests are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
import pytest
from fake_driver.harness import build_fakes

from jax_hopper_gemm import sharding
from jax_hopper_gemm.dispatch import choice, user_tables
from jax_hopper_gemm.dispatch.table import Table
from jax_hopper_gemm.launch import ffi_library


def pytest_configure(config: pytest.Config) -> None:
    expression = config.getoption("markexpr") or ""
    if "not gpu" in expression or (expression and "gpu" not in expression):
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering for CUDA emits launches; whether the FFI library is built is not the matter."""
    monkeypatch.setattr(ffi_library, "library", lambda: None)


@pytest.fixture(scope="session")
def fake_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in of the CUDA driver."""
    folder = tmp_path_factory.mktemp("libraries")
    build_fakes(folder)
    return folder


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Products are partitioned by us in programs for the CPU, too, each share XLA's product."""
    with sharding.on_cpu():
        yield


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """For programs that take far longer to compile than to run: most of LLVM's work is left out.

    XLA's passes stay. NOTE: a number that a program computes twice may then differ in its last
    bit, and the gradient of a maximum, which looks for it among the values, divide by no hits.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves dispatch to its model: neither a user's table nor the packaged one."""
    monkeypatch.delenv(user_tables.TABLE_VARIABLE, raising=False)
    monkeypatch.setattr(user_tables, "_tables", user_tables.UserTables())
    monkeypatch.setattr(user_tables, "packaged_table", cache(Table.of))
    choice._choose.cache_clear()
    yield
    choice._choose.cache_clear()
