"""Delayed scaling: its numbers, its state, and Flax's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes
from jax_hopper_gemm.testing.lowered import specs_of

pytestmark = pytest.mark.slow

M, K, N = 96, 144, 80


def normal(shape: tuple[int, ...], seed: int, dtype: Any = jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def rounded(x: Any, scale: float, dtype: Any) -> np.ndarray:
    limit = float(jnp.finfo(dtype).max)
    return np.clip(x / np.float32(scale), -limit, limit).astype(dtype).astype(np.float64) * scale


def test_scales_are_those_of_former_steps():
    x, w, dy = normal((M, K), 0), normal((K, N), 1), normal((M, N), 2)
    state = recipes.DelayedScaling.initial(3)
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2

    @jax.jit
    def step(x: Any, w: Any, dy: Any, state: Any) -> Any:
        y, pull = jax.vjp(lambda x, w, s: jhg.matmul(x, w, recipe=s), x, w, state)
        return y, *pull(dy)

    seen: list[list[float]] = []
    for factor in (1, 2, 4, 8):
        arrays = factor * x, w / factor, factor * dy
        y, dx, dw, state = step(*arrays, state)
        last = seen[-3:]
        scales = [
            max(amax[i] for amax in last) / float(jnp.finfo(dtype).max) if last else 1.0
            for i, dtype in enumerate((e4m3, e4m3, e5m2))
        ]
        np.testing.assert_allclose(state.scale, scales, rtol=1e-6)
        seen.append([np.abs(a).max() for a in arrays])
        newest, *older = seen[-3:][::-1]
        history = np.array([newest, *[[0.0] * 3] * (2 - len(older)), *older[::-1]]).T
        np.testing.assert_allclose(state.amax_history, history, rtol=1e-6)
        left, right, ct = (
            rounded(a, s, d) for a, s, d in zip(arrays, scales, (e4m3, e4m3, e5m2), strict=True)
        )
        for got, exact in ((y, left @ right), (dx, ct @ right.T), (dw, left.T @ ct)):
            np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("broken", [np.nan, np.inf, 0.0])
def test_a_scale_stays_where_no_magnitude_is_known(broken):
    arrays: Any = np.full(3, 0.5, "f4"), np.full((3, 2), broken, "f4")
    state = recipes.DelayedScaling(*arrays)
    x = np.ones((16, 16), np.float32)
    new = jax.jit(jax.grad(lambda s: jhg.matmul(x, x, recipe=s).sum()))(state)
    np.testing.assert_array_equal(new.scale, [0.5] * 3)


def test_what_follows_and_axes_are_as_without():
    x, w, bias = (
        normal((4, M, K), 0, jnp.bfloat16),
        normal((K, N), 1, jnp.bfloat16),
        normal((N,), 2),
    )
    arrays: Any = np.full(3, 2.0**-6, "f4"), np.zeros((3, 4), "f4")
    state = recipes.DelayedScaling(*arrays)
    y, largest = jhg.matmul(
        x, w, bias=bias, activation="relu", epilogue=lambda y: (y, jnp.max(y)), recipe=state
    )
    plain = np.maximum(np.asarray(x, np.float32) @ np.asarray(w, np.float32) + bias, 0)
    assert y.dtype == jnp.bfloat16 and largest.dtype == jnp.float32
    assert np.linalg.norm(np.asarray(y, np.float32) - plain) < 0.06 * np.linalg.norm(plain)
    numbers: Any = ((2,), (1,)), ((), ())
    dx, dw = jax.jit(jax.grad(
        lambda x, w: jhg.dot_general(x, w, numbers, recipe=state).astype(jnp.float32).sum(), (0, 1)
    ))(x, w.T)  # fmt: skip
    assert (dx.shape, dx.dtype, dw.shape, dw.dtype) == (x.shape, x.dtype, w.T.shape, w.dtype)

    def of_vector(x: Any, w: Any, state: Any) -> Any:  # whose gradient of weights contracts nothing
        return jhg.dot_general(x, w, (((0,), (0,)), ((), ())), recipe=state)

    row = x[0, 0]
    dw, new = jax.jit(jax.grad(lambda *args: of_vector(*args).sum(), (1, 2)))(row, w, state)
    near = rounded(row, 2.0**-6, jnp.float8_e4m3fn)
    np.testing.assert_allclose(np.float32(dw), np.broadcast_to(near[:, None], w.shape), rtol=2**-7)
    assert np.asarray(new.amax_history)[0, 0] == np.abs(row).max()


def test_all_three_products_run_on_kernels_of_8_bits():
    def step(x: Any, w: Any, state: Any) -> Any:
        product = partial(jhg.matmul, implementation="hopper")
        y, pull = jax.vjp(lambda x, w, s: product(x, w, recipe=s), x, w, state)
        return y, *pull(y)

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 512), (512, 2048))]
    state = jax.eval_shape(recipes.DelayedScaling.initial)
    forward, *backward = specs_of(step, *shapes, state)
    assert forward.a_dtype == forward.b_dtype == "float8_e4m3fn" and not forward.promoted
    assert len(backward) == 2 and all(spec.promoted for spec in backward)
    assert all("float8_e5m2" in (spec.a_dtype, spec.b_dtype) for spec in backward)


@pytest.mark.parametrize("extents", [(0, 8, 4), (4, 0, 8), (4, 8, 0)])
def test_empty_operands_are_zeros_and_leave_scales(extents):
    m, k, n = extents
    x, w, dy = (np.ones(shape, np.float32) for shape in ((m, k), (k, n), (m, n)))

    @jax.jit
    def step(*args: Any) -> Any:
        y, gradient = jax.vjp(lambda *args: jhg.matmul(*args[:2], recipe=args[2]), *args)
        return y, *gradient(dy)

    y, dx, dw, new = step(x, w, recipes.DelayedScaling.initial(2))
    for found, like in ((y, dy), (dx, x), (dw, w)):
        np.testing.assert_array_equal(found, np.zeros_like(like), strict=True)
    np.testing.assert_array_equal(new.scale, np.ones(3))


def test_a_scan_takes_a_state_for_each_layer():
    ws, x = normal((3, 64, 64), 0), normal((32, 64), 1)
    states = jax.tree.map(lambda s: np.stack([s] * 3), recipes.DelayedScaling.initial(4))

    def loss(ws: Any, states: Any) -> Any:
        body = jax.checkpoint(lambda x, w: (jhg.matmul(x, w[0], recipe=w[1]) / 8, None))
        return jnp.sum(jax.lax.scan(body, x, (ws, states))[0] ** 2)

    new = jax.jit(jax.grad(loss, 1))(ws, states)
    history = np.asarray(new.amax_history)
    assert history.shape == (3, 3, 4) and (history[:, :, 0] > 0).all()
    np.testing.assert_allclose(history[:, 1, 0], np.abs(ws).max((1, 2)), rtol=1e-6)


STATE: Any = recipes.DelayedScaling.initial(2)
X = np.ones((16, 16), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: jhg.ragged_dot(X, X[None], np.array([16]), recipe=STATE), NotImplementedError,
         "ragged_dot: a DelayedScaling is the state of one product"),
        (lambda: jhg.accelerate(jnp.matmul, recipe=STATE), NotImplementedError, "accelerate: a D"),
        (lambda: jhg.matmul(X, X, recipe=recipes.DelayedScaling(jnp.ones(2), jnp.ones((3, 2)))),
         ValueError, r"scales f32\[2\] and a history f32\[3,2\], expected f32\[3\]"),
        (lambda: recipes.DelayedScaling.initial(0), ValueError, "length is 0, expected an int"),
        (lambda: recipes.DelayedScaling.initial(True), ValueError, "length is True, expected an i"),
        (lambda: jhg.matmul(X, X, recipe=recipes.DelayedScaling(jnp.ones(3), jnp.ones((3, 0)))),
         ValueError, r"a history f32\[3,0\], expected f32\[3\] and f32\[3,length\]"),
        (lambda: jhg.matmul(X, X.astype(int), recipe=STATE), TypeError, "a recipe takes floats"),
        (lambda: jhg.matmul(X, X, recipe=STATE, batch_invariant=True), ValueError, "DelayedScali"),
        (lambda: jax.hessian(lambda x: jhg.matmul(x, x, recipe=STATE).sum())(X),
         NotImplementedError, "first derivative in reverse mode"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_layers_refuse_a_state():
    nnx = pytest.importorskip("flax.nnx")
    from jax_hopper_gemm import nn

    experts = partial(nn.MoE, num_experts=2, experts_per_token=1)
    for kind in (nn.Linear, nn.GatedLinear, nn.GatedMLP, experts):
        with pytest.raises(NotImplementedError, match="a DelayedScaling is the state of one prod"):
            kind(8, 6, recipe=STATE, rngs=nnx.Rngs(0))
    for layer in (nn.linen.Dense, nn.linen.GatedDense, nn.linen.MLP):
        with pytest.raises(NotImplementedError, match="Dense: a DelayedScaling is the state of on"):
            layer(8, recipe=STATE).init(jax.random.key(0), X)


def test_states_are_those_of_flax():
    """The same layer with Flax's product and with ours: numbers, gradients, next states."""
    nn = pytest.importorskip("flax.linen")
    from flax.linen import fp8_ops

    from jax_hopper_gemm.nn import linen as ours

    x, dy = normal((M, K), 0), normal((M, N), 1)
    results: list[Any] = []
    for op in (fp8_ops.Fp8DirectDotGeneralOp, ours.DelayedDotGeneral):
        layer = nn.Dense(N, dot_general_cls=partial(op, amax_history_length=3))
        variables = jax.jit(layer.init)(jax.random.key(0), x)
        results.append(None)

        def loss(variables: Any, x: Any, layer: Any = layer) -> Any:
            y = layer.apply(variables, x)
            return jnp.vdot(y, dy), y

        gradient = jax.jit(jax.grad(loss, has_aux=True))
        for factor in (1, 2, 3):
            gradients, y = gradient(variables, factor * x)
            results[-1:] = [(y, gradients)]
            variables = variables | {
                name: gradients[name] for name in variables if name == "_overwrite_with_gradient"
            }
    (y, gradients), (ours_y, ours_gradients) = results
    for a, b in zip(*map(jax.tree.leaves, ((y, gradients), (ours_y, ours_gradients))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max())


def test_states_are_float32_in_programs_of_64_bits_and_keep_nans():
    with jax.enable_x64(True):
        state = recipes.DelayedScaling.initial(4)
        x, w = normal((64, 256), 0), normal((256, 16), 1)
        x[0, 0] = np.nan
        new = jax.jit(jax.grad(lambda s: jhg.matmul(x, w, recipe=s).sum()))(state)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state, new))} == {"float32"}
    assert np.isnan(new.amax_history)[:, 0].tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.dtype("float8_e4m3fn"), "float8_e4m3fn"])
def test_a_dtype_of_gradients_is_kept_by_name(dtype):
    state = recipes.DelayedScaling.initial(4, dtype)
    assert state.gradients == "float8_e4m3fn"
    product = jax.jit(lambda state: jhg.matmul(X, X, recipe=state))
    stored = jax.export.export(product)(state).serialize()
    np.testing.assert_array_equal(jax.export.deserialize(stored).call(state), product(state))
