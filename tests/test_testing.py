"""What the tests and benchmarks are built on, itself tested without a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import math
import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hopper_gemm.dispatch import H200, problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.plan import Int32, Pointer, TensorMap, make_plan
from jax_hopper_gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.spec import GemmSpec, Traversal, violations
from jax_hopper_gemm.testing import (
    benchmark,
    cases,
    direct,
    graphs,
    outcome,
    policies,
    reference,
    results,
    shapes,
    timing,
    tolerance,
    trial,
    verified,
)
from jax_hopper_gemm.testing.gpu import CudaError, Gpu

LAYOUTS = list(itertools.product("km", "nk"))


def normal(shape, dtype="bfloat16", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


# Reference


@pytest.mark.parametrize(("a_major", "b_major"), LAYOUTS)
def test_view_reads_compact_operands_of_every_layout(a_major, b_major):
    problem = GemmProblem.dense(3, 5, 7, 2, a_major=a_major, b_major=b_major)
    a, b = normal((2, 3, 7)), normal((2, 7, 5), seed=1)
    flat_a = (a if a_major == "k" else a.swapaxes(1, 2)).ravel()
    flat_b = (b if b_major == "n" else b.swapaxes(1, 2)).ravel()
    assert np.array_equal(reference.view(problem, "a", flat_a), a)
    assert np.array_equal(reference.view(problem, "b", flat_b), b)


def test_view_reads_interleaved_and_shared_batches():
    interleaved = normal((3, 4, 8))  # (M, L, K)
    shared = normal((8, 5), seed=1)
    problem = dataclasses.replace(
        GemmProblem.dense(3, 5, 8, 4),
        a=MatrixLayout("k", 32, 8),
        b=MatrixLayout("n", 5, 0),
    )
    a = reference.view(problem, "a", interleaved.ravel())
    b = reference.view(problem, "b", shared.ravel())
    assert np.array_equal(a, interleaved.swapaxes(0, 1))
    assert np.array_equal(b, np.broadcast_to(shared, (4, 8, 5)))
    assert reference.num_elements(problem, "b") == 40


def test_view_refuses_a_short_buffer():
    problem = GemmProblem.dense(3, 5, 8)
    with pytest.raises(ValueError, match="d spans 15 elements"):
        reference.view(problem, "d", np.zeros(14))


def test_integer_product_rounds_once_to_nearest_even():
    a = np.array([[16.0, 1.0], [16.0, 3.0]]).astype(jnp.bfloat16)
    b = np.array([[16.0], [1.0]]).astype(jnp.bfloat16)
    # 257 and 259 lie halfway between bfloat16 numbers, whose last bits are even at 256 and 260.
    rounded = reference.integer_product(a, b, jnp.dtype(jnp.bfloat16))
    assert rounded.astype(float).tolist() == [[256.0], [260.0]]


# Tolerance


def wgmma_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b as the tensor cores compute it: 16 products at a time, aligned and cut off."""

    def cut(x, exponent):
        scale = np.ldexp(1.0, exponent)
        return np.trunc(x / scale) * scale

    exponent_of = lambda x: np.where(x == 0, -1000, np.frexp(x)[1] - 1)  # noqa: E731
    accumulator = np.zeros((a.shape[0], b.shape[1]))
    for k in range(0, a.shape[1], 16):
        x, y = (m.astype(np.float64) for m in (a[:, k : k + 16, None], b[None, k : k + 16]))
        exponents = np.where((x == 0) | (y == 0), -1000, exponent_of(x) + exponent_of(y))
        largest = np.maximum(exponents.max(axis=1), exponent_of(accumulator))
        aligned = cut(x * y, (largest - 25)[:, None, :]).sum(axis=1)
        total = aligned + cut(accumulator, largest - 25)
        accumulator = cut(total, exponent_of(total) - 23)
    return accumulator.astype(np.float32)


def operands(kind: str, k: int):
    a, b = normal((24, k), seed=k), normal((k, 40), seed=k + 1)
    if kind == "positive":  # no cancellation: the truncation is a bias
        return np.abs(a), np.abs(b)
    if kind == "wide":  # most terms lie far below the largest
        exponents = np.random.default_rng(k).integers(-12, 13, (24, k))
        return (a.astype(np.float32) * 2.0**exponents).astype(jnp.bfloat16), b
    if kind == "descending":  # the sum is largest from the start: the worst case of the bound
        decay = np.exp2(-np.arange(k) / 16)
        return (np.abs(a).astype(np.float32) * decay).astype(jnp.bfloat16), np.abs(b)
    return a, b


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "descending"])
@pytest.mark.parametrize("k", [1, 15, 16, 200, 4096])
def test_a_truncating_accumulator_is_within_the_bound(k, kind, dtype):
    a, b = operands(kind, k)
    result = (wgmma_product(a, b) * 2.0**-6).astype(jnp.dtype(dtype))  # float16: keep in range
    exact, magnitude = (f(a, b) * 2.0**-6 for f in (reference.product, reference.magnitude))
    tolerance.assert_within_bound(result, exact, magnitude, k)


def test_the_bound_is_of_the_order_of_the_error():
    a, b = operands("positive", 4096)
    exact, magnitude = reference.product(a, b), reference.magnitude(a, b)
    assert tolerance.worst(wgmma_product(a, b), exact, magnitude, 4096).ratio > 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("k", [64, 200, 4096])
def test_wrong_results_are_outside_the_bound(k, dtype):
    a, b = operands("normal", k)
    exact, magnitude = reference.product(a, b), reference.magnitude(a, b)

    def ratio(wrong):
        return tolerance.worst(wrong.astype(jnp.dtype(dtype)), exact, magnitude, k).ratio

    without_a_tile, swapped, unwritten = exact.copy(), exact.copy(), exact.copy()
    without_a_tile -= reference.product(a[:, :16], b[:16])
    swapped[[0, 1]] = swapped[[1, 0]]
    unwritten[3, 4] = np.nan
    assert ratio(without_a_tile) > 1
    assert ratio(swapped) > 1
    assert ratio(unwritten) == math.inf


def test_sums_rounded_to_16_bits_are_outside_the_bound():
    a, b = operands("positive", 512)
    rounded = np.zeros((24, 40), np.float32)
    for k in range(0, 512, 16):
        rounded = (rounded + reference.product(a[:, k : k + 16], b[k : k + 16])).astype(
            jnp.bfloat16
        )
    exact, magnitude = reference.product(a, b), reference.magnitude(a, b)
    with pytest.raises(AssertionError, match=r"result: element \(\d+, \d+\) is .* times the bound"):
        tolerance.assert_within_bound(rounded, exact, magnitude, 512)


def test_float32_sums_have_the_wider_bound():
    for k in (1, 100, 8192):
        ours, any_order = (tolerance.accumulation_error(k, s) for s in ("wgmma", "float32"))
        assert any_order >= ours
        assert any_order >= k * 2.0**-24


# Shapes


def test_bars_hold_every_shape_in_both_layouts_of_b():
    bars = set(shapes.suite("bars"))
    assert len(bars) == 24
    for m, n, k in [(1024, 1024, 1024), (3000, 5000, 4104), (8192, 28672, 8192)]:
        assert GemmProblem.dense(m, n, k) in bars
        assert GemmProblem.dense(m, n, k, b_major="k") in bars
    assert GemmProblem.dense(8192, 8192, 8192, a_major="m") in bars


@pytest.mark.parametrize("name", shapes.SUITES)
def test_suites_are_addressable_by_tma(name):
    problems = shapes.suite(name)
    assert problems
    for p in problems:
        assert all(x.leading_stride * 2 % 16 == 0 for x in (p.a, p.b, p.d)), p


def test_an_unknown_suite_names_the_known_ones():
    with pytest.raises(ValueError, match="no suite 'bar'; there are bars, fallback"):
        shapes.suite("bar")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("a_major", "b_major"), LAYOUTS)
def test_dimension_numbers_multiply_stored_operands(a_major, b_major, batch):
    problem = GemmProblem.dense(4, 5, 6, batch, a_major=a_major, b_major=b_major)
    a = normal(shapes.operand_shape(problem, "a"))
    b = normal(shapes.operand_shape(problem, "b"), seed=1)
    result = jax.lax.dot_general(
        a, b, shapes.dimension_numbers(problem), preferred_element_type=jnp.float32
    )
    views = reference.view(problem, "a", a.ravel()), reference.view(problem, "b", b.ravel())
    expected = reference.product(*views).reshape(shapes.operand_shape(problem, "d"))
    assert np.allclose(result, expected, rtol=1e-5, atol=1e-5)


# Policies


def test_covering_specs_are_legal_and_few():
    specs = policies.covering_specs()
    assert not any(violations(spec) for spec in specs)
    assert len(set(specs)) == len(specs) < 200


def test_both_covering_sets_stay_small_enough_to_compile():
    specs = policies.covering_specs() + policies.epilogue_covering_specs()
    assert not any(violations(spec) for spec in specs)
    assert len(set(specs)) == len(specs) <= 400
    names = {policies.name_of(spec) for spec in policies.epilogue_covering_specs()}
    assert names == set(graphs.STANDARD)


@pytest.mark.parametrize(
    ("choices", "specs"),
    [
        (policies.CHOICES, policies.covering_specs()),
        (policies.EPILOGUE_CHOICES, policies.epilogue_covering_specs()),
    ],
    ids=["plain", "epilogues"],
)
def test_covering_specs_hold_every_pair_that_a_legal_spec_has(choices, specs):
    covered = set().union(*(policies.pairs_of(policies.choice_of(s)) for s in specs))
    rng = random.Random(1)
    seen = 0
    while seen < 300:
        choice = {field: rng.choice(values) for field, values in choices.items()}
        if not violations(policies.spec_of(choice)):
            seen += 1
            assert policies.pairs_of(choice) <= covered


# Timing


def test_alternate_takes_turns():
    log = []
    candidates = {name: lambda name=name: log.append(name) or [len(log)] for name in "AB"}
    times = timing.alternate(candidates, rounds=3, rest=lambda: log.append("rest"))
    assert log == ["A", "rest", "B", "rest"] * 3
    assert times["A"].samples == (1, 5, 9)


def test_timing_summarises_its_samples():
    time = timing.Timing((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (time.median, time.quartiles) == (3.0, (2.0, 4.0))
    assert timing.Timing((7.0,)).quartiles == (7.0, 7.0)


@pytest.mark.parametrize("nbytes", [1, 2**20, 2**22, 2**26, 2**26 + 1, 2**30])
def test_rotated_inputs_exceed_l2(nbytes):
    sets = timing.sets_to_rotate(nbytes)
    assert sets == timing.MAX_SETS or (sets - 1) * nbytes >= timing.L2_BYTES or sets == 1
    assert (sets == 1) == (nbytes > timing.L2_BYTES)


def test_sustained_counts_only_the_second_second():
    now = 0.0
    calls = []

    def product(x):
        nonlocal now
        now += 0.010 if now < 1.0399 else 0.020  # the card slows down
        calls.append(x)
        return x

    samples = timing.sustained(product, [(1,), (2,)], clock=lambda: now)()
    assert samples == pytest.approx([20_000.0] * len(samples))
    assert len(samples) * 5 * 0.020 >= 1.0
    assert calls[:4] == [1, 2, 1, 2]


def test_burst_hands_one_call_at_a_time_to_cupti(monkeypatch):
    from jax.experimental.mosaic.gpu import profiler

    def measure(f, *, iterations):
        assert isinstance(f, jax.stages.Wrapped)  # else the profiler would trace it
        return lambda: (None, [f() * 1e-3 for _ in range(iterations)])

    monkeypatch.setattr(profiler, "measure", measure)
    assert timing.burst(lambda x: x, [(1.0,), (2.0,)])() == [1.0, 2.0] * 5
    assert len(timing.burst(lambda x: x, [(float(i),) for i in range(32)])()) == 32


def test_burst_without_kernels_is_an_error(monkeypatch):
    from jax.experimental.mosaic.gpu import profiler

    monkeypatch.setattr(profiler, "measure", lambda f, *, iterations: lambda: (None, None))
    with pytest.raises(RuntimeError, match="CUPTI saw no kernel"):
        timing.burst(lambda: None, [()])()


# Results


def row(problem, hopper, xla, regime="burst"):
    timings = {"hopper": timing.Timing((hopper,)), "xla": timing.Timing((xla,))}
    return results.Row(problem, regime, "kernel", "XLA", timings)


def test_summary_gives_geometric_mean_and_the_worst_case():
    small, large = GemmProblem.dense(64, 64, 64), GemmProblem.dense(128, 64, 64, b_major="k")
    total = results.summary([row(small, 1.0, 2.0), row(large, 2.0, 1.0)])["hopper, burst"]
    assert total["geometric_mean"] == pytest.approx(1.0)
    assert (total["minimum"], total["minimum_at"]) == (0.5, "128x64x64 MK,NK")


def test_a_row_shows_times_rates_and_what_ran():
    line = results.format_row(row(GemmProblem.dense(1000, 1000, 1000), 4.0, 5.0))
    assert line.split()[:5] == ["1000x1000x1000", "MK,KN", "burst", "4.0", "4.0-4.0"]
    assert "500" in line and "1.250" in line and line.endswith("kernel (auto: XLA)")


def test_rows_survive_json():
    line = json.loads(json.dumps(row(GemmProblem.dense(8, 8, 8), 4.0, 5.0).to_dict()))
    assert line["ratios"] == {"hopper": 1.25, "auto": None}
    assert line["timings"]["xla"]["median_us"] == 5.0


def test_plot_draws_every_regime(tmp_path):
    pytest.importorskip("matplotlib")
    problem = GemmProblem.dense(64, 64, 64)
    rows = [row(problem, 1.0, 2.0), row(problem, 1.0, 2.0, "sustained")]
    assert results.plot(rows, tmp_path / "plot.png", "a GPU")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_benchmark_asks_for_a_hopper_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match="timing needs a Hopper GPU; jax's first device is"):
        benchmark.this_device()


def test_benchmark_times_one_program_once(monkeypatch):
    timed = []

    def alternate(measures, rounds, rest):
        timed.append(sorted(measures))
        return {name: timing.Timing((1.0,)) for name in measures}

    monkeypatch.setattr(benchmark, "this_device", lambda: H200)
    monkeypatch.setattr(timing, "alternate", alternate)
    makers = {name: lambda p, sets: lambda a, b: a for name in ("hopper", "auto", "xla")}
    legal = GemmProblem.dense(4096, 4096, 4096)
    odd = GemmProblem.dense(33, 35, 37)
    monkeypatch.setattr(benchmark, "random_inputs", lambda problem: [(0, 0)])
    monkeypatch.setattr(benchmark.time, "sleep", lambda seconds: None)
    rows = benchmark.run([legal, odd], ["burst"], makers)
    if rows[0].auto == rows[0].kernel:
        assert timed[0] == ["hopper", "xla"]
    assert rows[0].timings.keys() == {"hopper", "auto", "xla"}
    assert timed[1] == ["auto", "xla"]  # no kernel is legal
    assert (rows[1].kernel, rows[1].auto) == ("", "XLA")


# Direct launches, against a driver that records what it is asked


class FakeDriver:
    """Stands in for `cuda.bindings.driver`: its types are real, its calls are recorded."""

    ENCODE = ctypes.CFUNCTYPE(
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_uint64,
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_uint32] * 4,
    )

    def __init__(self, parameter_sizes):
        self.parameter_sizes = parameter_sizes
        self.calls = []
        self.maps = []
        self.launched = []
        self.failing = ""
        self._encode = self.ENCODE(self._encode_tiled)
        self._next = 1 << 20

    def __getattr__(self, name):
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        if not name.startswith("cu"):
            return getattr(driver, name)

        def call(*args):
            self.calls.append((name, *args))
            if name == self.failing:
                return (driver.CUresult.CUDA_ERROR_LAUNCH_FAILED, *[None] * 1)
            return (driver.CUresult.CUDA_SUCCESS, *self._answer(name, args))

        return call

    def _answer(self, name, args):
        if name == "cuMemAlloc":
            self._next += -(-args[0] // 256) * 256
            return (self._next,)
        if name == "cuDeviceGetAttribute":
            return (132,)
        if name == "cuGetProcAddress":
            return ctypes.cast(self._encode, ctypes.c_void_p).value, 0
        if name == "cuGetErrorString":
            return (b"it failed",)
        if name == "cuLaunchKernelEx":
            self.launched.append(self._arguments(*args))
        return (0,) if name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain") else ()

    def cuKernelGetParamInfo(self, kernel, index):  # noqa: N802
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        if index >= len(self.parameter_sizes):
            return driver.CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return driver.CUresult.CUDA_SUCCESS, 0, self.parameter_sizes[index]

    def _arguments(self, config, kernel, addresses, extra):
        """What the kernel would read: the bytes behind each pointer."""
        pointers = (ctypes.c_void_p * len(self.parameter_sizes)).from_address(addresses)
        values = [
            ctypes.string_at(pointer, size)
            for pointer, size in zip(pointers, self.parameter_sizes, strict=True)
        ]
        cluster = config.attrs[0].value.clusterDim
        return SimpleNamespace(
            kernel=int(kernel),
            grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
            cluster=(cluster.x, cluster.y, cluster.z),
            threads=config.blockDimX,
            smem=config.sharedMemBytes,
            stream=int(config.hStream),
            values=values,
        )

    def _encode_tiled(self, out, dtype, rank, address, dims, strides, box, steps, *enums):
        def read(kind, pointer, count):
            return tuple((kind * count).from_address(pointer))

        self.maps.append(
            SimpleNamespace(
                aligned=out % 64 == 0,
                dtype=dtype,
                address=address,
                dims=read(ctypes.c_uint64, dims, rank),
                strides=read(ctypes.c_uint64, strides, rank - 1),
                box=read(ctypes.c_uint32, box, rank),
                steps=read(ctypes.c_uint32, steps, rank),
                swizzle=enums[1],
            )
        )
        ctypes.memset(out, len(self.maps), 128)
        return 0


SPEC = GemmSpec(
    "bfloat16", "float32", "k", "n", 128, 64, cluster_m=2, tile_scheduler="dynamic", epi_stages=2
)
PROBLEM = GemmProblem.dense(1000, 520, 256, 3, d_dtype="float32")
PLAN = make_plan(PROBLEM, SPEC, Traversal("n", 4), num_sms=132)
SIZES = [{TensorMap: 128, Int32: 4, Pointer: 8}[type(param)] for param in PLAN.params]


def launch_on(driver):
    gpu = Gpu(driver=driver)
    return direct.Launch(gpu, 77, PLAN, [gpu.allocate(1 << 20) for _ in range(3)])


def test_launch_passes_the_plan_to_the_driver():
    driver = FakeDriver(SIZES)
    launch = launch_on(driver)
    launch(stream=5)
    (seen,) = driver.launched
    assert seen.kernel == 77 and seen.stream == 5
    assert (seen.grid, seen.cluster) == (PLAN.grid, PLAN.cluster)
    assert (seen.threads, seen.smem) == (PLAN.threads, PLAN.smem_bytes)
    assert [value[0] for value in seen.values[:3]] == [1, 2, 3]  # the maps, in order
    scalars = [int.from_bytes(value, "little", signed=True) for value in seen.values[3:-1]]
    assert scalars == [param.value for param in PLAN.params if isinstance(param, Int32)]
    counter = launch.buffers[3]
    assert int.from_bytes(seen.values[-1], "little") == counter.address
    assert ("cuMemsetD8Async", counter.address, 0, 4, 5) in driver.calls


def test_launch_encodes_tensor_maps_as_planned():
    driver = FakeDriver(SIZES)
    launch = launch_on(driver)
    planned = [param for param in PLAN.params if isinstance(param, TensorMap)]
    for seen, param in zip(driver.maps, planned, strict=True):
        assert seen.aligned
        assert seen.address == launch.buffers[param.buffer].address
        assert (seen.dims, seen.strides, seen.box) == (param.dims, param.strides, param.box)
        assert seen.steps == (1, 1, 1)
    assert [seen.dtype for seen in driver.maps] == [9, 9, 7]
    assert [seen.swizzle for seen in driver.maps] == [3, 3, 3]


def test_launch_raises_the_shared_memory_limit_before_it_runs():
    driver = FakeDriver(SIZES)
    launch_on(driver)
    ((_, _, nbytes, *_),) = (call for call in driver.calls if call[0] == "cuKernelSetAttribute")
    assert nbytes == PLAN.smem_bytes


def test_launch_refuses_a_kernel_with_other_parameters():
    with pytest.raises(ValueError, match=r"parameters have \[128, 128, 128, 4, .*another version"):
        launch_on(FakeDriver(SIZES[:-1]))


def test_failed_driver_calls_name_themselves():
    driver = FakeDriver(SIZES)
    launch = launch_on(driver)
    driver.failing = "cuLaunchKernelEx"
    with pytest.raises(CudaError, match="cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED: it failed"):
        launch()


@pytest.mark.parametrize(("scheduler", "expected"), [("static", 2.0), ("dynamic", 3.7)])
def test_kernel_timer_launches_on_rotating_operands(scheduler, expected, monkeypatch):
    driver = FakeDriver(SIZES)
    gpu = Gpu(driver=driver)
    problem = GemmProblem.dense(2048, 2048, 2048)  # 16 MiB of inputs
    launches = []

    def prepare(gpu, problem, spec, traversal, buffers):
        return lambda: launches.append((spec, tuple(buffer.address for buffer in buffers)))

    def burst(function, input_sets, added):
        def measure():
            for launch in input_sets:
                jax.block_until_ready(function(*launch))
            return [3.0 + added, 1.0 + added, 2.0 + added]

        return measure

    monkeypatch.setattr(timing, "prepare", prepare)
    monkeypatch.setattr(timing, "burst", burst)
    spec = dataclasses.replace(SPEC, tile_scheduler=scheduler)
    assert timing.KernelTimer(gpu, problem)(spec, Traversal()) == expected  # clearing counts
    assert [spec for spec, _ in launches] == [spec] * 8
    addresses = [address for _, buffers in launches for address in buffers]
    assert len(set(addresses)) == 24
    assert [call[0] for call in driver.calls].count("cuCtxSynchronize") == 8  # each was awaited


def test_random_buffers_fill_to_the_last_byte():
    driver = FakeDriver(SIZES)
    buffer = Gpu(driver=driver).random("bfloat16", 9_000_001)
    copied = sum(call[3] for call in driver.calls if call[0].startswith("cuMemcpy"))
    assert copied == buffer.nbytes == 18_000_002


def test_a_missing_driver_is_said():
    def missing(*args):
        raise RuntimeError("libcuda.so.1 not found")

    with pytest.raises(CudaError, match=r"no CUDA driver: libcuda\.so\.1 not found"):
        Gpu(driver=SimpleNamespace(cuInit=missing))


# Trials, with a kernel that runs on the host


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


def run_on_host(monkeypatch, problem, a, b, spoil=lambda launches, d, flat: None, repeats=1):
    """trial.run, with NumPy for the kernel; `spoil` then does what a bug would."""
    launches = itertools.count()

    def prepare(gpu, problem, spec, traversal, parts, num_sms):
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

        return launch

    monkeypatch.setattr(trial, "prepare", prepare)
    gpu: Any = HostGpu()
    return trial.run(gpu, problem, SPEC, Traversal(), a, b, repeats)


def trial_problem():
    problem, _ = cases.edge_problems(SPEC, num_sms=4)[1]
    return problem, *cases.integers(problem, 0)


def test_trial_accepts_a_right_kernel(monkeypatch):
    problem, a, b = trial_problem()
    result = run_on_host(monkeypatch, problem, a, b, repeats=3)
    assert np.array_equal(result, reference.integer_product(a, b, result.dtype))


def test_trial_leaves_unwritten_elements_poisoned(monkeypatch):
    def skip(launches, d, flat):
        d[1, 2, 3] = np.frombuffer(bytes([trial.POISON] * 4), np.float32)[0]

    result = run_on_host(monkeypatch, *trial_problem(), skip)
    assert np.argwhere(np.isnan(result)).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("where", ["after a row", "after the end"])
def test_trial_finds_a_write_outside(monkeypatch, where):
    problem, a, b = trial_problem()
    end = reference.num_elements(problem, "d")
    index = {"after a row": problem.n, "after the end": end}[where]

    def stray(launches, d, flat):
        flat[index] = 1

    with pytest.raises(AssertionError, match=f"wrote 1 elements outside, the first {index}"):
        run_on_host(monkeypatch, problem, a, b, stray)


def test_trial_finds_a_write_before_the_start():
    problem, _, _ = trial_problem()
    (place,) = reference.result_places(problem, SPEC)
    bits = np.full(place.end + 2 * trial.GUARD, 2**32 - 1, np.uint32)
    trial.assert_untouched_outside(place, bits, "kernel")
    bits[3] = 0
    with pytest.raises(AssertionError, match=f"the first -{trial.GUARD - 3} elements"):
        trial.assert_untouched_outside(place, bits, "kernel")


def test_inputs_have_nans_wherever_no_element_is():
    problem, a, b = trial_problem()
    flat = trial.guarded(reference.input_places(problem)[0], [a])
    values = reference.view(problem, "a", flat[trial.GUARD :])
    assert np.array_equal(values, a)
    assert np.isnan(flat.astype(np.float32)).sum() == flat.size - a.size


def test_trial_finds_a_repeat_with_other_bits(monkeypatch):
    def waver(launches, d, flat):
        d[0, 0, 0] += launches == 2

    with pytest.raises(AssertionError, match="run 2 gave other bits in 1 elements"):
        run_on_host(monkeypatch, *trial_problem(), waver, repeats=4)


# Epilogues, with a kernel that computes on the host what it should


EPILOGUE_SPECS = policies.epilogue_covering_specs()
BY_NAME = {policies.name_of(spec): spec for spec in EPILOGUE_SPECS}
EXACT = [name for name, graph in graphs.STANDARD.items() if graphs.is_exact(graph)]


def run_epilogue_on_host(monkeypatch, spec, spoil=lambda results: None, num_sms=4):
    """trial.run_all on the second edge problem; `spoil` does what a bug would."""
    problem, traversal = cases.edge_problems(spec, num_sms)[1]
    inputs = cases.integer_inputs(problem, 0)

    def prepare(gpu, problem, spec, traversal, parts, num_sms):
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
            for part, place in zip(
                parts[len(buffers) :], reference.result_places(problem, spec), strict=True
            )
        ]
        count = 1 + problem.graph.accumulators
        seen = trial.Inputs(read[0], tuple(read[1:count]), tuple(read[count:]))

        def launch():
            for array, right in zip(written, outcome.exact(problem, spec, seen), strict=True):
                array[:] = right
            spoil(written)

        return launch

    monkeypatch.setattr(trial, "prepare", prepare)
    gpu: Any = HostGpu()
    return problem, inputs, trial.run_all(gpu, problem, spec, traversal, inputs)


@pytest.mark.parametrize("name", EXACT)
def test_trial_accepts_a_right_kernel_with_an_epilogue(monkeypatch, name):
    spec = BY_NAME[name]
    problem, inputs, results = run_epilogue_on_host(monkeypatch, spec)
    outcome.assert_exact(results, outcome.exact(problem, spec, inputs), name)


def test_trial_finds_one_wrong_part_of_a_reduction(monkeypatch):
    def spoil(results):
        results[1][0, 1, 3] += 1

    spec = BY_NAME["column_sum"]
    problem, inputs, results = run_epilogue_on_host(monkeypatch, spec, spoil)
    with pytest.raises(AssertionError, match=r"1 of \d+ elements of result 1 .* \[0 1 3\]"):
        outcome.assert_exact(results, outcome.exact(problem, spec, inputs), "kernel")


def test_trial_finds_a_part_of_a_reduction_that_was_not_written(monkeypatch):
    def spoil(results):
        results[1].view(np.uint32)[2, 0, 0] = 2**32 - 1

    spec = BY_NAME["amax"]
    problem, inputs, results = run_epilogue_on_host(monkeypatch, spec, spoil)
    with pytest.raises(AssertionError, match="elements of result 1 differ"):
        outcome.assert_exact(results, outcome.exact(problem, spec, inputs), "kernel")


def test_the_partial_results_add_up_to_the_whole(monkeypatch):
    """An independent look at `outcome.exact`: sums and maxima of the matrix beside them."""
    for name, reduce, axes in (
        ("column_sum", np.sum, (1,)),
        ("row_sum", np.sum, (2,)),
        ("row_max", np.max, (2,)),
    ):
        spec = BY_NAME[name]
        problem, inputs, (_, partial) = run_epilogue_on_host(monkeypatch, spec)
        product = reference.integer_product(inputs.a, inputs.b[0], np.dtype(np.float32))
        assert np.array_equal(reduce(partial, axis=1), reduce(product, axis=axes)), name
    spec = BY_NAME["top_k"]
    problem, inputs, (_, values, columns) = run_epilogue_on_host(monkeypatch, spec)
    product = reference.integer_product(inputs.a, inputs.b[0], np.dtype(np.float32))
    right = jax.lax.top_k(product, values.shape[-1])
    assert np.array_equal(values, right[0]) and np.array_equal(columns, right[1])


@pytest.mark.parametrize("name", [name for name in EXACT if name != "top_k"])
def test_float32_arithmetic_is_within_the_bounds_of_an_epilogue(name):
    spec = BY_NAME[name]
    problem, _ = cases.edge_problems(spec, 4)[1]
    inputs = cases.normal_inputs(problem, 3)
    results = outcome.exact(problem, spec, inputs)  # NumPy's float32, in another order
    outcome.assert_within_bound(problem, spec, inputs, results, name)
    results[-1][(-1,) * results[-1].ndim] += 100
    with pytest.raises(AssertionError, match="times the bound"):
        outcome.assert_within_bound(problem, spec, inputs, results, name)


def test_gate_and_up_are_found_in_one_array_and_in_two():
    spec = BY_NAME["planes"]
    offsets = {cases.padded(spec, m, 64, 64, 2).up_offset for m in range(16)}
    assert None in offsets and len(offsets) > 1
    for m in range(16):
        problem = cases.padded(spec, m + 1, 64, 64, 2)
        inputs = cases.integer_inputs(problem, 0)
        gate, up = inputs.b
        assert not np.array_equal(gate, up)
        for places in reference.input_places(problem)[1:]:
            first, *others = (set(place.view(np.arange(10**6)).ravel()) for place in places)
            assert not any(first & other for other in others)


def test_random_problems_can_run_and_vary():
    specs = policies.covering_specs()
    problems = []
    for seed in range(400):
        rng = random.Random(seed)
        problem, traversal = cases.random_problem(rng, rng.choice(specs))
        assert problem_violations(problem) == [], problem
        assert max(problem.m, problem.n, problem.k) <= cases.MAX_EXTENT
        problems.append((problem, traversal))
    assert sum(p.l > 1 for p, _ in problems) > 80
    assert sum(p.l > 1 and p.a.batch_stride == 0 for p, _ in problems) > 20
    assert sum(p.a.leading_stride > p.a.batch_stride > 0 for p, _ in problems) > 20
    assert sum(max(p.m, p.n, p.k) > 4000 for p, _ in problems) > 40
    assert {t.swizzle for _, t in problems} == set(range(1, 17))


@pytest.mark.parametrize("spec", EPILOGUE_SPECS[::3], ids=lambda spec: spec.name)
def test_edge_problems_of_epilogues_can_run(spec):
    for problem, traversal in [
        *cases.edge_problems(spec, 132),
        *(cases.random_problem(random.Random(seed), spec) for seed in range(8)),
    ]:
        assert problem_violations(problem) == []
        assert pairing_violations(problem, spec) == []
        assert make_plan(problem, spec, traversal, 132).grid[0] > 0


@pytest.mark.parametrize("spec", policies.covering_specs()[::7], ids=lambda spec: spec.name)
def test_edge_problems_can_run_and_cover_waves(spec):
    for problem, traversal in cases.edge_problems(spec, 132):
        assert problem_violations(problem) == []
        assert max(problem.m * problem.n, problem.m * problem.k, problem.n * problem.k) < 1 << 25
        plan = make_plan(problem, spec, traversal, 132)
        assert plan.grid[0] > 0
    waves = [
        math.ceil(p.m / (spec.tile_m * spec.cluster_m))
        * math.ceil(p.n / (spec.tile_n * spec.cluster_n))
        / (132 // spec.cluster_size)
        for p, _ in cases.edge_problems(spec, 132)[2:]
    ]
    assert all(2 < wave < 4 for wave in waves)


def test_rows_to_check_hold_both_ends_within_the_budget():
    problem = GemmProblem.dense(9000, 9000, 9000)
    rows = cases.rows_to_check(problem)
    assert (rows[0], rows[-1]) == (0, 8999)
    assert len(rows) * 9000 * 9000 <= 1_000_000_000
    assert cases.rows_to_check(GemmProblem.dense(50, 50, 50)).tolist() == list(range(50))


# The record of verified kernels


def test_verified_merges_and_sorts(tmp_path):
    path = tmp_path / "verified.json"
    verified.merge(path, {"bb": "kernel_b", "cc": "kernel_a"}, "H100")
    verified.merge(path, {"bb": "kernel_b", "aa": "kernel_a"}, "H200")
    entries = verified.read(path)
    assert list(entries) == ["aa", "cc", "bb"]  # by name, then digest
    assert [entries[key]["device"] for key in entries] == ["H200", "H100", "H200"]
    assert verified.missing(path, ["aa", "dd"]) == ["dd"]
