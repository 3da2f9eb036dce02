"""Every operation of an epilogue, in every form, on a million numbers, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from support import bounds, epilogue
from support.direct import prepare
from support.operations import factors_of, operation_specs, problem_of

from jax_hopper_gemm.gemm.raster import RasterOrder

SPECS = operation_specs()
M, N = 16384, 64
EXPONENTS = np.arange(N) - 48  # of the columns: numbers down to 2**-49 and up to 2**16
SPECIAL = np.array([0, np.inf, -np.inf, np.nan, 1, -1, 2.5, -2.5, 88, -88], np.float32)


def accumulators(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns A, B and their product in float64: each element one float32 number, exactly."""
    rng = np.random.default_rng(seed)
    x = (rng.uniform(1, 2, M) * rng.choice((-1, 1), M)).astype(np.float32)
    x[: SPECIAL.size] = SPECIAL
    x[SPECIAL.size : 2000] *= np.exp2(rng.integers(-40, 60, 2000 - SPECIAL.size))
    exact = x.astype(np.float64)[:, None] * np.exp2(EXPONENTS)
    return *factors_of(x, EXPONENTS), exact


def operand(seed: int, exact: np.ndarray) -> np.ndarray:
    """Returns (M, N) float32: moderate numbers, whole ones, some of the product's own."""
    rng = np.random.default_rng(seed)
    found = rng.uniform(-20, 20, (M, N)).astype(np.float32)
    found[:, ::4] = np.rint(found[:, ::4])
    found[:, 1::4] = exact[:, 1::4]
    found[:, 2] = rng.choice(SPECIAL, M)
    return found


@pytest.mark.parametrize("name", SPECS)
def test_operation_is_within_its_derived_bound(name, gpu, checked):
    spec = SPECS[name]
    problem = problem_of(spec, M, N)
    a, b, exact = accumulators(seed=1)
    operands = [operand(2 + i, exact) for i in range(len(spec.graph.operands))]
    dtype = spec.d_dtype
    d = gpu.allocate(M * N * np.dtype(np.float32 if dtype == "float32" else np.int16).itemsize)
    d.fill(0xFF)
    buffers = [gpu.upload(array) for array in (a, b, *operands)]
    launch = prepare(gpu, problem, spec, RasterOrder(), [*buffers, d])
    launch()
    gpu.synchronize()
    got = d.download(dtype).reshape(1, M, N)
    ((value, bound),) = epilogue.evaluate(spec.graph, [exact[None]], [o[None] for o in operands])
    bounds.assert_within(got, value, bound, name)
    checked(spec)
