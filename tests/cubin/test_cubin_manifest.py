"""The manifest says what the machine code says, and a misfit is an error."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest
from support.cubin_samples import PLACES, SPEC, sample_cubin, sample_manifest

from jax_hopper_gemm.cubin import CubinError, Manifest, Parameter
from jax_hopper_gemm.cubin.elf import read_kernel
from jax_hopper_gemm.cubin.manifest import derive_manifest
from jax_hopper_gemm.gemm.kernel_params import param_list

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("abi_version", "api_version"), [(7, 129), (8, 134)])
def test_kernel_is_read_from_either_abi(abi_version, api_version):
    code = read_kernel(
        sample_cubin(
            entry="k",
            abi_version=abi_version,
            api_version=api_version,
            registers=90,
            stack_bytes=16,
        )
    )
    assert (code.entry, code.sm, code.registers, code.stack_bytes) == ("k", 90, 90, 16)
    assert code.toolkit == divmod(api_version, 10)
    assert code.parameters == PLACES
    assert code.threads == SPEC.threads


def test_manifest_names_each_parameter_and_the_bytes():
    cubin = sample_cubin(entry="the_kernel")
    manifest = derive_manifest(SPEC, cubin)
    assert manifest.parameters[3] == Parameter("raster_total", 432, 4)
    assert [p.name for p in manifest.parameters] == [param.name for param in param_list(SPEC)]
    assert manifest.entry == "the_kernel"
    assert manifest.name == SPEC.name
    assert manifest.dynamic_smem_bytes == SPEC.smem_bytes
    assert manifest.cubin_sha256 == hashlib.sha256(cubin).hexdigest()


def test_manifest_survives_json():
    manifest = sample_manifest(replace(SPEC, cluster_n=2))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.cluster == (1, 2, 1)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"sm": 100}, "it is for sm_100, not sm_90a"),
        ({"sm": 80, "abi_version": 8}, "it is for sm_80, not sm_90a"),
        ({"threads": 128}, "a block has 128 threads, the spec 384"),
        ({"places": PLACES[:-1]}, r"parameters have \[128, 128, 128(, 4){16}\] bytes"),
        ({"places": ((0, 64), *PLACES[1:])}, r"\[64, .* expected a 128, b 128"),
        ({"places": (*PLACES, (500, 1))}, r"4, 4, 4, 1\] bytes, expected"),
    ],
)
def test_code_that_does_not_fit_the_spec_is_refused(difference, message):
    with pytest.raises(CubinError, match=message):
        derive_manifest(SPEC, sample_cubin(**difference))


def test_all_differences_come_in_one_message():
    with pytest.raises(CubinError, match="sm_80.*threads.*parameters"):
        derive_manifest(SPEC, sample_cubin(sm=80, threads=64, places=()))


@pytest.mark.parametrize("kernels", [0, 2])
def test_a_cubin_holds_one_kernel(kernels):
    with pytest.raises(CubinError, match=f"one kernel, found {kernels}"):
        read_kernel(sample_cubin(kernels=kernels))


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not a cubin, longer than a header" * 9])
def test_what_is_no_cubin_is_refused(content):
    with pytest.raises(CubinError, match="not a cubin|damaged"):
        read_kernel(content)


def test_an_object_for_the_host_is_refused():
    x86 = bytearray(sample_cubin())
    struct.pack_into("<H", x86, 18, 62)
    with pytest.raises(CubinError, match="not a cubin"):
        read_kernel(bytes(x86))


def test_a_cubin_cut_short_anywhere_is_refused():
    cubin = sample_cubin()
    for length in range(0, len(cubin), 7):
        with pytest.raises(CubinError):
            read_kernel(cubin[:length])


def test_a_damaged_cubin_is_an_error_of_its_own_kind_wherever_the_damage_is():
    """Each word in turn is replaced by one that is no place, no size and no count."""
    cubin = sample_cubin()
    for word in (b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\xff\xff\xff\xff\x7f"):
        for place in range(len(cubin)):
            damaged = cubin[:place] + word + cubin[place + 8 :]
            try:
                read_kernel(damaged)
            except CubinError:
                pass  # any other error fails
