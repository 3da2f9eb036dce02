"""The harness that runs random products on a GPU, with the host in the GPU's place.

So each of checker and NumPy's references proves the other (`chip/host.py`).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable

import pytest
from chip.arrays import Placed
from chip.device import Checker, build
from chip.host import Host
from chip.problems import Draw
from chip.record import Outcome, Record
from chip.workers import Worker, supervise, try_portion
from support import sgemm
from support.covering import ALL
from support.policies import (
    block_specs,
    converted_specs,
    converted_variants,
    covering_specs,
    eight_bit_specs,
    epilogue_covering_specs,
    grouped_covering_specs,
    nested_specs,
    parts_specs,
    split_specs,
    stacked_specs,
    tf32_specs,
    transposed_specs,
)

from jax_hopper_gemm.gemm.spec import GemmSpec

pytestmark = pytest.mark.pure
ARENA = 1 << 27
SEEDS = 16 if ALL else 4  # of random products


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


KERNELS: dict[str, Callable[[], tuple[GemmSpec, ...]]] = {
    "plain": covering_specs,
    "epilogues": epilogue_covering_specs,
    "split": split_specs,
    "nested": nested_specs,
    "stacks": stacked_specs,
    "groups": grouped_covering_specs,
    "8 bits": eight_bit_specs,
    "block scales": block_specs,
    "transposed": transposed_specs,
    "parts": parts_specs,
    "TF32": tf32_specs,
    "weights": converted_specs,
    "few rows of weights": converted_variants,
    "FMA units": lambda: tuple(sgemm.kernels()),
}


def draw_of(kind: str, **wanted: object) -> Draw:
    """Returns random products of a kind of kernels, of those with some fields alone."""
    specs = KERNELS[kind]()
    chosen = [s for s in specs if all(getattr(s, f) == value for f, value in wanted.items())]
    return Draw(chosen, 1 << 22, huge=0, run=1)


@pytest.mark.parametrize("kind", KERNELS)
def test_right_products_pass(checker, host, kind):
    draw = draw_of(kind)
    assert run(checker, host, draw, range(SEEDS)) == []
    assert checker.sweep() == 0


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
    draw = draw_of("plain", a_major="k", d_dtype="bfloat16")
    padded = next(s for s in range(100) if draw(s).problem.a.leading_stride > draw(s).problem.k)
    host.after, message = DAMAGE[damage]
    (failure,) = run(checker, host, draw, [padded])
    assert re.search(message, failure.what), failure.what
    assert failure.seed == padded
    host.after = lambda product: None
    assert run(checker, host, draw, [padded]) == []  # and nothing is left of it


@pytest.mark.parametrize("kind", ["groups", "epilogues", "split", "block scales"])
def test_every_result_and_operand_is_looked_at(checker, host, kind):
    draw = draw_of(kind)
    for seed in [seed for seed in range(9) if draw(seed).exact]:
        for buffer in range(len(draw(seed).buffers)):
            host.after = lambda product, at=buffer: poke(product.addresses[at])
            failures = run(checker, host, draw, [seed])
            assert failures, f"buffer {buffer} of {draw(seed)}"


def test_what_is_written_far_away_is_found_at_last(checker, host):
    poke(checker.arena + ARENA - 17, 0)
    assert checker.sweep() == 1
    assert checker.sweep() == 0


def test_a_portion_counts_what_it_ran(checker, host):
    specs = KERNELS["plain"]()
    counts, failures, wrong = try_portion(checker, host, specs, (3, 33), 48)
    assert (failures, wrong, counts["numbers checked"]) == ([], 0, 30)
    host.after = lambda product: product.trial.seed in (7, 9) and poke(first_result(product))
    _, failures, wrong = try_portion(checker, host, specs, (5, 11), 1)
    assert wrong == 2 and [int(f.split("seed ")[1].split(":")[0]) for f in failures] == [7, 9]


def test_a_launch_that_is_refused_is_a_failure(checker, host):
    host.launcher = lambda product: "no such kernel"
    counts, failures, wrong = try_portion(checker, host, KERNELS["plain"](), (0, 2), 2)
    assert wrong == 2 and "not launched: no such kernel" in failures[0]


def work(pipe, fatal: int) -> None:
    """Runs portions of nothing, and dies where it meets a seed."""
    while True:
        first, end = pipe.recv()
        if first <= fatal < end:
            os._exit(9)
        pipe.send(({"dense": end - first}, [], 0))


@pytest.mark.slow
def test_a_lost_process_costs_its_portion_and_no_other(tmp_path):
    identity = {"cubins_sha256": "a", "harness_sha256": "b"}
    record = Record(tmp_path / "record.json", identity)
    supervise(record, range(100, 3100), 1, 60, lambda: Worker(work, 1234))
    again = Record(tmp_path / "record.json", identity)
    assert again.fields["seeds"] == [[100, 3100]] and again.portions(range(100, 3100)) == []
    assert (again.fields["products"], again.fields["wrong"]) == (3000, 1000)
    assert again.fields["kinds"] == {"dense": 2000, "lost": 1000}
    (failure,) = again.fields["failures"]
    assert failure == "seeds 1100 to 2099: the process was lost: it ended, 9"
    assert again.portions(range(3200)) == [(0, 100), (3100, 3200)]


def test_a_record_of_other_kernels_is_refused(tmp_path):
    Record(tmp_path / "record.json", {"cubins_sha256": "a"}).write()
    with pytest.raises(SystemExit, match="another cubins_sha256: move it away"):
        Record(tmp_path / "record.json", {"cubins_sha256": "c"})


def run(checker, host, draw, seeds):
    """Returns the failures of one batch."""
    batch = checker.batch()
    for seed in seeds:
        batch.add(draw(seed))
    return checker.run(batch, host)
