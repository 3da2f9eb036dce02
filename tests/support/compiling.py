"""For the modules of tests that compile kernels."""

from __future__ import annotations

import pytest

from jax_hopper_gemm.cubin import CubinError, compiler
from jax_hopper_gemm.cubin.sass import find_nvdisasm


def skip_without_compiler() -> None:
    """Skips the module that calls it where its kernels could not be compiled or read."""
    try:
        compiler.require_compiler()
        find_nvdisasm()
    except CubinError as error:
        pytest.skip(str(error), allow_module_level=True)
