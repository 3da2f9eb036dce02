"""Exported and cached programs for CUDA, loaded on the CPU over a stand-in of the driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import export
from support.launches_on_cpu import LaunchesOnCpu, fake_kernels, runnable
from support.program_inspection import run_fresh
from support.stored_layer import DATA, LAYER, kernels_of, launches_of_all, layer_arguments

import jax_hopper_gemm as jhg
from jax_hopper_gemm import cubin, dispatch
from jax_hopper_gemm.cubin import CubinError, compiler, digest, lookup
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import LaunchPlan
from jax_hopper_gemm.sharding.export import launches_of, stored_programs
from jax_hopper_gemm.testing import benchmark, lowered, shapes


@pytest.fixture(scope="module")
def shared(fake_libraries) -> Iterator[LaunchesOnCpu]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_HOPPER_GEMM_LIBCUDA", str(fake_libraries / "fake_cuda.so"))
        yield LaunchesOnCpu(fake_libraries)


@pytest.fixture
def on_cpu(shared, monkeypatch, tmp_path) -> LaunchesOnCpu:
    """With an empty cache, no prebuilt kernels, and nothing known to the process."""
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prebuilt").mkdir()
    monkeypatch.setenv("JAX_HOPPER_GEMM_CUBINS", str(tmp_path / "prebuilt"))
    monkeypatch.setattr(lookup, "_known", {})
    shared.driver.reset()
    shared.launcher.resolved.clear()
    shared.launcher.resolve = shared.look_up
    return shared


@pytest.fixture
def compile_with(monkeypatch):
    """A function that makes the process compile what some launches need; it returns the specs."""

    def use(launches) -> list[GemmSpec]:
        compiled: list[GemmSpec] = []
        kernels = fake_kernels(launches, compiled)
        monkeypatch.setitem(sys.modules, "jax_hopper_gemm.kernels", kernels)
        monkeypatch.setattr("jax_hopper_gemm.kernels", kernels, raising=False)
        monkeypatch.setattr(compiler, "require_compiler", lambda: None)
        return compiled

    return use


def launched(on_cpu: LaunchesOnCpu) -> list[list[int]]:
    """Returns grid, threads and shared memory of each launch."""
    calls = on_cpu.driver.calls("cuLaunchKernelEx")
    return [[*x["grid"], x["block"][0], x["smem_bytes"]] for x in calls]


def planned(launches) -> list[list[int]]:
    return [[*x.plan[1:4], *x.plan[7:9]] for x in launches]


def product(extent: int) -> export.Exported:
    """Returns an exported product; a process resolves each digest once, so extents differ."""
    checks = jhg.export_disabled_checks()
    a = jax.ShapeDtypeStruct((extent, 64), jnp.bfloat16)
    function = jax.jit(lambda a: jhg.matmul(a, a.T, implementation="hopper"))
    return runnable(export.export(function, platforms=["cuda"], disabled_checks=checks)(a))


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(DATA.glob("*.jax_export")), ids=lambda path: path.stem)
def test_a_program_of_each_version_runs_on_the_kernels_that_were_built_for_it(
    on_cpu, monkeypatch, program
):
    """With its gradients; `docs/deployment.md` promises it."""
    monkeypatch.setattr(digest, "kernel_source_digest", lambda: "of a later version")
    monkeypatch.setattr(GemmSpec, "from_json", lambda text: 1 / 0)  # nor need it read the specs
    kernels_of(program, lookup.prebuilt().folder)
    exported, vjp = stored_programs(program.read_bytes())
    forward, backward = launches_of(exported), launches_of(vjp)
    arguments = layer_arguments()
    y = jax.block_until_ready(runnable(exported).call(*arguments))
    assert y.shape == arguments[0].shape
    assert launched(on_cpu) == planned(forward)
    assert dict(on_cpu.launcher.resolved) == {x.digest: x.spec for x in forward}
    on_cpu.driver.reset()
    gradients = jax.block_until_ready(runnable(vjp).call(*arguments, y))
    assert [g.shape for g in gradients[:4]] == [x.shape for x in arguments[:4]]
    assert sorted(launched(on_cpu)) == sorted(planned(backward))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_a_kernel_that_is_timed_is_launched_as_it_was_planned(on_cpu, compile_with, scheduler):
    problem = GemmProblem.dense(320, 512, 128, 2)
    chosen = dispatch.choose(problem, dispatch.H200, kernel_only=True).spec
    assert chosen
    spec = replace(chosen, tile_scheduler=scheduler)
    function = benchmark.one_kernel(problem, spec, RasterOrder("n", 2), num_sms=7)
    arrays = [
        jnp.ones(shapes.operand_shape(problem, operand), jnp.bfloat16) for operand in ("a", "b")
    ]
    launches = lowered.launches_of(function, *arrays)
    assert compile_with(launches) == []
    for _ in range(2):
        assert jax.block_until_ready(function(*arrays)).shape == (2, 320, 512)
    assert launched(on_cpu) == 2 * planned(launches)
    assert on_cpu.driver.calls("cuMemsetD32Async") == []


def test_a_stored_program_is_served_by_these_kernels_or_says_why_not(on_cpu, compile_with):
    """As `load` would find them: of the same sources, or of others and so refused."""
    launches = launches_of_all(LAYER)
    assert len(launches) == 7
    compile_with(launches)
    for launch in launches:
        try:
            manifest = lookup.resolve(launch.digest, launch.spec).manifest
        except CubinError as error:
            assert "belongs to another version" in str(error)
        else:
            assert manifest.name == GemmSpec.from_json(launch.spec).name


def test_a_program_of_other_kernel_sources_runs_on_the_kernel_it_was_made_for_alone(
    on_cpu, compile_with, monkeypatch
):
    monkeypatch.setattr(digest, "kernel_source_digest", lambda: "of an older version")
    exported = product(256)
    (launch,) = launches_of(exported)
    compiled = compile_with([launch])
    old = compiler.compile_spec(GemmSpec.from_json(launch.spec))
    monkeypatch.setattr(digest, "kernel_source_digest", lambda: "of a newer version")
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        exported.call(jnp.ones((256, 64), jnp.bfloat16))
    assert "belongs to another version of jax_hopper_gemm" in str(caught.value)
    assert launch.name in str(caught.value) and "JAX_HOPPER_GEMM_CUBINS" in str(caught.value)
    assert launched(on_cpu) == [] and len(compiled) == 1
    lookup.prebuilt().write(launch.digest, old.cubin, old.manifest)
    jax.block_until_ready(exported.call(jnp.ones((256, 64), jnp.bfloat16)))
    assert launched(on_cpu) == planned([launch]) and len(compiled) == 1


@pytest.mark.parametrize(
    "where, extent", [("../elsewhere/", 280), ("{tmp_path}/elsewhere/", 288), ("", 296)]
)
def test_a_program_that_names_a_file_and_no_kernel_is_refused(
    on_cpu, compile_with, monkeypatch, tmp_path, where, extent
):
    digest = where.format(tmp_path=tmp_path) + 63 * "a"
    monkeypatch.setattr(cubin, "digest_of_json", lambda spec_json: digest)
    exported = product(extent)
    (launch,) = launches_of(exported)
    compile_with([launch])
    with pytest.raises(jax.errors.JaxRuntimeError, match="64 hexadecimal digits") as caught:
        exported.call(jnp.ones((extent, 64), jnp.bfloat16))
    assert repr(digest)[:100] in str(caught.value)
    assert on_cpu.launcher.resolved == [(digest, launch.spec)] and launched(on_cpu) == []


def test_a_program_whose_plan_has_another_version_is_refused(on_cpu, monkeypatch):
    encode = LaunchPlan.encode
    monkeypatch.setattr(LaunchPlan, "encode", lambda plan: (7, *encode(plan)[1:]))
    exported = product(264)
    with pytest.raises(jax.errors.JaxRuntimeError, match="plan has version 7") as caught:
        exported.call(jnp.ones((264, 64), jnp.bfloat16))
    assert launches_of(exported)[0].name in str(caught.value)
    assert on_cpu.launcher.resolved == [] and launched(on_cpu) == []


def test_the_targets_of_exported_programs_carry_a_version():
    """Stored programs name them: to be registered for good."""
    assert {str(check) for check in jhg.export_disabled_checks()} == {
        "custom_call:jax_hopper_gemm.v1.launch",
        "custom_call:jax_hopper_gemm.v1.partition",
    }


# Programs that another process has compiled.

PROCESS = """
import sys
import pickle
from pathlib import Path
import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import serialize_executable
from support.launches_on_cpu import LaunchesOnCpu, fake_kernels, runnable, use_fake_kernels
from jax_hopper_gemm.sharding.export import launches_of, stored_programs

libraries, folder, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
on_cpu = LaunchesOnCpu(libraries)
exported = runnable(export.deserialize(folder.joinpath("program").read_bytes()))
compiled = []
use_fake_kernels(fake_kernels(launches_of(exported), compiled))
x = np.ones((272, 64), jnp.bfloat16)
executable = folder / "executable"
if how == "executable":
    program = serialize_executable.deserialize_and_load(*pickle.loads(executable.read_bytes()))
else:
    program = jax.jit(exported.call).lower(x).compile()
jax.block_until_ready(program(x))
if how == "write":
    executable.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
hits, misses = (events.count(f"/jax/compilation_cache/cache_{x}") for x in ("hits", "misses"))
print(hits, misses, len(compiled), len(on_cpu.driver.calls("cuLaunchKernelEx")))
"""


@pytest.mark.slow
def test_the_second_process_compiles_neither_program_nor_kernel(fake_libraries, tmp_path):
    tmp_path.joinpath("program").write_bytes(product(272).serialize())
    tmp_path.joinpath("prebuilt").mkdir()

    def process(how: str, cubins: str = "warm") -> list[int]:
        """Returns hits and misses of JAX's cache, kernels compiled, launches."""
        said = run_fresh(
            PROCESS, str(fake_libraries), str(tmp_path), how,
            PYTHONPATH=os.pathsep.join(sys.path),
            JAX_HOPPER_GEMM_LIBCUDA=str(fake_libraries / "fake_cuda.so"),
            JAX_HOPPER_GEMM_CACHE=str(tmp_path / cubins),
            JAX_HOPPER_GEMM_CUBINS=str(tmp_path / "prebuilt"),
            JAX_COMPILATION_CACHE_DIR=str(tmp_path / "jax"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )  # fmt: skip
        return [int(word) for word in said.split()]

    assert process("write") == [0, 1, 1, 1]
    assert process("read") == [1, 0, 0, 1]
    assert process("read", "cold") == [1, 0, 1, 1]
    assert process("executable") == [0, 0, 0, 1]
