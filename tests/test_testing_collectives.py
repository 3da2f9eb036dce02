"""Collectives are read from the text of HLO: of one result or many, at once or started."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.collectives import collectives

from jax_hopper_gemm.testing.collectives import collectives_in

LINES = {
    "%a = f32[8,4]{1,0} all-reduce(%p), channel_id=1, to_apply=%add": ("all-reduce", 128),
    "ROOT %a = bf16[8]{0:S(1)} all-gather(%p), dimensions={0}": ("all-gather", 16),
    "  %a = (f32[2]{0}, f32[]{:T(128)}, /*index=2*/bf16[3]{0}) all-reduce(%p, %q, %r)": (
        "all-reduce", 18
    ),
    "%b = (f32[2]{0}, bf16[]) all-reduce-done(%s)": ("all-reduce", 10),
    "%b = f32[8]{0} all-gather-done((f32[2]{0}, f32[8]{0}) %s)": ("all-gather", 32),
}  # fmt: skip

GROUPS = {
    "replica_groups={{0,2},{1,3}}, dimensions={0}": {(0, 2), (1, 3)},
    "replica_groups=[2,3]<=[6], to_apply=%add": {(0, 1, 2), (3, 4, 5)},
    "replica_groups=[3,2]<=[2,3]T(1,0), use_global_device_ids=true": {(0, 3), (1, 4), (2, 5)},
    "replica_groups=mesh['i'=2,'j'=3] {'j'}, to_apply=%add": {(0, 1, 2), (3, 4, 5)},
    "replica_groups=mesh['i'=2,'j'=2,'k'=2] {'i','k'}": {(0, 1, 4, 5), (2, 3, 6, 7)},
    "source_target_pairs={{0,1},{1,2}}": {(0, 1), (1, 2)},
    "replica_groups={}, to_apply=%add": set(),
}


def test_an_operation_is_counted_with_the_bytes_of_its_results():
    for line, (kind, size) in LINES.items():
        text = f"ENTRY %main {{\n%s = (f32[2]{{0}}, f32[2]{{0}}) {kind}-start(%p)\n{line}\n}}"
        assert collectives(text) == {kind: (1, size)}, line


def test_the_devices_that_exchange_are_known():
    for attributes, groups in GROUPS.items():
        at_once = f"%a = f32[2]{{0}} all-reduce(%p), channel_id=1, {attributes}"
        started = at_once.replace("reduce(", "reduce-start(")
        for text in (at_once, started + "\n%b = f32[2]{0} all-reduce-done(%a)"):
            (collective,) = collectives_in(text)
            assert collective == ("all-reduce", {frozenset(x) for x in groups}, 8), text


def test_operations_of_one_kind_add_up_and_uses_are_none():
    text = "%a = f32[2]{0} all-to-all(%p)\n%b = f32[4]{0} all-to-all(%a)\n%c = f32[4]{0} add(%b)"
    assert collectives(text) == {"all-to-all": (2, 24)}
    assert collectives("%a = f32[2]{0} fusion(%all-reduce.1), calls=%all-reduce.2") == {}


def test_many_sums_that_xla_makes_one_are_found():
    mesh = jax.make_mesh((2, 4), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("i", "j")))
    program = jax.jit(lambda x: [jnp.sum(x * i, axis=0) for i in range(1, 9)]).lower(x).compile()
    sums = list(collectives_in(program.as_text() or ""))
    assert sum(x.size for x in sums) == 8 * 4
    assert {x.groups for x in sums} == {frozenset(frozenset((i, i + 4)) for i in range(4))}
