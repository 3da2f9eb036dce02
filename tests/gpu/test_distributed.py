"""Two processes with a GPU each: XLA partitions products over them, each share runs on a kernel."""

from __future__ import annotations

import jax
import pytest
from support.distributed import run_processes

CROSSING = {"all-reduce", "reduce-scatter", "all-gather"}


def test_two_processes_share_products_on_kernels():
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    first, second = run_processes("cuda")
    for name, found in first.items():
        assert found["launches"] == 3, f"{name}: a product and two gradients"
        assert found["collectives"] and set(found["collectives"]) <= CROSSING, name
        for what in ("launches", "collectives"):
            assert second[name][what] == found[what], name
