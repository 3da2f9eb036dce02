"""Fits the trees of `dispatch/xla.py` to what `survey.py` measured.

    python -m pip install scikit-learn
    python benchmarks/fit_xla.py                 # cross-validates, and writes the packaged fit
    python benchmarks/fit_xla.py --dry-run       # writes nothing

Products of the packaged table are used beside the survey's. The figures that it prints are of the
survey's products, each judged by trees that were fitted to the other nine tenths.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_hopper_gemm.dispatch import H200
from jax_hopper_gemm.dispatch.candidates import considered_specs
from jax_hopper_gemm.dispatch.cost import Estimate, estimate
from jax_hopper_gemm.dispatch.model import LEAD, best_kernel
from jax_hopper_gemm.dispatch.table import packaged_table
from jax_hopper_gemm.dispatch.xla import FITS, LONGEST, SHORTEST, UNLIKELY, features, is_surveyed
from jax_hopper_gemm.gemm.problem import GemmProblem

SURVEYS = sorted((Path(__file__).parent / "data").glob("h200_survey_*.json"))
FOLDS, REPEATS = 10, 2
LEADS = 0.97, 1.0, 1.015, LEAD  # from which a kernel would run
DIGITS = 4  # of thresholds and leaves in the file


class Measured(NamedTuple):
    """A product, what is expected of one of our kernels, and XLA's time over that kernel's."""

    problem: GemmProblem
    cost: Estimate
    ratio: float


def surveyed(document: dict[str, Any]) -> Iterator[Measured]:
    """Yields the products of a survey, with the kernel that we would run of those timed."""
    for row in document["rows"]:
        problem = GemmProblem.dense(
            row["m"], row["n"], row["k"], a_major=row["a_major"], b_major=row["b_major"]
        )
        us = {document["names"][i]: us for i, us in zip(row["kernels"], row["us"], strict=True)}
        timed = [spec for spec in considered_specs(problem) if spec.name in us]
        best, _ = best_kernel(problem, H200, timed)
        if best:
            yield Measured(problem, best.cost, row["xla_us"] / us[best.spec.name])


def tabled() -> Iterator[Measured]:
    """Yields the packaged table's products of the kind that the fit is for."""
    for key, entry in packaged_table(H200).entries.items():
        problem = key.problem()
        if is_surveyed(problem, H200) and entry.kernel_us and entry.xla_us:
            cost = estimate(problem, entry.spec, entry.raster_order, H200)
            yield Measured(problem, cost, entry.xla_us / entry.kernel_us)


def fitted(found: np.ndarray, ratios: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Returns boosted trees, by their names in `dispatch.xla.Fit`."""
    from sklearn.ensemble import (  # pyright: ignore[reportMissingImports]  no test needs it
        GradientBoostingRegressor,
    )

    expected = GradientBoostingRegressor(
        n_estimators=120, max_depth=4, learning_rate=0.08, subsample=0.6, min_samples_leaf=6,
        max_features=0.4, random_state=seed,
    )  # fmt: skip
    least = GradientBoostingRegressor(
        loss="quantile", alpha=UNLIKELY, n_estimators=300, max_depth=4, learning_rate=0.07,
        subsample=0.6, min_samples_leaf=8, max_features=0.5, random_state=seed,
    )  # fmt: skip
    return {
        "expected": expected.fit(found, np.log(np.clip(ratios, SHORTEST, LONGEST))),
        "least": least.fit(found, np.log(ratios)),
    }


def unseen(found: np.ndarray, ratios: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Returns each product's ratios as trees expect them that were fitted to other products."""
    guesses = {name: np.empty_like(ratios) for name in ("expected", "least")}
    folds = np.random.default_rng(seed).permutation(len(ratios)) % FOLDS
    for fold in range(FOLDS):
        rest = folds != fold
        for name, trees in fitted(found[rest], ratios[rest], seed).items():
            guesses[name][~rest] = np.exp(trees.predict(found[~rest]))
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("surveys", nargs="*", type=Path, default=SURVEYS, help="what it measured")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    survey = [x for path in arguments.surveys for x in surveyed(json.loads(path.read_text()))]
    measured = [*survey, *tabled()]
    found = np.array([features(problem, cost) for problem, cost, _ in measured])
    ratios = np.array([x.ratio for x in measured])
    truth = np.array([x.ratio for x in survey])
    guesses = [unseen(found, ratios, seed) for seed in range(REPEATS)]
    expected, least = (
        np.concatenate([guess[name][: len(survey)] for guess in guesses])
        for name in ("expected", "least")
    )
    truth = np.tile(truth, REPEATS)
    error = float(np.median(np.abs(expected / np.clip(truth, SHORTEST, LONGEST) - 1)))
    print(f"{len(survey)} surveyed products, {len(measured) - len(survey)} of the table")
    print(f"median error {error:.1%}; XLA's time over ours, geometric means and least:")
    print(f"  kernel always: {speeds(truth)}")
    for lead in LEADS:
        speed = np.where(least >= lead, truth, 1.0)
        print(f"  from {lead}, the least that is likely: {speeds(speed)}")
    if not arguments.dry_run:
        fits = fitted(found, ratios).items()
        document: dict[str, Any] = {"products": len(measured), "error": round(error, 3)}
        for name, trees in fits:
            scale, (base,) = trees.learning_rate, trees.init_.constant_.ravel()
            document[name] = {
                "base": round(float(base), DIGITS),
                "trees": [as_lists(x.tree_, scale) for x in trees.estimators_[:, 0]],
            }
        path = FITS / f"xla_{H200.key}.json"
        path.write_text(_in_lines(document))
        print(f"wrote {path}")
    return 0


def _in_lines(document: dict[str, Any]) -> str:
    """Returns JSON of a line for each tree."""
    parts = []
    for name, value in document.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            lines = ",\n".join("  " + json.dumps(tree) for tree in value["trees"])
            text = f'{{"base": {value["base"]}, "trees": [\n{lines}\n ]}}'
        parts.append(f'"{name}": {text}')
    return "{" + ",\n ".join(parts) + "}\n"


if __name__ == "__main__":
    sys.exit(main())
