"""Runs random products on a GPU by the thousand, and keeps a record.

    python tests/chip/run.py build FOLDER                     compile kernels, checker and host
    python tests/chip/run.py run FOLDER --seeds 1000000       until all are done, or for --minutes
    python tests/chip/run.py run FOLDER --seeds 5:6 --again   one by one, without a record
    python tests/chip/run.py run FOLDER --jobs 1 --profile    and where the time goes
    python tests/chip/run.py status                           what the record says
    python tests/chip/run.py sanitize FOLDER                  memcheck, racecheck, initcheck

A run continues the record (record.json beside this file): it takes the seeds that are not in it
yet. Each product is launched by the C++ launcher on memory that is poison but for its inputs, with
guard zones around every array. Eight products at a time run beside each other, on streams of their
own.

Checked in full (`checker.cu`): every byte outside of results, of the batch's part of the arena
after each batch, of all of it after 50; every input; every element of every result of an epilogue
whose operations float32 carries out without rounding, however large the result is. Of others
(GELU, softmax: "numbers checked" counts the rest) every element was written, and its number is not
looked at; tests/gpu/ compares such numbers. Operands are small integers, so that every sum is
exact; what rounding does to others is not a matter of this harness.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests", ROOT / "benchmarks"):
    sys.path.append(str(folder))

from support.gpu import Gpu  # noqa: E402

from chip.device import build  # noqa: E402
from chip.problems import HUGE, kernels  # noqa: E402
from chip.record import Record, identity, read, status_of  # noqa: E402
from chip.workers import BATCH, Limits, Worker, supervise, work  # noqa: E402
from jax_hopper_gemm import cubin  # noqa: E402

RECORD = Path(__file__).with_name("record.json")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("build", "run", "status", "sanitize"))
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "chip")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes [one a core]")
    parser.add_argument(
        "--tables", choices=("none", "bf16", "all"), default="bf16",
        help="kernels of plain products that dispatch can choose: build [bf16]",
    )  # fmt: skip
    parser.add_argument(
        "--no-nvcc", action="store_true", help="build: checker.so and ffi_host.so are in FOLDER"
    )
    parser.add_argument("--seeds", default="1000000", help="END or FIRST:END [1000000]")
    parser.add_argument("--again", action="store_true", help="one by one, whatever was run")
    parser.add_argument("--minutes", type=float, default=8, help="time limit of run [8]")
    parser.add_argument("--arena", type=float, default=5.5, help="GiB of a process [5.5]")
    parser.add_argument("--record", type=Path, default=RECORD, help=f"[{RECORD.name} beside this]")
    parser.add_argument("--profile", action="store_true", help="wait after each phase; time it")
    parser.add_argument(
        "--huge", type=int, default=HUGE,
        help=f"one of so many products may have an array of over 2^31 elements [{HUGE}]",
    )  # fmt: skip
    parser.add_argument("--every", type=int, default=1, help="sanitize: every Nth kernel [1]")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    os.environ["JAX_HOPPER_GEMM_CUBINS"] = str(folder / "cubins")
    os.environ["JAX_PLATFORMS"] = "cpu"  # no process lets XLA take the GPU's memory
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process has one core
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if arguments.what == "status":
        print(status_of(read(arguments.record)))
        return 0
    if arguments.what == "build":
        if not arguments.no_nvcc:
            build(folder, "nvcc")
        return build_kernels(folder, arguments.jobs, arguments.tables)
    if arguments.what == "sanitize":
        return sanitize(folder, arguments.every)
    first, _, end = ("0:" + arguments.seeds).rpartition(":")
    seeds = range(int(first.split(":")[-1]), int(end))
    arena = int(arguments.arena * 2**30) // 256 * 256
    path: Path = arguments.record
    if arguments.again:
        path = folder / "again.json"
        path.unlink(missing_ok=True)
    together = 1 if arguments.again else BATCH
    limits = Limits(arena, together, arguments.huge, arguments.profile)
    return run(path, folder, seeds, arguments.jobs, 60 * arguments.minutes, limits)


def build_kernels(folder: Path, jobs: int, tables: str) -> int:
    """Compiles the kernels."""
    specs = kernels(tables)
    report = cubin.build(specs, jobs, folder=folder / "cubins")
    (folder / "specs.pickle").write_bytes(pickle.dumps(specs))
    print(report)
    return 1 if report.failures else 0


def run(path: Path, folder: Path, seeds: range, jobs: int, seconds: float, limits: Limits) -> int:
    """Runs seeds in several processes, for a record; returns 1 if one went wrong."""
    specs = pickle.loads((folder / "specs.pickle").read_bytes())
    gpu = Gpu()
    device = {"device": gpu.name, "driver": gpu.call("cuDriverGetVersion")}
    sizes = {"arena_bytes": limits.arena, "huge": limits.huge}
    record = Record(path, {**device, **identity(specs), **sizes})
    supervise(record, seeds, jobs, seconds, lambda: Worker(work, folder, limits))
    print(record)
    for failure in record.entry["failures"][:20]:
        print(failure)
    return 1 if record.entry["wrong"] else 0


def sanitize(folder: Path, every: int) -> int:
    """Runs one kernel of each policy under the tools of compute-sanitizer."""
    status = 0
    for tool, options in {"memcheck": [], "racecheck": [], "initcheck": ["--unset"]}.items():
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
        command += ["--report-api-errors", "no"] * (tool == "memcheck")
        command += [sys.executable, str(ROOT / "tests/gpu/sanitize.py"), "--policies", str(folder)]
        command += [*options, "--every", str(every)]
        print(" ".join(command), flush=True)
        status |= subprocess.run(command).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
