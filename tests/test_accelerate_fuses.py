"""`accelerate` fuses: which equations become part of which kernel, and with what numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.accelerated import equations, products
from support.program_inspection import integers

import jax_hopper_gemm as jhg
from jax_hopper_gemm.interop import fuse_jaxpr

M, K, N = 4096, 4096, 4096
S = jax.ShapeDtypeStruct
BF16, F32 = jnp.bfloat16, jnp.float32
X, W, V, ROW = S((M, K), BF16), S((K, N), BF16), S((K, N), BF16), S((N,), BF16)
MATRIX = S((M, N), BF16)


BIAS = {
    "bias": (lambda x, w, b: x @ w + b, ["add"]),
    "bias and relu": (lambda x, w, b: jax.nn.relu(x @ w + b), ["add", "custom_jvp_call"]),
    "written out": (lambda x, w, b: jnp.tanh(2 * (x @ w) + b) * 3, ["mul", "add", "tanh", "mul"]),
    "product by a scalar": (lambda x, w, b: (x @ w) * b[0], ["mul"]),
    "cast": (lambda x, w, b: (x @ w).astype(F32), []),
    "clipped": (lambda x, w, b: jnp.clip(x @ w + b, -1, 1), ["add", "max", "min"]),
}


@pytest.mark.parametrize("name", BIAS)
def test_what_follows_elementwise_is_part_of_the_kernel(name: str) -> None:
    function, operations = BIAS[name]
    ((_, _, names),) = products(function, X, W, ROW)
    assert names == operations
    assert products(function, X, W, ROW, fuse=False) == [(1, ("bfloat16",), None)]


def test_several_readers_make_several_results_of_one_kernel() -> None:
    def function(x: Any, w: Any, v: Any, b: Any) -> Any:
        h = x @ w + b
        return jnp.tanh(h) @ v, jnp.abs(h) @ v, h

    first, second, third = products(function, X, W, S((N, 512), BF16), ROW)
    assert first[1] == ("bfloat16",) * 3 and sorted(first[2]) == ["abs", "add", "tanh"]
    assert second[2] is None and third[2] is None


def test_a_residual_is_added_where_its_last_product_is() -> None:
    function = lambda x, w, v, r: r + x @ w + r @ v  # noqa: E731
    first, second = products(function, X, W, V, MATRIX)
    assert (first[2], second[2]) == (["add"], ["add"])


def test_two_products_of_one_array_are_a_gate() -> None:
    def function(x: Any, w: Any, v: Any) -> Any:
        return jax.nn.silu(x @ w) * (x @ v)

    assert products(function, X, W, V) == [(2, ("bfloat16",), ["logistic", "mul", "mul"])]


def test_products_of_other_arrays_are_no_gate() -> None:
    found = products(lambda x, y, w, v: jax.nn.silu(x @ w) * (y @ v), X, MATRIX, W, V)
    assert [num_b for num_b, *_ in found] == [1, 1]


def test_a_derivative_rides_on_the_product_of_its_cotangent() -> None:
    def loss(weights: Any, x: Any) -> Any:
        w, v, b = weights
        return (jax.nn.gelu(x @ w + b) @ v).astype(F32).sum()

    hidden = S((N, 512), BF16)
    found = products(jax.grad(loss), (W, hidden, ROW), X)
    forward, *others = [x for x in found if x[2]]
    assert forward[1] == ("bfloat16",) * 2  # what gelu gives, and what it took
    assert any({"tanh", "reduce_sum"} <= set(names) for *_, names in others)  # and the bias's


def test_an_argument_is_kept_after_its_bias() -> None:
    """So the mask of a relu is the one of the forward pass."""

    def loss(b: Any, x: Any, w: Any, v: Any) -> Any:
        return (jax.nn.relu(x @ w + b) @ v).astype(F32).sum()

    forward, *_ = (
        e for e in equations(jax.grad(loss), ROW, X, W, V) if e.primitive.name == "hopper_fused"
    )
    outputs = forward.params["jaxpr"].jaxpr.outvars
    makers = {x: e for e in forward.params["jaxpr"].eqns for x in e.outvars}

    def source(x: Any) -> str:
        name = makers[x].primitive.name
        return source(makers[x].invars[0]) if name == "convert_element_type" else name

    assert "add" in {source(x) for x in outputs}


def ragged(x: Any, w: Any, v: Any, sizes: Any) -> Any:
    return jax.nn.silu(lax.ragged_dot(x, w, sizes)) * lax.ragged_dot(x, v, sizes)


EXPERTS = S((8, 4096, 1024), BF16)


def test_ragged_products_are_gates() -> None:
    found = products(ragged, X, EXPERTS, EXPERTS, S((8,), jnp.int32))
    assert found == [(2, ("bfloat16",), ["logistic", "mul", "mul"])]


def test_rows_of_no_group_stay_what_the_function_makes_of_zero() -> None:
    x, w = integers((6, 8), "bfloat16"), integers((2, 8, 16), "bfloat16", seed=1)
    sizes = jnp.array([2, 1])

    def function(x: Any) -> Any:
        return lax.ragged_dot(x, w, sizes) + 1

    np.testing.assert_array_equal(jhg.accelerate(function)(x), function(x))


def in_scan(x: Any, w: Any, b: Any) -> Any:
    return lax.scan(lambda c, b: (jnp.tanh(c @ w + b), None), x, jnp.stack([b, b]))[0]


INNER = {
    "jit": lambda x, w, b: jax.jit(lambda x: jnp.tanh(x @ w + b))(x),
    "scan": in_scan,
    "while": lambda x, w, b: lax.while_loop(
        lambda c: c[0, 0] < 1, lambda c: jnp.tanh(c @ w + b), x
    ),
    "cond": lambda x, w, b: lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w + b), lambda x: x, x),
    "checkpoint": lambda x, w, b: jax.checkpoint(lambda x: jnp.tanh(x @ w + b))(x),
    "custom_vjp": lambda x, w, b: ruled(x, w, b),
}


@jax.custom_vjp
def ruled(x: Any, w: Any, b: Any) -> Any:
    return jnp.tanh(x @ w + b)


ruled.defvjp(lambda *args: (ruled(*args), args), lambda args, g: (g, g, g[0]))


@pytest.mark.parametrize("name", INNER)
def test_inner_programs_are_fused(name: str) -> None:
    assert [names for *_, names in products(INNER[name], X, W, ROW)] == [["add", "tanh"]]


def test_products_inside_shard_map_are_fused() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    def function(x: Any, w: Any, b: Any) -> Any:
        return jnp.abs(x @ w + b)

    shape = S((8 * M, K), BF16)
    assert [names for *_, names in products(function, shape, W, ROW)] == [["add", "abs"]]
    x, w, b = integers((16, 8), "bfloat16"), integers((8, 8), "bfloat16"), integers((8,))
    np.testing.assert_array_equal(jhg.accelerate(function)(x, w, b), function(x, w, b))


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_programs_that_xla_partitions_are_fused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_jaxpr, "_refusal", lambda *_: None)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shapes = {"x": (16, 8), "w": (8, 32), "v": (8, 32), "d": (32, 8), "b": (32,)}
    specs = {"x": P("x"), "w": P(None, "y"), "v": P(None, "y"), "d": P("y"), "b": P("y")}
    arrays = {name: integers(shape, "bfloat16") for name, shape in shapes.items()}
    arguments = {
        name: jax.device_put(array, jax.NamedSharding(mesh, specs[name]))
        for name, array in arrays.items()
    }

    def step(p: dict[str, Any]) -> Any:
        def loss(p: dict[str, Any]) -> Any:
            h = jax.nn.relu(p["x"] @ p["w"] + p["b"]) * (p["x"] @ p["v"])
            return (jnp.clip(h, -2, 2) @ p["d"] + p["x"]).astype(F32).sum()

        value, gradients = jax.value_and_grad(loss)(p)
        return value, jax.tree.map(jnp.add, p, gradients)

    ours, theirs = jax.jit(jhg.accelerate(step))(arguments), jax.jit(step)(arrays)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(x, y)


def test_nothing_is_rounded_between_a_product_and_the_result() -> None:
    x = jnp.full((1, 1), 1 + 2.0**-7, BF16)  # its square needs 15 digits
    exact = (float(x[0, 0]) ** 2 - 1) * 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse_jaxpr, "_refusal", lambda *_: None)
        assert jhg.accelerate(lambda x: (x @ x - 1) * 64)(x)[0, 0] == jnp.asarray(exact, BF16)


LONG = S((512, 16384), BF16), S((16384, 512), BF16)  # measured: XLA is faster, by 2.8 us


def test_products_that_xla_is_faster_at_are_left_alone() -> None:
    ((_, _, names),) = products(lambda x, y: jnp.tanh(x @ y), *LONG)
    assert names is None


def test_integers_and_other_dtypes_stay_outside() -> None:
    function = lambda x, w: jnp.argmax(x @ w, -1) + lax.iota(jnp.int32, M)  # noqa: E731
    assert products(function, X, W) == [(1, ("bfloat16",), None)]


@pytest.mark.slow
def test_the_sum_of_two_ragged_products_is_fused_and_keeps_zeros() -> None:
    """In rows of no group both have 0, and so has what a kernel stores. Other arrays may not."""

    def sums(x: Any, w: Any, v: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, w, sizes) + lax.ragged_dot(x + 1, v, sizes)

    def of_others(x: Any, w: Any, v: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, w, sizes) + lax.ragged_dot(x, v, sizes[::-1]) + x

    weights, sizes = S((4, K, N), BF16), S((4,), jnp.int32)
    names = [names for *_, names in products(sums, X, weights, weights, sizes)]
    assert names[0] is None and "add" in names[1]
    names = [names for *_, names in products(of_others, X, weights, weights, sizes)]
    assert names == [None, None]
    x, w, v = (integers(shape, "bfloat16", seed) for seed, shape in enumerate(
        ((16, 8), (4, 8, 8), (4, 8, 8))
    ))  # fmt: skip
    sizes = jnp.array([3, 0, 5, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse_jaxpr, "_refusal", lambda *_: None)
        for function in (sums, of_others):
            found = jhg.accelerate(function)(x, w, v, sizes)
            np.testing.assert_array_equal(found, function(x, w, v, sizes))
    assert not jnp.any(sums(x, w, v, sizes)[10:])


def test_calls_without_results_are_left_out() -> None:
    nothing = jax.jit(lambda y: None)

    @jax.jit
    def activated(y: Any) -> Any:
        nothing(y)
        return jax.nn.relu(y)

    found = products(lambda x, w: activated(x @ w), X, W)
    assert found == [(1, ("bfloat16",), ["custom_jvp_call"])]


def test_effects_without_results_stay() -> None:
    """Such an equation has no variable, and stays where it is."""
    seen: list[float] = []

    def function(x: Any, w: Any) -> Any:
        jax.debug.callback(lambda y: seen.append(float(y)), x[0, 0])
        return jnp.tanh(x @ w)

    assert [names for *_, names in products(function, X, W)] == [["tanh"]]
    x, w = integers((16, 8), "bfloat16"), integers((8, 8), "bfloat16")
    np.testing.assert_array_equal(jhg.accelerate(function)(x, w), jnp.tanh(x @ w))
    jax.effects_barrier()
    assert seen == [float(x[0, 0])]


@pytest.mark.parametrize("reads", [1, 2])
def test_residuals_begin_with_what_xla_computes(reads: int) -> None:
    """The sum of two arrays is one array to read; of one array its multiple is computed anew."""

    def function(x: Any, w: Any, v: Any, positions: Any) -> Any:
        x = x * 3 if reads == 1 else x + positions
        for y in (w, v):
            x = x + rms(x) @ y
        return rms(x)

    def rms(x: Any) -> Any:
        wide = x.astype(F32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True))).astype(BF16)

    first, second = (
        (e.invars[2:], [step.primitive.name for step in e.params["jaxpr"].eqns])
        for e in equations(function, X, W, V, S((M, K), BF16))
        if e.primitive.name == "hopper_fused"
    )
    for operands, names in (first, second):
        assert [x.aval.shape for x in operands] == [(M, N)]
        assert "add" in names
    assert ("mul" in first[1]) == (reads == 1) and "mul" not in second[1]


@pytest.mark.parametrize("of_less", [False, True])
def test_of_a_region_that_does_not_pay_less_is_tried(
    of_less: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless less is refused as well."""

    def function(x: Any, w: Any, v: Any, b: Any) -> Any:
        h = jnp.tanh(x @ w) * (x @ v) + b
        return h, h.astype(F32).sum(0)

    whole = [(2, ("bfloat16", "float32"), ["tanh", "mul", "add", "reduce_sum"])]
    assert products(function, X, W, V, ROW) == whole
    refused: list[int] = []

    def refusal(equations: Any, region: Any, *_: Any) -> fuse_jaxpr.Refusal | None:
        refused.append(len(region.products))
        too_much = (region.sums and not of_less) or len(region.products) > 1
        return fuse_jaxpr.Refusal("too much", of_less) if too_much else None

    monkeypatch.setattr(fuse_jaxpr, "_refusal", refusal)
    first, second = products(function, X, W, V, ROW)
    without_sum = [] if of_less else [2]
    assert refused == [2, *without_sum, 1, 1]  # both products, and each by itself
    total = ["reduce_sum"] if of_less else []  # that the second takes along
    assert (first[2], second[2]) == (["tanh"], ["mul", "add", *total])


def test_a_value_is_not_computed_before_what_it_reads() -> None:
    """The first product's second reader waits for the second product, which reads the first."""

    def function(x: Any, w: Any, v: Any) -> Any:
        first = x @ w
        return first * jnp.sort(jnp.tanh(first) @ v)

    first, second = products(function, X, W, V)
    assert first[2] == ["tanh"] and second[2] is None


def test_xla_takes_a_sum_that_the_last_product_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = fuse_jaxpr.Refusal("a sum")
    monkeypatch.setattr(fuse_jaxpr, "_refusal", lambda _, region, *__: region.sums and sums)
    arguments = [integers((8, 8), "bfloat16", seed=seed) for seed in range(5)]

    def function(x: Any, w: Any, y: Any, v: Any, scale: Any) -> Any:
        total = x @ w + y @ v
        return (total * scale).astype(F32).sum(0), jnp.sort(total)

    assert [names for *_, names in products(function, *arguments)] == [None, ["add"]]
    ours = jhg.accelerate(function)(*arguments)
    for mine, theirs in zip(ours, function(*arguments), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_report_says_what_is_fused_and_what_not() -> None:
    def function(x: Any, w: Any, v: Any, b: Any) -> Any:
        return jnp.tanh(x @ w + b) @ v

    report = jhg.explain(function, X, W, V, ROW)
    first, second = report.products
    assert first.fused.startswith("fused: add, tanh") and first.saved_us > 0
    assert second.fused == "" and report.kernel_share in (0.5, 1.0)
    assert report.flops == 2 * 2 * M * K * N
    (alone,) = jhg.explain(lambda x, w: jnp.tanh(x @ w), *LONG).products
    assert alone.fused.startswith("not fused: ")


def test_a_report_lists_equal_products_once() -> None:
    def function(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return lax.scan(lambda c, _: (c @ w, None), x, None, 5)[0]

    report = jhg.explain(function, X, W)
    assert [x.runs for x in report.products] == [1, 1, 1, 5]
    text = str(report)
    assert text.count("bf16[4096,4096] x") == 2 and " x 3 " in text and " x 5 " in text
