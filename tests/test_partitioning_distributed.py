"""Two processes on this machine: XLA partitions products over both."""

from __future__ import annotations

import pytest
from support.distributed import run_processes


@pytest.mark.slow
def test_two_processes_agree_on_every_share():
    first, second = run_processes("cpu")
    assert first == second
    assert first.pop("layers")["collectives"].get("all-gather", 0) == 0
    found = {name: case["collectives"] for name, case in first.items()}
    # A product, and two gradients of which one contracts what the result's rows are sharded by.
    assert found == {
        "rows": {"all-reduce": 2},
        "contracted": {"all-reduce": 1},
        "contracted within": {"all-reduce": 2},
        "scattered": {"reduce-scatter": 1, "all-gather": 1},
        "both": {"reduce-scatter": 1, "all-gather": 1},
    }
