"""Where tests run: on the CPU, on four devices of it, unless the GPU's tests are asked for."""

from __future__ import annotations

import jax
import pytest

from jax_hopper_gemm import native


def pytest_configure(config: pytest.Config) -> None:
    expression = config.getoption("markexpr") or ""
    if "not gpu" in expression or (expression and "gpu" not in expression):
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering for CUDA emits launches; whether the FFI library is built is not the matter."""
    monkeypatch.setattr(native, "library", lambda: None)
