"""The host in a GPU's place: the launcher runs over the stand-in of the CUDA driver.

What a kernel would write, NumPy writes, by the references of the GPU tests, which share nothing
with `checker.cu`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from fake_driver import harness
from support import float32, grouped_results, outcome, reference
from support.places import result_places
from support.trial import Inputs

from chip.arena import Placed
from chip.device import Launcher
from chip.problems import Trial
from jax_hopper_gemm.gemm.dtypes import DTYPES


class Host:
    """The launcher over the stand-in of the driver, and NumPy in place of kernels.

    Args:
      folder: `chip.device.build` was here.
      libraries: `harness.build_fakes` was here.

    Attributes:
      after: what to do to a product's memory after its launch; for tests of the checks.
    """

    def __init__(self, folder: Path, libraries: Path):
        os.environ["JAX_HOPPER_GEMM_LIBCUDA"] = str(libraries / "fake_cuda.so")
        self.driver = harness.Driver(libraries / "fake_cuda.so")
        private = harness.Launcher(libraries, libraries / "fake_cuda.so")
        private.resolve = lambda digest, spec: self.driver.add_kernel(self.plan)
        self.private = private
        self.launcher = Launcher(folder / "ffi_host.so", private.library)
        self.after: Callable[[Placed], object] = lambda product: None

    def __call__(self, product: Placed, stream: int | None = None) -> str | None:
        self.plan = product.plan
        self.driver.reset()
        if error := self.launcher(product):
            return error
        assert len(self.driver.calls("cuLaunchKernelEx")) == 1
        with np.errstate(invalid="ignore", over="ignore"):  # of sums that 8 bits do not hold
            write_results(product)
        self.after(product)
        return None


def memory(product: Placed, index: int, dtype: str) -> np.ndarray:
    """Returns a buffer of a product, flat; of what lies packed a copy in bytes."""
    nbytes = product.nbytes[index]
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(product.addresses[index]))
    if DTYPES[dtype].packed == 1:
        return raw.view(jnp.dtype(dtype))
    halves = np.stack((raw & 15, raw >> 4), axis=-1).reshape(-1)
    return (halves.astype(np.int8) ^ 8) - 8


def write_results(product: Placed) -> None:
    """Writes what the kernel should have."""
    trial, p = product.trial, product.trial.problem
    values = []
    for i in range(product.operands):
        for place in trial.buffers[i][0]:
            values.append(place.view(memory(product, i, place.dtype)).reshape(place.shape))
    count, accumulators = len(p.graph.operands), p.graph.accumulators
    inputs = Inputs(values[0], tuple(values[1 : 1 + accumulators]),
                    tuple(values[1 + accumulators : 1 + accumulators + count]))  # fmt: skip
    if trial.spec.reads_parts:
        joined = partial(float32.of_parts, k=p.k, terms=p.bf16_terms)
        inputs = replace(inputs, a=joined(inputs.a, 2), b=tuple(joined(b, 1) for b in inputs.b))
    rest = values[1 + accumulators + count :]
    places = result_places(p, trial.spec)
    if not trial.exact:
        found = [np.zeros(place.shape, jnp.dtype(place.dtype)) for place in places]
    elif p.groups:
        found = of_groups(trial, inputs, rest)
    else:
        if p.indexed:
            index = np.clip(rest[0], 0, p.stack - 1)
            if p.indexed == "a":
                inputs = replace(inputs, a=inputs.a[index])
            else:
                inputs = replace(inputs, b=tuple(b[index] for b in inputs.b))
        found = outcome.exact(p, trial.spec, scaled(trial, inputs, rest[p.indexed is not None :]))
    for i, (place, array) in enumerate(zip(places, found, strict=True)):
        view = place.view(memory(product, product.operands + i, place.dtype))
        view[...] = array.reshape(view.shape)


def scaled(trial: Trial, inputs: Inputs, scales: list[np.ndarray]) -> Inputs:
    """Returns inputs multiplied by the scales of their blocks, if there are any."""
    p = trial.problem
    if p.k_group:
        each = zip(inputs.b, scales, strict=True)
        pairs = [reference.scaled(p, replace(inputs, b=(b,), scales=(x,))) for b, x in each]
        return replace(inputs, b=tuple(b for _, b in pairs))
    if p.a_scales:
        a, b = reference.scaled(p, replace(inputs, scales=tuple(scales)))
        return replace(inputs, a=a, b=(b,))
    return inputs


def of_groups(trial: Trial, inputs: Inputs, rest: list[np.ndarray]) -> list[np.ndarray]:
    p, rows, nobody = trial.problem, None, np.zeros(0, int)
    assert p.groups
    inputs = replace(inputs, sizes=rest.pop(0))
    if p.groups.gathered:
        inputs = replace(inputs, indices=rest.pop(0))
    inputs = scaled(trial, inputs, rest)
    if p.groups.axis == "m":
        rows, nobody = np.arange(p.m), np.flatnonzero(trial.matrices < 0)
    sums = [grouped_results.products(p, inputs, b).astype(np.float32) for b in inputs.b]
    values = outcome.exact_values(p.graph, sums, grouped_results.operands_at(p, inputs, rows))
    stored = [np.broadcast_to(values[r.value], sums[0].shape).copy() for r in p.graph.results]
    for value in stored:
        value[:, nobody] = 0
    return outcome.arrays_of(p.graph, trial.spec, stored, sums[0].shape)
