"""A mixture of experts lowered for CUDA, on any machine: tokens are read where they lie."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
from moe_programs import COPYING, MOE_PROGRAMS, MoeProgram
from support.program_inspection import LAUNCH, lowered
from support.reachable import launches, reachable

pytestmark = pytest.mark.usefixtures("launcher")


def rows_written(program: MoeProgram, step: Callable) -> list[str]:
    """Returns the operations but launches that write a row of D for every choice of a token."""
    t, d, k = program.tokens, program.features, program.k
    rows = re.compile(rf"<(?:{t * k}|{t}x{k})x{d}x(?:bf16|f32)>")
    found = []
    for operation in reachable(lowered(step, *program.abstract())):
        written = operation.text.split("->")[-1].split(" : ")[-1]
        if LAUNCH not in operation.text and rows.search(written):
            found.append(operation.name)
    return found


@pytest.mark.parametrize("name", MOE_PROGRAMS)
def test_no_operation_but_a_product_writes_rows_by_expert(name):
    program = MOE_PROGRAMS[name]
    assert rows_written(program, program.step) == []


@pytest.mark.parametrize("name", COPYING)
def test_the_layer_with_barriers_writes_tokens_and_cotangents(name):
    program = MOE_PROGRAMS[name]
    written = Counter(rows_written(program, program.copying_step))
    assert written["stablehlo.gather"] == 2 <= written["stablehlo.optimization_barrier"]


def gathered(program: MoeProgram, step: Callable) -> Counter[str | None]:
    specs = launches(lowered(step, *program.abstract()))
    return Counter(spec.gathered for spec in specs if spec.grouped)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "decode"])
def test_products_that_read_tokens_or_cotangents_gather_them(name):
    program = MOE_PROGRAMS[name]
    # Gate and up, their weights' gradient, the hidden values' gradient; the gradient of down.
    # What the down product and the last data gradient read lies by expert.
    assert gathered(program, program.step) == {"a": 3, "b": 1, None: 2}
    if name in COPYING:
        assert gathered(program, program.copying_step) == {None: 6}
