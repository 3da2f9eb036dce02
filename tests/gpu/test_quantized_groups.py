"""Ragged and gated products of two quantized operands on kernels, beside float64 on the host."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support import quantized_groups


@pytest.mark.parametrize("name", quantized_groups.PROGRAMS)
def test_they_are_those_of_the_dequantized_arrays(name, checked):
    program = quantized_groups.PROGRAMS[name]()
    specs = program.specs(**quantized_groups.FORCED)
    found = program.ours(**quantized_groups.FORCED)(*program.operands)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = np.asarray(program.wanted(), np.float64)
    error = np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)
    print(f"{name}: {error:.1e}, {len(specs)} kernels")
    assert error < 2.0**-12  # sums of 128 products in tensor cores, of which 14 bits are kept
    for spec in specs:
        checked(spec)
