"""Fuzzers: each tries random input of a kind until its time is up, or something is wrong.

    python tests/fuzz.py                          # each for a minute
    python tests/fuzz.py elf tables --seconds 3600 --seed 7
    python tests/fuzz.py --list

A trial is one number. A failure names it: `python tests/fuzz.py NAME --seed N --seconds 0` runs it
again, alone. `.ci/run` runs each for a moment, in `test_fuzz.py` and where its trials are tests.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
    os.environ["JAX_PLATFORMS"] = "cpu"

import group_sizes  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from fake_driver import harness  # noqa: E402
from support.cubin_samples import (  # noqa: E402
    SPEC,
    sample_cubin,
    sample_manifest,
    start_python,  # noqa: E402
)
from support.launches_on_cpu import parameter_bytes  # noqa: E402

from jax_hopper_gemm.cubin import CubinError, lookup, store  # noqa: E402
from jax_hopper_gemm.cubin.elf import read_kernel  # noqa: E402
from jax_hopper_gemm.cubin.manifest import as_text  # noqa: E402
from jax_hopper_gemm.cubin.store import Store  # noqa: E402

Trial = Callable[[int], None]
DIGEST = "a" * 64
JUNK: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2**31, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "x", "m",
    "\ud800", [], {}, [1], [[1]], {"a": 1},
)  # fmt: skip


def run(name: str, seconds: float, seed: int = 0) -> int:
    """Runs trials from a seed on, one at least; returns how many.

    Raises:
      AssertionError: one found something wrong; its message names the seed.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_HOPPER_GEMM_CACHE", f"{folder}/cache")
        patch.setenv("JAX_HOPPER_GEMM_LIBCUDA", "")  # to be put back
        logging.disable(logging.WARNING)
        try:
            trial, count = FUZZERS[name](Path(folder), patch), 0
            end = time.monotonic() + seconds
            while count == 0 or time.monotonic() < end:
                try:
                    trial(seed + count)
                except Exception as error:
                    raise AssertionError(f"{name} fails at --seed {seed + count}") from error
                count += 1
        finally:
            logging.disable(logging.NOTSET)
    return count


def sanitized(folder: Path, sanitizer: str, threads: int) -> Trial:
    """The launcher's C++ under a sanitizer; a trial takes a second and makes thousands."""
    from chip.problems import Draw
    from support import policies

    from jax_hopper_gemm.launch.plan import Int32, Pointer, TensorMap, make_plan

    kinds = policies.covering_specs, policies.split_specs, policies.nested_specs
    specs = [spec for kind in kinds for spec in kind()[::5]]
    of_groups = replace(SPEC, grouped="m"), replace(SPEC, grouped="k", a_major="m")
    draw = Draw([*specs, *8 * of_groups], 1 << 40)
    drawn = [
        make_plan(trial.problem, trial.spec, trial.raster_order, trial.num_sms)
        for trial in map(draw, range(60))
    ]
    a_map = TensorMap(0, "float32", (32, 64), (128,), (32, 64), 128)
    past = [count * (param,) for param, most in ((a_map, 16), (Int32(1), 64), (Pointer(255), 64))
            for count in (most, most + 1)]  # fmt: skip
    with open(folder / "plans", "w") as file:
        for plan in (*drawn, *(replace(drawn[0], params=params) for params in past)):
            words = plan.encode()
            sizes = parameter_bytes(words)
            buffers = 1 + max(getattr(param, "buffer", 0) for param in plan.params)
            print(buffers + len(plan.workspaces), len(sizes), *sizes, *words, file=file)
    options = ["-O0", "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources = [*sorted(ROOT.glob("ffi/src/*.cc")), harness.SOURCES / "ffi_host.cc"]
    whole = folder / "fuzz_launcher.cc"  # in one piece, since XLA's headers take the time
    parts = [*sources, harness.SOURCES / "fuzz_launcher.cc"]
    whole.write_text("".join(f'#include "{part}"\n' for part in parts))
    driver = harness.compile_library(folder, harness.SOURCES / "fake_cuda.cc", options)
    program = harness.compile_library(
        folder, whole, [*options, f"-I{harness.SOURCES}"], shared=False
    )

    def trial(seed: int) -> None:
        command = [str(program), str(driver), str(folder / "plans"), "1", str(seed), str(threads)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr[-6000:]

    return trial


def launcher(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Damaged plans, odd buffers, a failing driver: ASan and UBSan on decode, load and run."""
    return sanitized(folder, "address,undefined", 1)


def threads(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """The same on several threads, which share programs: TSan."""
    return sanitized(folder, "thread", 4)


def products(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random products of every kind of kernels, planned, launched on the stand-in, checked."""
    from chip.device import Checker, build
    from chip.host import Host
    from test_chip import KERNELS, draw_of
    from test_chip import run as check

    build(folder, "c++")
    harness.build_fakes(folder)
    host, checker = Host(folder, folder), Checker(folder / "checker.so", 1 << 27)

    def trial(seed: int) -> None:
        kind = list(KERNELS)[seed % len(KERNELS)]
        failures = check(checker, host, draw_of(kind), range(seed, seed + 4))
        assert not failures, failures

    return trial


def dispatch(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random problems: dispatch chooses, what it chooses is legal, and C++ loads the plan."""
    import test_dispatch
    import test_dispatch_grouped
    from chip.device import build
    from chip.host import Host

    from jax_hopper_gemm.dispatch import H200, choose, problem_violations
    from jax_hopper_gemm.dispatch.legality import pairing_violations
    from jax_hopper_gemm.gemm.legality import violations
    from jax_hopper_gemm.launch.plan import make_plan

    build(folder, "c++")
    harness.build_fakes(folder)
    host = Host(folder, folder)

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        problem = rng.choice((test_dispatch, test_dispatch_grouped)).random_problem(rng)
        decision = choose(problem, H200, kernel_only=rng.random() < 0.5)
        if decision.spec is None:
            assert decision.reason, problem
            return
        assert decision.raster_order
        wrong = (violations(decision.spec), problem_violations(problem),
                 pairing_violations(problem, decision.spec))  # fmt: skip
        assert not any(wrong), (problem, wrong)
        host.plan = make_plan(problem, decision.spec, decision.raster_order, H200.num_sms)
        loaded = host.launcher.load(decision.spec, host.plan, str(seed))
        assert not isinstance(loaded, str), (problem, loaded)
        host.launcher.free(loaded)

    return trial


def calls(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random calls of the public functions, lowered for CUDA; launches keep to their buffers."""
    from support.random_calls import random_calls
    from test_ffi_launcher import run_launches

    harness.build_fakes(folder)
    launcher = harness.Launcher(folder, folder / "fake_cuda.so")
    driver = harness.Driver(folder / "fake_cuda.so")

    def trial(seed: int) -> None:
        driver.reset()
        for i, call in enumerate(random_calls(10, seed)):
            run_launches(launcher, driver, call, f"{seed} {i}")

    return trial


def groups(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Hostile sizes of groups: the kernels' search for tiles, and the fallback's numbers."""
    import test_group_search as search
    import test_ragged as ragged

    sizes_of = {**group_sizes.KINDS, **group_sizes.HOSTILE}

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        case = search.random_case(rng, rng.choice("mk"))
        assert search.found_tiles(case) == list(search.expected_tiles(case)), case
        subscripts, name = rng.choice(ragged.FORM_CASES)
        layout, like = ragged.CASES[name]
        sizes = sizes_of[rng.choice(list(sizes_of))](ragged.T, max(1, len(like)), seed)
        sizes = rng.choice((sizes, rng.choices(range(-1, 9), k=len(like))))[: len(like)]
        lhs, rhs = ragged.operands(subscripts, layout, sizes)
        found = ragged.compiled(subscripts, layout)(lhs, rhs, np.array(sizes, np.int32))
        right = ragged.by_loop(subscripts, layout, lhs, rhs, sizes)
        np.testing.assert_array_equal(found, right, f"{name}: {sizes}")

    return trial


def epilogues(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random epilogues and their gradients mean the same as the graphs they become."""
    from test_tracing import check_random_function

    return check_random_function


def programs(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Random programs under `accelerate`, with their gradients."""
    from test_accelerate_random import check_random_program

    from jax_hopper_gemm.interop import fuse_jaxpr

    patch.setattr(fuse_jaxpr, "_refusal", lambda *_: None)  # every region is one kernel
    return check_random_program


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Returns bytes of which some are others, gone, or new."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, how = rng.randrange(len(found) + 1), rng.random()
        junk = rng.choice((b"\xff" * 8, bytes(8), rng.randbytes(rng.randint(1, 8)), b"[" * 2000))
        if how < 0.6:
            found[at : at + len(junk)] = junk
        elif how < 0.8:
            found[at:at] = rng.choice((junk, b"9" * 400, bytes([rng.choice(b'019-.e"[]{},:')])))
        else:
            del found[at : at + rng.choice((1, 8, len(found)))]
    return bytes(found)


def tampered(rng: random.Random, document: Any) -> Any:
    """Returns a JSON document of which some values are others, or gone."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 2, 3))):
        within = document
        while True:
            keys = list(within if isinstance(within, dict) else range(len(within)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(within[key], dict | list) and rng.random() < 0.85:
                within = within[key]
                continue
            if rng.random() < 0.15:
                del within[key]
            else:
                within[key] = copy.deepcopy(rng.choice(JUNK))
            break
    return document


def elf(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Damaged cubins are errors of their own kind."""
    cubin = sample_cubin()

    def trial(seed: int) -> None:
        try:
            read_kernel(damaged(random.Random(seed), cubin))
        except CubinError:
            pass

    return trial


def entries(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Damaged entries of a cache count as absent; those with a right checksum raise nothing."""
    cache = Store(folder / "cache", "cache")
    cache.write(DIGEST, sample_cubin(), sample_manifest())
    right, cubin = cache.read(DIGEST), sample_cubin()
    code, facts = cache.folder / f"{DIGEST}.cubin", cache.folder / f"{DIGEST}.json"
    intact = facts.read_bytes()

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        kind = rng.choice(("code", "facts", "forged"))
        if kind == "forged":
            entry = tampered(rng, json.loads(intact))
            if isinstance(entry.get("manifest"), dict | list):
                checksum = store._checksum(DIGEST, cubin, as_text(entry["manifest"]))
                entry["checksum"] = checksum
            facts.write_text(json.dumps(entry))
        elif kind == "code":
            code.write_bytes(damaged(rng, cubin))
        else:
            facts.write_bytes(damaged(rng, intact))
        found = cache.read(DIGEST, SPEC.to_json())
        list(cache.entries().values())
        if kind != "forged":
            assert found in (None, right)
        elif found:
            assert found.manifest.is_of(SPEC.to_json()) and found.manifest.name
        code.write_bytes(cubin)
        facts.write_bytes(intact)

    return trial


def names(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Programs whose digest or spec is tampered with get the kernel that they name, or an error."""
    lookup.user_cache().write(DIGEST, sample_cubin(), sample_manifest())
    spec = SPEC.to_json()
    patch.setattr(lookup, "compile_spec", lambda spec: 1 / 0)

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        patch.setattr(lookup, "_known", {})
        named, asked = DIGEST, spec
        if rng.random() < 0.5:
            named = damaged(rng, DIGEST.encode()).decode("latin1")
        if rng.random() < 0.5:
            asked = json.dumps(tampered(rng, json.loads(spec)))
        elif rng.random() < 0.5:
            asked = damaged(rng, spec.encode()).decode("latin1")
        try:
            found = lookup.resolve(named, asked)
        except CubinError:
            return
        assert named == DIGEST and found.manifest.is_of(asked), (named, asked)

    return trial


def tables(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Damaged tables of dispatch are errors of their own kind."""
    from jax_hopper_gemm.dispatch.table import PACKAGED, TableError, read_table

    document = json.loads((PACKAGED / "sm90_132.json").read_text())
    plain = [e for e in document["entries"] if not e.get("grouped")]
    document["entries"] = plain[:2] + [e for e in document["entries"] if e.get("grouped")][:2]
    content, path = json.dumps(document).encode(), folder / "table.json"

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            path.write_text(json.dumps(tampered(rng, document)))
        else:
            path.write_bytes(damaged(rng, content))
        try:
            read_table(path)
        except TableError:
            pass

    return trial


WRITER = """
    import os
    from pathlib import Path
    from support.cubin_samples import sample_cubin, sample_manifest
    from jax_hopper_gemm.cubin.store import Store

    cache = Store(Path(os.environ["FOLDER"]), "cache")
    cubin, manifest = sample_cubin(), sample_manifest()
    print("ready", flush=True)
    while True:
        for digest in ("a" * 64, "b" * 64):
            with cache.locked(digest):
                cache.write(digest, cubin, manifest)
"""


def kills(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Processes killed while they write a cache leave entries that are whole, and no lock."""
    right = sample_cubin()

    def trial(seed: int) -> None:
        rng, cache = random.Random(seed), lookup.user_cache()
        writers = [start_python(WRITER, FOLDER=str(cache.folder)) for _ in range(2)]
        for writer in writers:
            assert writer.stdout and writer.stdout.readline()
        for writer in writers:
            time.sleep(rng.random() / 20)
            for entry in cache.entries().values():
                assert entry.cubin == right
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        with cache.locked(DIGEST):
            cache.write(DIGEST, right, sample_manifest())
        found = cache.read(DIGEST)
        assert found and found.cubin == right

    return trial


def disks(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """A disk that is full at any byte leaves the old entry and the old table, and nothing else."""
    from jax_hopper_gemm.dispatch import H200
    from jax_hopper_gemm.dispatch.table import Table, read_table, write_table

    cache, table, code = lookup.user_cache(), Table.of(H200, [], "empty"), (b"\0" * 64, b"\1" * 64)
    path = cache.folder / "table"
    cubins = [sample_cubin(code=part) for part in code]
    entries = [(cubin, sample_manifest(cubin=cubin)) for cubin in cubins]

    def trial(seed: int) -> None:
        rng = random.Random(seed)
        old, new = rng.sample(entries, 2)
        cache.write(DIGEST, *old)
        write_table(table, path)
        before = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(4000), limits[1]))
        try:
            for write in (lambda: cache.write(DIGEST, *new), lambda: write_table(table, path)):
                try:
                    write()
                except OSError:
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        found = cache.read(DIGEST)
        assert found is None or (found.cubin, found.manifest) in entries
        assert path.read_bytes() == before and read_table(path)
        left = {x.name for x in cache.folder.iterdir()}
        assert left == {f"{DIGEST}.cubin", f"{DIGEST}.json", "table"}, left

    return trial


def shapes(folder: Path, patch: pytest.MonkeyPatch) -> Trial:
    """Twenty more shapes, lowered and run on the stand-in: memory grows as JAX's own does."""
    import gc

    import jax
    import jax.numpy as jnp
    from support.random_calls import Call
    from test_ffi_launcher import run_launches

    import jax_hopper_gemm as jhg

    harness.build_fakes(folder)
    launcher = harness.Launcher(folder, folder / "fake_cuda.so")
    driver = harness.Driver(folder / "fake_cuda.so")
    growth = {"ours": np.zeros(2), "JAX's": np.zeros(2)}
    entries = 4096  # of a bounded cache, times the objects and bytes of one
    slack = np.array([entries * 80, entries * 80 * 200])

    def memory() -> np.ndarray:
        """Returns objects of Python, and bytes of the process."""
        jax.clear_caches()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return np.array([len(gc.get_objects()), pages * resource.getpagesize()])

    def ours(a: Any, b: Any, c: Any) -> Any:
        return jhg.matmul(a, b, bias=c, activation="gelu", implementation="hopper")

    def theirs(a: Any, b: Any, c: Any) -> Any:
        return jax.nn.gelu(a @ b + c)

    def trial(seed: int) -> None:
        for name in growth:
            before = memory()
            for i in range(20 * seed, 20 * seed + 20):
                dims = (8 * (i % 2500 + 1), 64), (64, 64 * (i // 2500 + 1)), (64 * (i // 2500 + 1),)
                arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in dims]
                if name == "ours":
                    call = Call(arguments=arrays, function=ours)
                    run_launches(launcher, driver, call, f"shapes {i}")
                    driver.reset()
                else:
                    jax.jit(theirs).trace(*arrays).lower(lowering_platforms=("cuda",))
                    jax.jit(theirs).lower(*arrays).compile()
            growth[name] += memory() - before
        assert (growth["ours"] < growth["JAX's"] + slack).all(), growth

    return trial


FUZZERS: dict[str, Callable[[Path, pytest.MonkeyPatch], Trial]] = {
    function.__name__: function
    for function in (
        launcher, threads, products, dispatch, calls, groups, epilogues, programs, elf, entries,
        names, tables, kills, disks, shapes,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    parser.add_argument("--seconds", type=float, default=60, help="time of each [60]")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial [0]")
    parser.add_argument("--list", action="store_true", help="say what there is")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in FUZZERS]:
        parser.error(f"no fuzzer {', '.join(unknown)}; there are {', '.join(FUZZERS)}")
    for name in arguments.names or FUZZERS:
        if arguments.list:
            print(f"{name:10} {FUZZERS[name].__doc__}")
        else:
            count = run(name, arguments.seconds, arguments.seed)
            print(f"{name}: {count} trials from seed {arguments.seed} on: nothing", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
