"""Kernels of several right operands side by side, with results of their own, on guarded memory."""

from __future__ import annotations

import pytest
from support import graphs, outcome, panels
from support.policies import panel_specs

FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked


@pytest.mark.parametrize("spec", panel_specs(), ids=lambda spec: spec.name)
def test_each_panel_is_right_and_nothing_else_is_written(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(panels.panel_problems(spec, FEW_SMS)):
        for exactly in {graphs.is_exact(spec.graph), False}:
            outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, 3, exactly=exactly)
    checked(spec)
