"""Ragged products as users write them: XLA's answers agree with the references of the GPU tests."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from support.covering import ALL
from support.grouped_programs import GROUPED_PROGRAMS

from jax_hopper_gemm import ops

pytestmark = pytest.mark.pure

# Large programs are for a GPU; of mapped ones a few, with gradients, stand for all.
LARGE = {"mixtral", "qwen3", "deepseek", "decode", "thousands of groups"}
OF_SIZES = [name for name in GROUPED_PROGRAMS if name.endswith(" sizes")]
MAPPED = {"vmap of a sum"} | {
    f"vmap of gradients {axes}" for axes in [(None, None, 0), (0, 0, 0), (1, 1, 0), (0, 2, None)]
}
NAMES = [
    name for name in GROUPED_PROGRAMS
    if name not in {*LARGE, *OF_SIZES} and (ALL or name in MAPPED or not name.startswith("vmap"))
]  # fmt: skip


@pytest.fixture
def on_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs insist on kernels, which run on a GPU alone."""
    for name in ("ragged_dot", "ragged_dot_general"):
        ours = getattr(ops, name)

        def answer(*args, ours=ours, implementation=None, **options):
            return ours(*args, **options, implementation="xla")

        monkeypatch.setattr(ops, name, functools.wraps(ours)(answer))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_xla_agrees_with_the_reference(name, on_xla):
    program = GROUPED_PROGRAMS[name]
    arguments = program.arguments()
    program.check(jax.jit(program.run)(*arguments), arguments, name, summation="float32")


@pytest.mark.slow
def test_xla_agrees_with_the_reference_whatever_the_sizes(on_xla):
    run = jax.jit(GROUPED_PROGRAMS[OF_SIZES[0]].run)  # they differ in the sizes alone
    for name in OF_SIZES:
        program = GROUPED_PROGRAMS[name]
        arguments = program.arguments()
        program.check(run(*arguments), arguments, name, summation="float32")


def test_a_wrong_result_is_found(on_xla):
    program = GROUPED_PROGRAMS["float32 result"]
    arguments = program.arguments()
    result = np.array(jax.jit(program.run)(*arguments))
    program.check(result, arguments, "right", summation="float32")
    result[17, 5] += 0.01
    with pytest.raises(AssertionError, match=r"element \(17, 5\)"):
        program.check(result, arguments, "wrong", summation="float32")


@pytest.mark.parametrize(
    "name", ["over sizes", "second derivative", "vmap of gradients (0, 0, 0)", "vmap of a sum"]
)
def test_programs_run_grouped_kernels_alone(name, launcher):
    specs = GROUPED_PROGRAMS[name].specs()
    assert specs and all(spec.grouped for spec in specs)
