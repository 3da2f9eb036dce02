"""Runs random products on a GPU by the thousand, and keeps a record.

    python tests/chip/run.py build FOLDER                     compile kernels, checker and host
    python tests/chip/run.py run FOLDER --seeds 1000000       until all are done, or for --minutes
    python tests/chip/run.py run FOLDER --seeds 5:6 --again   one more time, without a record
    python tests/chip/run.py sanitize FOLDER                  memcheck, racecheck, initcheck

A run continues its record (FOLDER/record.json): it takes the seeds that are not in it yet. Each
product is launched by the C++ launcher on memory that is poison but for its inputs, with guard
zones around every array; every element of every result is compared with the one right value, and
all bytes outside of results must stay as they were (`checker.cu`).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests", ROOT / "benchmarks"):
    sys.path.append(str(folder))

from support.gpu import Gpu  # noqa: E402

from chip.arrays import Full  # noqa: E402
from chip.device import Checker, DeviceError, Launcher, build  # noqa: E402
from chip.problems import Draw, kernels  # noqa: E402
from jax_hopper_gemm import cubin  # noqa: E402
from jax_hopper_gemm.gemm.spec import GemmSpec  # noqa: E402

PORTION = 1000  # seeds that a process is given at once
BATCH = 48  # products that are checked together
BATCH_BYTES = 1 << 28  # and the memory at which a batch is full
SWEEPS = 50  # batches after which the whole arena is looked over
PATIENCE = 120  # seconds without a word from a process
MAX_FAILURES = 200  # that a record describes; it counts all
REPORT_SECONDS = 5


@dataclass(frozen=True)
class Portion:
    """Seeds from `first` to `end` - 1 for a process; `alone`: one product a batch."""

    first: int
    end: int
    alone: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("build", "run", "sanitize"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes [one a core]")
    parser.add_argument(
        "--tables", choices=("none", "bf16", "all"), default="bf16",
        help="kernels of plain products that dispatch can choose: build [bf16]",
    )  # fmt: skip
    parser.add_argument("--seeds", default="1000000", help="END or FIRST:END [1000000]")
    parser.add_argument("--again", action="store_true", help="run what the record has, too")
    parser.add_argument("--minutes", type=float, default=8, help="time limit of run [8]")
    parser.add_argument("--arena", type=float, default=5.5, help="GiB of a process [5.5]")
    parser.add_argument("--every", type=int, default=1, help="sanitize: every Nth kernel [1]")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    os.environ["JAX_HOPPER_GEMM_CUBINS"] = str(folder / "cubins")
    os.environ["JAX_PLATFORMS"] = "cpu"  # no process lets XLA take the GPU's memory
    if arguments.what == "build":
        return build_all(folder, arguments.jobs, arguments.tables)
    if arguments.what == "sanitize":
        return sanitize(folder, arguments.every)
    first, _, end = ("0:" + arguments.seeds).rpartition(":")
    seeds = range(int(first.split(":")[-1]), int(end))
    arena = int(arguments.arena * 2**30) // 256 * 256
    path = folder / ("again.json" if arguments.again else "record.json")
    if arguments.again:
        path.unlink(missing_ok=True)
    return run(path, seeds, arguments.jobs, arguments.minutes, arena)


def build_all(folder: Path, jobs: int, tables: str) -> int:
    """Compiles the kernels, the checker and the host of the launcher."""
    build(folder, "nvcc")
    specs = kernels(tables)
    report = cubin.build(specs, jobs, folder=folder / "cubins")
    (folder / "specs.pickle").write_bytes(pickle.dumps(specs))
    print(report)
    return 1 if report.failures else 0


def run(path: Path, seeds: range, jobs: int, minutes: float, arena: int) -> int:
    """Runs seeds in several processes, for a record; returns 1 if one went wrong."""
    folder = path.parent
    specs = pickle.loads((folder / "specs.pickle").read_bytes())
    record = Record(path, {**identity(specs), "arena_bytes": arena})
    supervise(record, seeds, Crew(work, folder, specs, arena), jobs, 60 * minutes)
    print(record)
    for failure in record.fields["failures"][:20]:
        print(failure)
    return 1 if record.fields["wrong"] else 0


def identity(specs: Sequence[GemmSpec]) -> dict[str, Any]:
    """Returns what a record is of: device, kernels, harness."""
    kernel_digest = hashlib.sha256()
    for digest in sorted(map(cubin.digest_of, specs)):
        compiled = cubin.prebuilt().read(digest)
        assert compiled, f"{digest} is not built; run build"
        kernel_digest.update(hashlib.sha256(compiled.cubin).digest())
    sources = sorted((*Path(__file__).parent.glob("*.py"), *Path(__file__).parent.glob("*.cu")))
    gpu = Gpu()
    return {
        "device": gpu.name,
        "driver": gpu.call("cuDriverGetVersion"),
        "kernels": len(specs),
        "cubins_sha256": kernel_digest.hexdigest(),
        "harness_sha256": hashlib.sha256(b"".join(map(Path.read_bytes, sources))).hexdigest(),
    }


def supervise(record: Record, seeds: range, crew: Crew, jobs: int, seconds: float) -> None:
    """Has the seeds run that the record lacks; after so many seconds begins no more."""
    pending = record.portions(seeds)
    jobs = min(jobs, len(pending))
    last = start = time.monotonic()

    def remain() -> bool:
        return bool(pending) and time.monotonic() < start + seconds

    try:
        while crew.workers or remain():
            while remain() and len(crew.workers) < jobs:
                crew.hire(pending.pop(0))
            for worker, message in crew.messages():
                match message:
                    case ("done", portion, counts, failures, wrong):
                        record.add(portion, counts, failures, wrong)
                        if remain():
                            worker.give(pending.pop(0))
                        else:
                            crew.dismiss(worker)
                    case ("lost", reason):
                        pending[:0] = record.lose(*worker.lost(), reason)
            if time.monotonic() - last > REPORT_SECONDS:
                last = time.monotonic()
                record.write()
                print(record, flush=True)
    finally:
        crew.close()
        record.write()


class Record:
    """What has been run, in a file.

    Args:
      identity: what it is of; a record of other kernels or another harness is refused.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self.start = path, time.monotonic()
        self.fields: dict[str, Any] = {
            **identity,
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "products": 0,
            "wrong": 0,
            "seconds": 0,
            "seeds": [],
            "kinds": {},
            "failures": [],
        }
        if path.is_file():
            found = json.loads(path.read_text())
            if others := [f for f in identity if f.endswith("256") and found[f] != identity[f]]:
                sys.exit(f"{path} has another {' and '.join(others)}: move it away")
            self.fields = found
        self.before, self.earlier = self.fields["products"], self.fields["seconds"]

    def portions(self, seeds: range) -> list[Portion]:
        """Returns what of the seeds has not been run."""
        done = {seed for first, end in self.fields["seeds"] for seed in range(first, end)}
        left = [seed for seed in seeds if seed not in done]
        return [Portion(first, end) for first, end in _ranges(left, PORTION)]

    def add(
        self, portion: Portion, counts: dict[str, int], failures: list[str], wrong: int
    ) -> None:
        fields = self.fields
        seeds = [*fields["seeds"], [portion.first, portion.end]]
        merged: list[list[int]] = []
        for first, end in sorted(seeds):
            if merged and merged[-1][1] == first:
                merged[-1][1] = end
            else:
                merged.append([first, end])
        fields["seeds"] = merged
        fields["products"] += portion.end - portion.first
        fields["wrong"] += wrong
        kinds = collections.Counter(fields["kinds"]) + collections.Counter(counts)
        fields["kinds"] = dict(sorted(kinds.items()))
        fields["failures"] = [*fields["failures"], *failures][:MAX_FAILURES]

    def lose(self, portion: Portion, first: int, end: int, reason: str) -> list[Portion]:
        """Returns what is to run again of a portion whose process was lost at seeds of a batch."""
        if portion.alone:
            what = f"seed {first}: the process was lost: {reason}"
            self.add(Portion(first, end), {"lost": end - first}, [what], end - first)
        culprit = [] if portion.alone else [Portion(first, end, alone=True)]
        parts = (
            Portion(portion.first, first, portion.alone), *culprit,
            Portion(end, portion.end, portion.alone),
        )  # fmt: skip
        return [part for part in parts if part.first < part.end]

    def write(self) -> None:
        fields = self.fields
        fields["seconds"] = round(self.earlier + time.monotonic() - self.start)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(fields, indent=1))
        temporary.replace(self.path)

    def __str__(self) -> str:
        fields, elapsed = self.fields, time.monotonic() - self.start
        rate = (fields["products"] - self.before) / elapsed
        return (
            f"{fields['products']} products, {fields['wrong']} wrong; {rate:.0f} a second, "
            f"{elapsed:.0f} s"
        )


def _ranges(seeds: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yields runs of consecutive numbers, each of at most so many."""
    first = None
    for i, seed in enumerate(seeds):
        first = seed if first is None else first
        last = i + 1 == len(seeds) or seeds[i + 1] != seed + 1
        if last or seed + 1 - first == most:
            yield first, seed + 1
            first = None


class Worker:
    """A process that runs portions; `batch` is the seeds that it is on."""

    def __init__(self, work: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, *arguments))
        self.process.start()
        other.close()
        self.heard = time.monotonic()
        self.portion: Portion | None = None
        self.batch = (0, 0)

    def give(self, portion: Portion) -> None:
        self.portion, self.batch = portion, (portion.first, portion.first + 1)
        self.pipe.send(portion)

    def lost(self) -> tuple[Portion, int, int]:
        """Returns the portion, and the seeds of the batch that it was on."""
        assert self.portion
        return self.portion, self.batch[0], self.batch[1]


class Crew:
    """The processes.

    Args:
      work: what each runs, a function of a pipe and the arguments.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any):
        self.arguments = work, *arguments
        self.workers: list[Worker] = []

    def hire(self, portion: Portion) -> None:
        worker = Worker(*self.arguments)
        worker.give(portion)
        self.workers.append(worker)

    def dismiss(self, worker: Worker) -> None:
        worker.pipe.close()
        worker.process.join(20)
        if worker.process.is_alive():
            worker.process.kill()
        self.workers.remove(worker)

    def messages(self) -> Iterator[tuple[Worker, tuple]]:
        """Yields what processes say, and ("lost", why) of those that say no more."""
        ready = wait([worker.pipe for worker in self.workers], timeout=1)
        for worker in list(self.workers):
            if worker.pipe in ready:
                worker.heard = time.monotonic()
                try:
                    message = worker.pipe.recv()
                except EOFError:
                    self.dismiss(worker)
                    yield worker, ("lost", f"it ended, {worker.process.exitcode}")
                    continue
                if message[0] == "batch":
                    worker.batch = message[1:]
                    continue
                if message[0] == "lost":
                    self.dismiss(worker)
                yield worker, message
            elif time.monotonic() - worker.heard > PATIENCE:
                worker.process.kill()
                self.dismiss(worker)
                yield worker, ("lost", f"it said nothing for {PATIENCE} s")

    def close(self) -> None:
        for worker in list(self.workers):
            worker.process.kill()
            self.dismiss(worker)


def work(pipe: Connection, folder: Path, specs: Sequence[GemmSpec], arena: int) -> None:
    """Runs portions until the pipe closes; a process of its own."""
    try:
        Gpu()  # the context in which the launcher's resolver loads kernels
        checker = Checker(folder / "checker.so", arena)
        launcher = Launcher(folder / "ffi_host.so")
        while True:
            portion = pipe.recv()
            pipe.send(("done", portion, *try_portion(checker, launcher, specs, portion, pipe)))
    except EOFError:
        return
    except DeviceError as error:
        pipe.send(("lost", str(error)))


def try_portion(
    checker: Checker, launcher: Any, specs: Sequence[GemmSpec], portion: Portion, pipe: Any = None
) -> tuple[dict[str, int], list[str], int]:
    """Runs the seeds of a portion; returns counts of kinds, failures, and how many are wrong."""
    draw = Draw(specs, checker.arena_bytes * 9 // 10)
    counts: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    wrong: set[int] = set()
    seed, batches = portion.first, 0
    trial = None
    while seed < portion.end:
        batch, start = checker.batch(), seed
        while seed < portion.end and len(batch.products) < (1 if portion.alone else BATCH):
            trial = trial or draw(seed)
            try:
                batch.add(trial)
            except Full:
                if not batch.products:
                    raise
                break
            counts[trial.kind] += 1
            counts["numbers checked"] += trial.exact
            trial, seed = None, seed + 1
            if batch.arena.next - batch.arena.start > BATCH_BYTES:
                break
        if pipe:
            pipe.send(("batch", start, seed))
        for failure in checker.run(batch, launcher):
            wrong.add(failure.seed)
            failures.append(failure.what)
        batches += 1
        if batches % SWEEPS == 0 or seed == portion.end:
            if stray := checker.sweep():
                wrong.add(start)
                failures.append(f"{stray} bytes far from arrays, by seed {seed - 1} or before")
    return dict(counts), failures, len(wrong)


def sanitize(folder: Path, every: int) -> int:
    """Runs one kernel of each policy under the tools of compute-sanitizer."""
    status = 0
    for tool, options in {"memcheck": [], "racecheck": [], "initcheck": ["--unset"]}.items():
        for grouped in ([], ["--grouped"]):
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
            command += ["--report-api-errors", "no"] * (tool == "memcheck")
            command += [sys.executable, str(ROOT / "tests/gpu/sanitize.py"), "--policies"]
            command += [*options, *grouped, "--every", str(every)]
            print(" ".join(command), flush=True)
            status |= subprocess.run(command).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
