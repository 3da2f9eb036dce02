"""Products inside `jax.shard_map`: types, numbers and gradients are those of JAX's products."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.collectives import run_counted
from support.program_inspection import integers

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes, sharding
from jax_hopper_gemm.testing.lowered import specs_of

SIZES = jnp.array([3, 0, 4, 1])
relu = jax.nn.relu


def dot(product: Callable[..., Any], a: jax.Array, b: jax.Array) -> Any:
    return product(a, b, (((1,), (0,)), ((), ())))


def softmax_sum(y: jax.Array) -> Any:
    return jax.nn.softmax(y), y.sum(0)


PROGRAMS: dict[str, tuple[tuple[tuple[int, ...], ...], Any, Any]] = {
    "matmul": (((8, 8), (8, 8)), jhg.matmul, jnp.matmul),
    "dot_general": (
        ((8, 8), (8, 8)), partial(dot, jhg.dot_general), partial(dot, jax.lax.dot_general),
    ),
    "epilogue": (
        ((8, 8), (8, 8), (8,)),
        lambda a, b, c: jhg.matmul(a, b, bias=c, activation=relu),
        lambda a, b, c: relu(a @ b + c),
    ),
    "results": (
        ((8, 8), (8, 8)),
        lambda a, b: jhg.matmul(a, b, epilogue=softmax_sum),
        lambda a, b: softmax_sum(a @ b),
    ),
    "gated": (
        ((8, 8), (8, 8), (8, 8)),
        lambda x, gate, up: jhg.gated_linear_unit(x, (gate, up), activation=relu),
        lambda x, gate, up: relu(x @ gate) * (x @ up),
    ),
    "ragged_dot": (
        ((8, 8), (4, 8, 8)),
        lambda a, b: jhg.ragged_dot(a, b, SIZES),
        lambda a, b: jax.lax.ragged_dot(a, b, SIZES),
    ),
}  # fmt: skip


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def per_device(shapes: Any, specs: Any) -> list[jax.Array]:
    """Returns arrays of which each device that has a part has these shapes."""
    arrays = []
    for i, (shape, spec) in enumerate(zip(shapes, specs, strict=True)):
        count = {P(): 1, P("x"): 2, P(("x", "y")): 4}[spec]
        arrays.append(integers((count * shape[0], *shape[1:]), seed=i))
    return arrays


def mapped(function: Callable[..., Any], specs: Any, types: list[Any]) -> Callable[..., Any]:
    """Returns the function on each device, its results stacked; notes their types."""

    def local(*args: Any) -> Any:
        found = function(*args)
        types.append(jax.tree.map(jax.typeof, found))
        return jax.tree.map(lambda x: jax.lax.pcast(x[None], missing(x), to="varying"), found)

    out = P(("x", "y"))
    return jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=out, check_vma=True)


def missing(x: Any) -> tuple[str, ...]:
    return tuple({"x", "y"} - set(jax.typeof(x).manual_axis_type.varying))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("lhs, rhs", [(P(), P(("x", "y"))), (P("x"), P()), (P(("x", "y")), P("x"))])
def test_types_and_numbers_are_those_of_jax(name, lhs, rhs):
    shapes, ours, plain = PROGRAMS[name]
    specs = (lhs, *[rhs] * (len(shapes) - 1))
    args = per_device(shapes, specs)

    def step(function: Callable[..., Any], types: list[Any], *args: Any) -> Any:
        result, pull = jax.vjp(mapped(function, specs, types), *args)
        return result, pull(result)

    types: tuple[list[Any], list[Any]] = ([], [])
    found, collectives = run_counted(partial(step, ours, types[0]), *args)
    expected, wanted = run_counted(partial(step, plain, types[1]), *args)
    assert types[0][0] == types[1][0]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
    if name == "gated" and collectives != wanted:  # both gradients of x are summed at once
        ((kind, (count, size)),) = wanted.items()
        wanted = {kind: (count, size // 2)}
    assert collectives == wanted


# Over all axes of the mesh but one: the program of a device's group is partitioned along that one.

ALONG: list[tuple[str, P, P]] = [
    ("x", P(None, "y"), P("y")),  # K
    ("x", P(), P(None, "y")),  # N
    ("y", P("x"), P()),  # M
    ("y", P(None, "x"), P("x")),
]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["matmul", "epilogue", "gated"])
@pytest.mark.parametrize("manual, lhs, rhs", ALONG)
def test_one_axis_left_is_partitioned(name, manual, lhs, rhs):
    layout = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    (a, b, *more), ours, plain = PROGRAMS[name]
    arrays = [integers((8 * a[0], 4 * a[1])), *(integers((4 * b[0], b[1]), seed=i) for i in (1, 2))]
    arrays[2] = arrays[2] if more == [b] else integers(b[1:], seed=3)
    specs = [lhs, rhs, rhs if more == [b] else P()]
    args = [
        jax.device_put(x, NamedSharding(layout, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ][: 2 + len(more)]

    def step(function: Callable[..., Any], *args: Any) -> Any:
        rows = P(manual)
        mapped = jax.shard_map(
            function, mesh=layout, axis_names={manual}, out_specs=rows,
            in_specs=(rows, *[P()] * (len(args) - 1)),
        )  # fmt: skip
        result, pull = jax.vjp(mapped, *args)
        return result, pull(result)

    text = jax.jit(lambda *args: step(ours, *args)).lower(*args).as_text()
    assert sharding.TARGET in text and "stablehlo.dot_general" not in text
    found, collectives = run_counted(partial(step, ours), *args)
    expected, wanted = run_counted(partial(step, plain), *args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert collectives == wanted


@pytest.mark.usefixtures("on_cpu")
def test_the_middle_axis_of_three_is_partitioned():
    layout = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    specs = P(("x", "z"), "y"), P("y")
    a, b = (
        jax.device_put(integers(shape, seed=i), NamedSharding(layout, spec))
        for i, (shape, spec) in enumerate(zip([(64, 32), (32, 16)], specs, strict=True))
    )
    mapped = jax.shard_map(
        jhg.matmul, mesh=layout, axis_names={"x", "z"}, out_specs=P(("x", "z")),
        in_specs=(P(("x", "z")), P()),
    )  # fmt: skip
    found, collectives = run_counted(mapped, a, b)
    np.testing.assert_array_equal(found, a @ b)
    assert collectives == {"all-reduce": (1, 4 * 16 * 16)}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rhs", [P(None, "y"), P(None, None, "y"), P("y")])
def test_ragged_products_are_partitioned_along_the_axis_left(rhs):
    layout = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    weights = jax.device_put(integers((4, 32, 16), seed=1), NamedSharding(layout, rhs))
    rows = integers((64, 32))

    def step(product: Callable[..., Any], x: jax.Array, w: jax.Array) -> Any:
        sizes = jnp.array([10, 0, 17, 5])
        mapped = jax.shard_map(
            lambda x, w: product(x, w, sizes), mesh=layout, axis_names={"x"},
            in_specs=(P("x"), P()), out_specs=P("x"),
        )  # fmt: skip
        result, pull = jax.vjp(mapped, x, w)
        return result, pull(result)

    lowered = jax.jit(partial(step, jhg.ragged_dot)).lower(rows, weights)
    assert sharding.TARGET in lowered.as_text()
    found, expected = (
        jax.jit(partial(step, f))(rows, weights) for f in (jhg.ragged_dot, jax.lax.ragged_dot)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.usefixtures("on_cpu")
def test_parts_of_the_axis_left_are_not_partitioned_along():
    """XLA may then number the devices of a group in another order than the axis does."""
    layout = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    halves = jax.make_mesh((2, 2, 2), ("x", "y0", "y1"), axis_types=(AxisType.Auto,) * 3)
    a, b = integers((64, 32)), integers((32, 16), seed=1)
    a = jax.device_put(a, NamedSharding(halves, P("y1", "y0")))
    b = jax.device_put(b, NamedSharding(halves, P("y0", "y1")))
    mapped = jax.shard_map(
        jhg.matmul, mesh=layout, axis_names={"x"}, in_specs=(P("x"), P()), out_specs=P("x")
    )
    np.testing.assert_array_equal(jax.jit(mapped)(a, b), jnp.matmul(a, b))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "names, lhs, rhs",
    [
        ({"x", "y"}, P("x"), P()),
        ({"x", "y"}, P("x"), P(None, "y")),
        ({"x"}, P("x"), P()),
        ({"x"}, P(), P(None, "x")),
    ],
)
def test_a_state_that_devices_share_has_the_largest_magnitude_of_all(axis_type, names, lhs, rhs):
    """The next state, a gradient, is no sum over devices."""
    specs = lhs, rhs, P(), P(*lhs or (None,), *rhs[1:])
    over = tuple(names & {x for spec in (lhs, rhs) for x in spec if x})
    layout = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    x, w, ct = (integers(shape, seed=i) for i, shape in enumerate(((8, 32), (32, 16), (8, 16))))
    factors = np.arange(16, dtype=np.float32)
    x, w, ct = x * factors[:8, None], w * factors, ct * factors
    arrays: Any = np.full(3, 0.5, "f4"), np.ones((3, 2), "f4")
    state = recipes.DelayedScaling(*arrays)

    def loss(x: Any, w: Any, state: Any, ct: Any) -> Any:
        return (jhg.matmul(x, w, recipe=state) * ct).sum()

    mapped = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), over), mesh=layout, in_specs=specs, out_specs=P(),
        axis_names=names,
    )  # fmt: skip
    with jax.set_mesh(layout):
        places = (NamedSharding(layout, spec) for spec in specs)
        args = map(jax.device_put, (x, w, state, ct), places)
        found = jax.jit(jax.grad(mapped, (0, 1, 2)))(*args)
    whole = jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, state, ct)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-3), found, whole)


# What is lowered for a GPU.

FUNCTIONS: dict[str, Any] = {
    "relu": relu,
    "leaky_relu": jax.nn.leaky_relu,
    "relu6": jax.nn.relu6,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "where": lambda y: jnp.where(y > 0, y, 0.1 * y),
    "clipped": lambda y: jnp.clip(y, -1, 3),
}


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_and_what_follows_them_are_those_of_one_device(name):
    """Constants vary over no mesh axis, other values over all: JAX wants operands alike."""

    def step(x: Any, w: Any, bias: Any, cotangent: Any) -> Any:
        def product(x: Any, w: Any, bias: Any) -> jax.Array:
            return jhg.matmul(x, w, bias=bias, activation=FUNCTIONS[name], implementation="hopper")

        y, pull = jax.vjp(product, x, w, bias)
        return y, *pull(cotangent)

    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P("x"), P(), P(), P("x")), out_specs=(P("x"), P("x"), P(), P())
    )
    shapes = (256, 128), (128, 192), (192,), (256, 192)
    gathered = [(512, *shape[1:]) if shape[0] == 256 else shape for shape in shapes]
    whole = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in gathered]
    alone = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    assert specs_of(mapped, *whole) == specs_of(step, *alone) != []


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_accelerate_takes_gradients_of_ragged_products(axis_type, is_set):
    """JAX's own gradients state a sharding that names no axis."""
    devices = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    specs = P("x"), P(), P()
    shapes = (32, 16), (4, 16, 8)
    arrays = [*(integers(x, "bfloat16", seed=i) for i, x in enumerate(shapes)), SIZES]
    args = [
        jax.device_put(x, NamedSharding(devices, s)) for x, s in zip(arrays, specs, strict=True)
    ]

    def loss(a: Any, w: Any, sizes: Any) -> Any:
        return jnp.sum(jax.lax.ragged_dot(a, w, sizes).astype("float32") ** 2)

    step = jax.shard_map(
        jax.grad(loss, (0, 1)), mesh=devices, in_specs=specs, out_specs=(P("x"), P())
    )
    with jax.set_mesh(devices) if is_set else nullcontext():
        report = jhg.explain(step, *args)
        assert (len(report.taken), report.left) == (3, ())
        found, expected = jax.jit(jhg.accelerate(step))(*args), jax.jit(step)(*args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def reference_of_rows(x: jax.Array, w: jax.Array, bias: jax.Array) -> Any:
    """Products of rows in groups with their group's bias; 0 of other rows in the product."""
    rows = jnp.repeat(jnp.arange(4), SIZES, total_repeat_length=x.shape[0])
    return jax.lax.ragged_dot(x, w, SIZES) + bias[rows] * (jnp.arange(x.shape[0]) < 8)[:, None]


FUNCTIONS_OF_ROWS: dict[str, tuple[Any, Any]] = {
    "numbers": (
        lambda x, w, b: jhg.ragged_dot(x, w, SIZES, activation=lambda y: y * 2.0),
        lambda x, w, b: jax.lax.ragged_dot(x, w, SIZES) * 2.0,
    ),
    "operands": (
        lambda x, w, b: jhg.ragged_dot(
            x, w, SIZES, epilogue=lambda y, c: y + c, epilogue_operands=(b[0],)
        )[:8],
        lambda x, w, b: (jax.lax.ragged_dot(x, w, SIZES) + b[0])[:8],
    ),
    "bias": (
        lambda x, w, b: jhg.ragged_dot(x, w, SIZES, bias=b, activation="relu"),
        lambda x, w, b: jax.nn.relu(reference_of_rows(x, w, b)),
    ),
    "gated": (
        lambda x, w, b: jhg.gated_linear_unit(
            x, (w, w), group_sizes=SIZES, bias=(b, b), activation=lambda y: y * 0.5
        ),
        lambda x, w, b: 0.5 * reference_of_rows(x, w, b) ** 2,
    ),
    "offset": (
        lambda x, w, b: jhg.ragged_dot(x, w, SIZES, group_offset=jnp.int32(0)),
        lambda x, w, b: jax.lax.ragged_dot(x, w, SIZES),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS_OF_ROWS)
@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}], ids=["some axes", "all axes"])
def test_functions_of_ragged_products_vary_as_these_do(name, manual):
    """Weights and biases are those of all devices, whose gradients are added up."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    args = integers((20, 8)), integers((4, 8, 8), seed=1), integers((4, 8), seed=2)

    def step(function: Any) -> Any:
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), axis_names=manual
        )

        def loss(*args: Any) -> Any:
            y = mapped(*args)
            return (y**2).sum(), y

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

    ours, theirs = (step(function)(*args) for function in FUNCTIONS_OF_ROWS[name])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), ours, theirs)


LAYERS: dict[str, tuple[Any, int]] = {
    "residual": (lambda x, w: x + jnp.tanh(x @ w), 1),
    "gelu": (lambda x, u, d: x + jax.nn.gelu(x @ u) @ d, 2),
    "gated": (lambda x, g, u, d: x + (jax.nn.silu(x @ g) * (x @ u)) @ d, 3),
    "two readers": (lambda x, q, k: jnp.tanh(x @ q) + jnp.sin(x @ k), 2),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("outside", [True, False])
def test_accelerate_rewrites_gradients_of_what_is_read_twice(name, outside):
    """The gradient of a program that is mapped, or a gradient that is mapped."""
    layer, count = LAYERS[name]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = P("x"), *[P()] * count
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=(64, 32)) / 6, jnp.bfloat16) for _ in range(1)]
    args += [jnp.asarray(rng.normal(size=(32, 32)) / 6, jnp.bfloat16) for _ in range(count)]

    def loss(function: Any, *args: Any) -> Any:
        return (function(*args).astype(jnp.float32) ** 2).sum()

    if outside:
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("x"))
        step = jax.grad(partial(loss, mapped), tuple(range(count + 1)))
    else:
        gradient = jax.grad(partial(loss, layer))
        step = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=P("x"))
    accelerated = jhg.accelerate(step)
    found, wanted = jax.jit(accelerated)(*args), jax.jit(step)(*args)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        error = np.linalg.norm(np.asarray(ours - theirs, np.float32))
        assert error <= 0.02 * np.linalg.norm(np.asarray(theirs, np.float32))
    assert "hopper_fused" in str(jax.make_jaxpr(accelerated)(*args))
    again = jax.jit(jax.jvp, static_argnums=0)(accelerated, args, args)  # JAX's rules still agree
    assert jax.tree.map(jax.typeof, again[1]) == jax.tree.map(jax.typeof, found)
