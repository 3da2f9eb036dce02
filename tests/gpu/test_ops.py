"""What users call, on a GPU: numbers, gradients, batching, fallback, threads."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import bounds, reference, tolerance
from support.tolerance import Summation

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.dtypes import HALVES, RESULTS
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.testing import shapes

LAYOUTS = list(itertools.product("km", "nk"))


def normal(seed, shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def hopper(a, b, **kwargs):
    return jhg.matmul(a, b, implementation="hopper", **kwargs)


def assert_product(result, a, b, k, what="result", summation: Summation = "wgmma"):
    """Checks `result` against a @ b in float64; `a` and `b` broadcast like `jnp.matmul`'s."""
    a, b = np.asarray(a), np.asarray(b)
    expected, magnitude = reference.product(a, b), reference.magnitude(a, b)
    bounds.assert_within_bound(np.asarray(result), expected, magnitude, k, what, summation)


@pytest.mark.parametrize("d_dtype", RESULTS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("a_major", "b_major"), LAYOUTS)
def test_dot_general_reads_every_layout(a_major, b_major, dtype, d_dtype):
    problem = GemmProblem.dense(
        328, 520, 264, 3, a_major=a_major, b_major=b_major, dtype=dtype, d_dtype=d_dtype
    )
    a = normal(0, shapes.operand_shape(problem, "a"), dtype)
    b = normal(1, shapes.operand_shape(problem, "b"), dtype)
    dims = shapes.dimension_numbers(problem)
    result = jax.jit(
        lambda a, b: jhg.dot_general(
            a, b, dims, preferred_element_type=jnp.dtype(d_dtype), implementation="hopper"
        )
    )(a, b)
    assert result.dtype == jnp.dtype(d_dtype)
    a = reference.view(problem, "a", np.ravel(a))
    b = reference.view(problem, "b", np.ravel(b))
    assert_product(result, a, b, problem.k)


@pytest.mark.parametrize("seed", range(60))
def test_random_dot_general_is_right_on_kernel_or_xla(seed):
    rng = random.Random(seed)
    extents = {i: rng.choice((8, 40, 63, 128, 200, 264, 1000)) for i in "mnk"}
    extents["l"] = rng.choice((1, 2, 5))
    lhs, rhs = ("".join(rng.sample(indices, len(indices))) for indices in ("lmk", "lkn"))
    dtype = jnp.dtype(rng.choice(HALVES))
    a, b = (normal(seed, [extents[i] for i in order], dtype) for order in (lhs, rhs))
    dims = (((lhs.index("k"),), (rhs.index("k"),)), ((lhs.index("l"),), (rhs.index("l"),)))
    addressable = all(order[-1] != "l" and extents[order[-1]] % 8 == 0 for order in (lhs, rhs, "n"))
    result = jax.jit(
        lambda a, b: jhg.dot_general(
            a,
            b,
            dims,
            preferred_element_type=rng.choice((None, jnp.float32)),
            implementation="hopper" if addressable else None,
        )
    )(a, b)
    a = np.einsum(f"{lhs}->lmk", np.asarray(a).astype(np.float32))
    b = np.einsum(f"{rhs}->lkn", np.asarray(b).astype(np.float32))
    summation = "wgmma" if addressable else "float32"
    assert_product(result, a, b, extents["k"], f"{lhs},{rhs} {extents}", summation)


def test_matmul_folds_leading_dimensions_and_broadcasts():
    a, b = normal(0, (2, 3, 64, 128)), normal(1, (128, 256))
    assert_product(hopper(a, b), a, b, 128)
    one, b = normal(0, (1, 64, 128)), normal(1, (3, 128, 256))
    assert_product(hopper(one, b), one, b, 128)  # one matrix shared by the batch


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 8), (64, 64, 8), (200, 264, 72), (1000, 1000, 1000)]
)
def test_extents_need_not_fill_tiles(m, n, k):
    a, b = normal(0, (m, k)), normal(1, (k, n))
    assert_product(hopper(a, b), a, b, k)


def test_rows_of_any_length_run_on_a_kernel():
    a, b = normal(0, (64, 65)), normal(1, (65, 63))
    assert_product(hopper(a, b), a, b, 65)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.complex64])
def test_other_dtypes_are_those_of_jnp(dtype):
    a = (jnp.arange(64 * 64).reshape(64, 64) % 7).astype(dtype)
    ours, theirs = jhg.matmul(a, a.T), jnp.matmul(a, a.T)
    assert ours.dtype == theirs.dtype
    assert np.array_equal(ours, theirs)


def test_gradients_run_on_kernels_and_are_right():
    a, b, g = normal(0, (264, 512)), normal(1, (512, 328)), normal(2, (264, 328))
    _, vjp = jax.vjp(jax.jit(hopper), a, b)
    da, db = vjp(g)
    assert da.dtype == a.dtype and db.dtype == b.dtype
    assert_product(da, g, b.T, 328, "gradient of a")
    assert_product(db, a.T, g, 264, "gradient of b")


def test_gradients_are_differentiable_again():
    a, b, g, t = normal(0, (64, 72)), normal(1, (72, 80)), normal(2, (64, 80)), normal(3, (64, 72))
    grad_a = lambda b, g: jax.vjp(lambda a: hopper(a, b), a)[1](g)[0]  # noqa: E731
    _, vjp = jax.vjp(grad_a, b, g)
    db, dg = vjp(t)  # of sum(t * (g @ b.T))
    assert_product(dg, t, b, 72, "with respect to the cotangent")
    assert_product(db, np.asarray(t).T, g, 64, "with respect to b")


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 0), (0, 1), (1, 1), (2, 2)])
def test_vmap_maps_either_operand_along_any_axis(in_axes):
    # Matrices that lie element by element among each other are for XLA.
    product = jhg.matmul if in_axes == (2, 2) else hopper
    batch, m, n, k = 3, 72, 136, 264
    operands, expected = [], []
    for seed, axis, shape in ((0, in_axes[0], (m, k)), (1, in_axes[1], (k, n))):
        x = normal(seed, shape if axis is None else (batch, *shape))
        expected.append(np.broadcast_to(np.asarray(x), (batch, *shape)))
        operands.append(x if axis is None else jnp.moveaxis(x, 0, axis))
    result = jax.jit(jax.vmap(product, in_axes))(*operands)
    summation = "wgmma" if product is hopper else "float32"
    assert_product(result, expected[0], expected[1], k, summation=summation)


def test_vmap_of_grad_and_grad_of_vmap_agree_with_each_example():
    a, b, g = normal(0, (4, 64, 72)), normal(1, (72, 80)), normal(2, (4, 64, 80))

    def pull(a, b, g):
        return jax.vjp(hopper, a, b)[1](g)

    da, db = jax.vmap(pull, (0, None, 0))(a, b, g)
    assert_product(da, g, np.asarray(b).T, 80)
    assert_product(db, np.asarray(a).swapaxes(1, 2), g, 64)
    da, db = jax.vjp(jax.vmap(hopper, (0, None)), a, b)[1](g)
    assert_product(da, g, np.asarray(b).T, 80)
    # The sum over examples may be one product, or four whose three sums are rounded, too.
    a, g = np.asarray(a).swapaxes(1, 2), np.asarray(g)
    exact, magnitude = reference.product(a, g), reference.magnitude(a, g)
    bound = tolerance.error_bound(exact, magnitude, 64, db.dtype) + 2.0**-8 * magnitude
    assert (np.abs(np.asarray(db).astype(float) - exact.sum(0)) <= bound.sum(0)).all()


def test_checkpoint_gives_the_same_gradients():
    a, b = normal(0, (128, 256)), normal(1, (256, 128))

    def loss(a, b):
        return jnp.sum(jnp.tanh(hopper(a, b)).astype(jnp.float32))

    plain = jax.jit(jax.grad(loss, (0, 1)))(a, b)
    rematerialised = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(a, b)
    for x, y in zip(plain, rematerialised, strict=True):
        assert np.array_equal(x, y)
        assert np.any(np.asarray(x) != 0)


@pytest.mark.parametrize("size", [520, 4096])
def test_results_have_the_same_bits_in_20_repeats(size):
    a, b = normal(0, (size, size)), normal(1, (size, size))
    product = jax.jit(hopper)
    first = np.asarray(product(a, b))
    for _ in range(20):
        assert np.array_equal(np.asarray(product(a, b)), first)


def test_loops_and_chains_keep_their_order():
    a = normal(0, (256, 256)) / 16

    @jax.jit
    def power(a):
        return jax.lax.fori_loop(0, 5, lambda _, x: hopper(x, a), a)

    expected = a
    for _ in range(5):
        expected = hopper(expected, a)
    assert np.array_equal(power(a), expected)
    assert np.any(np.asarray(expected) != 0)


def test_threads_share_kernels_and_compile_their_own_programs():
    cases = [(128 + 8 * i, 256, 264) for i in range(8)]

    def work(i):
        m, n, k = cases[i]
        a, b = normal(i, (m, k)), normal(100 + i, (k, n))
        return a, b, [np.asarray(jax.jit(hopper)(a, b)) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(work, range(len(cases))))
    for a, b, results in outcomes:
        assert all(np.array_equal(results[0], other) for other in results[1:])
        assert_product(results[0], a, b, 264)


def test_every_gpu_gives_the_same_bits():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one GPU")
    a, b = normal(0, (512, 512)), normal(1, (512, 512))
    results = [jax.jit(hopper)(*jax.device_put((a, b), d)) for d in devices]
    assert [r.devices() for r in results] == [{d} for d in devices]
    assert all(np.array_equal(results[0], r) for r in results[1:])
