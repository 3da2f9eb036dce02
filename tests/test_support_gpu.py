"""A GPU's buffers, and what is said where there is no driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.gpu import CudaError, Gpu
from support.recording_driver import SIZES, FakeDriver

pytestmark = pytest.mark.pure


def test_random_buffers_fill_to_the_last_byte():
    driver = FakeDriver(SIZES)
    buffer = Gpu(driver=driver).random("bfloat16", 9_000_001)
    copied = sum(call[3] for call in driver.calls if call[0].startswith("cuMemcpy"))
    assert copied == buffer.nbytes == 18_000_002


def test_a_missing_driver_is_said():
    def missing(*args):
        raise RuntimeError("libcuda.so.1 not found")

    with pytest.raises(CudaError, match=r"no CUDA driver: libcuda\.so\.1 not found"):
        Gpu(driver=SimpleNamespace(cuInit=missing))
