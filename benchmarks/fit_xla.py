"""Fits the trees of `dispatch/xla.py` to what `survey.py` and `tf32.py` measured.

    python -m pip install scikit-learn
    python benchmarks/fit_xla.py                 # cross-validates, and writes the packaged fits
    python benchmarks/fit_xla.py --dry-run       # writes nothing

Products of the packaged table are used beside the surveys of 16-bit operands. The figures that it
prints are of the surveys' products whose timed kernels include the one that dispatch runs today,
each judged by trees that were fitted to nine tenths of the other products. Of products in TF32 XLA
alone was timed, and it prints by how much their trees err.

The trees are boosted, and split at random places: of products that they had not seen, trees that
split where it fits best told a kernel that is slower than XLA from others less well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_hopper_gemm.dispatch import H200
from jax_hopper_gemm.dispatch.candidates import considered_specs
from jax_hopper_gemm.dispatch.cost import Estimate, estimate
from jax_hopper_gemm.dispatch.model import THIN_IN_TF32, best_kernel, xla_lead
from jax_hopper_gemm.dispatch.table import packaged_table
from jax_hopper_gemm.dispatch.xla import FITS, RATIOS, Trees, compared, features, surveyed_kind
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec

DATA = Path(__file__).parent / "data"
SURVEYS, BATCHES = (sorted(DATA.glob(f"h*_{kind}_*.json")) for kind in ("survey", "batches"))
TF32 = DATA / "h200_tf32.json"
# Of products that move fewer bytes these surveys timed calls that found their operands in L2, as in
# a program they seldom would, XLA's more often than ours: its times were up to a tenth too short.
FROM_L2, SURVEYS_FROM_L2 = 20e6, tuple(f"00_survey_{number}" for number in range(1, 13))
FOLDS, REPEATS = 10, 4
LEADS = 0.8, 0.9, 1.0, 1.1  # times `xla_lead`, from which a kernel would run
TREES, DEPTH, RATE = 100, 7, 0.1
LEAST, SHARE = 4, 0.8  # products of a leaf, and part of them that a tree is made of
DIGITS = 4  # of thresholds and leaves in the file


class Measured(NamedTuple):
    """A product, what is expected of one of our kernels, XLA's time over its, and that kernel.

    In TF32 the ratio is that of XLA's time and the expected one.
    """

    problem: GemmProblem
    cost: Estimate
    ratio: float
    spec: GemmSpec

    @property
    def runs(self) -> bool:
        """Whether dispatch would run that kernel."""
        today, _ = best_kernel(self.problem, H200)
        return today is not None and today.spec == self.spec


def surveyed(path: Path) -> Iterator[Measured]:
    """Yields the products of a survey, with the kernel that we would run of those timed."""
    document, from_l2 = json.loads(path.read_text()), path.stem.endswith(SURVEYS_FROM_L2)
    for row in document["rows"]:
        problem = problem_of(row)
        if from_l2 and problem.bytes < FROM_L2:
            continue
        us = timed_specs(document["names"], row, problem)
        best, _ = best_kernel(problem, H200, us)
        if best:
            yield Measured(problem, best.cost, row["xla_us"] / us[best.spec], best.spec)


def problem_of(row: dict[str, Any], dtype: str = "bfloat16") -> GemmProblem:
    """Returns the product of a row that `survey.py` or `tf32.py` wrote."""
    majors: Any = {name: row[name] for name in ("a_major", "b_major")}
    return GemmProblem.dense(row["m"], row["n"], row["k"], row.get("l", 1), **majors, dtype=dtype)


def in_tf32(path: Path) -> Iterator[Measured]:
    """Yields the products of a file as `tf32.py --survey` writes it."""
    for row in json.loads(path.read_text())["rows"]:
        problem = problem_of(row, "float32")
        best, _ = best_kernel(compared(problem), H200)
        if best and min(problem.m, problem.n) > THIN_IN_TF32:
            yield Measured(problem, best.cost, 1e3 * row["xla_us"] / best.cost.ns, best.spec)


def timed_specs(
    names: list[str], row: dict[str, Any], problem: GemmProblem
) -> dict[GemmSpec, float]:
    """Returns microseconds of those of `considered_specs` that a row of a survey has.

    A stream is timed as dispatch would run it, which may be without a policy for L2.
    """
    us = {names[i]: us for i, us in zip(row["kernels"], row["us"], strict=True)}
    found = {}
    for spec in considered_specs(problem):
        as_run = replace(spec, evict_first=None).name
        if name := next((x for x in (spec.name, as_run) if x in us), None):
            found[spec] = us[name]
    return found


def tabled() -> Iterator[Measured]:
    """Yields the packaged table's products of the kind that the fit is for."""
    for key, entry in packaged_table(H200).entries.items():
        problem = key.problem()
        if surveyed_kind(problem, H200) == "half" and entry.kernel_us and entry.xla_us:
            cost = estimate(problem, entry.spec, entry.raster_order, H200)
            yield Measured(problem, cost, entry.xla_us / entry.kernel_us, entry.spec)


def fitted(found: np.ndarray, ratios: np.ndarray, kind: str, seed: int = 0) -> Trees:
    """Returns trees that expect the ratios of what was found, of products of a kind."""
    from sklearn.tree import (  # pyright: ignore[reportMissingImports]  no test needs it
        DecisionTreeRegressor,
    )

    random = np.random.default_rng(seed)
    rest = np.log(np.clip(ratios, *RATIOS[kind]))
    base, trees = round(float(rest.mean()), DIGITS), []
    rest -= base
    for _ in range(TREES):
        drawn = random.random(len(rest)) < SHARE
        tree = DecisionTreeRegressor(
            splitter="random", max_depth=DEPTH, min_samples_leaf=LEAST,
            random_state=int(random.integers(2**31)),
        )  # fmt: skip
        tree.fit(found[drawn], rest[drawn])
        rest -= RATE * tree.predict(found)
        trees.append(as_lists(tree.tree_, RATE))
    return Trees(base, tuple(trees))


def unseen(measured: list[Measured], kind: str, seed: int) -> np.ndarray:
    """Returns each product's ratio as trees expect it that were fitted to other extents."""
    found, ratios = arrays(measured)
    guesses = np.empty_like(ratios)
    extents = [(x.problem.m, x.problem.n, x.problem.k) for x in measured]
    numbers = {x: i for i, x in enumerate(dict.fromkeys(extents))}
    fold_of = np.random.default_rng(seed).permutation(len(numbers)) % FOLDS
    folds = np.array([fold_of[numbers[x]] for x in extents])
    for fold in range(FOLDS):
        rest = folds != fold
        trees = fitted(found[rest], ratios[rest], kind, seed)
        guesses[~rest] = [trees.ratio(tuple(inputs)) for inputs in found[~rest]]
    return guesses


def as_lists(tree: Any, scale: float, node: int = 0) -> Any:
    """Returns a tree in the form of `dispatch.xla.Tree`."""
    if tree.children_left[node] < 0:
        return round(float(tree.value[node].item()) * scale, DIGITS)
    branches = (tree.children_left[node], tree.children_right[node])
    threshold = round(float(tree.threshold[node]), DIGITS)
    return [int(tree.feature[node]), threshold, *(as_lists(tree, scale, x) for x in branches)]


def speeds(ratios: np.ndarray) -> str:
    slower = (ratios < 0.97).mean()
    mean = np.exp(np.log(ratios).mean())
    return f"{mean:.3f}, {ratios.min():.2f}, {slower:.1%} under 0.97"


def arrays(measured: list[Measured]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features and the ratios."""
    found = np.array([features(x.problem, x.cost) for x in measured])
    return found, np.array([x.ratio for x in measured])


def median_error(guesses: np.ndarray, truth: np.ndarray, kind: str) -> float:
    return float(np.median(np.abs(guesses / np.clip(truth, *RATIOS[kind]) - 1)))


def judge_16_bits(survey: list[Measured], measured: list[Measured], kind: str) -> float:
    """Prints how products of a survey would run, by trees of others; returns the error of these."""
    judged = np.array([i for i, x in enumerate(survey) if x.runs])
    guesses = [unseen(measured, kind, seed)[judged] for seed in range(REPEATS)]
    truth = np.tile(arrays(survey)[1][judged], REPEATS)
    leads = np.tile([xla_lead(survey[i].problem, survey[i].cost) for i in judged], REPEATS)
    error = median_error(np.concatenate(guesses), truth, kind)
    print(f"{kind}: {len(survey)} surveyed products, {len(measured) - len(survey)} of the table")
    print(f"median error of {len(judged)} {error:.1%}; XLA's time over ours, means and least:")
    print(f"  kernel always: {speeds(truth)}")
    for lead in LEADS:
        speed = np.where(np.concatenate(guesses) >= lead * leads, truth, 1.0)
        print(f"  from {lead} of what is asked: {speeds(speed)}")
    return error


def judge_tf32(measured: list[Measured]) -> float:
    """Prints by how much trees of other products in TF32 err, and returns that."""
    truth = np.tile(arrays(measured)[1], REPEATS)
    guesses = [unseen(measured, "tf32", seed) for seed in range(REPEATS)]
    error = median_error(np.concatenate(guesses), truth, "tf32")
    print(f"{len(measured)} products in TF32: median error {error:.1%}")
    return error


def write(measured: list[Measured], kind: str, error: float) -> None:
    """Writes the packaged fit to products of a kind."""
    trees = fitted(*arrays(measured), kind)
    lines = ",\n".join("  " + json.dumps(tree, separators=(",", ":")) for tree in trees.trees)
    path = FITS / f"xla_{kind}_{H200.num_sms}.json"
    path.write_text(
        f'{{"products": {len(measured)}, "error": {error:.3f}, "base": {trees.base}, '
        f'"trees": [\n{lines}\n ]}}\n'
    )
    print(f"wrote {path}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("surveys", nargs="*", type=Path, default=SURVEYS, help="of 16 bits")
    parser.add_argument("--batches", nargs="*", type=Path, default=BATCHES, help="of batches")
    parser.add_argument("--tf32", type=Path, default=TF32, help="what was measured in TF32")
    parser.add_argument("--kinds", nargs="+", default=[*RATIOS], choices=RATIOS)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        if kind == "tf32":
            measured = [*in_tf32(arguments.tf32)]
            error = judge_tf32(measured)
        else:
            paths = arguments.batches if kind == "batches" else arguments.surveys
            survey = [x for path in paths for x in surveyed(path)]
            measured = [*survey, *tabled()] if kind == "half" else survey
            error = judge_16_bits(survey, measured, kind)
        if not arguments.dry_run:
            write(measured, kind, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
