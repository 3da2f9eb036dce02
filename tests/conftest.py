"""Where tests run: on the CPU, on eight devices of it, unless the GPU's tests are asked for."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import pytest
from fake_driver.harness import build_fakes
from support import partitioned
from support.covering import covering_subset

from jax_hopper_gemm import cubin
from jax_hopper_gemm.dispatch import choice, model
from jax_hopper_gemm.dispatch import table as tables
from jax_hopper_gemm.dispatch.table import Table
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.interop import fuse_jaxpr
from jax_hopper_gemm.launch import ffi_library

GPU_TESTS = Path(__file__).with_name("gpu")


# For XLA's CPU backend: these programs take far longer to compile than to run.
# NOTE: a number that a program computes twice may differ in its last bit.
QUICK_COMPILES = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1",
}
OLDEST_JAX = jaxlib.version.__version_info__[:2] == (0, 10)
if OLDEST_JAX:  # later ones refuse the flag
    QUICK_COMPILES["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
PROGRAMS_OF_A_CONTEXT = 100  # what a context has seen, types and places in sources, it keeps


def marks_left_out(config: pytest.Config) -> set[str]:
    """Returns the marks that the option `-m` excludes."""
    expression = config.getoption("markexpr") or ""
    excluded = set(re.findall(r"not (\w+)", expression))
    if expression == "quick":
        excluded.add("compile")
    if expression and "gpu" not in expression:
        excluded.add("gpu")
    return excluded


def marks_asked_for(config: pytest.Config) -> set[str]:
    """Returns the marks written in the files that each test of the option `-m` has."""
    expression = config.getoption("markexpr") or ""
    if re.search(r"\bor\b|\(", expression):
        return set()
    return set(re.findall(r"(?<!not )\b(compile|alone|pure|slow)\b", expression))


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" in marks_left_out(config):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_disable_most_optimizations", True)
        for variable, value in QUICK_COMPILES.items():  # read later, and by other processes
            os.environ.setdefault(variable, value)
        if OLDEST_JAX:
            reuse_mlir_contexts()
    jax.config.update("jax_num_cpu_devices", 8)


def reuse_mlir_contexts() -> None:
    """Lets the programs that a thread lowers share an MLIR context, as in newer versions of JAX.

    One for each program takes a quarter of these tests' time, and memory for good.
    """
    from jax._src.interpreters import mlir

    make, kept = mlir.make_ir_context, threading.local()

    def context() -> Any:
        kept.programs = getattr(kept, "programs", -1) + 1
        if kept.programs % PROGRAMS_OF_A_CONTEXT == 0:
            kept.context = make()
        return kept.context

    mlir.make_ir_context = context


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of which `-m` excludes every test: to import them takes seconds."""
    left_out = marks_left_out(config)
    if collection_path == GPU_TESTS:
        return True if "gpu" in left_out else None
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if not all(f"pytest.mark.{mark}" in text for mark in marks_asked_for(config)):
        return True
    marks = re.findall(r"^pytestmark = \[?pytest\.mark\.(\w+)", text, re.M)
    return True if left_out.intersection(marks) else None


def pytest_collection_finish() -> None:
    """Spares the garbage collector the modules and items, which stay, and what jax caches."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


@pytest.fixture
def optimised() -> Iterator[None]:
    """XLA optimises, for tests that compare sums whose order it would otherwise leave apart."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `quick` the first case of each test that is not slow, as `repeated` what it can."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if GPU_TESTS not in item.path.parents:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for first, *others in tests.values():
        if not any(first.get_closest_marker(mark) for mark in ("slow", "compile")):
            first.add_marker(pytest.mark.quick)
        telling = covering_subset([first, *others], chosen_values)
        for item in others:
            if item not in telling:
                item.add_marker(pytest.mark.repeated)


def chosen_values(item: pytest.Item) -> list[tuple[str, type, str]]:
    """Returns the values that a case has of its test's parameters."""
    callspec = getattr(item, "callspec", None)
    params: dict[str, object] = callspec.params if callspec else {}
    return [(name, type(value), repr(value)) for name, value in params.items()]


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest) -> dict[KernelSpec, str]:
    """Compiles `SPECS` of each module that asks for it, all at once; returns the failures."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    modules = dict.fromkeys(test.module for test in tests if "built" in test.fixturenames)
    specs = [spec for module in modules if module for spec in module.SPECS]
    return cubin.build(specs, progress=False).failures


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cubin.build` compiles here, not in processes of its own, which take seconds to start."""
    monkeypatch.setattr(futures, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))


@pytest.fixture
def all_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `accelerate` every region is one kernel, whatever it costs."""
    monkeypatch.setattr(fuse_jaxpr, "_refusal", lambda *_: None)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering for CUDA emits launches; whether the FFI library is built is not the matter."""
    monkeypatch.setattr(ffi_library, "library", lambda: None)


@pytest.fixture(scope="session")
def fake_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in of the CUDA driver."""
    folder = tmp_path_factory.mktemp("libraries")
    build_fakes(folder)
    return folder


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Products are partitioned by us in programs for the CPU, too, each share XLA's product."""
    with partitioned.on_cpu():
        yield


@pytest.fixture
def use_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path | str], None]]:
    """A function that names a user's table in the environment, which is read anew."""

    def use(path: Path | str) -> None:
        monkeypatch.setenv(tables.TABLE_VARIABLE, str(path))
        tables._environment_tables.cache_clear()

    tables._environment_tables.cache_clear()
    yield use
    tables._environment_tables.cache_clear()


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch, use_table: object) -> Iterator[None]:
    """Leaves dispatch to its model: neither a user's table nor the packaged one."""
    monkeypatch.delenv(tables.TABLE_VARIABLE, raising=False)
    monkeypatch.setattr(tables, "packaged_table", cache(Table.of))
    choice._choose.cache_clear()
    yield
    choice._choose.cache_clear()


@pytest.fixture
def kernels_by_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets plain products of 16 bits run kernels, also where XLA is as likely to be faster."""

    def forget() -> None:
        jax.clear_caches()  # and what was decided of traces
        for cached in (choice._choose, model.xla_time):
            cached.cache_clear()

    monkeypatch.setattr(model, "xla_lead", lambda problem, best: 0.1)
    forget()
    yield
    forget()
