"""`ragged_dot_general` with `c`, `alpha` and `beta`: contractions that are added to an array."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.program_inspection import LAUNCH, attributes, integers, lowered, shape

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch
from jax_hopper_gemm.fusion.jaxprs import traced
from jax_hopper_gemm.gemm.dtypes import RESULTS
from jax_hopper_gemm.gemm.groups import VARLEN_K, GroupedAxis, Groups
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.lowering.request import Request
from jax_hopper_gemm.lowering.route import route

T, K, N, G = 12, 3, 4, 3
LHS, RHS, C = integers((T, K)), integers((T, N), seed=1), integers((G, K, N), seed=2)
SIZES = jax.device_put(np.array([3, 0, 5]))


def numbers(contracting: Any, batch: Any = ([], []), ragged: int = 0, group: Any = ()) -> Any:
    return lax.RaggedDotDimensionNumbers((contracting, batch), [ragged], group)


NUMBERS = numbers(([0], [0]))


def added(lhs, rhs, sizes, c, alpha=None, beta=None, **options):
    return jhg.ragged_dot_general(
        lhs, rhs, sizes, NUMBERS, c=c, alpha=alpha, beta=beta, **options
    )  # fmt: skip


@jax.jit
def by_masks(lhs, rhs, sizes, c, alpha: Any = 1.0, beta: Any = 1.0):
    """The same in float32, by a product with each group's rows and zeros."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(lhs)), side="right")
    own = (group == jnp.arange(len(c))[:, None]).astype(jnp.float32)
    lhs, rhs, c = (x.astype(jnp.float32) for x in (lhs, rhs, c))
    return alpha * jnp.einsum("gt,tk,tn->gkn", own, lhs, rhs) + beta * c


def assert_equal(out: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("sizes", [(3, 0, 5), (4, 4, 4), (0, 0, 0)])
@pytest.mark.parametrize("operands", RESULTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_result_is_added_and_takes_the_dtype_of_c(dtype, operands, sizes, implementation):
    lhs, rhs, c = LHS.astype(operands), RHS.astype(operands), C.astype(dtype)
    sizes = np.array(sizes)
    run = partial(added, implementation=implementation)
    for factors in ({}, {"alpha": 2.0}, {"beta": 0.5}, {"alpha": jnp.array(-1.0), "beta": 2}):
        out = run(lhs, rhs, sizes, c, **factors)
        assert out.dtype == dtype
        assert_equal(out, by_masks(lhs, rhs, sizes, c, **factors))


def test_the_product_is_not_rounded_before_the_sum():
    """1 + 2**-10 is 1 in bfloat16."""
    lhs = np.array([[1], [2.0**-10]], jnp.bfloat16)
    c = np.full((1, 1, 1), -1, jnp.bfloat16)
    assert added(lhs, np.ones_like(lhs), np.array([2]), c).item() == 2.0**-10


def test_another_dtype_may_be_asked_for():
    out = added(LHS, RHS, SIZES, C, preferred_element_type=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert_equal(out, by_masks(LHS, RHS, SIZES, C))


def test_alpha_needs_no_c():
    lhs = LHS.astype(jnp.bfloat16)
    out = added(lhs, RHS.astype(jnp.bfloat16), SIZES, None, alpha=0.5)
    assert out.dtype == jnp.bfloat16
    assert_equal(out, by_masks(LHS, RHS, SIZES, C, 0.5, 0))


def test_integers_stay_integers():
    lhs, rhs, c = (x.astype(dtype) for x, dtype in ((LHS, "int8"), (RHS, "int8"), (C, "int32")))
    out = added(lhs, rhs, SIZES, c, alpha=3)
    assert out.dtype == np.int32
    assert_equal(out, by_masks(LHS, RHS, SIZES, C, 3))
    assert added(lhs, rhs, SIZES, None, alpha=1.0, preferred_element_type=None).dtype == np.float32


GENERAL_CASES = {
    "(K, T)": ((K, T), (N, T), numbers(([1], [1]), ragged=1)),
    "two axes each": ((T, K, 2), (2, T, N), numbers(([0], [1]))),
    "batch": ((2, T, K), (T, 2, N), numbers(([1], [0]), ([0], [1]), 1)),
    "axes inside": ((2, T, K, 5), (T, 2, 5, N), numbers(([1, 3], [0, 2]), ([0], [1]), 1)),
    "axes outside": ((5, T, K), (T, 5, N), numbers(([0, 1], [1, 0]), ragged=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", GENERAL_CASES)
def test_c_has_the_axes_of_the_result(name):
    lhs_shape, rhs_shape, dimensions = GENERAL_CASES[name]
    lhs, rhs = integers(lhs_shape), integers(rhs_shape, seed=1)
    product = np.asarray(lax.ragged_dot_general(lhs, rhs, SIZES, dimensions))
    c = integers(product.shape, seed=3)
    out = jhg.ragged_dot_general(lhs, rhs, SIZES, dimensions, c=c, alpha=2.0, beta=0.5)
    np.testing.assert_array_equal(out, 2 * product + 0.5 * np.asarray(c))


def test_an_accumulation_over_steps_adds_up():
    lhs, rhs = integers((4, T, K), "bfloat16"), integers((4, T, N), "bfloat16", seed=1)
    step = jax.jit(lambda c, pair: (added(pair[0], pair[1], SIZES, c), None), donate_argnums=0)
    total, _ = lax.scan(step, C + 0, (lhs, rhs))
    expected = C
    for x, y in zip(*map(np.asarray, (lhs, rhs)), strict=True):
        expected = by_masks(x, y, SIZES, expected)
    assert_equal(total, expected)


# Transformations.


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_derivatives_follow_jnp(implementation):
    args = (LHS, RHS, C, jnp.array(2.0), jnp.array(0.5))
    weight = integers(C.shape, seed=4)

    def of(function, **options):
        def call(lhs, rhs, c, alpha, beta):
            return function(lhs, rhs, SIZES, c, alpha, beta, **options)

        def results(*args):
            moved = tuple(integers(jnp.shape(x), seed=5 + i) for i, x in enumerate(args))
            gradients = jax.vjp(call, *args)[1](weight)
            second = jax.grad(lambda *args: (call(*args) ** 2).sum(), (0, 2))(*args)
            return jax.jvp(call, args, moved), gradients, second

        return jax.jit(results)(*args)

    ours, theirs = of(added, implementation=implementation), of(by_masks)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_gradients_have_the_dtypes_of_the_operands():
    args = LHS.astype(jnp.bfloat16), RHS.astype(jnp.bfloat16), C

    def of(function):
        return jax.grad(lambda *xs: (function(*xs[:2], SIZES, xs[2], 1.0, 0.5)).sum(), (0, 1, 2))

    ours, theirs = (jax.jit(of(function))(*args) for function in (added, by_masks))
    for x, y, operand in zip(ours, theirs, args, strict=True):
        assert x.dtype == operand.dtype
        assert_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("c_axis", [None, 1])
def test_every_vmap_works(c_axis):
    """Also with K as long as the rows."""
    for axes in itertools.product((None, 0), repeat=3):
        axes = (*axes, c_axis, axes[0])
        if axes == (None,) * 5:
            continue
        args = mapped_arguments(axes)
        out = jax.jit(jax.vmap(partial(added, beta=0.5), axes))(*args)
        np.testing.assert_array_equal(out, jax.vmap(partial(by_masks, beta=0.5), axes)(*args))


def mapped_arguments(axes):
    """Returns lhs, rhs, sizes, c and alpha, two of each along these axes."""
    given = integers((T, T)), RHS, SIZES, integers((G, T, N), seed=2), np.float32(2)
    return [
        x if axis is None else np.stack([x, x[::-1] if x.ndim else -x], axis)
        for x, axis in zip(map(np.asarray, given), axes, strict=True)
    ]


def test_gradients_may_be_mapped():
    axes = (0, None, 0, 1, None)

    def gradient(function):
        return jax.grad(lambda *args: (function(*args, 0.5) ** 2).sum(), (0, 3))

    args = mapped_arguments(axes)
    ours, theirs = (jax.jit(jax.vmap(gradient(f), axes))(*args) for f in (added, by_masks))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_two_vmaps_work():
    lhs, c = integers((2, 3, T, K)), integers((3, G, K, N))
    mapped = [
        jax.vmap(jax.vmap(lambda x, c, f=f: f(x, RHS, SIZES, c, 2.0), (0, None)), (1, 0))
        for f in (added, by_masks)
    ]
    np.testing.assert_array_equal(*(jax.jit(f)(lhs, c) for f in mapped))


def test_each_device_adds_what_it_has():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    sizes = jnp.array([[1, 0, 2], [3, 0, 0], [0, 0, 0], [1, 1, 1]])

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("rows"), P("rows"), P("rows"), P()),
             out_specs=P("rows"))  # fmt: skip
    def step(lhs, rhs, sizes, c):
        return added(lhs, rhs, sizes[0], c)

    out = step(LHS, RHS, sizes, C).reshape(4, G, K, N)
    for i, part in enumerate(out):
        rows = slice(3 * i, 3 * i + 3)
        np.testing.assert_array_equal(part, by_masks(LHS[rows], RHS[rows], sizes[i], C))


def test_explicit_mesh_axes_stay():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rhs, c = jax.reshard(RHS, P(None, "x")), jax.reshard(C, P())
        out = jax.jit(added)(LHS, rhs, SIZES, c)
        assert jax.typeof(out).sharding.spec == P(None, None, "x")
        np.testing.assert_array_equal(out, by_masks(LHS, RHS, SIZES, C))
        whole = jax.jit(partial(added, out_sharding=P()))(LHS, rhs, SIZES, c)
        assert jax.typeof(whole).sharding.spec == P(None, None, None)


def test_symbolic_rows_export_and_run():
    (rows,) = jax.export.symbolic_shape("t")
    args = [jax.ShapeDtypeStruct((rows, x.shape[1]), np.float32) for x in (LHS, RHS)]
    exported = jax.export.export(jax.jit(added), platforms=["cpu"])(*args, SIZES, C)
    np.testing.assert_array_equal(
        exported.call(LHS, RHS, SIZES, C), by_masks(LHS, RHS, SIZES, C)
    )  # fmt: skip


# Lowered for CUDA, on any machine.


LARGE = [shape(4096, 512), shape(4096, 384), shape(8, dtype=np.int32)]
FACTOR = shape(dtype=jnp.float32)


def operations(program: str) -> list[str]:
    """Returns what XLA computes on arrays with the matrices of all groups."""
    return [
        line for line in program.splitlines()
        if "8x512x384x" in line and "= stablehlo." in line and LAUNCH not in line
    ]  # fmt: skip


@pytest.mark.usefixtures("launcher", "no_tables")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_one_launch_in_the_memory_of_c(dtype):
    c = shape(8, 512, 384, dtype=dtype)
    step = jax.jit(partial(added, implementation="hopper"), donate_argnums=3)
    traced = step.trace(*LARGE, c, FACTOR, FACTOR)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    (spec,) = map(GemmSpec.from_json, attributes(program, "spec"))
    assert spec.grouped == "k" and [r.dtype for r in spec.graph.results] == [dtype]
    loaded = [(operand.kind, operand.dtype) for operand in spec.graph.operands]
    assert sorted(loaded) == [("matrix", dtype), *[("scalar", "float32")] * 2]
    assert f"{LAUNCH}(%arg0, %arg1, %arg4, %arg3, %arg5, %arg2)" in program
    place = "0" if spec.dynamic else ""  # whose workspace is one more output
    assert f"output_tuple_indices = [{place}]" in program and "operand_index = 3" in program
    assert operations(program) == []


@pytest.mark.usefixtures("launcher", "no_tables")
def test_a_donated_c_is_what_the_kernel_overwrites():
    step = jax.jit(lambda c, lhs, rhs, sizes: added(lhs, rhs, sizes, c), donate_argnums=0)
    c = shape(8, 512, 384, dtype=jnp.float32)
    program = step.trace(c, *LARGE).lower(lowering_platforms=("cuda",)).as_text()
    assert "%arg0: tensor<8x512x384xf32> {tf.aliasing_output = 0" in program
    assert f"{LAUNCH}(%arg1, %arg2, %arg0, %arg3)" in program
    assert "operand_index = 2" in program and operations(program) == []


@pytest.mark.usefixtures("launcher", "no_tables")
def test_a_c_of_another_dtype_than_the_result_is_only_read():
    run = partial(added, preferred_element_type=jnp.bfloat16)
    program = lowered(run, *LARGE, shape(8, 512, 384, dtype=jnp.float32))
    assert program.count(LAUNCH) == 1 and "output_operand_alias" not in program
    assert operations(program) == []


@pytest.mark.usefixtures("launcher", "no_tables")
@pytest.mark.parametrize("c_axis", [None, 0])
def test_a_mapped_sum_is_one_launch(c_axis):
    c = shape(*(2,) * (c_axis == 0), 8, 512, 384, dtype=jnp.float32)
    mapped = jax.vmap(partial(added, alpha=2.0, beta=0.5), (0, None, 0, c_axis))
    program = lowered(mapped, shape(2, 4096, 512), LARGE[1], shape(2, 8, dtype=np.int32), c)
    (name,) = attributes(program, "name")
    assert "M=512 N=384 K=8192 L=16" in name
    done = {line.split("stablehlo.")[1].split()[0] for line in operations(program)}
    assert done <= {"reshape", "broadcast_in_dim"}


@pytest.mark.usefixtures("launcher", "no_tables")
def test_a_product_that_is_not_mapped_is_computed_once():
    c = shape(2, 8, 512, 384, dtype=jnp.float32)
    program = lowered(jax.vmap(added, (None, None, None, 0)), *LARGE, c)
    (name,) = attributes(program, "name")
    assert "M=512 N=384 K=4096 L=8" in name
    assert any("stablehlo.add" in line for line in operations(program))


@pytest.mark.usefixtures("launcher", "no_tables")
def test_a_mapped_factor_is_xlas():
    args = [shape(2, 4096, 512), *LARGE[1:], shape(8, 512, 384, dtype=jnp.float32)]

    def scaled(lhs, rhs, sizes, c, beta):
        return added(lhs, rhs, sizes, c, beta=beta)

    mapped = jax.vmap(scaled, (0, None, None, None, 0))
    program = lowered(mapped, *args, shape(2, dtype=jnp.float32))
    (spec,) = map(GemmSpec.from_json, attributes(program, "spec"))
    assert spec.graph.operands == ()
    assert any("stablehlo.multiply" in line for line in operations(program))


@pytest.mark.usefixtures("no_tables")
@pytest.mark.parametrize("axes, path", [((2, 8), "hopper"), ((8,), "xla")])
def test_a_mapped_kernel_reads_no_c_that_its_groups_share(axes, path):
    function = traced(
        lambda acc, c: acc + c, shape(2, 8, 512, 384, dtype=jnp.float32),
        shape(*axes, 512, 384, dtype=jnp.float32),
    )  # fmt: skip
    product = Request(
        VARLEN_K, (8192, 512), "bfloat16", (8192, 384), "bfloat16", "float32",
        function=function, groups=GroupedAxis("k", 17, Groups(9, 8, step=8)),
    )  # fmt: skip
    assert route(product, dispatch.H200, kernel_only=True).path == path


@pytest.mark.usefixtures("launcher", "no_tables")
@pytest.mark.parametrize("extents", [(0, 64, 32, 3), (16, 64, 0, 3), (16, 64, 32, 0)])
def test_empty_products_are_xlas(extents):
    rows, k, n, groups = extents
    args = [np.ones((rows, k), jnp.bfloat16), np.ones((rows, n), jnp.bfloat16)]
    args += [np.zeros(groups, np.int32), np.ones((groups, k, n), np.float32)]
    np.testing.assert_array_equal(added(*args, beta=0.5), np.full((groups, k, n), 0.5))
    assert LAUNCH not in lowered(added, *args)


@pytest.mark.usefixtures("launcher", "no_tables")
def test_gradients_are_products_of_rows():
    c = shape(8, 512, 384, dtype=jnp.float32)

    def gradients(lhs, rhs, sizes, c, cotangent):
        return jax.vjp(lambda lhs, rhs, c: added(lhs, rhs, sizes, c, 2.0, 0.5), lhs, rhs, c)[1](
            cotangent
        )

    program = lowered(gradients, *LARGE, c, c)
    specs = [GemmSpec.from_json(text) for text in attributes(program, "spec")]
    assert [spec.grouped for spec in specs] == ["m", "m"]


@pytest.mark.usefixtures("launcher", "no_tables")
def test_the_explained_kernel_is_the_one_that_is_launched():
    lhs, rhs, sizes = LARGE
    c = shape(8, 512, 384, dtype=jnp.float32)
    found = jhg.explain(
        jhg.ragged_dot_general, lhs, rhs, sizes, NUMBERS, c=c, alpha=FACTOR, beta=FACTOR
    )
    program = lowered(added, *LARGE, c, FACTOR, FACTOR)
    assert found.spec and attributes(program, "spec") == [found.spec.to_json()]
    assert "reads scalar f32, matrix f32" in found.epilogue and found.uncovered == ()
