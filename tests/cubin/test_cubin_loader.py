"""Loading, with a driver that does as it is told: what it accepts and what it must refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.cubin_samples import SPEC, sample_cubin, sample_manifest

from jax_hopper_gemm.cubin import Compiled, CubinError, LoadedKernel, Parameter, digest_of, loader
from jax_hopper_gemm.cubin.loader import load_compiled

driver = pytest.importorskip("cuda.bindings.driver")

pytestmark = pytest.mark.pure

COMPILED = Compiled(sample_cubin(), sample_manifest(), "cache /somewhere")
SUCCESS = driver.CUresult.CUDA_SUCCESS
HANDLE = 0x5EED


class FakeDriver:
    """The calls that the loader makes, for one kernel that fits `COMPILED`.

    Attributes:
      capabilities: of the visible GPUs.
      failing: status that a call gives, by its name.
      absent: calls that this driver does not have.
      places: (offset, size) of the kernel's parameters.
      attributes: of the kernel.
      limits: dynamic shared memory set, by device.
      calls: names of the calls made.
    """

    CUresult = driver.CUresult
    CUdevice_attribute = driver.CUdevice_attribute
    CUfunction_attribute = driver.CUfunction_attribute

    def __init__(self, *, capabilities=((9, 0),), failing=None, absent=()):
        self.capabilities = capabilities
        self.failing = failing or {}
        self.absent = absent
        self.places = [(p.offset, p.size) for p in COMPILED.manifest.parameters]
        self.attributes = {
            self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS: COMPILED.manifest.registers,
            self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: SPEC.threads,
        }
        self.limits = {}
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("cu"):
            return super().__getattribute__(name)
        self.calls.append(name)
        if name in self.absent:
            raise RuntimeError(f'Function "{name}" not found')
        if name in self.failing:
            return lambda *args: (self.failing[name], None)
        return super().__getattribute__(name)

    def cuInit(self, flags):
        return (SUCCESS,)

    def cuDeviceGetCount(self):
        return SUCCESS, len(self.capabilities)

    def cuDeviceGet(self, index):
        return SUCCESS, index

    def cuDeviceGetAttribute(self, attribute, device):
        part = {
            self.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 0,
            self.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 1,
        }[attribute]
        return SUCCESS, self.capabilities[device][part]

    def cuLibraryLoadData(self, code, *options):
        assert code == COMPILED.cubin
        assert options == ([], [], 0, [], [], 0)
        return SUCCESS, "library"

    def cuLibraryGetKernel(self, library, name):
        assert (library, name) == ("library", COMPILED.manifest.entry.encode())
        return SUCCESS, HANDLE

    def cuKernelGetParamInfo(self, kernel, index):
        if index >= len(self.places):
            return self.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
        return SUCCESS, *self.places[index]

    def cuKernelGetAttribute(self, attribute, kernel, device):
        return SUCCESS, self.attributes[attribute]

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        limit = self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        assert (attribute, kernel) == (limit, HANDLE)
        self.limits[device] = value
        return (SUCCESS,)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(loader, "_loaded", {})


def test_a_kernel_is_loaded_and_checked():
    assert load_compiled(COMPILED, FakeDriver()) == LoadedKernel(
        HANDLE, SPEC.name, COMPILED.manifest
    )


def test_a_kernel_of_a_spec_that_this_version_cannot_read_is_loaded():
    manifest = replace(COMPILED.manifest, spec='{"field_of_tomorrow": 1}')
    loaded = load_compiled(replace(COMPILED, manifest=manifest), FakeDriver())
    assert loaded == LoadedKernel(HANDLE, manifest.entry, manifest)


def test_shared_memory_is_granted_on_every_hopper_gpu_and_on_no_other():
    fake = FakeDriver(capabilities=((8, 0), (9, 0), (10, 0), (9, 0)))
    load_compiled(COMPILED, fake)
    assert fake.limits == {1: SPEC.smem_bytes, 3: SPEC.smem_bytes}


def test_a_kernel_is_loaded_once_a_process(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(loader, "_driver", lambda: fake)
    monkeypatch.setattr(loader, "resolve", lambda digest, spec_json: COMPILED)
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(loader.load, [digest_of(SPEC)] * 4, [SPEC.to_json()] * 4))
    assert [id(kernel) for kernel in loaded] == [id(loaded[0])] * 4
    assert fake.calls.count("cuLibraryLoadData") == 1


def test_a_failed_load_is_tried_again(monkeypatch):
    broken = FakeDriver(failing={"cuLibraryLoadData": driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY})
    monkeypatch.setattr(loader, "_driver", lambda: broken)
    monkeypatch.setattr(loader, "resolve", lambda digest, spec_json: COMPILED)
    with pytest.raises(CubinError):
        loader.load("digest", "spec")
    broken.failing.clear()
    assert loader.load("digest", "spec").handle == HANDLE


def has_driver() -> bool:
    try:
        driver.cuInit(0)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
def test_a_missing_driver_is_a_clear_error():
    with pytest.raises(CubinError, match=f'{SPEC.name}: no CUDA driver.*implementation="xla"'):
        load_compiled(COMPILED, driver)


def test_a_driver_that_is_too_old_is_a_clear_error():
    fake = FakeDriver(absent=("cuKernelGetParamInfo",))
    with pytest.raises(CubinError, match="no cuKernelGetParamInfo; CUDA 12.4 or newer has"):
        load_compiled(COMPILED, fake)


@pytest.mark.parametrize(
    ("capabilities", "seen"),
    [(((8, 0),), "GPU 0 has 8.0"), (((12, 0), (10, 0)), "GPU 0 has 12.0, GPU 1 has 10.0"),
     ((), "No GPU is visible")],
)  # fmt: skip
def test_a_gpu_of_another_architecture_is_named(capabilities, seen):
    fake = FakeDriver(capabilities=capabilities)
    with pytest.raises(CubinError, match=f"{SPEC.name} is for sm_90a.*{seen}"):
        load_compiled(COMPILED, fake)
    assert "cuLibraryLoadData" not in fake.calls


@pytest.mark.parametrize(
    ("call", "status", "advice"),
    [
        ("cuInit", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("cuKernelGetParamInfo", "CUDA_ERROR_INVALID_CONTEXT", ""),
        ("cuLibraryLoadData", "CUDA_ERROR_OUT_OF_MEMORY", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
        ("cuKernelSetAttribute", "CUDA_ERROR_OUT_OF_MEMORY", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
        ("cuLibraryLoadData", "CUDA_ERROR_NO_BINARY_FOR_GPU", "sm_90a.*CUDA 12.9"),
        ("cuLibraryLoadData", "CUDA_ERROR_INVALID_IMAGE", "must be for CUDA 12 or newer"),
        ("cuLibraryGetKernel", "CUDA_ERROR_NOT_FOUND", ""),
        ("cuKernelGetAttribute", "CUDA_ERROR_UNKNOWN", ""),
    ],
)
def test_a_cuda_error_names_kernel_call_and_way_out(call, status, advice):
    fake = FakeDriver(failing={call: getattr(driver.CUresult, status)})
    with pytest.raises(CubinError, match=f"{SPEC.name}: {call} gave {status}.*{advice}"):
        load_compiled(COMPILED, fake)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (lambda places: places[:-1], r"\(492, 4\)\], not \[\(48, 128\)"),
        (lambda places: [*places, (504, 8)], r"\(504, 8\)\], not"),
        (lambda places: [(0, 128), *places[1:]], r"\[\(0, 128\), .* not \[\(48, 128\)"),
        (lambda places: [*places[:-1], (500, 4)], r"\(500, 4\)\], not"),
    ],
)
def test_parameters_that_differ_from_the_manifest_are_refused(places, message):
    fake = FakeDriver()
    fake.places = places(fake.places)
    with pytest.raises(CubinError, match=message) as raised:
        load_compiled(COMPILED, fake)
    assert "It came from: cache /somewhere" in str(raised.value)
    assert fake.limits == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"registers": 40}, "a thread has 168 registers, not 40"),
        ({"threads": 512}, "a block has at most 384 threads, not 512"),
        ({"parameters": (Parameter("tma_a", 0, 128),)}, r"\(48, 128\).*not \[\(0, 128\)\]"),
    ],
)
def test_a_manifest_of_another_kernel_is_refused(change, message):
    other = replace(COMPILED, manifest=replace(COMPILED.manifest, **change))
    with pytest.raises(CubinError, match=f"differs from its manifest.*{message}"):
        load_compiled(other, FakeDriver())
