"""The harness that runs random products on a GPU, with the host in the GPU's place.

So each of checker and NumPy's references proves the other (`chip/host.py`).
"""

from __future__ import annotations

import ctypes
import os
import random
import re
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from chip import families
from chip.arena import Placed
from chip.arrays import place
from chip.device import Checker, build
from chip.host import Host
from chip.problems import Draw, Trial
from chip.record import PORTION, Outcome, Record, status_of
from chip.workers import Worker, supervise, try_portion
from support.covering import ALL
from support.grouped_results import spans
from support.policies import block_specs, covering_specs, epilogue_covering_specs

from jax_hopper_gemm.dispatch.candidates import model_specs
from jax_hopper_gemm.gemm.spec import GemmSpec

pytestmark = pytest.mark.pure
chosen_specs = cache(families.chosen_specs)
ARENA = 1 << 27
SEEDS, MOST = 16, 300  # random products for each kernel, if `ALL`; else of a share's kernels
TYPES = 3000 if ALL else 60  # of random problems, of which each kernel is looked up


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chip")
    build(folder, "c++")
    return folder


@pytest.fixture(scope="module")
def checker(folder):
    return Checker(folder / "checker.so", ARENA)


@pytest.fixture
def host(folder, fake_libraries, monkeypatch):
    monkeypatch.setenv("JAX_HOPPER_GEMM_LIBCUDA", "")  # to be put back
    return Host(folder, fake_libraries)


# Shares of the kernels of every family: each kernel is in one of them.
SHARES: dict[str, Callable[[GemmSpec], object]] = {
    "groups": lambda spec: spec.grouped,
    "block scales": lambda spec: spec.a_block,
    "8 bits": lambda spec: spec.a_itemsize == 1,
    "weights": lambda spec: spec.b_in_registers,
    "float32": lambda spec: spec.a_dtype == "float32",
    "split K": lambda spec: spec.split_k,
    "epilogues": lambda spec: spec.epilogue,
    "plain": lambda spec: True,
}


def draw_of(share: str, largest: int = 1 << 20) -> Draw:
    """Returns random products of a share of the kernels."""
    before = list(SHARES)[: list(SHARES).index(share)]
    chosen = [
        spec for spec in chosen_specs()
        if SHARES[share](spec) and not any(SHARES[other](spec) for other in before)
    ]  # fmt: skip
    return Draw(chosen, largest, huge=0, run=1)


@pytest.mark.parametrize("share", SHARES)
def test_right_products_pass(checker, host, share):
    draw = draw_of(share)
    count = len(draw.specs)
    seeds = range(SEEDS * count) if ALL else range(0, count, -(-count // MOST))
    assert run(checker, host, draw, seeds) == []
    assert checker.sweep() == 0


SOME_SETS = covering_specs, epilogue_covering_specs, block_specs  # of those in `problems.kernels`


def test_kernels_of_every_family_that_dispatch_chooses_are_drawn():
    others = [spec for of in SOME_SETS for spec in of()]
    drawn = families.families_of([*others, *families.chosen_specs(others)])
    missing = {}
    for kind in random.Random(0).sample(list(families.problem_types()), TYPES):
        for spec in model_specs(kind):
            missing |= dict.fromkeys(families.families_of([spec]) - drawn, spec.name)
    assert missing == {}


def test_each_kernel_has_its_turn_and_a_seed_one_meaning():
    draw = Draw(chosen_specs()[:9], 1 << 20, huge=0, run=4)
    trials = [draw(seed) for seed in range(4 * 9)]
    assert sorted({trial.spec.name for trial in trials}) == sorted(s.name for s in draw.specs)
    assert all(len({t.spec for t in trials[i : i + 4]}) == 1 for i in range(0, 36, 4))
    again = Draw(chosen_specs()[:9], 1 << 20, huge=0, run=4)
    assert [again(seed) for seed in range(36)] == trials
    assert len({(t.problem, t.raster_order) for t in trials}) == len(trials)


def poke(address: int, byte: int | None = None) -> None:
    """Changes a byte."""
    place = ctypes.c_uint8.from_address(address)
    place.value = place.value ^ 0x40 if byte is None else byte


def first_result(product: Placed) -> int:
    return product.addresses[product.operands]


DAMAGE = {
    "a result": (lambda p: poke(first_result(p)), "1 elements wrong, the first at .* of result"),
    "nothing written": (
        lambda p: ctypes.memset(first_result(p), 0xFF, 2),
        "1 elements wrong, the first at .* of result",
    ),
    "an operand": (lambda p: poke(p.addresses[1]), "1 elements wrong, the first at .* of factor 1"),
    "behind a result": (
        lambda p: poke(first_result(p) + p.nbytes[p.operands] + 100),
        r"1 bytes written outside of arrays, .*buffer 2 \+",
    ),
    "before an operand": (
        lambda p: poke(p.addresses[0] - 1),
        "1 bytes written outside of arrays, .*buffer 0 -1 ",
    ),
    "between rows": (
        lambda p: poke(p.addresses[0] + 2 * p.trial.problem.k),
        "1 bytes written outside",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_wrong_products_are_found(checker, host, damage):
    specs = [s for s in covering_specs() if (s.a_major, s.d_dtype) == ("k", "bfloat16")]
    draw = Draw(specs, 1 << 20, huge=0, run=1)
    padded = next(s for s in range(100) if draw(s).problem.a.leading_stride > draw(s).problem.k)
    host.after, message = DAMAGE[damage]
    (failure,) = run(checker, host, draw, [padded])
    assert re.search(message, failure.what), failure.what
    assert failure.seed == padded
    host.after = lambda product: None
    assert run(checker, host, draw, [padded]) == []  # and nothing is left of it


def is_known_at_first(trial: Trial) -> bool:
    """Whether the first element of every result has one right value: no row of no group has."""
    p = trial.problem
    if p.groups is None or p.groups.axis == "k":
        return trial.exact
    first = next(x for x in spans(p, np.array(trial.sizes)) if x.start < x.end)
    return trial.exact and first.matrix >= 0


@pytest.mark.parametrize("share", ["groups", "epilogues", "split K", "block scales", "weights"])
def test_every_result_and_operand_is_looked_at(checker, host, share):
    draw = draw_of(share, largest=1 << 19)
    for seed in [seed for seed in range(9) if is_known_at_first(draw(seed))]:
        for buffer in range(len(draw(seed).buffers)):
            host.after = lambda product, at=buffer: poke(product.addresses[at])
            failures = run(checker, host, draw, [seed])
            assert failures, f"buffer {buffer} of {draw(seed)}"


def test_what_is_written_far_away_is_found_at_last(checker, host):
    poke(checker.arena + ARENA - 17, 0)
    assert checker.sweep() == 1
    assert checker.sweep() == 0


def test_a_portion_counts_what_it_ran(checker, host):
    draw = Draw(covering_specs()[:40], 1 << 20, huge=0, run=1)
    found = try_portion(checker, host, draw, (3, 33), 7)
    assert (found.failures, found.wrong, found.outside) == ([], 0, 0)
    assert found.counts == {"dense": 30, "numbers checked": 30}
    host.after = lambda product: product.trial.seed in (7, 9) and poke(first_result(product))
    found = try_portion(checker, host, draw, (5, 11), 1)
    assert (found.wrong, found.outside) == (2, 0)
    assert [int(f.split("seed ")[1].split(":")[0]) for f in found.failures] == [7, 9]
    host.after = lambda product: product.trial.seed == 6 and poke(product.addresses[0] - 1)
    found = try_portion(checker, host, draw, (5, 11), 4)
    assert (found.wrong, found.outside) == (1, 1)


def test_a_launch_that_is_refused_is_a_failure(checker, host):
    host.launcher = lambda product: "no such kernel"
    found = try_portion(checker, host, draw_of("plain"), (0, 2), 2)
    assert found.wrong == 2 and "not launched: no such kernel" in found.failures[0]


def work(pipe, fatal: int) -> None:
    """Runs portions of nothing, and dies where it meets a seed."""
    while True:
        first, end = pipe.recv()
        if first <= fatal < end:
            os._exit(9)
        pipe.send(Outcome({"dense": end - first}))


IDENTITY = {"harness_sha256": "a", "kernels_sha256": "b", "cubins_sha256": "c", "device": "none"}


@pytest.mark.slow
def test_a_lost_process_costs_its_portion_and_no_other(tmp_path):
    record = Record(tmp_path / "record.json", IDENTITY)
    seeds, end = range(100, 100 + 3 * PORTION), 100 + 3 * PORTION
    supervise(record, seeds, 1, 60, lambda: Worker(work, 100 + PORTION))
    again = Record(tmp_path / "record.json", IDENTITY)
    assert again.entry["seeds"] == [[100, end]] and again.portions(seeds) == []
    assert (again.entry["products"], again.entry["wrong"]) == (3 * PORTION, PORTION)
    assert again.entry["kinds"] == {"dense": 2 * PORTION, "lost": PORTION}
    (failure,) = again.entry["failures"]
    first = 100 + PORTION
    lost = f"seeds {first} to {first + PORTION - 1}: the process was lost: it ended, 9"
    assert failure == lost
    assert again.portions(range(end + 100)) == [(0, 100), (end, end + 100)]


def test_a_record_has_an_entry_for_each_version_and_runs_no_product_twice(tmp_path):
    path = tmp_path / "record.json"
    first = Record(path, IDENTITY)
    first.add((0, 100), Outcome({"dense": 100}, ["one"], 1, 3))
    first.write()
    newer = Record(path, {**IDENTITY, "cubins_sha256": "d"})
    assert newer.portions(range(150)) == [(100, 150)]  # the same products of other machine code
    newer.add((100, 150), Outcome({"dense": 50}))
    newer.write()
    other = Record(path, {**IDENTITY, "harness_sha256": "e"})
    assert other.portions(range(150)) == [(0, 150)]  # other products
    text = status_of([*other.entries[:2], {**other.entry, "seeds": [], "dates": ["2026-01-01"]}])
    assert "none: 100 products of" in text and "seeds 100 to 149" in text
    assert text.endswith("in all 150 products, 1 wrong, 3 bytes outside")


def run(checker, host, draw, seeds):
    """Returns the failures of one batch."""
    batch = checker.batch()
    for seed in seeds:
        place(batch, draw(seed))
    return checker.run(batch, host)
