"""Products of complex64 by an algorithm: real products, on kernels where these are."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import DotAlgorithmPreset

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

X6 = DotAlgorithmPreset.BF16_BF16_F32_X6
M, K, N = 32, 96, 64


def numbers(shape: tuple[int, ...], seed: int, real: bool = False) -> jax.Array:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) + (0 if real else 1j * rng.standard_normal(shape))
    return jnp.asarray(x, jnp.float32 if real else jnp.complex64)


def assert_near(got: Any, exact: np.ndarray) -> None:
    assert got.dtype == jnp.complex64
    np.testing.assert_allclose(np.asarray(got), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("real", [(False, False), (True, False), (False, True)])
def test_no_part_is_dropped(real):
    a, b = numbers((M, K), 0, real[0]), numbers((K, N), 1, real[1])
    exact = np.asarray(a, np.complex128) @ np.asarray(b, np.complex128)
    assert_near(jhg.matmul(a, b, precision=X6), exact)
    assert_near(jhg.einsum("mk,kn->nm", a, b, precision=X6), exact.T)
    assert_near(jhg.dot_general(a, b, (((1,), (0,)), ((), ())), precision=X6), exact)
    with jax.default_matmul_precision("BF16_BF16_F32_X6"):
        assert_near(jhg.matmul(a, b), exact)
    product = partial(jhg.matmul, precision=X6, implementation="hopper")
    found = specs_of(product, a, b)
    assert [spec.bf16_terms for spec in found] == [6] * (2 if True in real else 4)


NAMES = [X6, "BF16_BF16_F32_X6", DotAlgorithmPreset.F32_F32_F32]


@pytest.mark.parametrize("precision", NAMES, ids=str)
def test_an_algorithm_may_be_a_name(precision):
    a, b = numbers((M, K), 0), numbers((K, N), 1)
    exact = np.asarray(a, np.complex128) @ np.asarray(b, np.complex128)
    assert_near(jhg.matmul(a, b, precision=precision), exact)
    assert_near(jhg.einsum("mk,kn->nm", a, b, precision=precision), exact.T)
    numbers_of: Any = ((1,), (0,)), ((), ())
    assert_near(jhg.dot_general(a, b, numbers_of, precision=precision), exact)


@pytest.mark.slow
@pytest.mark.parametrize("precision", NAMES, ids=str)
def test_einsums_groups_and_gates_drop_no_part(precision):
    a, b, c = numbers((M, K), 0) / K, numbers((K, N), 1), numbers((N, 8), 2) / N
    left, right, last = (np.asarray(x, np.complex128) for x in (a, b, c))
    exact = left @ right
    assert_near(jhg.einsum("mk,kn,nj->mj", a, b, c, precision=precision), exact @ last)
    mixed = jhg.einsum("mk,kn,nj->mj", a.real, b.real, c, precision=precision)
    assert_near(mixed, left.real @ right.real @ last)
    sizes, weights = jnp.array([3, M - 3], jnp.int32), jnp.stack([b, 2 * b])
    grouped = exact * np.where(np.arange(M) < 3, 1, 2)[:, None]
    assert_near(jhg.ragged_dot(a, weights, sizes, precision=precision), grouped)
    biased = jhg.ragged_dot(a, weights, sizes, bias=b[:2], precision=precision)
    rows = np.where(np.arange(M)[:, None] < 3, right[0], right[1])
    assert_near(biased, grouped + rows)
    for pair in ((b, b), jnp.stack([b, b], 1)):
        gated = jhg.gated_linear_unit(a, pair, activation=None, precision=precision)
        assert_near(gated, exact**2)
    gradients = [
        jax.grad(lambda w, p=p: jnp.sum(jnp.abs(jhg.ragged_dot(a, w, sizes, precision=p)) ** 2))
        for p in (precision, "highest")
    ]
    ours, theirs = (gradient(weights) for gradient in gradients)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_follows_is_complex_and_gradients_are_those_of_the_exact_product():
    a, b = numbers((M, K), 0), numbers((K, N), 1)
    biased = jhg.matmul(a, b, bias=b[0], precision=X6)
    exact = np.asarray(a, np.complex128) @ np.asarray(b, np.complex128)
    assert_near(biased, exact + np.asarray(b[0]))

    def loss(product: Any, a: Any) -> Any:
        return jnp.sum(jnp.abs(product(a, b)) ** 2)

    gradient = jax.grad(partial(loss, partial(jhg.matmul, precision=X6)))(a)
    plain = jax.grad(partial(loss, jnp.matmul))(a)
    np.testing.assert_allclose(gradient, plain, rtol=1e-4, atol=1e-2)


def test_products_without_an_algorithm_are_jaxs():
    a, b = numbers((M, K), 0), numbers((K, N), 1)
    assert (np.asarray(jhg.matmul(a, b)) == np.asarray(jnp.matmul(a, b))).all()
    assert specs_of(jhg.matmul, a, b) == []
