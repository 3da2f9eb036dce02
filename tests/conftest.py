"""Where tests run: on the CPU, on eight devices of it, unless the GPU's tests are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
import jaxlib.version
import pytest
from fake_driver.harness import build_fakes

from jax_hopper_gemm import sharding
from jax_hopper_gemm.dispatch import choice
from jax_hopper_gemm.dispatch import table as tables
from jax_hopper_gemm.dispatch.table import Table
from jax_hopper_gemm.launch import ffi_library

GPU_TESTS = Path(__file__).with_name("gpu")


# For XLA's CPU backend: these programs take far longer to compile than to run.
# NOTE: a number that a program computes twice may differ in its last bit.
QUICK_COMPILES = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
if jaxlib.version.__version_info__[:2] == (0, 10):  # later ones refuse the flag
    QUICK_COMPILES["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"


def pytest_configure(config: pytest.Config) -> None:
    expression = config.getoption("markexpr") or ""
    if "not gpu" in expression or (expression and "gpu" not in expression):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_disable_most_optimizations", True)
        for variable, value in QUICK_COMPILES.items():  # read later, and by other processes
            os.environ.setdefault(variable, value)
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def optimised() -> Iterator[None]:
    """XLA optimises, for tests that compare sums whose order it would otherwise leave apart."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `quick` the first case of each test that is not marked as slow."""
    seen = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        slow = any(item.get_closest_marker(mark) for mark in ("slow", "compile"))
        if function not in seen and not slow and GPU_TESTS not in item.path.parents:
            item.add_marker(pytest.mark.quick)
        seen.add(function)


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


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves dispatch to its model: neither a user's table nor the packaged one."""
    monkeypatch.delenv(tables.TABLE_VARIABLE, raising=False)
    monkeypatch.setattr(tables, "_tables", tables.UserTables())
    monkeypatch.setattr(tables, "packaged_table", cache(Table.of))
    choice._choose.cache_clear()
    yield
    choice._choose.cache_clear()
