"""The mixture of experts: against loops in float64, against JAX's gradients, over eight devices."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.moe_reference import assert_close, dense, looped, weights_of
from support.program_inspection import integers, normal

from jax_hopper_gemm import moe
from jax_hopper_gemm.moe import expert_parallel
from jax_hopper_gemm.moe.router import row_weights, sort_by_group
from jax_hopper_gemm.primitives.rows import sum_rows


def layer(k, **options):
    return partial(moe.mixture_of_experts, experts_per_token=k, **options)


def routed(k, **options):
    return jax.jit(lambda logits: moe.route(logits, k, **options))


def loss(function, *args):
    return (function(*args) ** 2).sum()


# Rows.


def relation(results: int, rows: int, j: int, seed: int = 0):
    """Returns sources (results, j) and users (rows, p) of one random relation."""
    rng = np.random.default_rng(seed)
    sources = rng.integers(-1, rows, (results, j))
    of = [np.argwhere(sources == row)[:, 0] for row in range(rows)]
    users = np.full((rows, max(map(len, of))), -1)
    for row, found in enumerate(of):
        users[row, : len(found)] = found
    return jnp.asarray(sources, jnp.int32), jnp.asarray(users, jnp.int32)


def added(x, sources):
    return jnp.where((sources >= 0)[:, :, None], x[sources], 0).sum(1)


def test_sum_rows_adds_the_rows_it_is_told():
    sources, users = relation(7, 5, 3)
    x = integers((5, 4))
    np.testing.assert_array_equal(sum_rows(x, sources, users), added(x, sources))


def test_sums_of_16_bit_rows_are_rounded_once():
    x = jnp.asarray([[256.0], [1.0], [1.0]], jnp.bfloat16)  # 256 + 1 is 256 in bfloat16
    users = jnp.zeros((3, 1), jnp.int32)
    assert sum_rows(x, jnp.asarray([[0, 1, 2]], jnp.int32), users)[0, 0] == 258


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
    sources = jnp.stack([s for s, _ in relations])
    users = jnp.stack(
        [jnp.pad(u, ((0, 0), (0, p - u.shape[1])), constant_values=-1) for _, u in relations]
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
    np.testing.assert_array_equal(order[positions], np.arange(groups.size).reshape(groups.shape))
    np.testing.assert_array_equal(sizes, np.bincount(groups.reshape(-1), minlength=3)[:3])


@pytest.mark.slow
def test_ties_go_to_the_lower_expert():
    routing = moe.route(jnp.asarray([[1.0, 2, 2, 1], [0, 0, 0, 0]]), 3)
    np.testing.assert_array_equal(routing.experts, [[1, 2, 0], [0, 1, 2]])
    np.testing.assert_array_equal(routing.order, [2, 3, 0, 4, 1, 5])
    np.testing.assert_array_equal(routing.group_sizes, [2, 2, 2, 0])


def test_renormalised_weights_are_the_softmax_of_the_chosen_logits():
    logits = normal((9, 8))
    best, experts = lax.top_k(logits, 3)
    routing = routed(3, scale=2.5)(logits)
    np.testing.assert_array_equal(routing.experts, experts)
    assert_close(routing.weights, 2.5 * jax.nn.softmax(best))
    plain = routed(3, normalize=False)(logits)
    assert_close(plain.weights, lax.top_k(jax.nn.softmax(logits), 3)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("none", "options"),
    [(-1, {}), (8, {"normalize": False}), (2**31 - 1, {"score": "sigmoid"}), (-(2**31), {})],
)
def test_a_choice_of_no_expert_leaves_all_others_alone(none, options):
    tokens, k, held = 80, 3, 8
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.standard_normal((tokens, held)), jnp.float32)
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
    np.testing.assert_array_equal(y[untouched], whole[untouched])
    np.testing.assert_array_equal(routing.experts, np.where(void, held, experts))
    np.testing.assert_array_equal(routing.group_sizes, np.bincount(experts[~void], minlength=held))
    scores = jax.nn.sigmoid(logits) if options.get("score") else jax.nn.softmax(logits)
    weights = np.where(void, 0, np.take_along_axis(np.asarray(scores, np.float64), experts, 1))
    if options.get("normalize", True):
        weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-30)
    assert_close(routing.weights, weights)
    assert not np.asarray(y[3]).any() and np.asarray(y[7]).any()
    gradient = jax.jit(jax.grad(lambda logits: layer(logits, holes)[0].sum()))(logits)
    assert np.isfinite(gradient).all() and not np.asarray(gradient[3]).any()


def test_a_selection_bias_chooses_and_does_not_weigh():
    logits = normal((9, 8))
    bias = jnp.zeros(8).at[5].set(2.0)
    routing = routed(2, score="sigmoid", selection_bias=bias, normalize=False)(logits)
    np.testing.assert_array_equal(routing.experts[:, 0], 5)
    assert_close(routing.weights[:, 0], jax.nn.sigmoid(logits[:, 5]))
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
        return loss(lambda *args: router(*args).weights, x, kernel)

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
    np.testing.assert_array_equal(moe.dispatch_rows(x, routing), x[routing.order // 3])
    expected = jnp.zeros_like(x).at[routing.order // 3].add(rows)
    np.testing.assert_array_equal(moe.combine_rows(rows, routing), expected)
    (gradient,) = jax.jit(jax.linear_transpose(lambda x: moe.dispatch_rows(x, routing), x))(rows)
    np.testing.assert_array_equal(gradient, expected)
    np.testing.assert_array_equal(
        moe.row_weights(routing), routing.weights.reshape(-1)[routing.order]
    )


# The layer.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(1, 8, 2), (13, 16, 3), (67, 4, 4), (5, 1, 1)]
)
def test_layer_is_the_loop_over_tokens_and_experts(tokens, experts, k):
    args = weights_of(tokens, 6, experts, 10)
    y, _ = jax.jit(layer(k))(*args)
    assert_close(y, looped(*args, k=k))


@pytest.mark.slow
def test_layer_with_sigmoid_scores_is_the_loop():
    args = weights_of(9, 6, 8, 10)
    bias = jnp.linspace(0, 1, 8)
    options = {"score": "sigmoid", "normalize": False}
    y, _ = jax.jit(layer(2, selection_bias=bias, **options))(*args)
    assert_close(y, looped(*args, k=2, bias=np.asarray(bias), **options))


@pytest.mark.slow
def test_gradients_are_those_of_the_dense_layer():
    args = weights_of(13, 6, 8, 10)
    ours = jax.jit(jax.grad(partial(loss, lambda *a: layer(3)(*a)[0]), (0, 1, 2, 3)))(*args)
    theirs = jax.jit(jax.grad(partial(loss, partial(dense, k=3)), (0, 1, 2, 3)))(*args)
    assert_close(ours, theirs)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_agree_with_the_dense_layer():
    args = weights_of(5, 4, 4, 3)

    def product(function, x, *others):  # a Hessian times a vector
        return jax.jvp(jax.grad(lambda x: loss(function, x, *others)), (x,), (x[::-1],))

    ours, theirs = (
        jax.jit(partial(product, f))(*args)
        for f in (lambda *a: layer(2)(*a)[0], partial(dense, k=2))
    )
    assert_close(ours, theirs)


def test_no_gradient_adds_by_scattering():
    args = weights_of(13, 6, 8, 10)
    gradient = jax.grad(partial(loss, lambda *a: layer(3)(*a)[0]), (0, 1, 2, 3))
    assert "scatter-add" not in str(jax.make_jaxpr(gradient)(*args))


@pytest.mark.slow
def test_one_expert_takes_all_and_the_others_learn_nothing():
    x, router, gate_up, down = weights_of(9, 6, 8, 10)
    router = jnp.zeros_like(router)
    bias = jnp.zeros(8).at[3].set(1.0)

    def run(*args):
        y, statistics = layer(1, selection_bias=bias)(*args)
        return (y**2).sum(), (y, statistics)

    gradient, (y, statistics) = jax.jit(jax.grad(run, argnums=2, has_aux=True))(
        x, router, gate_up, down
    )
    np.testing.assert_array_equal(statistics.load, jnp.zeros(8).at[3].set(1.0))
    assert_close(y, looped(x, router, gate_up, down, 1, bias=np.asarray(bias)))
    moved = np.abs(gradient).max((1, 2, 3)) > 0
    np.testing.assert_array_equal(moved, np.arange(8) == 3)


@pytest.mark.slow
def test_a_pair_of_weights_is_as_good_as_the_stack():
    x, router, gate_up, down = weights_of(9, 6, 8, 10)
    pair = (gate_up[:, :, 0], gate_up[:, :, 1])
    run = jax.jit(layer(2))
    np.testing.assert_array_equal(run(x, router, pair, down)[0], run(x, router, gate_up, down)[0])
    program = str(jax.make_jaxpr(lambda *a: layer(2)(*a)[0])(x, router, pair, down))
    assert "concatenate" not in program and not re.search(r"\[8,6,(2,10|20)\]", program)


@pytest.mark.slow
def test_leading_axes_and_dtypes_are_those_of_the_tokens():
    x, router, gate_up, down = (a.astype(jnp.bfloat16) for a in weights_of(12, 6, 8, 10))
    run = jax.jit(layer(2))
    y, _ = run(x.reshape(3, 4, 6), router, gate_up, down)
    assert y.shape == (3, 4, 6) and y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.reshape(12, 6), run(x, router, gate_up, down)[0])


def test_grouped_mlp_leaves_rows_of_no_group_zero():
    x, _, gate_up, down = weights_of(9, 6, 4, 10)
    sizes = jnp.asarray([2, 0, 3, 1])
    mlp = jax.jit(moe.grouped_mlp)
    y = mlp(x, gate_up, down, sizes, row_weights=jnp.arange(9.0))
    np.testing.assert_array_equal(y[6:], 0)
    plain = mlp(x, gate_up, down, sizes)
    assert_close(y, plain * jnp.arange(9.0)[:, None])


@pytest.mark.slow
def test_layer_maps_over_routers_and_weights():
    stacks = [jnp.stack(a) for a in zip(*(weights_of(5, 4, 4, 3, s) for s in (0, 1)), strict=True)]
    y, _ = jax.jit(jax.vmap(layer(2)))(*stacks)
    for i in range(2):
        assert_close(y[i], looped(*(a[i] for a in stacks), k=2))


# Over devices.


EIGHT = P("expert")
SPECS = {"in_specs": (EIGHT, P(), EIGHT, EIGHT), "out_specs": (EIGHT, P())}


def over_devices(k, how, **options):
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        layer(k, expert_axis="expert", exchange=how, **options), mesh=mesh, **SPECS
    )


def exchanged(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` as its documentation says, which XLA does not run on CPUs."""
    n, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    per = send_sizes.size // n
    operands, begins, sizes, places = (
        lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    rows = jnp.arange(output.shape[0])
    for source in range(n):
        for i in range(per):
            begin, size, place = (a[source, me * per + i] for a in (begins, sizes, places))
            size = jnp.where(size == recv_sizes[source * per + i], size, output.shape[0])
            taken = operands[source, jnp.clip(rows - place + begin, 0, operand.shape[0] - 1)]
            inside = (rows >= place) & (rows < place + size)
            output = jnp.where(inside[:, None], taken, output)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("how", expert_parallel.EXCHANGES)
def test_experts_over_devices_are_the_layer_of_one(how, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", exchanged)
    k = 3  # more than the two experts of a device
    args = weights_of(8 * 3, 6, 16, 4)
    spread = over_devices(k, how)

    def both(function):
        def run(*args):
            y, statistics = function(*args)
            return (y**2).sum() + moe.load_balancing_loss(statistics), (y, statistics)

        return jax.jit(jax.grad(run, (0, 1, 2, 3), has_aux=True))(*args)

    assert_close(both(spread), both(layer(k)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gather", "all_to_all"])
def test_all_tokens_of_all_devices_fit_one_expert(how):
    x, router, gate_up, down = weights_of(8 * 3, 6, 16, 4)
    bias = jnp.zeros(16).at[jnp.asarray([4, 5])].set(1.0)  # both on device 2
    router = jnp.zeros_like(router)
    y, statistics = jax.jit(over_devices(2, how, selection_bias=bias))(x, router, gate_up, down)
    assert_close(y, looped(x, router, gate_up, down, 2, bias=np.asarray(bias)))
    np.testing.assert_array_equal(statistics.load, jnp.zeros(16).at[4:6].set(0.5))


def test_the_ragged_exchange_is_one_collective_each_way():
    args = weights_of(8 * 3, 6, 16, 4)
    spread = over_devices(2, "ragged_all_to_all")
    for function, count in (
        (spread, 3),  # rows, their weights, and results back
        (jax.grad(lambda *a: (spread(*a)[0] ** 2).sum(), (0, 1, 2, 3)), 6),
    ):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert len(re.findall(r"custom_call @ragged_all_to_all", text)) == count


def test_moved_rows_are_found_past_empty_spans():
    sizes = jnp.asarray([0, 2, 0, 1, 0])
    found = expert_parallel.moved(
        sizes, jnp.asarray([9, 4, 9, 0, 9]), jnp.asarray([0, 0, 2, 3, 4]), 6
    )
    np.testing.assert_array_equal(found, [4, 5, -1, 0, -1, -1])


# Errors.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, r, g, d: layer(9)(x, r, g, d), "experts_per_token is 9, expected .* 1 to 8"),
        (lambda x, r, g, d: layer(2, score="relu")(x, r, g, d), "score is 'relu', expected"),
        (lambda x, r, g, d: layer(2, exchange="mail")(x, r, g, d), "exchange is 'mail', expected"),
        (lambda x, r, g, d: layer(2)(x, r.T, g, d), "among 6 experts, and 8 have weights"),
        (lambda x, r, g, d: layer(2)(x, r, g[:, :, 0], d), r"gate_up is f32\[8,6,10\].*reshape"),
        (lambda x, r, g, d: layer(2)(x, r, (g,), d[0]), r"down is f32\[10,6\], expected \(experts"),
        (lambda x, r, g, d: layer(2)(x, r, g, d[:, 1:]), r"f32\[8,9,6\]: expected equal experts"),
        (lambda x, r, g, d: layer(2)(x[:, 1:], r, g, d), r"features differ: x is f32\[9,5\]"),
        (lambda x, r, g, d: layer(2)(x, r[:, 1:], g, d), "among 7 experts, and 8 have weights"),
        (lambda x, r, g, d: moe.route_tokens(x, r.T[:, 1:].T, 2), "features differ"),
        (lambda x, r, g, d: moe.route(x[0], 2), r"logits are f32\[6\], expected"),
        (lambda x, r, g, d: moe.route(x, 2, selection_bias=r), "expected one for each expert"),
        (lambda x, r, g, d: moe.route(x, 2, experts=jnp.zeros((9, 3), int)), r"int32\[9, 2\]"),
        (lambda x, r, g, d: moe.route(x, 2, experts=jnp.zeros((9, 2))), r"f32\[9,2\], expected"),
        (lambda x, r, g, d: moe.grouped_mlp(x, g, d, jnp.zeros(7, int)), "group_sizes are .*8,10"),
        (lambda x, r, g, d: moe.grouped_mlp(x, g, d, jnp.zeros(8)), "expected integers"),
        (lambda x, r, g, d: moe.grouped_mlp(x, g, d, jnp.zeros(8, int), row_weights=x[1:, 0]),
         r"row_weights are f32\[8\]"),
        (lambda x, r, g, d: moe.grouped_mlp(x, g, d, jnp.zeros(8, int), activation="sulu"),
         "activation is 'sulu', expected"),
    ],
)  # fmt: skip
def test_errors_say_what_came_and_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call(*weights_of(9, 6, 8, 10))
