"""Kernels that compile tests build have passed on a GPU, byte for byte, but for a list."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_compile
import test_compile_float32
import test_compile_weights
from support import verified
from support.compiling import skip_without_compiler

from jax_hopper_gemm import cubin

skip_without_compiler()

pytestmark = pytest.mark.compile

MODULES = test_compile, test_compile_float32, test_compile_weights
SPECS = list(dict.fromkeys(spec for module in MODULES for spec in module.SPECS))
VERIFIED = Path(__file__).parent / "gpu" / "verified.json"

# Names of kernels that await a GPU run; one that has passed must leave the list.
AWAITING = frozenset((VERIFIED.parent / "awaiting.txt").read_text().split())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_has_passed_on_a_gpu(spec, built, request):
    """The record holds the bytes that ran: another compiler or another source is another kernel."""
    assert spec not in built, built[spec]
    if spec.name in AWAITING:
        request.applymarker(pytest.mark.xfail(raises=AssertionError, strict=True))
    sha256 = cubin.get(spec).manifest.cubin_sha256
    assert verified.missing(VERIFIED, [sha256]) == [], (
        "no GPU run has covered this kernel: run tests/gpu/run.sh on a Hopper GPU and commit "
        f"{VERIFIED.name}"
    )
