"""`accelerate` launches products of one array together, where the cost model gains by it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval as pe
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.accelerated import accelerated, equations
from support.program_inspection import integers, products_of

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes
from jax_hopper_gemm.testing.lowered import specs_of

ROWS, WIDTH = 512, 1024
S = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16
X, Q, K, V = S((ROWS, WIDTH), BF16), S((WIDTH, WIDTH), BF16), *(S((WIDTH, 256), BF16),) * 2
H = S((ROWS, WIDTH), BF16)
BQ, BK = S((WIDTH,), BF16), S((256,), BF16)


def launches(function: Callable[..., Any], *args: Any, **options: Any) -> list[int]:
    """Returns how many products each launch of an accelerated function is of."""
    return [n for n in map(products_of, equations(function, *args, **options)) if n]


def projections(x: Any, *weights: Any) -> list[Any]:
    return [x @ w for w in weights]


def gradients(x: Any, *cotangents: Any) -> list[Any]:
    return [jnp.einsum("sd,sn->dn", x, g) for g in cotangents]


def biased(x: Any, *arrays: Any) -> list[Any]:
    def layer(w: Any, b: Any) -> Any:
        return (jnp.dot(x, w, preferred_element_type="float32") + b).astype(x.dtype)

    return [layer(w, b) for w, b in zip(arrays[::2], arrays[1::2], strict=True)]


def updates(x: Any, rate: Any, *arrays: Any) -> list[Any]:
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [w - (rate * jnp.einsum("sd,sn->dn", x, g)).astype(w.dtype) for g, w in pairs]


def update(x: Any, q: Any, k: Any) -> Any:
    return jnp.sort(x @ q).at[:, :256].add(jnp.sort(x @ k))


def chained(x: Any, q: Any) -> Any:
    y = x @ q
    return y, x @ jnp.sort(y).T


TOGETHER = {
    "forward": (projections, (X, Q, K, V), [3]),
    "two": (projections, (X, K, V), [2]),
    "seven": (projections, (X, *[K] * 7), [4, 3]),
    "gradients of weights": (gradients, (X, H, S((ROWS, 256), BF16)), [2]),
    "heads": (
        lambda x, q, k: (jnp.einsum("sd,dhe->she", x, q), jnp.einsum("sd,dhe->she", x, k)),
        (X, S((WIDTH, 8, 64), BF16), S((WIDTH, 2, 64), BF16)), [2],
    ),
    "transposed weights": (lambda x, q, k: (x @ q.T, x @ k.T), (X, Q, S((256, WIDTH), BF16)), [2]),
    "batch and sequence": (projections, (S((2, 256, WIDTH), BF16), Q, K), [2]),
    "later weights": (lambda x, q, k: (x @ q, x @ jnp.roll(k, 1)), (X, Q, K), [2]),
    "an earlier reader": (lambda x, q, k: (jnp.sort(x @ q), x @ k), (X, Q, K), [2]),
    "a loop": (
        lambda x, q, k: lax.fori_loop(0, 3, lambda _, c: update(c, q, k), x),
        (X, Q, K), [2],
    ),
    "float32 results": (
        lambda x, k, v: [jnp.dot(x, w, preferred_element_type="float32") for w in (k, v)],
        (X, K, V), [2],
    ),
    "biases": (biased, (X, Q, BQ, K, BK, V, BK), [3]),
    "biases of some": (
        lambda x, q, b, k, v: [*biased(x, q, b, v, b), x @ k, x @ (k + 1)],
        (X, Q, BQ, K, Q), [2, 2],
    ),
    "biases of heads": (
        lambda x, q, b, k, c: [
            jnp.einsum("sd,dhe->she", x, w, preferred_element_type="float32") + y.astype("float32")
            for w, y in ((q, b), (k, c))
        ],
        (X, *[S(shape, BF16) for shape in ((WIDTH, 8, 64), (8, 64), (WIDTH, 2, 64), (2, 64))]), [2],
    ),
    "activations": (lambda x, k, v: [jax.nn.relu(x @ w) for w in (k, v)], (X, K, V), [2]),
    "updates of weights": (
        updates, (X, S((), BF16), H, S((WIDTH, WIDTH), BF16), S((ROWS, 256), BF16), K), [2],
    ),
}  # fmt: skip
APART = {
    "of different arrays": (lambda x, y, k: (x @ k, y @ k), (X, H, K)),
    "one needs the other": (chained, (X, Q)),
    "dtypes of results": (
        lambda x, k, v: (x @ k, jnp.dot(x, v, preferred_element_type="float32")), (X, K, V),
    ),
    "float32": (projections, [x.update(dtype="float32") for x in (X, K, V)]),
    "layouts": (lambda x, k, v: (x @ k, x @ v.T), (X, K, S((256, WIDTH), BF16))),
    "one with a bias": (lambda x, k, v, b: (x @ k, x @ v + b), (X, K, V, BK)),
    "other activations": (
        lambda x, k, v: (jax.nn.relu(x @ k), jnp.abs(x @ v)), (X, K, V),
    ),
    "a bias and a matrix": (
        lambda x, k, b, v, c: (x @ k + b, x @ v + c), (X, K, S((ROWS, 256), BF16), V, BK),
    ),
    "largest values of rows": (
        lambda x, k, v: [(y := x @ w, y.max(1)) for w in (k, v)], (X, K, V),
    ),
    "batches": (
        lambda x, k, v: (jnp.matmul(x, k), jnp.matmul(x, v)),
        [S((4, *x.shape), BF16) for x in (X, K, V)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_products_of_one_array_are_one_launch(name: str) -> None:
    function, shapes, expected = TOGETHER[name]
    assert sorted(launches(function, *shapes), reverse=True) == expected
    assert set(launches(function, *shapes, fuse=False)) == {1}


@pytest.mark.parametrize("name", APART)
def test_others_are_launched_one_by_one(name: str) -> None:
    function, shapes = APART[name]
    assert set(launches(function, *shapes)) == {1}


def test_products_by_a_recipe_or_with_bits_of_their_own_are_launched_one_by_one() -> None:
    assert set(launches(projections, X, Q, K, recipe=recipes.CurrentScaling())) == {1}
    with jhg.batch_invariant():
        assert set(launches(projections, X, Q, K)) == {1}


@pytest.mark.usefixtures("launcher", "kernels_by_default")
def test_shards_of_products_that_xla_partitions_are_launched_one_by_one() -> None:
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    rows, whole = (NamedSharding(mesh, P(*axes)) for axes in (("rows",), ()))
    step = jax.jit(jhg.accelerate(projections), in_shardings=(rows, whole, whole))
    arrays = [integers(x.shape, "bfloat16", i) for i, x in enumerate((X, Q, K))]
    assert launches(projections, *arrays) == [2]
    text = step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("hopper_dot") >= 2 and "jax_hopper_gemm.v1.launch" not in text
    for found, expected in zip(step(*arrays), projections(*arrays), strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))


def test_two_groups_that_would_wait_for_each_other_are_not_both_launched_together() -> None:
    def function(x: Any, y: Any, k: Any, v: Any) -> Any:
        a, c = x @ k, y @ v
        b = x @ jnp.roll(v, c[0, 0].astype(int))
        d = y @ jnp.roll(k, a[0, 0].astype(int))
        return a, b, c, d

    assert sorted(launches(function, X, H, K, V)) == [1, 1, 2]


def test_effects_keep_their_order() -> None:
    """One launch would have to come before the first effect, and so the second one."""
    seen: list[int] = []

    def effect(number: int, x: Any) -> Any:
        def note(value: Any) -> Any:
            seen.append(number)
            return value

        return io_callback(note, x, x, ordered=True)

    def function(x: Any, k: Any, v: Any) -> Any:
        y = effect(1, (x @ k)[0])
        return y, x @ (v * effect(2, v[0]))

    arrays = [integers(shape.shape, "bfloat16", i) for i, shape in enumerate((X, K, V))]
    assert launches(function, *arrays) == [1, 1]
    jax.block_until_ready(jax.jit(jhg.accelerate(function))(*arrays))
    jax.effects_barrier()
    assert seen == [1, 2]


@pytest.mark.parametrize("name", TOGETHER)
def test_results_are_those_of_the_products(name: str) -> None:
    function, shapes, _ = TOGETHER[name]
    arrays = [integers(x.shape, "bfloat16", i) for i, x in enumerate(shapes)]
    found, expected = (jax.jit(f(function))(*arrays) for f in (jhg.accelerate, lambda f: f))
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.float32(x), np.float32(y))


def test_derivatives_and_vmap_are_those_of_the_products() -> None:
    x, k, v = (integers((8, 16), "bfloat16", i) for i in range(3))
    k, v = k.T, v.T

    def loss(function: Any) -> Any:
        return lambda *arrays: sum((i + 1) * y.sum() for i, y in enumerate(function(*arrays)))

    arrays = x, k, v
    for transform in (
        lambda f: jax.grad(loss(f), (0, 1, 2)),
        lambda f: lambda *xs: jax.jvp(f, xs, xs),
        lambda f: lambda *xs: jax.linear_transpose(lambda y: f(y, *xs[1:]), xs[0])(
            [y @ w for y, w in ((xs[0], xs[1]), (xs[0], xs[2]))]
        ),
        lambda f: jax.vmap(f, (None, 1, None)),
        lambda f: jax.vmap(f, (0, None, None)),
        lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    ):
        found, expected = (
            transform(f)(*arrays) for f in (jhg.accelerate(projections), projections)
        )
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_array_equal(np.float32(a), np.float32(b))


@pytest.mark.slow
def test_derivatives_and_vmap_of_products_with_epilogues_are_those_of_the_products() -> None:
    x, k, v = (integers((8, 16), "bfloat16", i) for i in range(3))
    arrays = x, k.T, integers((8,), "bfloat16", 3), v.T, integers((8,), "bfloat16", 4)

    def loss(function: Any) -> Any:
        return lambda *arrays: sum((i + 1) * y.sum() for i, y in enumerate(function(*arrays)))

    for transform in (
        lambda f: jax.grad(loss(f), (0, 1, 2, 3, 4)),
        lambda f: lambda *xs: jax.jvp(f, xs, xs),
        lambda f: jax.vmap(f, (None, 1, 0, None, None)),
        lambda f: jax.vmap(f, (0, None, None, None, 0)),
        lambda f: jax.vmap(f, (None, None, 0, None, None)),
    ):
        found, expected = (transform(f)(*arrays) for f in (jhg.accelerate(biased), biased))
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_a_result_that_nothing_reads_is_not_computed() -> None:
    whole = jax.make_jaxpr(jhg.accelerate(projections))(X, Q, K, V)
    (outer,) = whole.jaxpr.eqns
    inner = outer.params["call_jaxpr"].jaxpr
    less, used = pe.dce_jaxpr(inner, [True, False, True])
    (launch,) = less.eqns
    assert (len(launch.outvars), used) == (2, [True, True, False, True])
    alone, _ = pe.dce_jaxpr(inner, [False, False, True])
    (spec,) = specs_of(jaxpr_as_fun(ClosedJaxpr(alone, ())), X, V)
    assert spec.panels == 1


def test_an_epilogue_whose_results_nothing_reads_is_not_computed() -> None:
    def function(x: Any, rate: Any, *arrays: Any) -> Any:
        return [(w, jnp.float32(w)) for w in updates(x, rate, *arrays)]

    shapes = X, S((), BF16), H, S((WIDTH, WIDTH), BF16), S((ROWS, 256), BF16), K
    whole = accelerated(function, *shapes)
    (launch,) = [e for e in whole.eqns if e.primitive.name == "hopper_dots"]
    assert len(launch.outvars) == 4
    less, _ = pe.dce_jaxpr(whole, [True, False, False, True])
    (launch,) = [e for e in less.eqns if e.primitive.name == "hopper_dots"]
    assert [len(x.out_avals) for x in launch.params["functions"]] == [1, 1]
    arrays = [integers(x.shape, "bfloat16", i) for i, x in enumerate(shapes)]
    every = jaxpr_as_fun(ClosedJaxpr(whole, ()))(*arrays)
    some = jaxpr_as_fun(ClosedJaxpr(less, ()))(*arrays)
    for found, expected in zip(some, every[::3], strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))
    alone, used = pe.dce_jaxpr(whole, [False, False, True, False])
    (launch,) = [e for e in alone.eqns if e.primitive.name == "hopper_dots"]
    assert len(launch.invars) == 4 and used == [True, True, False, False, True, True]


@pytest.mark.usefixtures("launcher")
def test_updates_take_the_memory_of_what_they_update() -> None:
    shapes = X, S((), BF16), H, S((WIDTH, WIDTH), BF16), S((ROWS, 256), BF16), K
    step = jax.jit(jhg.accelerate(updates), donate_argnums=(3, 5))
    text = step.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "jax_hopper_gemm.v1.launch" in line]
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", call)
    assert aliases == [("0", "3"), ("1", "5")]
    kept = jax.jit(jhg.accelerate(updates)).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "operand_index" not in kept.as_text()


@pytest.mark.usefixtures("launcher")
def test_nothing_overwrites_what_is_multiplied_in_the_same_launch() -> None:
    def function(x: Any, v: Any, w: Any, u: Any) -> tuple[Any, Any]:
        return w - x @ v, u - x @ w

    square = S((WIDTH, WIDTH), BF16)
    assert launches(function, *[square] * 4) == [2]
    step = jax.jit(jhg.accelerate(function), donate_argnums=(2, 3))
    text = step.trace(*[square] * 4).lower(lowering_platforms=("cuda",)).as_text()
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", text)
    assert aliases == [("1", "4")]


@pytest.mark.usefixtures("launcher")
def test_one_kernel_is_launched_on_a_gpu() -> None:
    (spec,) = specs_of(jhg.accelerate(projections), X, Q, K, V)
    assert spec.panels == 3


@pytest.mark.usefixtures("launcher", "kernels_by_default")
def test_what_kernels_of_one_product_read_in_place_is_read_by_these() -> None:
    def function(x: Any, stack: Any, i: Any, k: Any) -> Any:
        return x @ stack[i], x @ k

    arguments = X, S((4, WIDTH, 256), BF16), S((), "int32"), K
    assert launches(function, *arguments) == [2]
    first, second = specs_of(jhg.accelerate(function), *arguments)
    assert (first.panels, second.panels) == (1, 1) and first.indexed
    assert [x.product.count(" and ") for x in jhg.explain(function, *arguments).products] == [0, 0]


def test_explain_says_what_is_launched_together() -> None:
    (product,) = jhg.explain(projections, X, Q, K, V).products
    assert product.path == "hopper" and product.flops == 2 * ROWS * WIDTH * (WIDTH + 512)
    assert product.product == (
        "bf16[512,1024] x bf16[1024,1024] and bf16[1024,256] and bf16[1024,256] by 'ab,bc->ac' "
        "into bf16"
    )
    assert "one by one" in product.reason
    (product,) = jhg.explain(biased, X, K, BK, V, BK).products
    assert product.product.endswith("with an epilogue each") and product.saved_us > 0
    assert product.fused == "fused: add; reads row f32; writes matrix bf16"
