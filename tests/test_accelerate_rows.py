"""`accelerate` around rows: statistics of a softmax, picked numbers, rounded operands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.program_inspection import integers, lowered, normal
from support.stepwise import run_stepwise
from test_accelerate_fuses import equations

import jax_hopper_gemm as jhg
from jax_hopper_gemm.interop import scatters
from jax_hopper_gemm.primitives.rows import add_rows_p

S = jax.ShapeDtypeStruct
BF16, F32 = jnp.bfloat16, jnp.float32
TOKENS, WIDTH, WORDS = 4096, 1024, 8192
X, W, LABELS = S((TOKENS, WIDTH), BF16), S((WIDTH, WORDS), BF16), S((TOKENS,), "int32")


def kernels(function: Callable[..., Any], *args: Any) -> list[tuple[list[str], set[str]]]:
    """Returns of each product the dtypes and ranks of its results, and its operations."""
    found = []
    for equation in equations(function, *args):
        if equation.primitive.name.startswith("hopper"):
            results = [f"{x.aval.dtype.name} {x.aval.ndim}" for x in equation.outvars]
            jaxpr = equation.params.get("jaxpr")
            found.append((results, {e.primitive.name for e in jaxpr.eqns} if jaxpr else set()))
    return found


def cross_entropy(x: Any, w: Any, labels: Any) -> Any:
    logits = (x @ w).astype(F32)
    right = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


def attended(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.usefixtures("launcher")
def test_kernels_read_probabilities_and_their_gradient_as_the_logits_lie() -> None:
    """XLA would transpose these arrays otherwise, the largest of the program.

    What computes them stands in functions of its own, once what is differentiated is lowered.
    """
    b, t, heads, groups = 2, 1024, 4, 4

    def gradients(q: Any, k: Any, v: Any, g: Any) -> Any:
        y, pull = jax.vjp(attended, q, k, v)
        return y, pull(g)

    q, k = S((b, t, heads * groups, 64), BF16), S((b, t, heads, 64), BF16)
    text = lowered(jhg.accelerate(gradients), q, k, k, q)
    types = re.findall(r"v1.launch\(.*?\) .* : \((.*?)\) ->", text)
    large = [x for x in ", ".join(types).split(", ") if x.count(str(t)) == 2]
    assert large == [f"tensor<{b}x{heads}x{t}x{groups}x{t}xbf16>"] * 4


def test_logits_of_a_loss_are_stored_once_in_16_bits_with_statistics_of_rows() -> None:
    for function in (cross_entropy, jax.grad(cross_entropy, (0, 1))):
        (results, operations), *_ = kernels(function, X, W, LABELS)
        assert sorted(results) == ["bfloat16 2", "float32 1", "float32 1"]
        assert {"reduce_max", "exp", "reduce_sum"} <= operations


def test_a_softmax_takes_its_statistics_from_the_kernel_and_its_derivative_does() -> None:
    shape = S((8, 1024, 16, 64), BF16)

    def written_out(q: Any, k: Any, v: Any) -> Any:
        logits = jnp.einsum("bthd,bshd->bhts", q, k) * 0.125
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits.astype(F32)).astype(BF16), v)

    def gradients(q: Any, k: Any, v: Any, g: Any) -> Any:
        return jax.vjp(written_out, q, k, v)[1](g)

    found = kernels(gradients, *[shape] * 4)
    assert (["float32 3", "float32 3", "bfloat16 4"], {"reduce_max", "reduce_sum"}) in [
        (results, operations & {"reduce_max", "reduce_sum"}) for results, operations in found
    ]
    assert (["float32 3", "bfloat16 4"], {"reduce_sum", "exp"}) in [
        (results, operations & {"reduce_sum", "exp"}) for results, operations in found
    ]


@pytest.mark.usefixtures("all_fused")
def test_statistics_are_those_of_the_stored_numbers() -> None:
    """A share computed from rounded logits and a sum of others would be off by 3 %."""
    x = jnp.asarray(np.arange(64).reshape(8, 8) % 13 - 3, BF16)
    w = jnp.asarray(np.arange(8 * 16).reshape(8, 16) % 11 + 0.4375, BF16)

    def shares(x: Any, w: Any) -> Any:
        logits = (x @ w).astype(F32)
        parts = jnp.exp(logits - logits.max(-1, keepdims=True))
        total = parts.sum(-1, keepdims=True)
        return parts / total, total

    (results, _), *_ = kernels(shares, x, w)
    assert results == ["float32 1", "float32 1", "bfloat16 2"]
    assert np.any(np.asarray(x, np.float32) @ np.asarray(w, np.float32) != np.asarray(x @ w, F32))
    found, _ = jax.jit(jhg.accelerate(shares))(x, w)
    np.testing.assert_allclose(found, jax.jit(shares)(x, w)[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.sum(found, -1), 1, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("all_fused")
def test_a_maximum_is_one_of_the_numbers_that_are_compared_with_it() -> None:
    """Its derivative divides by how many there are: computed anew from the product, none were."""
    x, w = (jax.random.normal(jax.random.key(i), (16, 16), BF16) for i in range(2))

    def loss(x: Any, w: Any) -> Any:
        y = x @ w
        y = y / (1 + jnp.abs(y) * 0.1)
        return jnp.sum((y + y.max(-1, keepdims=True)).astype(F32) ** 2)

    results, operations = kernels(jax.grad(loss), x, w)[0]
    assert results.count("bfloat16 2") == 2 and "reduce_max" in operations
    found, expected = (np.float32(f(jax.grad(loss))(x, w)) for f in (jhg.accelerate, jax.jit))
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("all_fused")
@pytest.mark.parametrize(
    "other",
    [
        lambda y: y.max(-1, keepdims=True),
        lambda y: lax.top_k(y, 3)[0][:, -1:],
        lambda y: jnp.sort(y, 0),
        lambda y: y[::-1],  # that of the row in the middle is the row
    ],
    ids=["maximum", "third", "sorted", "mirrored"],
)
def test_numbers_equal_what_is_taken_from_them(other: Any) -> None:
    """Computed anew from the product, which is not rounded then, few are their own equals."""
    x, w = jax.random.normal(jax.random.key(0), (15, 16), BF16), jnp.eye(16, dtype=BF16)

    def loss(x: Any, w: Any) -> Any:
        y = jnp.square(x @ w)  # of x itself, so that all round alike
        return (jnp.where(y >= other(y), y, 0) @ w).astype(F32).sum()

    expected = np.float32(jax.grad(loss)(x, w))  # under `jit` XLA rounds less, and loses some, too
    assert np.count_nonzero(expected) >= 15
    found = np.float32(run_stepwise(jhg.accelerate(jax.grad(loss)), x, w))
    np.testing.assert_allclose(found, expected, rtol=2**-6)


@pytest.mark.usefixtures("all_fused")
def test_numbers_that_a_kernel_computes_of_an_array_equal_their_maximum() -> None:
    """XLA takes the maximum of rounded numbers; no product comes before them."""
    x, w = (jax.random.normal(jax.random.key(i), (16, 16), BF16) for i in range(2))

    def loss(x: Any, w: Any) -> Any:
        y = jax.nn.silu(x)
        return (jnp.minimum(y, y.max(-1, keepdims=True)) @ w).astype(F32).sum()

    found, expected = (run_stepwise(f(jax.grad(loss)), x, w) for f in (jhg.accelerate, jax.jit))
    difference = np.linalg.norm(np.float32(found) - np.float32(expected))
    assert difference < 0.01 * np.linalg.norm(np.float32(expected))


def test_xla_reads_a_row_once_for_a_softmax_of_which_nothing_else_is_read() -> None:
    def probabilities(x: Any, w: Any) -> Any:
        return jax.nn.softmax((x @ w).astype(F32)).astype(BF16)

    for results, operations in kernels(probabilities, X, W):
        assert results == ["bfloat16 2"] and "reduce_max" not in operations


@pytest.mark.slow
@pytest.mark.usefixtures("all_fused")
def test_a_float16_result_and_its_statistics_keep_the_smallest_numbers() -> None:
    steps = np.arange(8 * 8).reshape(8, 8) - 3.75  # results lie between the subnormal numbers
    x, w = jnp.asarray(steps * 2.0**-14, "float16"), jnp.eye(8, dtype="float16") * 2.0**-10

    def function(x: Any, w: Any) -> Any:
        y = x @ w  # below the least normal number
        return y, y.astype(F32).max(-1), y.astype(F32).sum(-1), jnp.where(y > 2.0**-20, y, 0)

    accelerated = jhg.accelerate(function)
    (results, _), *_ = kernels(function, x, w)
    assert len(results) == 4
    found, expected = (jax.jit(f)(x, w) for f in (accelerated, function))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.all(np.abs(found[0]) < 2.0**-14) and np.all(found[2][1:] > 0)
    cotangents = jax.tree.map(lambda y: jnp.full_like(y, 2.0**-18), expected)
    found, expected = (jax.vjp(f, x, w)[1](cotangents) for f in (accelerated, function))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_variance_is_not_part_of_a_kernel_which_has_not_the_mean() -> None:
    def norm(x: Any, w: Any, r: Any) -> Any:
        y = (r + x @ w).astype(F32)
        return y * lax.rsqrt(jnp.mean((y - y.mean(-1, keepdims=True)) ** 2, -1, keepdims=True))

    ((results, operations),) = kernels(norm, X, W, S((TOKENS, WORDS), BF16))
    assert "bfloat16 2" in results and "rsqrt" not in operations and "square" not in operations


PICKS = {
    "default": ({}, [3, -1, 9, -300, 0]),
    "clipped": ({"mode": "clip"}, [3, 300, 299, 0, 1]),
    "promised": ({"mode": "promise_in_bounds"}, [3, 0, 299, 17, 1]),
    "fill": ({"mode": "fill", "fill_value": 0}, [3, 300, 299, -301, 1]),
}


@pytest.mark.parametrize("name", PICKS)
@pytest.mark.parametrize("axis", [1, 0])
def test_the_gradient_of_picked_numbers_is_no_scatter(name: str, axis: int) -> None:
    options, numbers = PICKS[name]
    x = np.asarray(np.arange(5 * 300).reshape(5, 300) % 7 - 3, F32)
    x, indices = (x, np.array(numbers)[:, None]) if axis else (x.T, np.array(numbers)[None])

    def function(x: Any, indices: Any) -> Any:
        picked = jnp.take_along_axis(x * 2, indices, axis, **options)
        return jnp.sum(jnp.nan_to_num(picked) * jnp.arange(1.0, 6).reshape(indices.shape))

    gradient = jax.grad(function)
    assert all("scatter" not in e.primitive.name for e in equations(gradient, x, indices))
    found, expected = (jax.jit(f)(x, indices) for f in (jhg.accelerate(gradient), gradient))
    np.testing.assert_array_equal(found, expected)
    assert np.any(found)


def test_an_index_of_8_bits_picks_one_of_300() -> None:
    x, indices = np.ones((2, 300), F32), jax.device_put(np.array([[3], [255]], "uint8"))
    gradient = jax.grad(lambda x: jnp.take_along_axis(x, indices, 1).sum())
    np.testing.assert_array_equal(jhg.accelerate(gradient)(x), jax.jit(gradient)(x))


def test_other_scatters_stay() -> None:
    x, two = jax.device_put(np.ones((4, 8), F32)), jax.device_put(np.zeros((4, 2), int))
    several = jax.grad(lambda x: jnp.take_along_axis(x, two, 1).sum())
    for function in (several, lambda x: x.at[0].add(1), lambda x: x.at[:, 3].add(x[:, 0])):
        assert any("scatter" in e.primitive.name for e in equations(function, x))
        np.testing.assert_array_equal(jhg.accelerate(function)(x), jax.jit(function)(x))


def test_picks_are_sharded_as_they_were() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 8)), jax.P("i", None))
        indices = jax.device_put(jnp.zeros((4, 1), int), jax.P("i", None))
        gradient = jax.grad(lambda x: jnp.take_along_axis(x, indices, 1).sum())
        found = jax.jit(jhg.accelerate(gradient))(x)
        assert jax.typeof(found) == jax.typeof(jax.jit(gradient)(x))
        np.testing.assert_array_equal(found, gradient(x))


def test_gradients_of_attention_are_rounded_as_their_algorithm_says() -> None:
    shape = S((4, 1024, 16, 256), BF16)

    def gradients(q: Any, k: Any, v: Any, g: Any) -> Any:
        return jax.vjp(attended, q, k, v)[1](g)

    found = equations(gradients, *[shape] * 4)
    names = [e.primitive.name for e in found]
    assert "dot_general" not in names
    products = [e for e in found if e.primitive.name.startswith("hopper")]
    assert len(products) == 5  # the result of the attention is not read
    assert all(x.aval.dtype == BF16 for e in products for x in e.invars[:2])


def test_a_mask_behind_axes_of_extent_1_is_part_of_the_logits_kernel() -> None:
    (_, operations), *_ = kernels(attended, *[S((4, 1024, 16, 256), BF16)] * 3)
    assert {"mul", "select_n"} <= operations


@pytest.mark.slow
@pytest.mark.usefixtures("all_fused")
@pytest.mark.parametrize("heads", [4, 2], ids=["as many keys", "shared keys"])
def test_accelerated_attention_has_the_plain_one_s_gradients(heads: int) -> None:
    q, g = (normal((2, 16, 4, 8), seed=seed) for seed in (0, 1))
    k, v = (normal((2, 16, heads, 8), seed=seed) for seed in (2, 3))

    def gradients(*args: Any) -> Any:
        out, back = jax.vjp(attended, *args[:3])
        return out, *back(args[3])

    exact = jax.jit(gradients)(q, k, v, g)
    narrow = [x.astype(BF16) for x in (q, k, v, g)]
    plain, ours = (jax.jit(f)(*narrow) for f in (gradients, jhg.accelerate(gradients)))
    for x, y, z in zip(ours, plain, exact, strict=True):
        x, y, z = (np.asarray(array, np.float64) for array in (x, y, z))
        assert np.linalg.norm(x - z) <= 2 * np.linalg.norm(y - z)


LOOKUPS = {"default": {}, "clipped": {"mode": "clip"}, "fill": {"mode": "fill", "fill_value": 0}}


@pytest.mark.parametrize("name", LOOKUPS)
def test_the_gradient_of_a_small_table_is_a_product(name: str) -> None:
    """Summed in float32, where XLA adds 16-bit floats one after the other."""
    numbers = np.random.default_rng(0)
    indices = jax.device_put(numbers.integers(-6, 6, (64, 64)))  # some of no row of the table
    factors = jax.device_put(numbers.integers(-2, 3, (64, 64, 8)).astype(F32))

    def loss(table: Any) -> Any:
        found = table.at[indices].get(**LOOKUPS[name])
        return jnp.sum(jnp.nan_to_num(found.astype(F32)) * factors)

    gradient, table = jax.grad(loss), np.ones((4, 8), BF16)
    found = equations(gradient, table)
    assert all("scatter" not in e.primitive.name for e in found)
    assert sum(e.primitive.name.startswith("hopper") for e in found) == 1
    exact = np.asarray(jax.jit(gradient)(table.astype(F32)), BF16)
    np.testing.assert_array_equal(jax.jit(jhg.accelerate(gradient))(table), exact)
    assert np.any(exact)
    unfused = jax.make_jaxpr(jhg.accelerate(gradient, fuse=False))(table)
    assert "scatter-add" in str(unfused)


@pytest.mark.parametrize(
    "rows, dtype, indices",
    [(4, "float32", 4096), (64, "bfloat16", 4096), (2048, "bfloat16", 2048 * 256)],
    ids=["float32", "few each", "many rows"],
)
def test_the_gradient_of_another_table_stays_a_scatter(rows: int, dtype: str, indices: int) -> None:
    gradient = jax.grad(lambda table, i: table[i].astype(F32).sum())
    found = equations(gradient, S((rows, 8), dtype), S((indices,), "int32"))
    assert any(e.primitive.name == "scatter-add" for e in found)


def put_back(rows: Any, order: Any, g: Any) -> Any:
    """Returns the gradient by rows of the same in another order."""
    return jax.vjp(lambda rows: rows[order], rows)[1](g)[0]


@pytest.mark.usefixtures("launcher")
def test_rows_go_back_to_their_order_without_a_scatter_on_one_gpu() -> None:
    tokens, width = 4096, 256
    x, order = S((tokens, width), BF16), S((2 * tokens,), "int32")
    shapes = x, order, S((2 * tokens, width), BF16)
    (summed,) = [e for e in equations(put_back, *shapes) if e.primitive.name == "add_rows"]
    assert summed.outvars[0].aval.shape == x.shape
    assert "stablehlo.scatter" not in lowered(jhg.accelerate(put_back), *shapes)
    assert "stablehlo.scatter" in lowered(jhg.accelerate(put_back, fuse=False), *shapes)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("i",), axis_types=auto, devices=jax.devices()[:2])
    rows = jax.NamedSharding(mesh, jax.P("i"))
    step = jax.jit(jhg.accelerate(put_back), in_shardings=rows)
    text = step.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.scatter" in text


@pytest.mark.slow
def test_rows_in_order_are_those_of_the_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatters, "LEAST_MOVED", 1)
    tokens, width = 128, 64
    indices = np.random.default_rng(0).permutation(2 * tokens) // 2
    indices[:3] = -1, tokens, -tokens - 1  # the last row, and none
    rows, g = integers((tokens, width), BF16), integers((2 * tokens, width), BF16, 1)
    arguments = rows, jax.device_put(indices), g
    assert "add_rows" in [e.primitive.name for e in equations(put_back, *arguments)]
    for ours in (jhg.accelerate(put_back), add_in_order):
        np.testing.assert_array_equal(ours(*arguments), jax.jit(put_back)(*arguments))


def add_in_order(rows: Any, order: Any, g: Any) -> Any:
    order = jnp.where(order < 0, order + len(rows), order)
    return add_rows_p.bind(g, order, length=len(rows), scattered=False)


@pytest.mark.parametrize(
    ("length", "width", "indices", "dtype"),
    [(8192, 256, 4096, BF16), (4096, 256, 8192, F32), (2**17, 8, 2**18, BF16), (64, 256, 64, BF16)],
    ids=["fewer rows", "float32", "narrow rows", "few rows"],
)
def test_other_rows_are_scattered(length: int, width: int, indices: int, dtype: Any) -> None:
    shapes = S((length, width), dtype), S((indices,), "int32"), S((indices, width), dtype)
    assert "scatter-add" in [e.primitive.name for e in equations(put_back, *shapes)]
