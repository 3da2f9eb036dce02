"""Collectives are read from the text of HLO: of one result or many, at once or started."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_hopper_gemm.testing.collectives import collectives, run_counted

LINES = {
    "%a = f32[8,4]{1,0} all-reduce(%p), channel_id=1, to_apply=%add": ("all-reduce", 128),
    "ROOT %a = bf16[8]{0:S(1)} all-gather(%p), dimensions={0}": ("all-gather", 16),
    "  %a = (f32[2]{0}, f32[]{:T(128)}, /*index=2*/bf16[3]{0}) all-reduce(%p, %q, %r)": (
        "all-reduce", 18
    ),
    "%b = (f32[2]{0}, bf16[]) all-reduce-done(%a)": ("all-reduce", 10),
    "%b = f32[8]{0} all-gather-done((f32[2]{0}, f32[8]{0}) %a)": ("all-gather", 32),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_an_operation_is_counted_with_the_bytes_of_its_results(line: str):
    kind, size = LINES[line]
    text = f"ENTRY %main {{\n%a = (f32[2]{{0}}, f32[2]{{0}}) {kind}-start(%p)\n{line}\n}}"
    assert collectives(text) == {kind: (1, size)}


def test_operations_of_one_kind_add_up_and_uses_are_none():
    text = "%a = f32[2]{0} all-to-all(%p)\n%b = f32[4]{0} all-to-all(%a)\n%c = f32[4]{0} add(%b)"
    assert collectives(text) == {"all-to-all": (2, 24)}
    assert collectives("%a = f32[2]{0} fusion(%all-reduce.1), calls=%all-reduce.2") == {}


def test_many_sums_that_xla_makes_one_are_found():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    rows = jax.NamedSharding(mesh, P("i"))
    x = jax.device_put(jnp.ones((8, 4)), rows)
    sums, found = run_counted(lambda x: [jnp.sum(x * i, axis=0) for i in range(1, 9)], x)
    assert sums[7].tolist() == [64] * 4
    assert found == {"all-reduce": (found["all-reduce"][0], 8 * 16)}
