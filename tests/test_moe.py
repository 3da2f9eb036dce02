"""The mixture of experts: against loops in float64, against JAX's gradients, over eight devices."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.moe_reference import assert_close, dense, looped, weights_of
from support.quantization import dequantize, quantize

from jax_hopper_gemm import moe
from jax_hopper_gemm.moe import expert_parallel


def layer(k, **options):
    return partial(moe.mixture_of_experts, experts_per_token=k, **options)


def loss(function, *args):
    return (function(*args) ** 2).sum()


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
    bias = np.linspace(0, 1, 8, dtype=np.float32)
    options = {"score": "sigmoid", "normalize": False}
    y, _ = jax.jit(layer(2, selection_bias=bias, **options))(*args)
    assert_close(y, looped(*args, k=2, bias=bias, **options))


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
    router, bias = np.zeros_like(router), np.eye(8, dtype=np.float32)[3]

    def run(*args):
        y, statistics = layer(1, selection_bias=bias)(*args)
        return (y**2).sum(), (y, statistics)

    gradient, (y, statistics) = jax.jit(jax.grad(run, argnums=2, has_aux=True))(
        x, router, gate_up, down
    )
    np.testing.assert_array_equal(statistics.load, bias)
    assert_close(y, looped(x, router, gate_up, down, 1, bias=bias))
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
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("dtype, block", [("int8", None), ("int4", 32)])
def test_experts_may_be_quantized(dtype, block, pair):
    x, router, gate_up, down = map(np.asarray, weights_of(9, 64, 8, 64))
    x, router = x.astype(jnp.bfloat16), router.astype(jnp.bfloat16)
    down = quantize(down, dtype, (1, block, 1))
    if pair:
        gate_up = tuple(quantize(gate_up[:, :, i], dtype, (1, block, 1)) for i in (0, 1))
        wide = np.stack([dequantize(part) for part in gate_up], 2)
    else:
        gate_up = quantize(gate_up, dtype, (1, block, 1, 1))
        wide = dequantize(gate_up)
    y, _ = jax.jit(layer(2))(x, router, gate_up, down)
    assert y.dtype == jnp.bfloat16
    expected = looped(x, router, wide, dequantize(down), 2)
    error = np.abs(np.asarray(y, np.float64) - expected).max()
    assert error < 2**-6 * np.abs(expected).max()  # hidden values and results are rounded


@pytest.mark.slow
def test_leading_axes_and_dtypes_are_those_of_the_tokens():
    x, router, gate_up, down = (np.asarray(a, jnp.bfloat16) for a in weights_of(12, 6, 8, 10))
    run = jax.jit(layer(2))
    y, _ = run(x.reshape(3, 4, 6), router, gate_up, down)
    assert y.shape == (3, 4, 6) and y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.reshape(y, (12, 6)), run(x, router, gate_up, down)[0])


def test_grouped_mlp_leaves_rows_of_no_group_zero():
    x, _, gate_up, down = weights_of(9, 6, 4, 10)
    sizes, weights = np.array([2, 0, 3, 1]), np.arange(9, dtype=np.float32)
    mlp = jax.jit(moe.grouped_mlp)
    y = mlp(x, gate_up, down, sizes, row_weights=weights)
    np.testing.assert_array_equal(np.asarray(y)[6:], 0)
    assert_close(y, mlp(x, gate_up, down, sizes) * weights[:, None])


@pytest.mark.slow
def test_layer_maps_over_routers_and_weights():
    stacks = [np.stack(a) for a in zip(*(weights_of(5, 4, 4, 3, s) for s in (0, 1)), strict=True)]
    y = np.asarray(jax.jit(jax.vmap(layer(2)))(*stacks)[0])
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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gather", "all_to_all"])
def test_experts_may_be_over_several_axes(how):
    args = weights_of(8 * 2, 6, 16, 4)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    both = P(("b", "a"))  # not the mesh's order
    spread = jax.shard_map(
        layer(3, expert_axis=["b", "a"], exchange=how), mesh=mesh,
        in_specs=(both, P(), both, both), out_specs=(both, P()),
    )  # fmt: skip
    assert_close(jax.jit(spread)(*args), jax.jit(layer(3))(*args))


def exchanged(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` as its documentation says, which XLA does not run on CPUs."""
    n, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    operands = lax.all_gather(operand, axis_name)
    begins, sizes, places = (  # (n * per,) of what each device sends here
        lax.all_gather(a.reshape(n, -1), axis_name)[:, me].ravel()
        for a in (input_offsets, send_sizes, output_offsets)
    )
    sizes = jnp.where(sizes == recv_sizes, sizes, output.shape[0])
    rows = jnp.arange(output.shape[0])
    inside = (rows >= places[:, None]) & (rows < (places + sizes)[:, None])
    span = jnp.argmax(inside, 0)
    row = jnp.clip(rows - places[span] + begins[span], 0, operand.shape[0] - 1)
    taken = operands[span // (sizes.size // n), row]
    return jnp.where(inside.any(0)[:, None], taken, output)


def both(function, args):
    """Returns gradients and results."""

    def run(*args):
        y, statistics = function(*args)
        return (y**2).sum() + moe.load_balancing_loss(statistics), (y, statistics)

    return jax.jit(jax.grad(run, (0, 1, 2, 3), has_aux=True))(*args)


K = 3  # more than the two experts of a device


@pytest.fixture(scope="module")
def of_one_device():
    args = weights_of(8 * 3, 6, 16, 4)
    return args, both(layer(K), args)


@pytest.mark.slow
@pytest.mark.parametrize("how", expert_parallel.EXCHANGES)
def test_experts_over_devices_are_the_layer_of_one(how, of_one_device, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", exchanged)
    args, expected = of_one_device
    assert_close(both(over_devices(K, how), args), expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gather", "all_to_all"])
def test_no_tokens_are_exchanged(how):
    args = weights_of(0, 6, 16, 4)
    spread = over_devices(2, how)
    y, statistics = jax.jit(spread)(*args)
    assert y.shape == (0, 6)
    assert_close(statistics, jax.jit(layer(2))(*args)[1])
    gradient = jax.jit(jax.grad(lambda a: spread(*a)[0].sum()))(args)
    jax.tree.map(np.testing.assert_array_equal, gradient, list(map(np.zeros_like, args)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gather", "all_to_all"])
def test_all_tokens_of_all_devices_fit_one_expert(how):
    x, router, gate_up, down = weights_of(8 * 3, 6, 16, 4)
    bias = np.isin(np.arange(16), [4, 5]).astype(np.float32)  # both on device 2
    router = np.zeros_like(router)
    y, statistics = jax.jit(over_devices(2, how, selection_bias=bias))(x, router, gate_up, down)
    assert_close(y, looped(x, router, gate_up, down, 2, bias=bias))
    np.testing.assert_array_equal(statistics.load, bias / 2)


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
    spans = np.array([[0, 2, 0, 1, 0], [9, 4, 9, 0, 9], [0, 0, 2, 3, 4]])
    found = jax.jit(expert_parallel.moved, static_argnums=3)(*spans, 6)
    np.testing.assert_array_equal(found, [4, 5, -1, 0, -1, -1])


# Explicit mesh axes.


def parts(x, router, gate_up, down):
    routing = moe.route_tokens(x, router, 2, scale=jnp.float32(2))
    rows = moe.dispatch_rows(x, routing)
    weights = moe.row_weights(routing)
    rows = moe.grouped_mlp(rows, gate_up, down, routing.group_sizes, row_weights=weights)
    return moe.combine_rows(rows, routing), routing


PLACED = {  # x, router, gate_up, down
    "tokens": (P("d"), P(), P(), P()),
    "tokens over two axes": (P(("d", "e")), P(), P(), P()),
    "experts": (P("d"), P(), P("e"), P("e")),
    "features": (P("d", "e"), P("e"), P(None, "e"), P(None, None, "e")),
    "all over one": (P("d"), P("d"), P("d"), P("d")),
    "nothing": (P(), P(), P(), P()),
    "not placed": None,
}


@jax.jit  # which keeps the program without axes for all placements
def step(*args):
    def run(x, *weights):
        y, statistics = layer(2, scale=jnp.float32(2))(x, *weights)
        return (y**2).sum() + moe.load_balancing_loss(statistics), (y, parts(x, *weights))

    return jax.grad(run, (0, 1, 2, 3), has_aux=True)(*args)


@pytest.mark.slow
@pytest.mark.parametrize("specs", PLACED.values(), ids=PLACED)
def test_explicit_axes_give_results_shardings_of_their_tokens(specs):
    args = weights_of(8, 8, 4, 6)
    expected = step(*args)
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = args if specs is None else list(map(jax.reshard, args, specs))
        gradients, results = step(*placed)
        assert_close((gradients, results), expected)
        for array, gradient in zip(placed, gradients, strict=True):
            assert specs is None or jax.typeof(gradient) == jax.typeof(array)
        y, (by_parts, routing) = results
        (rows, features) = P(None, None) if specs is None else jax.typeof(placed[0]).sharding.spec
        for array in (y, by_parts):
            assert jax.typeof(array).sharding.spec == P(rows, features)
        for array in (routing.weights, routing.experts, routing.positions):
            assert jax.typeof(array).sharding.spec == P(rows, None)
        assert jax.typeof(routing.order).sharding.spec == P(rows)
        assert jax.typeof(routing.statistics.load).sharding.spec == P(None)


def test_given_choices_are_routed_on_explicit_axes_of_arrays_alone():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    logits = np.arange(12, dtype=np.float32).reshape(4, 3)
    experts, bias = np.array([[0], [2], [7], [1]]), np.array([0, 0, 30], np.float32)
    placed = [jax.device_put(x, NamedSharding(mesh, P("d"))) for x in (logits, experts)]
    given = jax.jit(lambda x, experts: moe.route(x, 1, experts=experts))
    assert_close(given(*placed), given(logits, experts))
    chosen = jax.jit(lambda x: moe.route(x, 1, selection_bias=bias))
    assert_close(chosen(placed[0]), chosen(logits))


# Errors.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, r, g, d: layer(9)(x, r, g, d), "experts_per_token is 9, expected .* 1 to 8"),
        (lambda x, r, g, d: layer(2, score="relu")(x, r, g, d), "score is 'relu', expected"),
        (lambda x, r, g, d: layer(2, normalize="no")(x, r, g, d), "normalize is 'no', expected"),
        (lambda x, r, g, d: MOE.route(x, 2, normalize=0), "normalize is 0, expected True or False"),
        (lambda x, r, g, d: layer(2)(x, r[0], g, d), r"^mix.*: router_kernel is f32\[8\]"),
        (lambda x, r, g, d: layer(2)(x, r[1:], g, d), r"^mix.*, router_kernel is f32\[5,8\]"),
        (lambda x, r, g, d: layer(2, exchange="mail")(x, r, g, d), "exchange is 'mail', expected"),
        (lambda x, r, g, d: layer(2, scale="x")(x, r, g, d), "scale is 'x', expected a real"),
        (lambda x, r, g, d: layer(2, expert_axis=0)(x, r, g, d), "expert_axis is 0, expected an"),
        (lambda x, r, g, d: layer(2, implementation="gpu")(x, r, g, d), "^mixture_of_e.*: implem"),
        (lambda x, r, g, d: layer(2, save_preactivation=2)(x, r, g, d), "^mixture_of_e.*: save_"),
        (lambda x, r, g, d: MOE.route_tokens(x, r, 2, implementation=0), "^route_tokens: implem"),
        (lambda x, r, g, d: layer(2)(x, r.T, g, d), r"Pass router_kernel\.T"),
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
        jax.eval_shape(call, *weights_of(9, 6, 8, 10))


MOE: Any = moe  # for arguments of other types


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, r, g, d: MOE.route(x * 1j, 2), r"^route: logits is c64\[9,6\], expected real"),
        (lambda x, r, g, d: MOE.route_tokens(x, r * 1j, 2), r"^route_tokens: kernel is c64"),
        (lambda x, r, g, d: MOE.route(x, 2, selection_bias=x[0] * 1j), "selection_bias is c64"),
        (lambda x, r, g, d: MOE.route(x, 1, experts=[[0]] * 9), "^route: experts is a list, exp"),
        (lambda x, r, g, d: MOE.route(x, 2, selection_bias="a"), "^route: selection_bias is a str"),
        (lambda x, r, g, d: layer(2, selection_bias="a")(x, r, g, d),
         "^mixture_of_experts: selection_bias is a str, expected an array"),
        (lambda x, r, g, d: layer(2)(x, r, None, d), "^mixture_of_experts: gate_up is a NoneType"),
        (lambda x, r, g, d: layer(2)(x, r, (g, None), d), r"gate_up\[1\] is a NoneType, expected"),
        (lambda x, r, g, d: MOE.grouped_mlp(x, g, d, [9] + [0] * 7),
         "^grouped_mlp: group_sizes is a list, expected an array: convert it with jnp.asarray"),
        (lambda x, r, g, d: MOE.dispatch_rows(x, MOE.route(x, 2).order),
         r"^dispatch_rows: routing is i32\[18\], expected a Routing: pass what route"),
        (lambda x, r, g, d: MOE.combine_rows(x, None), "^combine_rows: routing is a NoneType"),
        (lambda x, r, g, d: MOE.row_weights(x), r"^row_weights: routing is f32\[9,6\], expected"),
        (lambda x, r, g, d: MOE.load_balancing_loss(jnp.ones(3)),
         r"^load_balancing_loss: statistics is f32\[3\], expected a Statistics: pass the stat"),
        (lambda x, r, g, d: MOE.router_z_loss(MOE.route(x, 2)), "statistics is a Routing, expect"),
    ],
)  # fmt: skip
def test_errors_name_the_function_and_its_argument(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(call, *weights_of(9, 6, 8, 10))
