"""Processes that run portions of random products, and the one that hands them out."""

from __future__ import annotations

import collections
import multiprocessing
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.gpu import Gpu

from chip.arena import Batch, Full
from chip.arrays import place
from chip.device import Checker, DeviceError, Launch, Launcher, Profile
from chip.problems import HUGE, Draw
from chip.record import Outcome, Portion, Record

BATCH = 128  # products that are checked together
BATCH_BYTES = 1 << 29  # and the memory at which a batch is full
SWEEPS = 50  # batches after which the whole arena is looked over
PATIENCE = 240  # seconds that a portion may take
REPORT_SECONDS = 5


@dataclass(frozen=True)
class Limits:
    """What a process takes.

    Attributes:
      arena: bytes of GPU memory for the arrays of products.
      together: products that are checked together.
      huge: one of so many products may have an array of over 2^31 elements.
      profile: whether it waits after each phase and counts the seconds.
    """

    arena: int
    together: int = BATCH
    huge: int = HUGE
    profile: bool = False


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
                if pending and time.monotonic() < start + seconds and "lost" not in outcome.counts:
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


class Worker:
    """A process that runs portions.

    Args:
      work: what it runs, a function of a pipe and the arguments.

    NOTE: it is forked from a server that has imported this module, if `PYTHONPATH` leads there, and
    that has not touched the GPU: so a start takes milliseconds.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
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
        if isinstance(answer, Outcome):
            return answer
        (first, end) = self.portion
        what = f"seeds {first} to {end - 1}: the process was lost: {answer}"
        return Outcome({"lost": end - first}, [what], end - first)

    def dismiss(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def work(pipe: Connection, folder: Path, limits: Limits) -> None:
    """Runs portions for good; a process of its own."""
    specs = pickle.loads((folder / "specs.pickle").read_bytes())
    Gpu()  # the context in which the launcher's resolver loads kernels
    checker = Checker(folder / "checker.so", limits.arena)
    launcher = Launcher(folder / "ffi_host.so")
    while True:
        portion = pipe.recv()
        checker.profile = Profile() if limits.profile else None
        try:
            draw = Draw(specs, limits.arena * 9 // 10, limits.huge)
            pipe.send(try_portion(checker, launcher, draw, portion, limits.together))
        except DeviceError as error:
            pipe.send(str(error))
            return


def try_portion(
    checker: Checker, launch: Launch, draw: Draw, portion: Portion, together: int
) -> Outcome:
    """Runs the seeds of a portion, so many together: while some run the next ones are drawn."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: set[int] = set()
    outcome = Outcome(counts)
    (seed, last), batches, begun = portion, 0, portion

    def finish() -> None:
        try:
            found = checker.finish()
        except DeviceError as error:
            raise DeviceError(f"{error}, at one of seeds {begun[0]} to {begun[1] - 1}") from error
        for failure in found:
            wrong.add(failure.seed)
            outcome.failures.append(failure.what)
            outcome.outside += failure.outside

    while seed < last:
        batch, start = checker.batch(), seed
        seed = _fill(batch, draw, (seed, last), together, counts)
        if checker.profile:
            checker.profile.lap("draw and place")
        finish()
        checker.begin(batch, launch)
        begun, batches = (start, seed), batches + 1
        if batches % SWEEPS == 0 or seed == last:
            finish()
            if stray := checker.sweep():
                wrong.add(start)
                outcome.outside += stray
                outcome.failures.append(
                    f"{stray} bytes far from arrays, by seed {seed - 1} or before"
                )
    outcome.wrong = len(wrong)
    outcome.seconds = checker.profile.seconds if checker.profile else {}
    return outcome


def _fill(
    batch: Batch, draw: Draw, seeds: Portion, together: int, counts: collections.Counter[str]
) -> int:
    """Places products in a batch until it is full; returns the first seed that is not in it."""
    seed, last = seeds
    while seed < last and len(batch.products) < together:
        trial = draw(seed)
        try:
            place(batch, trial)
        except Full:
            if not batch.products:
                raise
            break
        counts[trial.kind] += 1
        counts["numbers checked"] += trial.exact
        seed += 1
        if batch.arena.next - batch.arena.start > BATCH_BYTES:
            break
    return seed
