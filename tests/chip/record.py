"""The record of products that were run: of which versions, which seeds, and what came of them.

A file holds a list of entries. An entry is of one state of all that decides what runs: the harness,
which says what product a seed is and checks it; the kernels; their cubins; the host's code; the
device. A seed that any entry of the same harness and kernels holds is done; limits of memory are
part of the harness. Whoever looks into what
went wrong adds a "note" of what it was.
"""

from __future__ import annotations

import collections
import datetime
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin.digest import CUTLASS_DSL_VERSION
from jax_hopper_gemm.gemm.spec import GemmSpec

ROOT = Path(__file__).resolve().parents[2]
PORTION = 1024  # seeds that a process is given at once
MAX_FAILURES = 200  # that an entry describes; it counts all
LONGEST_FAILURE = 400  # characters; `run.py run --again` prints the rest
# Where these are equal, a seed means the same product.
SAME_PRODUCTS = ("harness_sha256", "kernels_sha256", "arena_bytes", "huge")

Portion = tuple[int, int]  # of seeds, from the first to before the second


@dataclass
class Outcome:
    """What came of a portion.

    Attributes:
      counts: products of each kind.
      wrong: how many were.
      outside: bytes that were written outside of arrays.
      seconds: by what they were spent on, of a profile.
    """

    counts: dict[str, int]
    failures: list[str] = field(default_factory=list)
    wrong: int = 0
    outside: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def identity(specs: Sequence[GemmSpec]) -> dict[str, Any]:
    """Returns what an entry is of, but for the device."""
    code = hashlib.sha256()
    for digest in sorted(map(cubin.digest_of, specs)):
        compiled = cubin.prebuilt().read(digest)
        assert compiled, f"{digest} is not built; run build"
        code.update(hashlib.sha256(compiled.cubin).digest())
    package = ROOT / "jax_hopper_gemm"
    host = [*(package / "gemm").glob("*.py"), *(package / "launch").glob("*.py")]
    host += [*(package / "dispatch").glob("*.py"), *(ROOT / "ffi" / "src").glob("*")]
    return {
        "harness_sha256": digest_of(harness_sources()),
        "kernels_sha256": hashlib.sha256("".join(s.to_json() for s in specs).encode()).hexdigest(),
        "cubins_sha256": code.hexdigest(),
        "host_sha256": digest_of(host),
        "kernels": len(specs),
        "cutlass_dsl": CUTLASS_DSL_VERSION,
    }


def harness_sources() -> list[Path]:
    """Returns the files that decide what product a seed is, and what is checked."""
    own = ("arena.py", "arrays.py", "checker.cu", "device.py", "problems.py", "structs.py")
    others = ("cases", "graphs", "grouped", "places", "random_grouped", "reference", "sgemm")
    tests = ROOT / "tests"
    shared = [tests / "support" / f"{name}.py" for name in others]
    shared += [tests / "chip/values.cuh", ROOT / "benchmarks/group_sizes.py"]
    return [*(tests / "chip" / name for name in own), *shared]


def digest_of(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of files, in the order of their names."""
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(path.read_bytes())
    return found.hexdigest()


class Record:
    """What has been run, in a file.

    Args:
      identity: what the runs to come are of; their entry is the one that has it, or a new one.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self.start = path, time.monotonic()
        self.entries: list[dict[str, Any]] = read(path)
        alike = [e for e in self.entries if all(e.get(f) == x for f, x in identity.items())]
        if not alike:
            blank = {"seeds": [], "products": 0, "wrong": 0, "outside": 0, "seconds": 0}
            alike = [{**identity, "dates": [], **blank, "kinds": {}, "failures": []}]
            self.entries.append(alike[0])
        self.entry = alike[0]
        self.before, self.earlier = self.entry["products"], self.entry["seconds"]
        self.profile: collections.Counter[str] = collections.Counter()

    def portions(self, seeds: range) -> list[Portion]:
        """Returns what of the seeds has not been run."""
        done: set[int] = set()
        for entry in self.entries:
            if all(entry.get(f) == self.entry.get(f) for f in SAME_PRODUCTS):
                done.update(*(range(first, end) for first, end in entry["seeds"]))
        left = [seed for seed in seeds if seed not in done]
        return list(_ranges(left, PORTION))

    def add(self, portion: Portion, outcome: Outcome) -> None:
        entry = self.entry
        merged: list[list[int]] = []
        for first, end in sorted([*entry["seeds"], list(portion)]):
            if merged and merged[-1][1] == first:
                merged[-1][1] = end
            else:
                merged.append([first, end])
        entry["seeds"] = merged
        entry["products"] += portion[1] - portion[0]
        entry["wrong"] += outcome.wrong
        entry["outside"] += outcome.outside
        kinds = collections.Counter(entry["kinds"]) + collections.Counter(outcome.counts)
        entry["kinds"] = dict(sorted(kinds.items()))
        described = (failure[:LONGEST_FAILURE] for failure in outcome.failures)
        entry["failures"] = [*entry["failures"], *described][:MAX_FAILURES]
        today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        entry["dates"] = sorted({*entry["dates"], today})
        self.profile.update(outcome.seconds)

    def write(self) -> None:
        self.entry["seconds"] = round(self.earlier + time.monotonic() - self.start)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(as_text(self.entries))
        temporary.replace(self.path)

    def __str__(self) -> str:
        entry, elapsed = self.entry, time.monotonic() - self.start
        rate = (entry["products"] - self.before) / elapsed
        seconds = "".join(f"\n  {x:8.2f} s {name}" for name, x in self.profile.most_common())
        return (
            f"{entry['products']} products, {entry['wrong']} wrong, {entry['outside']} bytes "
            f"outside; {rate:.0f} a second, {elapsed:.0f} s{seconds}"
        )


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a file; none where there is none."""
    return json.loads(path.read_text())["entries"] if path.is_file() else []


def as_text(entries: list[dict[str, Any]]) -> str:
    """Returns what a record's file holds: a line for each field."""
    lines = (
        ",\n".join(f"   {json.dumps(name)}: {json.dumps(x)}" for name, x in entry.items())
        for entry in entries
    )
    return '{"entries": [\n' + ",\n".join(f"  {{\n{text}\n  }}" for text in lines) + "\n]}\n"


def status_of(entries: list[dict[str, Any]]) -> str:
    """Returns what the entries of a record say, in words."""
    text = []
    for e in entries:
        dates = " to ".join(dict.fromkeys((e["dates"][0], e["dates"][-1])))
        seeds = ", ".join(f"{first} to {end - 1}" for first, end in e["seeds"])
        digests = ", ".join(f"{name} {e[f'{name}_sha256'][:12]}" for name in (
            "harness", "kernels", "cubins", "host") if f"{name}_sha256" in e)  # fmt: skip
        text.append(
            f"{dates}, {e['device']}: {e['products']} products of {e.get('kernels')} kernels, "
            f"{e['wrong']} wrong, {e['outside']} bytes outside, {e['seconds']} s; seeds {seeds}; "
            f"{digests}{'. ' + e['note'] if 'note' in e else ''}"
        )
    totals = (sum(e[name] for e in entries) for name in ("products", "wrong", "outside"))
    text.append("in all {} products, {} wrong, {} bytes outside".format(*totals))
    return "\n".join(text)


def _ranges(seeds: Sequence[int], most: int) -> Iterator[Portion]:
    """Yields runs of consecutive numbers, each of at most so many."""
    first = None
    for i, seed in enumerate(seeds):
        first = seed if first is None else first
        last = i + 1 == len(seeds) or seeds[i + 1] != seed + 1
        if last or seed + 1 - first == most:
            yield first, seed + 1
            first = None
