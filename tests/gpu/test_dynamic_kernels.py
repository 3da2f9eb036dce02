"""Kernels whose clusters claim tiles from a counter that nobody clears."""

from __future__ import annotations

import pytest
from support import counters

SPECS = counters.dynamic_specs()


@pytest.mark.parametrize("num_sms", [8, None])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_launch_frees_the_counter_and_so_the_next_one_waits_for_its_own(spec, num_sms, gpu):
    counters.check(gpu, spec, num_sms or gpu.device.num_sms, launches=100)
