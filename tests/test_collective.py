"""All-gather matmul and matmul reduce-scatter on eight devices, beside their unoverlapped forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.collectives import run_counted
from support.program_inspection import LAUNCH, integers, lowered

import jax_hopper_gemm as jhg

AXIS = {"axis_name": "tp"}


def mesh_of(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("tp",), axis_types=(AxisType.Auto,))


def gather_then_matmul(x: Any, w: Any, axis_name: Any) -> Any:
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ w


def matmul_then_scatter(x: Any, w: Any, axis_name: Any) -> Any:
    return lax.psum_scatter(x @ w, axis_name, scatter_dimension=x.ndim - 2, tiled=True)


PRODUCTS = {  # and their unoverlapped forms
    "gather": (jhg.all_gather_matmul, gather_then_matmul),
    "scatter": (jhg.matmul_reduce_scatter, matmul_then_scatter),
}


def specs_of(name: str, batch: int = 0) -> tuple[tuple[P, P], P]:
    """Returns how x and w are split, and the result."""
    rows, columns = (P(*[None] * batch, *split) for split in (("tp", None), (None, "tp")))
    if name == "gather":
        return (rows, P(None, "tp")), columns
    return (columns, P("tp", None)), rows


def both(name: str, count: int, batch: int = 0, **options: Any) -> list[Any]:
    """Returns ours and the unoverlapped form, as functions of whole arrays."""
    in_specs, out_specs = specs_of(name, batch)
    mapped = partial(
        jax.shard_map, mesh=mesh_of(count), in_specs=in_specs, out_specs=out_specs, **options
    )
    return [mapped(partial(f, axis_name="tp")) for f in PRODUCTS[name]]


def step(f: Any, x: Any, w: Any, cotangent: Any) -> Any:
    """The product, its tangent, its gradients, and the gradients' tangents."""

    def gradients(x: Any, w: Any) -> Any:
        return jax.vjp(f, x, w)[1](cotangent)

    return jax.jvp(f, (x, w), (x[::-1], w[::-1])), jax.jvp(gradients, (x, w), (x[::-1], w[::-1]))


def assert_equal(ours: Any, theirs: Any) -> None:
    def check(a: Any, b: Any) -> None:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))

    jax.tree.map(check, ours, theirs)


@pytest.mark.parametrize(
    ("count", "rows", "batch", "dtype"),
    [
        (1, 6, (), "float32"),
        (2, 6, (), "bfloat16"),
        (4, 12, (3,), "float32"),  # three rows a device: halves of one and two
        (8, 8, (), "float16"),
    ],
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_derivatives_are_those_of_the_unoverlapped_form(
    name, count, rows, batch, dtype
):
    x = integers((*batch, rows, 8), dtype)
    w = integers((8, 16), dtype, seed=1)
    ct = integers((*batch, rows, 16), dtype, seed=2)
    ours, theirs = both(name, count, len(batch))
    assert_equal(*(jax.jit(partial(step, f))(x, w, ct) for f in (ours, theirs)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_rows_are_an_empty_product(name):  # whose unoverlapped form JAX does not lower
    ours, _ = both(name, 2)
    y, pull = jax.vjp(jax.jit(ours), jnp.ones((0, 8)), jnp.ones((8, 16)))
    dx, dw = pull(y)
    assert (y.shape, dx.shape, dw.shape) == ((0, 16), (0, 8), (8, 16)) and not dw.any()


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("tp", "data"), ("data", "tp"), ("pp", "tp", "data")])
@pytest.mark.parametrize("name", PRODUCTS)
def test_several_axes_are_taken_in_any_order(name, axes):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "tp", "pp"))
    x, w, ct = integers((16, 8)), integers((8, 16), seed=1), integers((16, 16), seed=2)
    (x_spec, w_spec), out_spec = (
        jax.tree.map(lambda spec: P(*(axes if a else None for a in spec)), specs)
        for specs in specs_of(name)
    )
    ours, theirs = (
        jax.shard_map(partial(f, axis_name=axes), mesh=mesh, in_specs=(x_spec, w_spec),
                      out_specs=out_spec)
        for f in PRODUCTS[name]
    )  # fmt: skip
    assert_equal(*(jax.jit(partial(step, f))(x, w, ct) for f in (ours, theirs)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_second_derivative_by_reverse_mode_is_the_same(name):
    x, w = integers((8, 8)) / 4, integers((8, 8), seed=1) / 4

    def norm(f: Any, x: Any, w: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            return jnp.sum(f(x, w) ** 2)

        return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))

    ours, theirs = (jax.jit(jax.grad(partial(norm, f), (0, 1)))(x, w) for f in both(name, 4))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_second_derivative_by_forward_mode_is_the_same(name):
    x, w = integers((8, 8)), integers((8, 8), seed=1)

    def twice(f: Any, x: Any, w: Any) -> Any:
        def once(x: Any, w: Any) -> Any:
            return jax.jvp(f, (x, w), (x[::-1], w[::-1]))

        return jax.jvp(once, (x, w), (x[:, ::-1], w[:, ::-1]))

    assert_equal(*(jax.jit(partial(twice, f))(x, w) for f in both(name, 4)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_replication_need_not_be_checked(name):
    x, w, ct = integers((8, 8)), integers((8, 8), seed=1), integers((8, 8), seed=2)
    ours, theirs = both(name, 4, check_vma=False)
    assert_equal(*(jax.jit(partial(step, f))(x, w, ct) for f in (ours, theirs)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_results_are_not_taken_for_replicated_ones(name):
    ours, _ = PRODUCTS[name]
    in_specs, _ = specs_of(name)
    wrong = jax.shard_map(partial(ours, **AXIS), mesh=mesh_of(2), in_specs=in_specs, out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(wrong, integers((8, 8)), integers((8, 8)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_of_a_matrix_is_summed_over_axes_that_share_it(name):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tp"))
    ours, plain = PRODUCTS[name]
    (x_spec, w_spec), out_spec = specs_of(name, 1)
    x, w = integers((2, 8, 8)), integers((8, 8), seed=1)

    def gradients(f: Any) -> Any:
        mapped = jax.shard_map(
            partial(f, **AXIS), mesh=mesh, in_specs=(P("data", *x_spec[1:]), w_spec),
            out_specs=P("data", *out_spec[1:]),
        )  # fmt: skip
        return jax.jit(jax.grad(lambda x, w: jnp.sum(mapped(x, w) ** 2), (0, 1)))(x, w)

    assert_equal(gradients(ours), gradients(plain))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 1)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_mapped_products_and_gradients(name, axes):
    x = integers((8, 3, 8) if axes[0] == 1 else (3, 8, 8) if axes[0] == 0 else (8, 8))
    w = integers((8, 3, 8) if axes[1] == 1 else (3, 8, 8) if axes[1] == 0 else (8, 8), seed=1)

    def gradients(f: Any, x: Any, w: Any) -> Any:
        inner, outer = (
            jax.grad(lambda x, w: jnp.sum(jax.vmap(f, axes)(x, w) ** 2), (0, 1)),
            jax.vmap(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)), axes),
        )
        return jax.vmap(f, axes)(x, w), inner(x, w), outer(x, w)

    assert_equal(*(jax.jit(partial(gradients, f))(x, w) for f in both(name, 2)))


def test_bias_and_activation_follow_the_product():
    x, w, bias = integers((8, 8), "bfloat16"), integers((8, 16), "bfloat16", 1), jnp.arange(16.0)
    mapped = partial(
        jax.shard_map, mesh=mesh_of(4), in_specs=(P("tp"), P(None, "tp"), P("tp")),
        out_specs=P(None, "tp"),
    )  # fmt: skip

    def ours(x: Any, w: Any, bias: Any) -> Any:
        return jhg.all_gather_matmul(x, w, "tp", bias=bias - 4.25, activation="relu")

    def wanted(x: Any, w: Any, bias: Any) -> Any:
        y = (x @ w).astype(jnp.float32) + (bias - 4.25)
        return jax.nn.relu(y).astype(jnp.bfloat16)

    def results(f: Any) -> Any:
        y, pull = jax.vjp(f, x, w, bias)
        return y, pull(integers((8, 16), "bfloat16", 2))

    assert_equal(*(jax.jit(partial(results, f))() for f in (mapped(ours), wanted)))


def test_other_mesh_axes_may_stay_automatic():
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    x, up, down = integers((8, 8)), integers((8, 16), seed=1), integers((16, 8), seed=2)

    def layer(x: Any, up: Any, down: Any) -> Any:
        return jhg.matmul_reduce_scatter(jhg.all_gather_matmul(x, up, "tp"), down, "tp")

    mapped = jax.shard_map(
        layer, mesh=mesh, axis_names={"tp"}, in_specs=(P("tp"), P(None, "tp"), P("tp")),
        out_specs=P("tp"),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(mapped)(x, up, down), x @ up @ down)


def test_several_mesh_axes_are_one_ring():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    x, w = integers((8, 4)), integers((4, 8), seed=1)
    mapped = jax.shard_map(
        lambda x, w: jhg.all_gather_matmul(x, w, ("a", "b")), mesh=mesh,
        in_specs=(P(("a", "b")), P(None, ("a", "b"))), out_specs=P(None, ("a", "b")),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(mapped)(x, w), x @ w)


@pytest.mark.parametrize(("name", "forward", "backward"), [("gather", 1, 2), ("scatter", 2, 1)])
def test_programs_permute_and_gather_nothing(name, forward, backward):
    """Rows take one stream around the ring, sums two of half the size; each gradient the other."""
    count, x, w = 4, integers((16, 8)), integers((8, 16), seed=1)
    ours, _ = both(name, count)
    hops, columns = count - 1, {"gather": 8, "scatter": 16}[name]
    _, found = run_counted(ours, x, w)
    a_hop = 16 // count * columns * 4  # bytes
    assert found == {"collective-permute": (forward * hops, hops * a_hop)}
    _, found = run_counted(lambda x, w, ct: jax.vjp(ours, x, w)[1](ct), x, w, ours(x, w))
    kinds = {kind: number for kind, (number, _) in found.items()}
    gathered = hops if name == "gather" else 0  # the rows that the forward pass keeps
    assert kinds == {"collective-permute": backward * hops + gathered}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.usefixtures("launcher")
def test_every_product_of_a_ring_and_of_its_gradients_is_a_kernel(name):
    ours, _ = PRODUCTS[name]
    in_specs, out_specs = specs_of(name)
    mapped = jax.shard_map(
        partial(ours, **AXIS, implementation="hopper"), mesh=mesh_of(4), in_specs=in_specs,
        out_specs=out_specs,
    )  # fmt: skip
    x, w, ct = (integers((256, 256), "bfloat16", seed) for seed in range(3))
    hops = {"gather": 4, "scatter": 8}
    text = lowered(mapped, x, w)
    assert text.count(LAUNCH) == hops[name]
    report = jhg.explain(mapped, x, w)
    assert len(report.products) == hops[name] and report.kernel_share == 1
    assert "[[0, 1], [1, 2]" in text  # source and target
    assert ("[[0, 3], [1, 0]" in text) == (name == "scatter")  # sums go both ways
    text = lowered(lambda x, w, ct: jax.vjp(mapped, x, w)[1](ct), x, w, ct)
    kept = 4 if name == "gather" else 0  # XLA drops these, whose rows alone are needed
    of_x = hops["scatter" if name == "gather" else "gather"]
    assert text.count(LAUNCH) == kept + of_x + 1
    assert "stablehlo.dot_general" not in text
    # Sums are added to in kernels: but for the first two of a device all are.
    adds = hops["scatter"] - 2 if name == "gather" else 0
    assert text.count("output_operand_aliases = [#stablehlo") == adds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((jhg.all_gather_matmul, (8, 8), (4, 8)), r"K differs: x is f32\[4,8\], w is f32\[4,8\]"),
        ((jhg.all_gather_matmul, (8, 4), (8, 4)), r"Is w stored \(N, K\)\? Pass w.T"),
        ((jhg.all_gather_matmul, (8,), (8, 8)), r"x is f32\[4\], expected \(..., m, K\)"),
        ((jhg.matmul_reduce_scatter, (8, 8), (8,)), r"w is f32\[8\], expected \(K, N\)"),
        ((jhg.matmul_reduce_scatter, (10, 8), (8, 8)), "5 rows cannot be divided among the 2"),
    ],
)
def test_wrong_arguments_say_what_was_expected(arguments, message):
    function, *shapes = arguments
    mapped = jax.shard_map(
        partial(function, **AXIS), mesh=mesh_of(2), in_specs=(P("tp"), P()), out_specs=P("tp")
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, *(jnp.zeros(shape) for shape in shapes))


def test_wrong_options_say_what_was_expected():
    x = jnp.zeros((4, 4))

    def call(*args: Any, **options: Any) -> Any:
        mapped = jax.shard_map(
            lambda x: jhg.all_gather_matmul(x, x, *args, **options), mesh=mesh_of(1),
            in_specs=P(), out_specs=P(),
        )  # fmt: skip
        return jax.eval_shape(mapped, x)

    with pytest.raises(ValueError, match="axis_name is 'model', expected an axis of the mesh"):
        call("model")
    with pytest.raises(ValueError, match="^matmul_reduce_scatter: axis_name is 'i', expected an"):
        jax.vmap(lambda x: jhg.matmul_reduce_scatter(x, x, "i"), axis_name="i")(x[None])
    for wrong_axis in (0, ("tp", "tp")):
        with pytest.raises(ValueError, match="axis_name is .*, expected an axis of the mesh"):
            call(wrong_axis)
    with pytest.raises(ValueError, match="bias is f32\\[3\\], expected \\(4,\\)"):
        call("tp", bias=jnp.zeros(3))
    with pytest.raises(ValueError, match="bias is c64\\[4\\], and the product is not complex"):
        call("tp", bias=jnp.zeros(4, jnp.complex64))
    with pytest.raises(ValueError, match="all_gather_matmul: activation returned f32\\[\\] for"):
        call("tp", activation=jnp.sum)
    with pytest.raises(ValueError, match="activation is 'rleu'"):
        call("tp", activation="rleu")
    with pytest.raises(TypeError, match="activation is a int"):
        call("tp", activation=3)
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        call("tp", implementation="cuda")
    with pytest.raises(TypeError, match="w is a list, expected an array"):
        wrong: Any = [1.0]
        jhg.matmul_reduce_scatter(x, wrong, "tp")
    with pytest.raises(ValueError, match="call it inside jax.shard_map"):
        jhg.matmul_reduce_scatter(x, x, "tp")
