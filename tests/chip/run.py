"""Runs random products on a GPU by the thousand, and keeps a record.

    python tests/chip/run.py build FOLDER                     compile kernels, checker and host
    python tests/chip/run.py run FOLDER --seeds 1000000       until all are done, or for --minutes
    python tests/chip/run.py run FOLDER --seeds 5:6 --again  one by one, without a record
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
PATIENCE = 240  # seconds that a portion may take
MAX_FAILURES = 200  # that a record describes; it counts all
REPORT_SECONDS = 5


Portion = tuple[int, int]  # of seeds, from the first to before the second
Outcome = tuple[dict[str, int], list[str], int]  # counts of kinds, failures, how many are wrong


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
    parser.add_argument("--again", action="store_true", help="one by one, whatever was run")
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
    batch = 1 if arguments.again else BATCH
    return run(path, seeds, arguments.jobs, 60 * arguments.minutes, (arena, batch))


def build_all(folder: Path, jobs: int, tables: str) -> int:
    """Compiles the kernels, the checker and the host of the launcher."""
    build(folder, "nvcc")
    specs = kernels(tables)
    report = cubin.build(specs, jobs, folder=folder / "cubins")
    (folder / "specs.pickle").write_bytes(pickle.dumps(specs))
    print(report)
    return 1 if report.failures else 0


def run(path: Path, seeds: range, jobs: int, seconds: float, sizes: tuple[int, int]) -> int:
    """Runs seeds in several processes, for a record; returns 1 if one went wrong."""
    folder = path.parent
    specs = pickle.loads((folder / "specs.pickle").read_bytes())
    record = Record(path, {**identity(specs), "arena_bytes": sizes[0]})
    supervise(record, seeds, jobs, seconds, lambda: Worker(work, folder, specs, *sizes))
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


def supervise(
    record: Record, seeds: range, jobs: int, seconds: float, hire: Callable[[], Worker]
) -> None:
    """Has the seeds run that the record lacks; after so many seconds begins no more."""
    pending = record.portions(seeds)
    workers: list[Worker] = []
    last = start = time.monotonic()
    try:
        while True:
            begins = pending and time.monotonic() < start + seconds
            if begins and len(workers) < jobs:
                workers.append(hire())
                workers[-1].give(pending.pop(0))
                continue
            if not workers:
                return
            ready = wait([worker.pipe for worker in workers], timeout=1)
            for worker in list(workers):
                if worker.pipe not in ready and not worker.is_late:
                    continue
                outcome = worker.outcome()
                record.add(worker.portion, outcome)
                if pending and time.monotonic() < start + seconds and "lost" not in outcome[0]:
                    worker.give(pending.pop(0))
                else:
                    worker.dismiss()
                    workers.remove(worker)
            if time.monotonic() - last > REPORT_SECONDS:
                last = time.monotonic()
                record.write()
                print(record, flush=True)
    finally:
        for worker in workers:
            worker.dismiss()
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
        return list(_ranges(left, PORTION))

    def add(self, portion: Portion, outcome: Outcome) -> None:
        fields, (counts, failures, wrong) = self.fields, outcome
        merged: list[list[int]] = []
        for first, end in sorted([*fields["seeds"], list(portion)]):
            if merged and merged[-1][1] == first:
                merged[-1][1] = end
            else:
                merged.append([first, end])
        fields["seeds"] = merged
        fields["products"] += portion[1] - portion[0]
        fields["wrong"] += wrong
        kinds = collections.Counter(fields["kinds"]) + collections.Counter(counts)
        fields["kinds"] = dict(sorted(kinds.items()))
        fields["failures"] = [*fields["failures"], *failures][:MAX_FAILURES]

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
    """A process that runs portions.

    Args:
      work: what it runs, a function of a pipe and the arguments.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, *arguments))
        self.process.start()
        other.close()

    def give(self, portion: Portion) -> None:
        self.portion, self.begun = portion, time.monotonic()
        self.pipe.send(portion)

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.begun > PATIENCE

    def outcome(self) -> Outcome:
        """Returns what came of its portion; all of it counts as wrong if the process was lost."""
        try:
            answer = self.pipe.recv() if self.pipe.poll() else f"nothing for {PATIENCE} s"
        except EOFError:
            self.process.join()
            answer = f"it ended, {self.process.exitcode}"
        if not isinstance(answer, str):
            return answer
        (first, end) = self.portion
        what = f"seeds {first} to {end - 1}: the process was lost: {answer}"
        return {"lost": end - first}, [what], end - first

    def dismiss(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def work(
    pipe: Connection, folder: Path, specs: Sequence[GemmSpec], arena: int, together: int
) -> None:
    """Runs portions for good; a process of its own."""
    Gpu()  # the context in which the launcher's resolver loads kernels
    checker = Checker(folder / "checker.so", arena)
    launcher = Launcher(folder / "ffi_host.so")
    while True:
        portion = pipe.recv()
        try:
            pipe.send(try_portion(checker, launcher, specs, portion, together))
        except DeviceError as error:
            pipe.send(str(error))
            return


def try_portion(
    checker: Checker, launcher: Any, specs: Sequence[GemmSpec], portion: Portion, together: int
) -> Outcome:
    """Runs the seeds of a portion, so many together."""
    draw = Draw(specs, checker.arena_bytes * 9 // 10)
    counts: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    wrong: set[int] = set()
    (seed, last), batches = portion, 0
    trial = None
    while seed < last:
        batch, start = checker.batch(), seed
        while seed < last and len(batch.products) < together:
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
        try:
            found = checker.run(batch, launcher)
        except DeviceError as error:
            raise DeviceError(f"{error}, at one of seeds {start} to {seed - 1}") from error
        for failure in found:
            wrong.add(failure.seed)
            failures.append(failure.what)
        batches += 1
        if batches % SWEEPS == 0 or seed == last:
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
