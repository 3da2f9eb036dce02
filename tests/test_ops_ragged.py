"""`ragged_dot` and `ragged_dot_general` on the CPU: JAX's contract, and what goes beyond it."""

from __future__ import annotations

import inspect
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.program_inspection import integers, step
from support.ragged import LHS, RHS, SIZES, G, K, N, T, by_loop, numbers

import jax_hopper_gemm as jhg

RAGGED: Any = jhg.ragged_dot  # taken with arguments of other types than it declares


@pytest.mark.parametrize("ours, theirs", [
    (jhg.ragged_dot, lax.ragged_dot), (jhg.ragged_dot_general, lax.ragged_dot_general),
])  # fmt: skip
def test_the_signature_begins_with_that_of_lax(ours, theirs):
    def named(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    expected = named(theirs)
    assert named(ours)[: len(expected)] == expected
    assert all(
        kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in named(ours)[len(expected) :]
    )


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("sizes", [(3, 0, 5), (4, 4, 4), (0, 0, 0), (5, 9, 4), (0, 12, 0)])
def test_ragged_dot_is_that_of_lax_and_of_a_loop(sizes, implementation):
    sizes = jax.device_put(np.array(sizes))
    out = jhg.ragged_dot(LHS, RHS, sizes, implementation=implementation)
    np.testing.assert_array_equal(out, lax.ragged_dot(LHS, RHS, sizes))
    np.testing.assert_array_equal(out, by_loop(LHS, RHS, sizes))


def test_negative_sizes_count_as_none():
    sizes = jnp.array([5, -3, 4])
    np.testing.assert_array_equal(jhg.ragged_dot(LHS, RHS, sizes), by_loop(LHS, RHS, sizes))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_sizes_may_be_any_integers(dtype):
    sizes = np.array([3, 0, np.iinfo(dtype).max], dtype)
    np.testing.assert_array_equal(jhg.ragged_dot(LHS, RHS, sizes), by_loop(LHS, RHS, [3, 0, 9]))


def test_sizes_beyond_int32_stay_what_they_are():
    with jax.enable_x64(True):
        for size, expected in ((2**32 + 1, [3, 9, 0]), (-(2**32) + 1, [3, 0, 5])):
            sizes = jnp.array([3, size, 5], np.int64)
            np.testing.assert_array_equal(
                jhg.ragged_dot(LHS, RHS, sizes), by_loop(LHS, RHS, expected)
            )


def test_known_sizes_that_are_too_long_are_clipped_as_in_lax():
    out = jhg.ragged_dot(LHS, RHS, np.array([5, 9, 4]))
    np.testing.assert_array_equal(out, by_loop(LHS, RHS, [5, 9, 4]))


@pytest.mark.parametrize("dtypes, preferred", [
    (("bfloat16", "bfloat16"), None), (("bfloat16", "bfloat16"), "float32"),
    (("float16", "float16"), None), (("bfloat16", "float32"), None), (("int8", "int8"), "int32"),
    (("bool", "bool"), None),
])  # fmt: skip
def test_dtypes_are_those_of_lax(dtypes, preferred):
    lhs, rhs = LHS.astype(dtypes[0]), RHS.astype(dtypes[1])
    ours, theirs = (
        f(lhs, rhs, SIZES, preferred_element_type=preferred)
        for f in (jhg.ragged_dot, lax.ragged_dot)
    )
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_gradients_have_the_operands_dtypes():
    lhs, rhs = LHS.astype("bfloat16"), RHS.astype("bfloat16")

    def loss(function, lhs, rhs):
        out = function(lhs, rhs, SIZES, preferred_element_type=jnp.float32)
        return (out**2).sum()

    gradients = (jax.grad(partial(loss, f), (0, 1)) for f in (jhg.ragged_dot, lax.ragged_dot))
    ours, theirs = (jax.jit(gradient)(lhs, rhs) for gradient in gradients)
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("options", [
    {"precision": "highest"}, {"precision": lax.Precision.HIGH}, {"precision": ("high", "default")},
    {"precision": ["highest", "highest"]},
])  # fmt: skip
def test_precision_is_taken_in_every_way_of_lax(options):
    expected = by_loop(LHS, RHS, SIZES)
    np.testing.assert_array_equal(jhg.ragged_dot(LHS, RHS, SIZES, **options), expected)


# Groups of several devices.


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("sizes", [(3, 0, 2, 4, 1), (1, 20, 3, 2, 1), (2, -5, 3, 0, 1)])
def test_the_parts_of_all_devices_add_up(sizes, shape):
    rhs, sizes = integers((5, K, N), seed=2), jnp.array(sizes)
    local = jax.jit(lambda rhs, first: jhg.ragged_dot(LHS, rhs, sizes, None, None, first))
    parts = [local(rhs[i : i + count], jnp.full(shape, i)) for i, count in ((0, 2), (2, 1), (3, 2))]
    np.testing.assert_array_equal(sum(parts), by_loop(LHS, rhs, sizes))


@pytest.mark.parametrize("first", [-7, 3, 4, 2**31 - 1])
def test_groups_that_there_are_not_give_zeros(first):
    out = jhg.ragged_dot(LHS, RHS[:1], SIZES, group_offset=jnp.array(first))
    expected = by_loop(LHS, RHS, [3, 0, 0])
    np.testing.assert_array_equal(out, expected if first < 0 else np.zeros((T, N)))


@pytest.mark.parametrize(
    ("dtype", "sizes", "first"),
    [("int8", 128, 127), ("int8", 300, 100), ("uint8", 256, 255), ("int16", 40_000, 30_000)],
)
def test_an_offset_may_be_narrower_than_the_number_of_groups(dtype, sizes, first):
    where = np.arange(sizes)
    sizes = jax.device_put(np.select([where == 1, where == first], [3, 4]))
    local = jax.jit(lambda first: jhg.ragged_dot(LHS, RHS[:1], sizes, group_offset=first))
    expected = by_loop(LHS, np.asarray(RHS)[[1, 0]], [3, 4]) * (np.arange(T) >= 3)[:, None]
    np.testing.assert_array_equal(local(np.array(first, dtype)), expected)


def test_groups_behind_the_last_size_are_empty():
    out = jhg.ragged_dot(LHS, RHS[:2], SIZES, group_offset=jnp.array(2))
    rows = np.arange(T)[:, None]
    expected = np.where((rows >= 3) & (rows < 8), np.asarray(LHS) @ np.asarray(RHS[0]), 0)
    np.testing.assert_array_equal(out, expected)


def test_gradients_with_an_offset_are_those_of_the_local_groups():
    def local(lhs, rhs, first):
        return (jhg.ragged_dot(lhs, rhs, SIZES, group_offset=first) ** 2).sum()

    def whole(lhs, rhs):
        return (lax.ragged_dot(lhs, rhs, SIZES) ** 2).sum()

    of_local = jax.jit(jax.grad(local, (0, 1)))
    parts = [of_local(LHS, np.asarray(RHS)[i : i + 1], np.array(i)) for i in range(G)]
    of_lhs, of_rhs = jax.jit(jax.grad(whole, (0, 1)))(LHS, RHS)
    np.testing.assert_array_equal(sum(np.asarray(part[0]) for part in parts), of_lhs)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), of_rhs)


def test_offsets_may_be_mapped():
    first = jnp.arange(G)
    out = jax.vmap(lambda rhs, i: jhg.ragged_dot(LHS, rhs[None], SIZES, group_offset=i))(RHS, first)
    np.testing.assert_array_equal(out.sum(0), by_loop(LHS, RHS, SIZES))


@pytest.mark.slow
def test_expert_parallel_under_shard_map():
    mesh = jax.make_mesh((4,), ("experts",), axis_types=(AxisType.Auto,))
    rhs, sizes = integers((8, K, N), seed=2), jnp.array([1, 0, 3, 2, 0, 2, 1, 1])

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("experts"), P()), out_specs=P(), check_vma=True
    )
    def product(lhs, rhs, sizes):
        first = 2 * lax.axis_index("experts")
        return lax.psum(jhg.ragged_dot(lhs, rhs, sizes, group_offset=first), "experts")

    np.testing.assert_array_equal(product(LHS, rhs, sizes), by_loop(LHS, rhs, sizes))
    gradients = (
        jax.grad(lambda x, w, f=f: (f(x, w, sizes) ** 2).sum(), (0, 1))
        for f in (product, lax.ragged_dot)
    )
    ours, theirs = (jax.jit(gradient)(LHS, rhs) for gradient in gradients)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# ragged_dot_general.


MATRIX_OF_SIZES = jnp.array([[1, 2, 3], [4, 5, 6]])
GENERAL_CASES = {
    "rows": ((T, K), (G, K, N), SIZES, numbers(([1], [1]), ([], []), 0, 0)),
    "rows, weights (G, N, K)": ((T, K), (G, N, K), SIZES, numbers(([1], [2]), ([], []), 0, 0)),
    "rows, weights (K, G, N)": ((T, K), (K, G, N), SIZES, numbers(([1], [0]), ([], []), 0, 1)),
    "rows, weights (N, K, G)": ((T, K), (N, K, G), SIZES, numbers(([1], [1]), ([], []), 0, 2)),
    "rows, (K, T)": ((K, T), (G, K, N), SIZES, numbers(([0], [1]), ([], []), 1, 0)),
    "rows, two contracted": (
        (T, K, 2), (N, 2, K, G), SIZES, numbers(([1, 2], [2, 1]), ([], []), 0, 3),
    ),
    "rows, two columns": ((T, K), (G, 2, K, N), SIZES, numbers(([1], [2]), ([], []), 0, 0)),
    "rows, axes outside": (
        (2, T, K), (G, K, N), MATRIX_OF_SIZES, numbers(([2], [1]), ([], []), 1, 0),
    ),
    "rows, axes inside": ((T, 5, K), (G, K, N), SIZES, numbers(([2], [1]), ([], []), 0, 0)),
    "rows, axes around": (
        (2, T, 5, K), (G, K, N), MATRIX_OF_SIZES, numbers(([3], [1]), ([], []), 1, 0),
    ),
    "rows, batch": (
        (2, T, K), (2, G, K, N), MATRIX_OF_SIZES, numbers(([2], [2]), ([0], [0]), 1, 1),
    ),
    "rows, batch, sizes shared": (
        (T, 2, K), (G, 2, K, N), SIZES, numbers(([2], [2]), ([1], [1]), 0, 0),
    ),
    "rows, everything": (
        (2, 3, T, 2, K), (G, 2, K, N), integers((2, 3, G), "int32") + 2,
        numbers(([4], [2]), ([0], [1]), 2, 0),
    ),
    "contraction": ((T, K), (T, N), SIZES, numbers(([0], [0]), ([], []), 0, None)),
    "contraction, (K, T)": ((K, T), (N, T), SIZES, numbers(([1], [1]), ([], []), 1, None)),
    "contraction, two axes each": (
        (T, K, 2), (2, T, N), SIZES, numbers(([0], [1]), ([], []), 0, None),
    ),
    "contraction, batch": (
        (2, T, K), (T, 2, N), MATRIX_OF_SIZES, numbers(([1], [0]), ([0], [1]), 1, None),
    ),
    "contraction, batch, sizes shared": (
        (2, T, K), (2, T, N), SIZES, numbers(([1], [1]), ([0], [0]), 1, None),
    ),
    "contraction, axes inside": (
        (2, T, K, 5), (T, 2, 5, N), SIZES, numbers(([1, 3], [0, 2]), ([0], [1]), 1, None),
    ),
    "contraction, axes outside": (
        (5, T, K), (T, 5, N), SIZES, numbers(([0, 1], [1, 0]), ([], []), 1, None),
    ),
    "batch": ((T, 2, K), (T, K, N), SIZES, numbers(([2], [1]), ([0], [0]), 0, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", GENERAL_CASES)
def test_ragged_dot_general_follows_lax(name):
    lhs_shape, rhs_shape, sizes, dimensions = GENERAL_CASES[name]
    lhs, rhs = integers(lhs_shape), integers(rhs_shape, seed=1)
    ours, theirs = (
        f(lhs, rhs, sizes, dimensions, preferred_element_type=jnp.float32)
        for f in (jhg.ragged_dot_general, lax.ragged_dot_general)
    )
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", GENERAL_CASES)
def test_only_what_no_form_covers_is_left_to_lax(name):
    lhs_shape, rhs_shape, sizes, dimensions = GENERAL_CASES[name]
    function = partial(jhg.ragged_dot_general, ragged_dot_dimension_numbers=dimensions)
    lhs, rhs = (jax.ShapeDtypeStruct(shape, np.float32) for shape in (lhs_shape, rhs_shape))
    program = jax.make_jaxpr(function)(lhs, rhs, sizes)
    expected = {"batch": "hopper_dot", "contraction, axes outside": "ragged_dot_general"}
    names = [e.primitive.name for e in program.eqns if "dot" in e.primitive.name]
    assert names == [expected.get(name, "hopper_ragged_dot")]


@pytest.mark.parametrize("name", ["rows", "rows, weights (G, N, K)", "contraction"])
def test_the_forms_move_nothing(name):
    lhs_shape, rhs_shape, sizes, dimensions = GENERAL_CASES[name]
    function = partial(jhg.ragged_dot_general, ragged_dot_dimension_numbers=dimensions)
    lhs, rhs = (jax.ShapeDtypeStruct(shape, np.float32) for shape in (lhs_shape, rhs_shape))
    program = jax.make_jaxpr(function)(lhs, rhs, sizes)
    assert [e.primitive.name for e in program.eqns] == ["hopper_ragged_dot"]


@pytest.mark.parametrize("first", range(G))
def test_an_offset_counts_groups_of_any_axis(first):
    weights = integers((N, K, G), seed=1)
    dimensions = numbers(([1], [1]), ([], []), 0, 2)
    out = jhg.ragged_dot_general(
        LHS, weights[:, :, first : first + 1], SIZES, dimensions, group_offset=first
    )
    only = np.where(np.arange(G)[:, None, None] == first, weights.transpose(2, 1, 0), 0)
    np.testing.assert_array_equal(out, by_loop(LHS, only, SIZES))


@pytest.mark.parametrize(
    "name", ["rows, two contracted", "rows, axes inside", "contraction, two axes each"]
)
def test_derivatives_of_ragged_dot_general_follow_lax(name):
    lhs_shape, rhs_shape, sizes, dimensions = GENERAL_CASES[name]
    lhs, rhs = integers(lhs_shape), integers(rhs_shape, seed=1)

    def of(function):
        return lambda lhs, rhs: function(lhs, rhs, sizes, dimensions)

    moved = (integers(lhs.shape, seed=6), integers(rhs.shape, seed=7))
    ours, theirs = (
        jax.jit(partial(jax.jvp, of(f)))((lhs, rhs), moved)
        for f in (jhg.ragged_dot_general, lax.ragged_dot_general)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    # JAX has no gradient of some of these, and a gradient is the transpose of that derivative.
    weight = integers(ours[0].shape, seed=5)
    _, gradients = jax.jit(partial(step, of(jhg.ragged_dot_general)))(weight, lhs, rhs)
    along = sum(np.vdot(g, x) for g, x in zip(gradients, moved, strict=True))
    assert along == np.vdot(weight, theirs[1])


# Transformations, in short: the primitive has tests of its own.


@pytest.mark.slow
def test_every_vmap_works():
    for axes in itertools.product((None, 0), repeat=3):
        if axes == (None,) * 3:
            continue
        args = [
            x if axis is None else np.stack([x, x[::-1]])
            for x, axis in zip(map(np.asarray, (LHS, RHS, SIZES)), axes, strict=True)
        ]
        out = np.asarray(jax.jit(jax.vmap(jhg.ragged_dot, axes))(*args))
        for i in range(2):
            own = [x if axis is None else x[i] for x, axis in zip(args, axes, strict=True)]
            np.testing.assert_array_equal(out[i], by_loop(*own))


@pytest.mark.parametrize("options", [{}, {"implementation": "xla"}, {"group_offset": 0}], ids=str)
def test_explicit_mesh_axes_of_rows_and_columns_stay(options):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    rhs = jax.device_put(RHS, NamedSharding(mesh, P(None, None, "x")))
    with jax.set_mesh(mesh):
        out = jax.jit(partial(jhg.ragged_dot, **options))(LHS, rhs, SIZES)
        assert jax.typeof(out).sharding.spec == P(None, "x")
        np.testing.assert_array_equal(out, by_loop(LHS, RHS, SIZES))
    here = RAGGED(LHS, rhs, SIZES, out_sharding=NamedSharding(mesh, P("x")))
    assert jax.typeof(here).sharding.spec == P("x", None)
    np.testing.assert_array_equal(here, out)


def test_explicit_mesh_axes_stay_where_axes_outside_of_the_ragged_one_are_contracted():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    numbers = lax.RaggedDotDimensionNumbers((([0, 1], [0, 1]), ([], [])), [1], [])
    shapes = (3, 8, 4), (3, 8, 6)
    rows, rhs, sizes = (*(jnp.ones(shape) for shape in shapes), jnp.asarray([[3, 5]] * 3))
    with jax.set_mesh(mesh):
        lhs = jax.device_put(rows, NamedSharding(mesh, P(None, None, "x")))
        out = jhg.ragged_dot_general(lhs, rhs, sizes, numbers)
        assert jax.typeof(out).sharding.spec == P(None, "x", None)
    theirs = lax.ragged_dot_general(rows, rhs, sizes, numbers)
    np.testing.assert_array_equal(out, theirs)


def test_a_sharding_that_explicit_mesh_axes_leave_open_is_asked_for():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    placed = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    rows = np.zeros((4, K), np.float32)
    with pytest.raises(ValueError, match=r"groups of weights, are sharded .* \['x'\]: .* out_shar"):
        RAGGED(rows, placed(np.zeros((2, K, N), np.float32), "x"), np.array([1, 2]))
    with pytest.raises(ValueError, match=r"over the mesh axes \['x'\], as the operands' are. Name"):
        RAGGED(placed(rows, "x"), placed(RHS, None, None, "x"), SIZES)
    with pytest.raises(ValueError, match="out_sharding came, and its arrays have no Explicit mesh"):
        RAGGED(rows, RHS, SIZES, bias=np.zeros((len(RHS), N)), out_sharding=P())


def test_symbolic_rows_export_and_run():
    (rows,) = jax.export.symbolic_shape("t")
    args = (jax.ShapeDtypeStruct((rows, K), np.float32), RHS, SIZES)
    for offset in (None, 0):
        function = jax.jit(partial(jhg.ragged_dot, group_offset=offset))
        exported = jax.export.export(function, platforms=["cpu"])(*args)
        np.testing.assert_array_equal(exported.call(LHS, RHS, SIZES), by_loop(LHS, RHS, SIZES))
