"""`explain` of products of groups: the kernel that is launched, or why there is none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.program_inspection import LAUNCH, attributes, lowered

import jax_hopper_gemm as jhg

pytestmark = pytest.mark.usefixtures("launcher", "no_tables")

S, M, K, N, G = 512, 2048, 256, 384, 8


def array(*extents: int, dtype: Any = jnp.bfloat16, **options: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, dtype, **options)


X, W, SIZES, ROWS = array(S, K), array(G, K, N), array(G, dtype=np.int32), array(M, dtype=np.int32)
BOTH = array(G, K, 2, N)
CASES = {
    "rows": (jhg.ragged_dot, X, W, {}),
    "an offset": (
        jhg.ragged_dot, X, array(2, K, N), {"group_offset": array(dtype=np.int32)}
    ),
    "picked rows": (jhg.ragged_dot, X, W, {"row_indices": ROWS}),
    "what follows": (
        jhg.ragged_dot, X, W,
        {"row_indices": ROWS, "bias": array(G, N), "activation": "silu"},
    ),
    "a gate": (
        jhg.gated_linear_unit, X, BOTH,
        {"row_indices": ROWS, "row_scale": array(M, dtype=jnp.float32)},
    ),
    "gate and up": (
        jhg.gated_linear_unit, X, (W, W),
        {"bias": (array(G, N), array(G, N))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("function, x, w, options", CASES.values(), ids=CASES)
def test_the_explained_kernel_is_the_one_that_is_launched(function, x, w, options):
    static = {name: value for name, value in options.items() if isinstance(value, str)}
    arrays = {name: value for name, value in options.items() if name not in static}
    call = partial(function, implementation="hopper", **static)
    program = lowered(
        lambda x, w, sizes, arrays: call(x, w, group_sizes=sizes, **arrays), x, w, SIZES, arrays
    )
    found = jhg.explain(function, x, w, group_sizes=SIZES, implementation="hopper", **options)
    assert found.path == "hopper" and found.spec
    assert attributes(program, "spec")[-1] == found.spec.to_json()
    assert found.spec.gathered == ("a" if "row_indices" in options else None)
    assert ("8 along M, A's rows picked of 512" in str(found)) == ("row_indices" in options)
    assert found.waves and found.waves >= 1


def test_a_weight_gradient_is_explained():
    numbers = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    found = jhg.explain(jhg.ragged_dot_general, X, array(S, N), SIZES, numbers)
    assert found.problem and found.problem.groups and found.problem.groups.axis == "k"
    assert "8 along K" in str(found) and "rows contracted in 8 groups" in found.product
    assert (found.problem.m, found.problem.n, found.problem.k) == (K, N, S)


@pytest.mark.parametrize("x, w, options, reason", [
    (array(S, 65), array(G, 65, N), {}, "pad K from 65"),
    (X, array(G, K, N, dtype=jnp.float32), {}, "the operands are bfloat16 and float32"),
    (array(0, K), W, {}, "an extent is 0"),
])  # fmt: skip
def test_what_goes_to_xla_is_explained(x, w, options, reason):
    found = jhg.explain(jhg.ragged_dot, x, w, SIZES, **options)
    assert (found.path, found.source) == ("xla", "unsupported") and reason in found.reason
    assert jhg.explain(jhg.ragged_dot, x, w, SIZES, implementation="hopper") == found
    assert LAUNCH not in lowered(jhg.ragged_dot, x, w, SIZES)


def test_rows_that_no_kernel_picks_are_written_first():
    found = jhg.explain(jhg.ragged_dot, array(0, K), W, SIZES, row_indices=ROWS)
    assert found.path == "hopper" and found.spec and found.spec.gathered is None
    assert "XLA writes the rows first that are picked: indices pick among 0 rows" in found.reason


def test_what_stays_jaxs_own_is_explained():
    numbers = lax.RaggedDotDimensionNumbers((([0, 1], [0, 1]), ([], [])), [1], [])
    x, sizes = array(4, 8, 16), array(4, 3, dtype=np.int32)
    found = jhg.explain(jhg.ragged_dot_general, x, x, sizes, numbers)
    assert (found.path, found.reason) == ("xla", "it contracts axes outside of the ragged one")
    assert found.product == "bf16[4,8,16] x bf16[4,8,16]"


def test_explicit_mesh_axes_make_no_difference():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = array(S, K, sharding=NamedSharding(mesh, P()))
        on = NamedSharding(mesh, P("rows"))
        found = jhg.explain(jhg.ragged_dot, x, W, SIZES, out_sharding=on)
        gate = partial(jhg.gated_linear_unit, recipe=jhg.recipes.BlockScaling())
        stacked: Any = jhg.explain(gate, x, array(G, K, 2, N), group_sizes=SIZES)
    assert found.devices == 2
    assert replace(found, devices=1) == jhg.explain(jhg.ragged_dot, array(S, K), W, SIZES)
    assert {x.path for x in stacked.products} == {"hopper"}


def test_xla_on_request_is_explained():
    found = jhg.explain(jhg.gated_linear_unit, X, BOTH, group_sizes=SIZES, implementation="xla")
    assert (found.path, found.source, found.spec) == ("xla", "request", None)


def test_dense_gated_units_are_explained():
    found = jhg.explain(jhg.gated_linear_unit, X, array(K, 2, N), activation=None)
    assert found.problem and found.problem.gated and found.problem.groups is None


def test_explain_raises_what_ragged_dot_would():
    with pytest.raises(ValueError, match="ragged_dot: K differs"):
        jhg.explain(jhg.ragged_dot, X, array(G, N, K), SIZES)
