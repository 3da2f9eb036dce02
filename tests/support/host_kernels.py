"""Kernels that run on the host, in the hands of `testing.trial`."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from support import cases, graphs, outcome, policies, random_operands, reference, trial
from support.places import result_places
from support.recording_driver import SPEC

from jax_hopper_gemm.dispatch import H200
from jax_hopper_gemm.gemm.raster import RasterOrder

EPILOGUE_SPECS = policies.epilogue_covering_specs()
BY_NAME = {policies.name_of(spec): spec for spec in EPILOGUE_SPECS}
EXACT = [name for name, graph in graphs.STANDARD.items() if graphs.is_exact(graph)]


class HostBuffer:
    def __init__(self, nbytes):
        self.memory = np.zeros(nbytes, np.uint8)

    def part(self, offset):
        return self.memory[offset:]

    def fill(self, byte):
        self.memory[:] = byte

    def download(self, dtype):
        return self.memory.copy().view(jnp.dtype(dtype))


class HostGpu:
    device = H200

    def allocate(self, nbytes):
        return HostBuffer(nbytes)

    def upload(self, array):
        buffer = HostBuffer(array.nbytes)
        buffer.memory[:] = array.view(np.uint8)
        return buffer

    def synchronize(self):
        pass


class HostLaunch:
    """A function in the place of a launch without workspaces."""

    workspaces = ()

    def __init__(self, function):
        self._function = function

    def __call__(self):
        self._function()


def run_on_host(monkeypatch, problem, a, b, spoil=lambda launches, d, flat: None, repeats=1):
    """trial.run, with NumPy for the kernel; `spoil` then does what a bug would."""
    launches = itertools.count()

    def prepare(gpu, problem, spec, raster_order, parts, num_sms):
        flat = [
            part[: part.size // size * size].view(reference.dtype_of(problem, operand))
            for part, operand in zip(parts, ("a", "b", "d"), strict=True)
            for size in (reference.dtype_of(problem, operand).itemsize,)
        ]
        a, b, d = (
            reference.view(problem, operand, x)
            for operand, x in zip(("a", "b", "d"), flat, strict=True)
        )

        def launch():
            d[:] = (a.astype(np.float32) @ b.astype(np.float32)).astype(d.dtype)
            spoil(next(launches), d, flat[2])

        return HostLaunch(launch)

    monkeypatch.setattr(trial, "prepare", prepare)
    gpu: Any = HostGpu()
    return trial.run(gpu, problem, SPEC, RasterOrder(), a, b, repeats)


def run_epilogue_on_host(monkeypatch, spec, spoil=lambda results: None, num_sms=4):
    """trial.run_all on the second edge problem; `spoil` does what a bug would."""
    problem, raster_order = cases.edge_problems(spec, num_sms)[1]
    inputs = random_operands.integer_inputs(problem, 0)

    def prepare(gpu, problem, spec, raster_order, parts, num_sms):
        def flat(part, dtype):
            return part[: part.size // jnp.dtype(dtype).itemsize * jnp.dtype(dtype).itemsize].view(
                jnp.dtype(dtype)
            )

        buffers = reference.input_places(problem)
        read = [
            place.view(flat(part, place.dtype))
            for part, places in zip(parts, buffers, strict=False)
            for place in places
        ]
        written = [
            place.view(flat(part, place.dtype))
            for part, place in zip(parts[len(buffers) :], result_places(problem, spec), strict=True)
        ]
        count = 1 + problem.graph.accumulators
        seen = trial.Inputs(read[0], tuple(read[1:count]), tuple(read[count:]))

        def launch():
            for array, right in zip(written, outcome.exact(problem, spec, seen), strict=True):
                array[:] = right
            spoil(written)

        return HostLaunch(launch)

    monkeypatch.setattr(trial, "prepare", prepare)
    gpu: Any = HostGpu()
    return problem, inputs, trial.run_all(gpu, problem, spec, raster_order, inputs)
