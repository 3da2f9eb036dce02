"""The tensor-parallel layer that benchmarks and GPU tests compare: its forms are one function."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from tensor_parallel_programs import FORMS, RINGS, Mlp, mesh_of


@pytest.mark.slow
def test_forms_compute_the_same():
    mlp, mesh = Mlp(64, 32, 128, "gelu"), mesh_of(4)
    arguments = mlp.arguments()
    results = {form: mlp.step(form, mesh)(*arguments) for form in FORMS if form != "local"}
    for found in results.values():
        for a, b in zip(found, results["jnp"], strict=True):
            a, b = np.float32(a), np.float32(b)
            assert np.max(np.abs(a - b)) <= 2.0**-6 * np.max(np.abs(b))


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.usefixtures("launcher")
def test_rings_are_exact_and_launch_as_often_as_they_say(name):
    ring = RINGS[name]
    assert [len(ring.launched(n, 16)) for n in (2, 4)] == [ring.launches(2), ring.launches(4)]
    x, w, cotangent = (a.astype(np.float64) for a in ring.arguments())
    exact = x @ w, cotangent @ w.T, x.T @ cotangent
    assert max(np.max(np.abs(a)) for a in exact) <= 256  # integers of bfloat16 up to there

    def anywhere(x, w, axis_name, implementation):
        return ring.product(x, w, axis_name)

    on_cpu = replace(ring, product=anywhere)
    found = jax.jit(on_cpu.step(mesh_of(4)))(*ring.arguments())
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), b)
