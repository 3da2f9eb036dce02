"""The covering sets of kernels hold what they promise, and are small."""

from __future__ import annotations

import random

import pytest
from support import graphs, policies
from support.choices import CHOICES, EPILOGUE_CHOICES

from jax_hopper_gemm.gemm.legality import violations

pytestmark = pytest.mark.pure


def test_the_covering_sets_are_legal_and_small_enough_to_compile():
    assert len(policies.covering_specs()) < 200
    specs = policies.covering_specs() + policies.epilogue_covering_specs()
    assert not any(violations(spec) for spec in specs)
    assert len(set(specs)) == len(specs) <= 400
    names = {policies.name_of(spec) for spec in policies.epilogue_covering_specs()}
    assert names == set(graphs.STANDARD)


@pytest.mark.parametrize(
    ("choices", "specs"),
    [
        (CHOICES, policies.covering_specs()),
        (EPILOGUE_CHOICES, policies.epilogue_covering_specs()),
    ],
    ids=["plain", "epilogues"],
)
def test_covering_specs_hold_every_pair_that_a_legal_spec_has(choices, specs):
    covered = set().union(*(policies.pairs_of(policies.choice_of(s)) for s in specs))
    rng = random.Random(1)
    seen = 0
    while seen < 300:
        choice = {field: rng.choice(values) for field, values in choices.items()}
        if not violations(policies.spec_of(choice)):
            seen += 1
            assert policies.pairs_of(choice) <= covered
