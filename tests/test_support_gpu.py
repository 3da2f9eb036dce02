"""A GPU's buffers, and what is said where there is no driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.gpu import CudaError, Gpu

pytestmark = pytest.mark.pure


def test_a_missing_driver_is_said():
    def missing(*args):
        raise RuntimeError("libcuda.so.1 not found")

    with pytest.raises(CudaError, match=r"no CUDA driver: libcuda\.so\.1 not found"):
        Gpu(driver=SimpleNamespace(cuInit=missing))
