"""`cotangent_dtype`: gradients of wide results on kernels, cotangents rounded once before them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.program_inspection import LAUNCH, equations, integers, lowered, normal
from support.tolerance import error_bound, farthest

import jax_hopper_gemm as jhg

M, N, K = 256, 384, 512
LAST = {"preferred_element_type": jnp.float32, "cotangent_dtype": jnp.bfloat16}
SIZES = jnp.array([M, 0], jnp.int32)
WGRAD = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])


def sample(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return normal(shape, dtype)


def by_numbers(a: Any, b: Any, **options: Any) -> Any:
    return jhg.dot_general(a, b, (((1,), (0,)), ((), ())), **options)


def ragged(a: Any, b: Any, **options: Any) -> Any:
    return jhg.ragged_dot(a, jnp.stack([b, jnp.zeros_like(b)]), SIZES, **options)


def contracted(a: Any, b: Any, **options: Any) -> Any:
    return jhg.ragged_dot_general(a.T, b, jnp.array([K]), WGRAD, **options)[0]


DENSE = {
    "matmul": jhg.matmul,
    "dot_general": by_numbers,
    "einsum": partial(jhg.einsum, "mk,kn->mn"),
    "xla": partial(jhg.matmul, implementation="xla"),
    "bias": lambda a, b, **options: jhg.matmul(a, b, bias=jnp.ones(N), **options),
    "recompute": lambda a, b, **options: jhg.matmul(
        a, b, epilogue=lambda y: 1.0 * y, save_preactivation=False, **options
    ),
    "bias on xla": lambda a, b, **options: jhg.matmul(
        a, b, bias=jnp.ones(N), implementation="xla", **options
    ),
    "ragged": ragged,
    "ragged on xla": partial(ragged, implementation="xla"),
    "ragged bias": lambda a, b, **options: ragged(a, b, bias=jnp.ones((2, N)), **options),
    "contracted": contracted,
}


def cotangents(product: Any, a: Any, b: Any, w: Any, **options: Any) -> Any:
    return jax.jit(lambda a, b: jax.vjp(partial(product, **options), a, b)[1](w))(a, b)


# On the CPU of jax 0.12 XLA adds up the contraction's bfloat16 gradient in bfloat16, if jitted.
@pytest.mark.parametrize("name", sorted(DENSE.keys() - {"contracted"}))
def test_gradients_are_those_of_the_rounded_cotangent(name):
    a, b, w = sample(M, K), sample(K, N), sample(M, N, dtype=jnp.float32)
    da, db = cotangents(DENSE[name], a, b, w, **LAST)
    exact, rounded = np.asarray(w, np.float64), np.asarray(w.astype(jnp.bfloat16), np.float64)
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    unit = 2.0**-8  # half of bfloat16's epsilon: what rounding the cotangent changes, relatively
    for got, other, k in ((da, y.T, N), (db.T, x, M)):
        left = (rounded, exact) if k == N else (rounded.T, exact.T)
        expected, whole = (ct @ other for ct in left)
        size, whole_size = (abs(ct) @ abs(other) for ct in left)
        bound = error_bound(expected, size, k, "bfloat16", "float32")
        assert got.dtype == jnp.bfloat16
        assert farthest(got, expected, bound).ratio <= 1
        assert farthest(got, whole, bound + unit * whole_size).ratio <= 1


def test_another_dtype_than_that_of_the_operands_changes_the_gradient():
    a, b, w = sample(M, K), sample(K, N), sample(M, N, dtype=jnp.float32)
    none, narrow = (
        cotangents(jhg.matmul, a, b, w, preferred_element_type=jnp.float32, cotangent_dtype=dtype)
        for dtype in (None, jnp.bfloat16)
    )
    assert (none[0] != narrow[0]).any()
    for wide in (jnp.float32, "float32"):
        same = cotangents(
            jhg.matmul, a, b, w, preferred_element_type=jnp.float32, cotangent_dtype=wide
        )
        np.testing.assert_array_equal(same[0], none[0])


@pytest.mark.parametrize("operands", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", ["matmul", "bias", "ragged", "ragged bias", "contracted"])
def test_every_pair_of_dtypes_has_derivatives(name, dtype, operands):
    a, b = integers((M, K), operands), integers((K, N), operands, seed=1)
    w = integers((M, N), seed=2)
    for preferred in (None, jnp.float32):
        options = {"preferred_element_type": preferred, "cotangent_dtype": dtype}

        def f(a, b, product=DENSE[name], options=options):
            return (product(a, b, **options).astype(jnp.float32) * w).sum()

        da, db = jax.jit(jax.grad(f, (0, 1)))(a, b)
        np.testing.assert_array_equal(
            da.astype(jnp.float32), (w @ b.T.astype(jnp.float32)).astype(operands)
        )
        np.testing.assert_array_equal(
            db.astype(jnp.float32), (a.T.astype(jnp.float32) @ w).astype(operands)
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn])
def test_operands_of_8_bits_have_derivatives(dtype):
    a, b = (integers(shape, jnp.float8_e5m2) for shape in ((M, K), (K, N)))

    def f(a, b):
        return jhg.matmul(a, b, preferred_element_type=jnp.float32, cotangent_dtype=dtype).sum()

    da, _ = jax.grad(f, (0, 1))(a, b)
    exact = jnp.ones((M, N)) @ b.T.astype(jnp.float32)
    np.testing.assert_array_equal(da, exact.astype(da.dtype))


TRANSFORMS = {
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "grad of grad": lambda f: jax.grad(
        lambda x, y: sum((g * g[::-1]).sum() for g in jax.grad(f, (0, 1))(x, y)), (0, 1)
    ),
    "jvp of grad": lambda f: lambda x, y: jax.jvp(jax.grad(f, (0, 1)), (x, y), (x[::-1], y[::-1])),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "vmap": lambda f: lambda x, y: jax.vmap(jax.grad(f, (0, 1)), (0, None))(jnp.stack([x, -x]), y),
    "grad of vmap": lambda f: jax.grad(
        lambda x, y: jax.vmap(f, (None, 0))(x, jnp.stack([y, 2 * y])).sum(), (0, 1)
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["matmul", "bias", "ragged", "ragged bias"])
def test_transformations_keep_it(name, transform):
    x, y, w = integers((64, 4)), integers((4, N), seed=1), integers((64, N), seed=2)

    def f(x, y, **options):
        return (DENSE[name](x, y, **options) * w).sum()

    ours, theirs = (
        jax.jit(TRANSFORMS[transform](partial(f, **options)))(x, y)
        for options in ({"cotangent_dtype": jnp.bfloat16}, {})
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def factors(function: Any, *args: Any) -> list[tuple[str, ...]]:
    """Returns the dtypes of the factors of each product of a program."""
    names = "hopper_dot", "hopper_ragged_dot"
    return [
        tuple(x.aval.dtype.name for x in e.invars[:2])
        for e in equations(function, *args)
        if e.primitive.name in names
    ]


def test_second_derivatives_multiply_rounded_cotangents():
    def f(a, b):
        return jnp.sin(jhg.matmul(a, b, **LAST)).sum()

    def second(a, b):
        return jax.grad(lambda a, b: sum(g.sum() for g in jax.grad(f, (0, 1))(a, b)), (0, 1))(a, b)

    found = factors(second, sample(M, K), sample(K, N))
    assert len(found) > 4
    assert set(found) == {("bfloat16", "bfloat16")}


def test_gated_products_round_what_reaches_gate_and_up():
    x, w = sample(M, K), sample(M, N, dtype=jnp.float32)
    weights = sample(K, N), sample(K, N) / 2
    results = [
        jax.vjp(partial(jhg.gated_linear_unit, **LAST, **options), x, weights)[1](w)
        for options in ({}, {"implementation": "xla"}, {"save_preactivation": False})
    ]
    for result in results[1:]:
        for ours, theirs in zip(*map(jax.tree.leaves, (results[0], result)), strict=True):
            assert ours.dtype == theirs.dtype == jnp.bfloat16
            ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
            np.testing.assert_allclose(ours, theirs, rtol=2**-6, atol=2**-6 * abs(theirs).max())


@pytest.mark.usefixtures("launcher", "kernels_by_default")
@pytest.mark.parametrize("name", ["matmul", "einsum", "ragged", "contracted"])
def test_both_gradients_of_a_wide_result_are_launches(name):
    def gradients(a, b, w, dtype):
        product = partial(DENSE[name], preferred_element_type=jnp.float32, cotangent_dtype=dtype)
        return jax.vjp(product, a, b)[1](w)

    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((M, K), jnp.bfloat16), ((K, N), jnp.bfloat16), ((M, N), jnp.float32),
        )
    ]  # fmt: skip
    asked, unasked = (
        lowered(partial(gradients, dtype=dtype), *args).count(LAUNCH)
        for dtype in (jnp.bfloat16, None)
    )
    assert (asked, unasked) == (2, 0)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_programs_over_several_devices_round_too(axes):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=(axes,) * 2)
    a, b, w = sample(M, K), sample(K, N), sample(M, N, dtype=jnp.float32)
    expected = cotangents(jhg.matmul, a, b, w, **LAST)
    with jax.set_mesh(mesh):
        shards = [
            jax.device_put(x, jax.NamedSharding(mesh, spec))
            for x, spec in ((a, P("x")), (b, P(None, "y")), (w, P("x", "y")))
        ]
        results = cotangents(jhg.matmul, *shards, **LAST)
    for ours, whole in zip(results, expected, strict=True):
        ours, whole = (np.asarray(x, np.float64) for x in (ours, whole))
        np.testing.assert_allclose(ours, whole, rtol=2**-6, atol=2**-6 * abs(whole).max())


@pytest.mark.parametrize("product", [jhg.all_gather_matmul, jhg.matmul_reduce_scatter])
def test_rings_move_and_multiply_rounded_cotangents(product):
    gathers = product is jhg.all_gather_matmul
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",), axis_types=(AxisType.Auto,))
    rows, columns = P("tp", None), P(None, "tp")
    x_spec, w_spec, y_spec = (rows, columns, columns) if gathers else (columns, rows, rows)
    x, w = integers((8, 16), jnp.bfloat16), integers((16, 8), jnp.bfloat16, seed=1)
    ct = integers((8, 8), seed=2) * (1 + 2.0**-12)  # rounds to integers

    def gradients(x, w, ct):
        mapped = jax.shard_map(
            partial(product, axis_name="tp", **LAST), mesh=mesh, in_specs=(x_spec, w_spec),
            out_specs=y_spec,
        )  # fmt: skip
        return jax.vjp(mapped, x, w)[1](ct)

    dx, dw = jax.jit(gradients)(x, w, ct)
    whole = jnp.round(ct)
    np.testing.assert_array_equal(dx.astype(jnp.float32), whole @ w.T.astype(jnp.float32))
    np.testing.assert_array_equal(dw.astype(jnp.float32), x.T.astype(jnp.float32) @ whole)


@pytest.mark.slow
def test_layers_pass_it_on():
    flax = pytest.importorskip("flax")
    from jax_hopper_gemm import nn

    x, rngs = sample(M, K), flax.nnx.Rngs(0)
    shared = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
    for layer in (nn.Linear(K, N, **shared, **LAST), nn.GatedMLP(K, N, **shared, **LAST)):
        found = factors(jax.grad(lambda x, run=layer: run(x).sum()), x)
        assert set(found) == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize("wrong", ["int8", jnp.complex64, "bfloat", 16, bool])
def test_a_wrong_dtype_is_named(wrong):
    a, b = sample(M, K), sample(K, N)
    calls = [
        *(partial(DENSE[name], a, b) for name in ("matmul", "dot_general", "einsum")),
        partial(ragged, a, b), partial(contracted, a, b), partial(jhg.gated_linear_unit, a, (b, b)),
        partial(jhg.explain, jhg.matmul, a, b),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match="cotangent_dtype is .*expected a real floating-point"):
            call(cotangent_dtype=wrong)


def test_what_jax_runs_alone_refuses_it():
    numbers = jax.lax.RaggedDotDimensionNumbers((([0, 1], [0, 1]), ([], [])), [1], [])
    with pytest.raises(NotImplementedError, match="cotangent_dtype came, and XLA, which has none"):
        jhg.ragged_dot_general(
            sample(2, 8, 4), sample(2, 8, 4), jnp.full((2, 1), 8), numbers,
            cotangent_dtype=jnp.bfloat16,
        )  # fmt: skip


def test_explain_takes_it():
    options = {"preferred_element_type": jnp.float32}
    args = (
        jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16),
    )
    plain, asked = (jhg.explain(jhg.matmul, *args, **x) for x in (options, LAST))
    assert (plain.path, plain.spec) == (asked.path, asked.spec)
