"""Coverage of the launcher's C++ by the tests that need no GPU: all lines, nearly all branches.

    python tests/ffi_coverage.py        # builds with gcov, runs the tests, lists what none reaches

Branches by which an exception leaves are not counted, since gcov sees one at each call, nor closing
braces, to which it adds what unwinds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "ffi"
LINES, BRANCHES = 100.0, 95.0  # percent, at least


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        build, environment = Path(folder), dict(os.environ, PYTHONPATH=str(ROOT))
        environment["CXXFLAGS"] = "--coverage -fprofile-update=atomic"  # of tests' builds, too
        flags = f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Debug"
        for command in (
            ["cmake", "-S", str(ROOT / "ffi"), "-B", folder, *flags],
            ["cmake", "--build", folder],
        ):
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        environment["JAX_HOPPER_GEMM_LIBRARY"] = str(build / "libjax_hopper_gemm.so")
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        pytest += ["--basetemp", str(build / "tests")]
        marks = ["-m", "not gpu and not compile", "-k", "not microseconds"]
        subprocess.run(
            [*pytest, *marks, str(TESTS)],
            cwd=ROOT, env=environment, check=True,
        )  # fmt: skip
        found = [gcov(path, build) for path in build.rglob("*.gcda")]
    lines, branches = merged(found)
    passed = tell("lines", lines, LINES)
    return 0 if tell("branches", branches, BRANCHES) and passed else 1


def gcov(data: Path, folder: Path) -> dict:
    """Returns what gcov says of an object file's counts."""
    command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", str(data)]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout)


def merged(found: list[dict]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns how often each line and each branch of `ffi/src` was taken, by its place."""
    lines: dict[str, int] = defaultdict(int)
    branches: dict[str, int] = defaultdict(int)
    sources = ROOT / "ffi" / "src"
    for file in (file for each in found for file in each["files"]):
        path = Path(file["file"])
        if path.parent != sources:
            continue
        text = path.read_text().splitlines()
        for line in file["lines"]:
            if text[line["line_number"] - 1].strip() == "}":
                continue
            place = f"{path.name}:{line['line_number']}"
            lines[place] += line["count"]
            for i, branch in enumerate(line["branches"]):
                if not branch["throw"]:
                    branches[f"{place} branch {i}"] += branch["count"]
    return lines, branches


def tell(what: str, counts: dict[str, int], least: float) -> bool:
    """Prints a summary; returns whether enough is covered."""
    missed = [place for place, count in counts.items() if count == 0]
    percent = 100 * (1 - len(missed) / len(counts))
    print(f"{what}: {percent:.1f} % of {len(counts)}, at least {least} %")
    for place in missed:
        print(f"  never taken: {place}")
    return percent >= least


if __name__ == "__main__":
    sys.exit(main())
