"""Rows that move to experts and back, and the router that says where."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.moe_reference import assert_close
from support.program_inspection import integers, normal

from jax_hopper_gemm import moe
from jax_hopper_gemm.moe.router import row_weights, sort_by_group
from jax_hopper_gemm.primitives.rows import sum_rows


def routed(k, **options):
    return jax.jit(lambda logits: moe.route(logits, k, **options))


# Rows.


def relation(results: int, rows: int, j: int, seed: int = 0):
    """Returns sources (results, j) and users (rows, p) of one random relation."""
    rng = np.random.default_rng(seed)
    sources = rng.integers(-1, rows, (results, j))
    of = [np.argwhere(sources == row)[:, 0] for row in range(rows)]
    users = np.full((rows, max(map(len, of))), -1)
    for row, found in enumerate(of):
        users[row, : len(found)] = found
    return jax.device_put((sources.astype(np.int32), users.astype(np.int32)))


def added(x, sources):
    return jnp.where((sources >= 0)[:, :, None], x[sources], 0).sum(1)


def test_sum_rows_adds_the_rows_it_is_told():
    sources, users = relation(7, 5, 3)
    x = integers((5, 4))
    np.testing.assert_array_equal(sum_rows(x, sources, users), jax.jit(added)(x, sources))


def test_sums_of_16_bit_rows_are_rounded_once():
    x: Any = np.array([[256], [1], [1]], jnp.bfloat16)  # 256 + 1 is 256 in bfloat16
    indices: Any = np.array([[0, 1, 2]], np.int32), np.zeros((3, 1), np.int32)
    assert np.asarray(sum_rows(x, *indices)) == 258


@pytest.mark.slow
def test_derivatives_of_sum_rows_are_those_of_indexing():
    sources, users = relation(7, 5, 3)
    x, tangent = integers((5, 4)), integers((5, 4), seed=1)

    def ours(x):
        return (sum_rows(x, sources, users) ** 3).sum()

    def theirs(x):
        return (added(x, sources) ** 3).sum()

    for transform in (jax.grad, jax.hessian, lambda f: jax.grad(jax.checkpoint(f))):
        np.testing.assert_array_equal(*(jax.jit(transform(f))(x) for f in (ours, theirs)))
    for mine, other in zip(
        *(jax.jit(lambda x, t, f=f: jax.jvp(f, (x,), (t,)))(x, tangent) for f in (ours, theirs)),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (1, 0)])
def test_sum_rows_maps_over_any_operand(mapped):
    relations = [relation(6, 5, 2, seed) for seed in range(3)]
    p = max(users.shape[1] for _, users in relations)
    sources = np.stack([s for s, _ in relations])
    users = np.stack(
        [np.pad(u, ((0, 0), (0, p - u.shape[1])), constant_values=-1) for _, u in relations]
    )
    x = integers((5, 4)) if mapped[0] is None else integers((5, 3, 4) if mapped[0] else (3, 5, 4))
    if mapped[1] is None:
        sources, users = sources[0], users[0]

    def value_and_gradient(f):
        axes = (mapped[0], mapped[1], mapped[1])
        return jax.jit(jax.vmap(jax.value_and_grad(lambda *args: (f(*args) ** 2).sum()), axes))(
            x, sources, users
        )

    def gradient_of_map(f):
        mapped_function = jax.vmap(f, (mapped[0], *mapped[1:] * 2))
        return jax.jit(jax.grad(lambda x: (mapped_function(x, sources, users) ** 2).sum()))(x)

    for way in (value_and_gradient, gradient_of_map):
        ours, theirs = way(sum_rows), way(lambda x, s, u: added(x, s))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# Routing.


@pytest.mark.parametrize("groups", [[[3, 0], [1, 3], [0, 3], [3, 1]], [[2], [2], [2]], [[0, 1]]])
def test_rows_are_sorted_stably_by_group(groups):
    groups = np.asarray(groups, np.int32)
    sizes, order, positions = jax.jit(sort_by_group, static_argnums=1)(groups, 3)  # 3 is no group
    np.testing.assert_array_equal(order, np.argsort(groups.reshape(-1), kind="stable"))
    np.testing.assert_array_equal(
        np.asarray(order)[positions], np.arange(groups.size).reshape(groups.shape)
    )
    np.testing.assert_array_equal(sizes, np.bincount(groups.reshape(-1), minlength=3)[:3])


@pytest.mark.slow
def test_ties_go_to_the_lower_expert():
    routing = routed(3)(np.array([[1, 2, 2, 1], [0, 0, 0, 0]], np.float32))
    np.testing.assert_array_equal(routing.experts, [[1, 2, 0], [0, 1, 2]])
    np.testing.assert_array_equal(routing.order, [2, 3, 0, 4, 1, 5])
    np.testing.assert_array_equal(routing.group_sizes, [2, 2, 2, 0])


def test_renormalised_weights_are_the_softmax_of_the_chosen_logits():
    logits = normal((9, 8))
    best, experts = lax.top_k(logits, 3)
    softmax = jax.jit(jax.nn.softmax)
    routing = routed(3, scale=2.5)(logits)
    np.testing.assert_array_equal(routing.experts, experts)
    assert_close(routing.weights, 2.5 * np.asarray(softmax(best)))
    plain = routed(3, normalize=False)(logits)
    assert_close(plain.weights, lax.top_k(softmax(logits), 3)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("none", "options"),
    [(-1, {}), (8, {"normalize": False}), (2**31 - 1, {"score": "sigmoid"}), (-(2**31), {})],
)
def test_a_choice_of_no_expert_leaves_all_others_alone(none, options):
    tokens, k, held = 80, 3, 8
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((tokens, held)).astype(np.float32)
    experts = rng.permuted(np.tile(np.arange(held), (tokens, 1)), axis=1)[:, :k].astype(np.int32)
    void = np.zeros(experts.shape, bool)
    void[[3, 3, 3, 7, 20], [0, 1, 2, 1, 2]] = True  # token 3 has no expert at all
    holes = np.where(void, none, experts).astype(np.int32)
    x, gate_up = integers((tokens, 8)), integers((held, 8, 2, 4), seed=1)
    down = integers((held, 4, 8), seed=2)

    def layer(logits, experts):
        routing = moe.route(logits, k, experts=experts, **options)
        y = moe.grouped_mlp(
            moe.dispatch_rows(x, routing), gate_up, down, routing.group_sizes,
            row_weights=row_weights(routing),
        )  # fmt: skip
        return moe.combine_rows(y, routing), routing

    (y, routing), (whole, _) = jax.jit(layer)(logits, holes), jax.jit(layer)(logits, experts)
    untouched = ~void.any(1)
    y, whole = np.asarray(y), np.asarray(whole)
    np.testing.assert_array_equal(y[untouched], whole[untouched])
    np.testing.assert_array_equal(routing.experts, np.where(void, held, experts))
    np.testing.assert_array_equal(routing.group_sizes, np.bincount(experts[~void], minlength=held))
    score = jax.nn.sigmoid if options.get("score") else jax.nn.softmax
    scores = np.asarray(jax.jit(score)(logits), np.float64)
    weights = np.where(void, 0, np.take_along_axis(scores, experts, 1))
    if options.get("normalize", True):
        weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-30)
    assert_close(routing.weights, weights)
    assert not y[3].any() and y[7].any()
    gradient = jax.jit(jax.grad(lambda logits: layer(logits, holes)[0].sum()))(logits)
    assert np.isfinite(gradient).all() and not np.asarray(gradient)[3].any()


def test_a_selection_bias_chooses_and_does_not_weigh():
    logits = normal((9, 8))
    bias = 2 * np.eye(8, dtype=np.float32)[5]
    routing = routed(2, score="sigmoid", selection_bias=bias, normalize=False)(logits)
    np.testing.assert_array_equal(np.asarray(routing.experts)[:, 0], 5)
    assert_close(np.asarray(routing.weights)[:, 0], jax.nn.sigmoid(np.asarray(logits)[:, 5]))
    weights = lambda b: moe.route(logits, 2, score="sigmoid", selection_bias=b).weights  # noqa: E731
    gradient = jax.jit(jax.grad(lambda b: weights(b).sum()))(bias)
    np.testing.assert_array_equal(gradient, 0)


def test_statistics_and_losses_are_those_of_their_definitions():
    logits = normal((10, 4), seed=1)
    routing = routed(2)(logits)
    load = np.bincount(np.asarray(routing.experts).reshape(-1), minlength=4) / 20
    exponentials = np.exp(np.asarray(logits, np.float64))
    probability = (exponentials / exponentials.sum(-1, keepdims=True)).mean(0)
    assert_close(routing.statistics.load, load)
    assert_close(routing.statistics.probability, probability)
    assert_close(moe.load_balancing_loss(routing.statistics), 4 * (load * probability).sum())
    z = np.log(exponentials.sum(-1))
    assert_close(moe.router_z_loss(routing.statistics), (z**2).mean())
    gradients = (
        jax.jit(jax.grad(f))(logits)
        for f in (
            lambda x: moe.load_balancing_loss(moe.route(x, 2).statistics),
            lambda x: 4 * (jax.nn.softmax(x).mean(0) * load).sum(),
        )
    )
    assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [8, 300])  # 300 do not fit the router's kernel
def test_router_routes_by_its_product(experts):
    x, kernel = integers((12, 16)), normal((16, experts))

    def weights(router, x, kernel):
        return (router(x, kernel).weights ** 2).sum()

    def separate(x, kernel):
        return moe.route(x @ kernel, 3)

    ours = partial(moe.route_tokens, experts_per_token=3)

    def both(router):
        gradient = jax.grad(partial(weights, router), (0, 1))
        return jax.jit(lambda x, kernel: (router(x, kernel), gradient(x, kernel)))(x, kernel)

    assert_close(both(ours), both(separate))


def test_the_router_kernel_chooses_from_what_gradients_see():
    """With bfloat16 operands, too, no gradient chooses again from rounded logits."""
    x, kernel = (normal(shape, "bfloat16") for shape in ((64, 32), (32, 16)))
    program = str(jax.make_jaxpr(jax.grad(
        lambda x: moe.route_tokens(x, kernel, 4).weights.var()))(x))  # fmt: skip
    assert len(re.findall(r"= top_k\b", program)) == 1
    chosen = jax.eval_shape(lambda x, kernel: moe.route_tokens(x, kernel, 4), x, kernel)
    assert chosen.weights.dtype == jnp.float32


@pytest.mark.slow
def test_dispatch_and_combine_are_transposes():
    routing = routed(3)(normal((11, 6)))
    x, rows = integers((11, 4)), integers((33, 4), seed=1)
    order = np.asarray(routing.order)
    np.testing.assert_array_equal(moe.dispatch_rows(x, routing), np.asarray(x)[order // 3])
    expected = np.zeros_like(x)
    np.add.at(expected, order // 3, rows)
    np.testing.assert_array_equal(moe.combine_rows(rows, routing), expected)
    (gradient,) = jax.jit(jax.linear_transpose(lambda x: moe.dispatch_rows(x, routing), x))(rows)
    np.testing.assert_array_equal(gradient, expected)
    np.testing.assert_array_equal(
        moe.row_weights(routing), np.asarray(routing.weights).reshape(-1)[order]
    )


@pytest.mark.slow
def test_rows_that_are_not_those_of_the_routing_are_named():
    routing = routed(2)(np.ones((4, 8), np.float32))
    with pytest.raises(ValueError, match=r"x is f32\[3,5\], expected 4 rows, one for each token"):
        moe.dispatch_rows(np.ones((3, 5), np.float32), routing)
    with pytest.raises(ValueError, match=r"rows is f32\[4,5\], expected 8 rows, one for each sort"):
        moe.combine_rows(np.ones((4, 5), np.float32), routing)
