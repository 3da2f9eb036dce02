"""Products of groups whose rows are picked by indices: as of `jnp.take`, without the copy."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.program_inspection import LAUNCH, integers, lowered, shape
from support.reachable import launches, on_matrices, reachable
from test_ops_epilogue import assert_close

import jax_hopper_gemm as jhg

S, M, K, N, G = 7, 30, 3, 4, 3
LHS, RHS, BIAS = integers((S, K)), integers((G, K, N), seed=1), integers((G, N), seed=2)
SIZES = jnp.asarray([11, 0, 16], np.int32)  # three rows belong to no group
ROWS = {
    "any": np.random.default_rng(0).integers(-2, S + 2, M),
    "all the same": np.full(M, 3),
    "one often": np.concatenate([np.zeros(20), np.arange(10)]),
    "none": np.full(M, -1),
}
INDICES = jnp.asarray(ROWS["any"], np.int32)
RAGGED: Any = jhg.ragged_dot  # taken with arguments of other types than it declares
GATED: Any = jhg.gated_linear_unit


def taken(x, rows):
    exists = (rows >= 0) & (rows < x.shape[0])
    return jnp.where(exists[:, None], jnp.take(x, rows, axis=0, mode="clip"), 0)


def product(lhs, rhs, rows):
    return jhg.ragged_dot(lhs, rhs, SIZES, row_indices=rows)


def reference(lhs, rhs, rows):
    return lax.ragged_dot(taken(lhs, rows), rhs, SIZES)


def gradients(function, *args):
    return jax.grad(lambda *xs: (function(*xs, *args[2:]) ** 2).sum(), (0, 1))(*args[:2])


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_values_and_gradients_follow_take(rows):
    rows = jnp.asarray(rows, np.int32)
    for way in (lambda f, *args: f(*args), gradients):
        ours, theirs = (way(f, LHS, RHS, rows) for f in (product, reference))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint32"])
def test_indices_may_be_any_integers(dtype):
    with jax.enable_x64(dtype == "int64"):
        limits = np.iinfo(dtype)
        rows = np.array([0, 3, limits.min, limits.max, S, S - 1, 1, 1, 2], dtype)
        if dtype == "int64":
            rows = np.append(rows, [2**32, -(2**32) + 1])
        sizes = jnp.asarray([5, 0, len(rows) - 5], np.int32)
        found = jhg.ragged_dot(LHS, RHS, sizes, row_indices=rows)
        exists = np.array([0 <= int(row) < S for row in rows])
        lhs = np.where(exists[:, None], np.asarray(LHS)[np.where(exists, rows, 0).astype(int)], 0)
        np.testing.assert_array_equal(found, lax.ragged_dot(jnp.asarray(lhs), RHS, sizes))


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_follow_take():
    """Beside products of a group each: `lax.ragged_dot` has no `vmap` that a Hessian wants."""
    group = np.searchsorted(np.cumsum(SIZES), np.arange(M), side="right")
    tangents = integers(LHS.shape, seed=3), integers(RHS.shape, seed=4)

    def by_groups(lhs, rhs, rows):
        own = jnp.concatenate([rhs, jnp.zeros_like(rhs[:1])])[group]
        return jnp.einsum("mk,mkn->mn", taken(lhs, rows), own)

    @partial(jax.jit, static_argnums=0)
    def outcomes(f, *args):
        def loss(lhs, rhs):
            return (f(lhs, rhs, INDICES) ** 3).sum()

        return jax.jvp(loss, args, tangents), jax.hessian(loss, (0, 1))(*args)

    found = (outcomes(f, LHS, RHS) for f in (product, by_groups))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [
    (0, None, None), (None, None, 0), (0, None, 0), (None, 0, 0), (0, 0, 0), (None, 0, None),
])  # fmt: skip
def test_every_vmap_follows_take(axes):
    args = [integers((2, S, K)), integers((2, G, K, N), seed=1), jnp.stack([INDICES, INDICES // 2])]
    args = [x if axis == 0 else x[0] for x, axis in zip(args, axes, strict=True)]
    for way in (lambda f, *args: f(*args), gradients):
        ours = jax.vmap(partial(way, product), axes)(*args)
        each = [
            [x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True)] for i in (0, 1)
        ]
        theirs = jax.tree.map(lambda *xs: jnp.stack(xs), *(way(reference, *a) for a in each))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def assert_picks(layer, *args):
    """Checks values and gradients of `layer(rows, *args)`, of which the first has the rows."""

    @jax.jit
    def outcomes(rows, *args):
        def call(lhs, *others):
            return layer(rows, lhs if rows is not None else taken(lhs, INDICES), *others)

        wrt = tuple(range(len(args)))
        return call(*args), jax.grad(lambda *args: (call(*args) ** 2).sum(), wrt)(*args)

    assert_close(outcomes(INDICES, *args), outcomes(None, *args))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_what_follows_and_an_offset_take_the_picked_rows(implementation):
    def layer(rows, lhs, rhs, bias):
        return jhg.ragged_dot(
            lhs, rhs, jnp.asarray([4, 9, 3, 12]), row_indices=rows, bias=bias,
            group_offset=jnp.asarray(1), activation="silu", epilogue=lambda y, s: y * s,
            epilogue_operands=(integers((M, 1), seed=5),), implementation=implementation,
        )  # fmt: skip

    assert_picks(layer, *(0.25 * x for x in (LHS, RHS, BIAS)))


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, False])
def test_gated_units_take_indices(stacked):
    def layer(rows, lhs, weights, scale):
        pair = weights if stacked else (weights[:, :, 0], weights[:, :, 1])
        return jhg.gated_linear_unit(
            lhs, pair, row_scale=scale, group_sizes=SIZES, row_indices=rows
        )

    weights, scale = integers((G, K, 2, N), seed=1), integers((M,), seed=6)
    assert_picks(layer, 0.25 * LHS, 0.25 * weights, scale)


@pytest.mark.slow
def test_gradients_of_16_bit_rows_are_rounded_once():
    """256 and then 40 ones: added in bfloat16, that would stay 256."""
    lhs, rhs = jnp.zeros((1, 8), jnp.bfloat16), jnp.ones((1, 8, 8), jnp.bfloat16)
    weights = jnp.concatenate([jnp.full(1, 32), jnp.full(40, 0.125)]).astype(jnp.bfloat16)
    rows, sizes = jnp.zeros(41, np.int32), jnp.asarray([41])

    def loss(lhs):
        y = jhg.ragged_dot(lhs, rhs, sizes, row_indices=rows)
        return (y.astype(jnp.float32) * weights[:, None]).sum()

    found = jax.grad(loss)(lhs)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, np.full((1, 8), 296))


@pytest.mark.slow
def test_indices_under_shard_map():
    """Each device has some of the groups, and picks its rows of all tokens."""
    mesh = jax.make_mesh((2,), ("experts",), axis_types=(AxisType.Auto,))
    rhs, sizes = integers((4, K, N), seed=2), jnp.asarray([6, 0, 13, 8])

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("experts"), P("experts")), out_specs=P())
    def ours(lhs, rhs, rows):
        first = 2 * lax.axis_index("experts")
        y = jhg.ragged_dot(lhs, rhs, sizes, row_indices=rows[0], group_offset=first)
        return lax.psum(y, "experts")

    both = jnp.stack([INDICES, INDICES[::-1]])

    def theirs(lhs, rhs, rows):
        parts = [
            lax.ragged_dot(taken(lhs, own), jnp.where(mine[:, None, None], rhs, 0), sizes)
            for own, mine in zip(rows, jnp.asarray([[1, 1, 0, 0], [0, 0, 1, 1]]) > 0, strict=True)
        ]
        return sum(parts)

    for way in (lambda f, *args: f(*args), gradients):
        jax.tree.map(
            np.testing.assert_array_equal, way(ours, LHS, rhs, both), way(theirs, LHS, rhs, both)
        )


def test_numbers_of_rows_may_be_symbolic_forwards():
    def exported(function):
        many, source = export.symbolic_shape("m, s")
        lhs = jax.ShapeDtypeStruct((source, K), LHS.dtype)
        rows = jax.ShapeDtypeStruct((many,), INDICES.dtype)
        return export.export(jax.jit(function), platforms=("cpu",))(lhs, RHS, rows)

    found = exported(product).call(LHS, RHS, INDICES)
    np.testing.assert_array_equal(found, product(LHS, RHS, INDICES))
    with pytest.raises(NotImplementedError, match="m of s rows are picked.*export a gradient for"):
        exported(jax.grad(lambda *args: product(*args).sum()))


ERRORS = {
    "rank": (
        lambda: RAGGED(LHS, RHS, SIZES, row_indices=INDICES[:, None]),
        ValueError, r"row_indices is i32\[30,1\], expected \(M,\)",
    ),
    "dtype": (
        lambda: RAGGED(LHS, RHS, SIZES, row_indices=jnp.ones(M)),
        TypeError, r"row_indices is f32\[30\], expected integers",
    ),
    "no array": (
        lambda: RAGGED(LHS, RHS, SIZES, row_indices=[0, 1]),
        TypeError, "row_indices is a list, expected an array",
    ),
    "dense": (
        lambda: GATED(LHS, integers((K, 2, N)), row_indices=INDICES),
        ValueError, r"row_indices came without group_sizes: pass x\[row_indices\]",
    ),
    "gated": (
        lambda: GATED(LHS, integers((G, K, 2, N)), group_sizes=SIZES, row_indices=jnp.ones(M)),
        TypeError, "gated_linear_unit: row_indices is .*expected integers",
    ),
    "scale": (
        lambda: GATED(
            LHS, integers((G, K, 2, N)), group_sizes=SIZES, row_indices=INDICES,
            row_scale=jnp.ones(S),
        ),
        ValueError, r"row_scale is f32\[7\], expected \(30,\): one for each row of the result",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call, error, message", ERRORS.values(), ids=ERRORS)
def test_what_is_no_index_of_rows_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_rows_lie_as_explicit_mesh_axes_have_their_indices():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,))
    lhs = integers((8, K))
    expected = jhg.ragged_dot(lhs, RHS, SIZES, row_indices=INDICES)
    with jax.set_mesh(mesh):
        lhs = jax.device_put(lhs, NamedSharding(mesh, P("rows")))
        out = jhg.ragged_dot(lhs, RHS, SIZES, row_indices=INDICES)
    assert jax.typeof(out).sharding.spec == P(None, None)
    np.testing.assert_array_equal(out, expected)


# Lowered for CUDA.

T, R, D, F, E = 256, 1024, 256, 384, 4  # tokens, rows, model, hidden, experts


X, SIZES_OF_X, ROWS_OF_X = shape(T, D), shape(E, dtype=np.int32), shape(R, dtype=np.int32)
hopper: Any = partial(jhg.ragged_dot, implementation="hopper")
gated: Any = partial(jhg.gated_linear_unit, implementation="hopper")
LAYERS = {
    "product": (lambda x, w, s, i: hopper(x, w, s, row_indices=i), shape(E, D, F)),
    "activated": (
        lambda x, w, s, i: hopper(x, w, s, row_indices=i, activation="silu"), shape(E, D, F)
    ),
    "gated": (lambda x, w, s, i: gated(x, w, group_sizes=s, row_indices=i), shape(E, D, 2, F)),
}  # fmt: skip


def first_operands(program: str) -> list[str]:
    """Returns the first operand of each launch that the program's results depend on."""
    used = "\n".join(o.text for o in reachable(program))
    return re.findall(re.escape(LAUNCH) + r"\((%\w+)", used)


def in_program(program: str, operation: str) -> bool:
    """Whether a function of the program has the operation."""
    return f"stablehlo.{operation}" in program


@pytest.mark.parametrize("layer, weights", LAYERS.values(), ids=LAYERS)
def test_the_kernel_reads_rows_where_they_lie(launcher, layer, weights):
    program = lowered(layer, X, weights, SIZES_OF_X, ROWS_OF_X)
    (spec,) = launches(program)
    assert spec.gathered == "a" and first_operands(program) == ["%arg0"]
    assert on_matrices(program, R * D) == []


@pytest.mark.parametrize("axes", [(0, None, 0, 0), (None, None, None, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("layer, weights", LAYERS.values(), ids=LAYERS)
def test_mapped_rows_are_read_where_they_lie(launcher, layer, weights, axes):
    args = [
        x if axis is None else shape(2, *x.shape, dtype=x.dtype)
        for x, axis in zip((X, weights, SIZES_OF_X, ROWS_OF_X), axes, strict=True)
    ]
    program = lowered(jax.vmap(layer, axes), *args)
    (spec,) = launches(program)
    assert spec.gathered == "a"
    assert set(on_matrices(program, R * D)) <= {"stablehlo.reshape"}


def test_gradients_write_no_copy_and_scatter_nothing(launcher):
    layer, weights = LAYERS["product"]

    def step(x, weights, sizes, rows, cotangent):
        return jax.vjp(lambda x, w: layer(x, w, sizes, rows), x, weights)[1](cotangent)

    program = lowered(step, X, weights, SIZES_OF_X, ROWS_OF_X, shape(R, F))
    assert sorted((s.grouped, s.gathered) for s in launches(program)) == [("k", "a"), ("m", None)]
    # But for the kernel's own rows of the gradient, nothing as large as they is written.
    assert on_matrices(program, R * D) == []
    assert not in_program(program, "scatter") and not in_program(program, "while")


def test_indexing_instead_writes_the_copy_and_scatters(launcher):
    """What the two tests before this one look for is there without `row_indices`."""

    def step(x, weights, sizes, rows, cotangent):
        return jax.vjp(lambda x, w: hopper(x[rows], w, sizes), x, weights)[1](cotangent)

    program = lowered(step, X, LAYERS["product"][1], SIZES_OF_X, ROWS_OF_X, shape(R, F))
    assert on_matrices(program, R * D) == ["stablehlo.gather"]
    assert in_program(program, "scatter")
