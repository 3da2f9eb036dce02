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
from typing import Any

import numpy as np

from jax_hopper_gemm.dispatch import H200
from jax_hopper_gemm.dispatch.candidates import surveyed_specs
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.dispatch.table import packaged_table
from jax_hopper_gemm.dispatch.xla import FITS, features, is_surveyed
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import ProblemType

SURVEYS = sorted((Path(__file__).parent / "data").glob("h200_survey_*.json"))
FOLDS = 10
DIGITS = 4  # of thresholds and leaves in the file

Measured = tuple[GemmProblem, float]  # and XLA's time over that of the kernel that we would run


def surveyed(document: dict[str, Any]) -> Iterator[Measured]:
    """Yields the products of a survey."""
    for row in document["rows"]:
        problem = GemmProblem.dense(
            row["m"], row["n"], row["k"], a_major=row["a_major"], b_major=row["b_major"]
        )
        chosen, _ = best_kernel(problem, H200, surveyed_specs(ProblemType.of(problem)))
        names = [document["names"][i] for i in row["kernels"]]
        if chosen and chosen.spec.name in names:
            yield problem, row["xla_us"] / row["us"][names.index(chosen.spec.name)]


def tabled() -> Iterator[Measured]:
    """Yields the packaged table's products of the kind that the fit is for."""
    for key, entry in packaged_table(H200).entries.items():
        problem = key.problem()
        if is_surveyed(problem, H200) and entry.kernel_us and entry.xla_us:
            yield problem, entry.xla_us / entry.kernel_us


def fitted(found: np.ndarray, ratios: np.ndarray) -> Any:
    """Returns boosted trees; few products are far off, so the sum of errors is made small."""
    from sklearn.ensemble import (  # pyright: ignore[reportMissingImports]  no test needs it
        GradientBoostingRegressor,
    )

    trees = GradientBoostingRegressor(
        loss="absolute_error", n_estimators=100, max_depth=3, learning_rate=0.09, subsample=0.7,
        random_state=0,
    )  # fmt: skip
    return trees.fit(found, np.log(ratios))


def unseen(found: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """Returns each product's ratio as trees expect it that were fitted to other products."""
    expected = np.empty_like(ratios)
    folds = np.random.default_rng(0).permutation(len(ratios)) % FOLDS
    for fold in range(FOLDS):
        rest = folds != fold
        expected[~rest] = np.exp(fitted(found[rest], ratios[rest]).predict(found[~rest]))
    return expected


def as_lists(tree: Any, scale: float, node: int = 0) -> Any:
    """Returns a tree in the form of `dispatch.xla.Tree`."""
    if tree.children_left[node] < 0:
        return round(float(tree.value[node].item()) * scale, DIGITS)
    branches = (tree.children_left[node], tree.children_right[node])
    threshold = round(float(tree.threshold[node]), DIGITS)
    return [int(tree.feature[node]), threshold, *(as_lists(tree, scale, x) for x in branches)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("surveys", nargs="*", type=Path, default=SURVEYS, help="what it measured")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    survey = [x for path in arguments.surveys for x in surveyed(json.loads(path.read_text()))]
    measured = [*survey, *tabled()]
    ratios = np.array([ratio for _, ratio in measured])
    rows = []
    for problem, _ in measured:
        best, _ = best_kernel(problem, H200, surveyed_specs(ProblemType.of(problem)))
        assert best
        rows.append(features(problem, best.cost))
    found = np.array(rows)
    expected = unseen(found, ratios)[: len(survey)]
    truth = ratios[: len(survey)]
    error = float(np.median(np.abs(expected / truth - 1)))
    speed = np.where(expected >= 1, truth, 1.0)
    print(f"{len(survey)} surveyed products, {len(measured) - len(survey)} of the table")
    print(f"median error {error:.1%}; XLA's time over ours, geometric means and least:")
    for name, x in (("kernel always", truth), ("by the fit", speed)):
        slower = (x < 0.97).sum()
        print(f"  {name}: {np.exp(np.log(x).mean()):.3f}, {x.min():.2f}, {slower} under 0.97")
    if not arguments.dry_run:
        trees = fitted(found, ratios)
        document = {
            "products": len(measured),
            "error": round(error, 3),
            "base": round(float(trees.init_.constant_.item()), DIGITS),
            "trees": [as_lists(x.tree_, trees.learning_rate) for x in trees.estimators_[:, 0]],
        }
        lines = ",\n".join("  " + json.dumps(tree) for tree in document.pop("trees"))
        head = json.dumps(document)[:-1]
        path = FITS / f"xla_{H200.key}.json"
        path.write_text(f'{head},\n "trees": [\n{lines}\n ]}}\n')
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
