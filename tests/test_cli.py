"""The command line: what it prints, what it refuses, and its JSON."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_hopper_gemm
from jax_hopper_gemm import cubin, dispatch
from jax_hopper_gemm.cli import main, tune
from jax_hopper_gemm.cubin import digest
from jax_hopper_gemm.dispatch import table, tuner
from jax_hopper_gemm.gemm.dtypes import short_name
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.launch import ffi_library
from jax_hopper_gemm.testing import benchmark, shapes

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("empty_cache")]


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prebuilt").mkdir()
    monkeypatch.setenv("JAX_HOPPER_GEMM_CUBINS", str(tmp_path / "prebuilt"))
    return tmp_path / "cache"


def output_of(capsys, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def json_of(capsys, *words: str):
    found = json.loads(output_of(capsys, *words, "--json"))
    assert (found["schema"], found["status"], found["error"]) == (1, 0, None)
    assert words[: len(found["command"].split())] == tuple(found["command"].split())
    return found["result"]


def test_explain_names_the_kernel_that_dispatch_chooses(capsys):
    decision = dispatch.choose(GemmProblem.dense(1024, 1024, 1024), dispatch.H200)
    assert decision.spec is not None
    assert decision.spec.name in output_of(capsys, "explain", "1024x1024x1024")


def test_explain_json_holds_the_decision(capsys):
    words = ("explain", "96x1440x6024", "--a-major", "m", "--result-dtype", "float32")
    found = json_of(capsys, *words)
    assert found["path"] == "hopper"
    assert found["spec"]["a_major"] == "m" and found["spec"]["d_dtype"] == "float32"
    assert found["raster_order"]["swizzle"] >= 1 and found["waves"] >= 1


def test_explain_says_why_a_product_goes_to_xla(capsys):
    found = json_of(capsys, "explain", "8784x218x302")
    assert found["path"] == "xla" and found["kernel"] is None
    assert "copies and our best kernel are expected to take" in found["reason"]


def test_explain_accepts_float32(capsys):
    assert "in TF32 our best kernel" in output_of(
        capsys, "explain", "512x512x512", "--dtype", "f32"
    )


@pytest.mark.parametrize("words", [(), ("--b-major", "k"), ("--batch", "2")])
def test_explain_tells_of_groups(capsys, words):
    found = json_of(capsys, "explain", "4096x1024x512", "--groups", "8", *words)
    batch = 2 if "--batch" in words else 1
    assert found["path"] == "hopper" and found["spec"]["grouped"] == "m"
    assert (found["problem"]["m"], found["problem"]["l"]) == (4096 * batch, 8 * batch)
    assert found["spec"]["b_major"] == ("k" if "k" in words else "n")


def test_explain_says_whose_gpu_it_is(capsys, monkeypatch):
    assert output_of(capsys, "explain", "64x64x64").startswith("no GPU here; as an H200\n")
    assert json_of(capsys, "explain", "64x64x64")["device_is_here"] is False
    monkeypatch.setenv("JAX_HOPPER_GEMM_GPU", "H100")
    assert output_of(capsys, "explain", "64x64x64").startswith("no GPU here; as an H100\n")


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "f8_e4m3fn", "float8_e4m3fn", "i8", "int8"])
def test_dtypes_have_short_and_whole_names(capsys, name):
    found = json_of(capsys, "explain", "512x512x512", "--dtype", name, "--result-dtype", "f32")
    assert short_name(found["problem"]["a_dtype"]) in (name, short_name(name))


@pytest.mark.parametrize("words", [("tune", "512x512x512"), ("bench",)])
def test_measuring_needs_a_gpu(capsys, words):
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and ("GPU" in error or "driver" in error)


@pytest.mark.slow
def test_cache_is_shown_and_cleared(capsys, empty_cache):
    assert json_of(capsys, "cache", "show") == {"folder": str(empty_cache), "entries": []}
    (spec, *_) = dispatch.table_specs(dispatch.H200, [("bfloat16", "bfloat16")])
    nbytes = len(cubin.get(spec).cubin)
    (entry,) = json_of(capsys, "cache", "show")["entries"]
    assert entry == {"digest": cubin.digest_of(spec), "name": spec.name, "nbytes": nbytes}
    assert spec.name in output_of(capsys, "cache", "show")
    assert json_of(capsys, "cache", "clear")["freed_bytes"] > nbytes
    assert cubin.user_cache().entries() == {}


@pytest.mark.slow
def test_build_fills_a_folder_and_reuses_it(capsys, tmp_path, monkeypatch, in_this_process):
    specs = dispatch.table_specs(dispatch.H200, [("float16", "float16")])[:2]
    monkeypatch.setattr(dispatch, "table_specs", lambda device, dtypes: list(specs))
    words = ("build", "--out", str(tmp_path / "cubins"), "--jobs", "1")
    first = json_of(capsys, *words)
    assert first["compiled"] == [spec.name for spec in specs] and first["failures"] == {}
    again = json_of(capsys, *words)
    assert again["reused"] == first["compiled"] and again["compiled"] == []
    assert {path.stem for path in (tmp_path / "cubins").glob("*.cubin")} == {
        cubin.digest_of(spec) for spec in specs
    }


def test_build_can_be_restricted_to_dtypes(monkeypatch):
    built = []
    monkeypatch.setattr(
        cubin,
        "build",
        lambda specs, **kw: built.extend(specs) or cubin.BuildReport(None, (), (), {}),
    )
    assert main(["build", "--dtype", "float16", "--result-dtype", "float32"]) == 0
    assert {(s.a_dtype, s.d_dtype) for s in built} == {("float16", "float32")}
    assert {s.grouped for s in built} == {None, "m", "k"}


def test_failed_builds_are_listed_and_change_the_exit_status(capsys, monkeypatch):
    (spec, *_) = dispatch.table_specs(dispatch.H200)
    report = cubin.BuildReport(None, (), (), {spec: "no compiler here"})
    monkeypatch.setattr(cubin, "build", lambda specs, **kw: report)
    assert main(["build"]) == 1
    out = capsys.readouterr().out
    assert spec.name in out and "no compiler here" in out


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The file of an exported product with its gradients."""
    monkeypatch.setattr(ffi_library, "library", lambda: None)
    matmul = partial(jax_hopper_gemm.matmul, activation="gelu", implementation="hopper")
    product = jax.jit(matmul)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (128, 512))]
    checks = jax_hopper_gemm.export_disabled_checks()
    exported = jax.export.export(product, platforms=["cuda"], disabled_checks=checks)(*args)
    path = tmp_path / "program"
    path.write_bytes(exported.serialize(vjp_order=1))
    return path


def test_build_compiles_what_exported_programs_ask_for(program, monkeypatch):
    built = []
    report = cubin.BuildReport(None, (), (), {})
    monkeypatch.setattr(cubin, "build", lambda specs, **kw: built.extend(specs) or report)
    assert main(["build", "--program", str(program)]) == 0
    product, *of_gradients = built
    assert product.epilogue is not None and len(of_gradients) >= 2
    assert {spec.a_major for spec in of_gradients} == {"k", "m"}


def test_build_refuses_programs_whose_kernels_it_does_not_know(
    program, capsys, tmp_path, monkeypatch
):
    assert main(["build", "--program", str(tmp_path / "missing")]) == 1
    assert "missing: no kernels can be read from it: FileNotFoundError" in capsys.readouterr().err
    monkeypatch.setattr(digest, "kernel_source_digest", lambda: "of another version")
    assert main(["build", "--program", str(program)]) == 1
    said = capsys.readouterr().err
    assert "another version of jax_hopper_gemm made it" in said and "jhg_gemm_bf16" in said


@pytest.fixture
def fake_timers(monkeypatch):
    """A GPU whose kernels take 2 us a stage, but for one, which takes 1 us; XLA takes 5 us."""
    problem = GemmProblem.dense(512, 512, 512)
    fast = tuner.ranked_candidates(problem, dispatch.H200, 4)[2]
    monkeypatch.setattr(benchmark, "this_device", lambda: dispatch.H200)
    monkeypatch.setattr(cubin, "build", lambda specs: None)

    def timers(device, problem):
        return (lambda *kernel: 1.0 if kernel == fast else 2.0 * kernel[0].num_stages, lambda: 5.0)

    monkeypatch.setattr(tune, "timers", timers)
    return fast


def test_tune_writes_the_fastest_kernel_into_a_table(capsys, tmp_path, fake_timers):
    out = tmp_path / "table.json"
    words = ("tune", "512x512x512", "--count", "4", "--out", str(out))
    assert fake_timers[0].name in output_of(capsys, *words)
    ((key, entry),) = table.read_table(out).entries.items()
    assert (key.m, key.n, key.k) == (512, 512, 512)
    assert (entry.spec, entry.raster_order) == fake_timers
    assert (entry.prefer, entry.kernel_us, entry.xla_us) == ("kernel", 1.0, 5.0)


def test_tune_keeps_the_entries_of_other_products(tmp_path, fake_timers):
    words = ["--count", "2", "--out", str(tmp_path / "table.json")]
    assert main(["tune", "512x512x512", *words]) == 0
    assert main(["tune", "256x256x256", "512x512x1024", *words]) == 0
    assert len(table.read_table(tmp_path / "table.json").entries) == 3


def test_tune_refuses_a_table_of_another_gpu(capsys, tmp_path, fake_timers):
    out = tmp_path / "table.json"
    table.write_table(table.Table.of(dispatch.Device((9, 0), 114), (), ""), out)
    assert main(["tune", "512x512x512", "--out", str(out)]) == 1
    assert "h200_114, this GPU is h200_132: choose another --out" in capsys.readouterr().err


def test_tune_takes_suites(capsys, tmp_path, fake_timers, monkeypatch):
    monkeypatch.setitem(
        shapes.SUITES, "two", lambda: [GemmProblem.dense(512, 512, 512 * i) for i in (1, 2)]
    )
    words = ("tune", "two", "512x512x512", "--count", "2", "--out", str(tmp_path / "table.json"))
    assert json_of(capsys, *words)["entries"] == 2


@pytest.mark.slow
def test_demo_checks_a_product_and_shows_a_kernel(capsys):
    report = json.loads(output_of(capsys, "--json"))["result"]
    assert set(report["product"]["results"]) == {"D = A B", "dA = dD B^T", "dB = A^T dD"}
    assert all(result["good"] for result in report["product"]["results"].values())
    if "kernel" in report:  # no GPU
        kernel = report["kernel"]
        assert kernel["origin"] == "compiled" and kernel["wgmma"] > 0 and kernel["tma_loads"] > 0
        assert kernel["local_accesses"] == 0 and 0 < kernel["registers"] <= 255
    else:
        assert report["speed"]["timings"]["auto"]["median_us"] > 0
