"""Products that overlap with transfers, on two or more GPUs of this machine."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from meshes import most_gpus
from support.lowered import grids_of
from tensor_parallel_programs import RINGS, TESTED, TESTED_LIMITS, Ring, mesh_of

TARGET = 'custom_call_target="jax_hopper_gemm'
GATHERS = r" (all-gather|all-reduce|reduce-scatter|all-to-all)(-start)?\("
LATENCY_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}
PEER = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(len(most_gpus()))


def compiled(ring: Ring, mesh: Mesh, max_sms: int | None, options: dict[str, Any]) -> Any:
    given = placed(ring, mesh)
    step = jax.jit(ring.step(mesh, max_sms), compiler_options=LATENCY_HIDING | options)
    return step.lower(*given).compile()


def placed(ring: Ring, mesh: Mesh) -> list[jax.Array]:
    return [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(ring.arguments(), ring.specs, strict=True)
    ]


@pytest.mark.parametrize("max_sms", TESTED_LIMITS)
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_and_its_gradients_are_exact(name, max_sms, mesh, checked):
    ring = RINGS[name]
    program = compiled(ring, mesh, max_sms, {})
    x, w, cotangent = (a.astype(np.float64) for a in ring.arguments())
    exact = x @ w, cotangent @ w.T, x.T @ cotangent
    for _ in range(3):
        for found, wanted in zip(program(*placed(ring, mesh)), exact, strict=True):
            np.testing.assert_array_equal(np.asarray(found).astype(np.float64), wanted)
    text = program.as_text()
    assert text.count(TARGET) == ring.launches(mesh.size)
    assert not re.search(GATHERS, text)
    for spec in ring.launched(mesh.size, max_sms):
        checked(spec)


@pytest.mark.parametrize("name", RINGS)
def test_copy_engines_give_the_same(name, mesh):
    ring = RINGS[name]
    given = placed(ring, mesh)
    ours, peers = (compiled(ring, mesh, None, options)(*given) for options in ({}, PEER))
    jax.tree.map(np.testing.assert_array_equal, ours, peers)


@pytest.mark.parametrize("name", RINGS)
def test_a_kernel_runs_beside_a_transfer(name, mesh):
    """In the schedule: a launch lies between the start of a transfer and its end."""
    text = compiled(RINGS[name], mesh, None, {}).as_text()
    lines = text.splitlines()
    starts = {
        match[1]: i for i, line in enumerate(lines)
        if (match := re.search(r"(%?[\w.-]+) = .*collective-permute-start\(", line))
    }  # fmt: skip
    beside = 0
    for i, line in enumerate(lines):
        if done := re.search(r"collective-permute-done\((%?[\w.-]+)\)", line):
            between = lines[starts[done[1]] : i]
            beside += any(TARGET in x or "command_buffer" in x for x in between)
    assert beside, text


@pytest.mark.parametrize("max_sms", [16, 2])
@pytest.mark.parametrize("name", RINGS)
def test_launches_keep_to_a_limit(name, max_sms, mesh):
    grids = grids_of(RINGS[name].step(mesh, max_sms), *placed(RINGS[name], mesh))
    assert len(grids) == RINGS[name].launches(mesh.size)
    assert max(map(prod, grids)) <= max_sms


def test_an_overlapped_layer_is_as_good_as_a_gathered_one(mesh):
    """Its sums are rounded once for each device on their way, as those of NCCL are."""
    arguments = TESTED.arguments()
    exact = [np.asarray(a, np.float64) for a in arguments]
    wanted = jax.tree.map(np.asarray, in_float64(*exact))
    forms = (TESTED.step(form, mesh)(*arguments) for form in ("overlapped", "gathered"))
    for found, other, value in zip(*forms, wanted, strict=True):
        error, others = (
            float(np.max(np.abs(np.asarray(a).astype(np.float64) - value))) for a in (found, other)
        )
        unit = float(np.max(np.abs(value))) * 2.0**-8
        assert error <= 1.5 * max(others, unit) + 2 * mesh.size * unit


def in_float64(x: Any, up: Any, down: Any, cotangent: Any) -> Any:
    with jax.enable_x64(True):
        x, up, down, cotangent = map(jnp.asarray, (x, up, down, cotangent))
        y, pull = jax.vjp(lambda x, up, down: jax.nn.gelu(x @ up) @ down, x, up, down)
        return (y, *pull(cotangent))
