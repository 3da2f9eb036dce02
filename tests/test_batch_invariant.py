"""Rows of the same bits in every batch: sums are added in an order that N and K decide alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support.covering import ALL
from support.invariant_programs import INVARIANT_PROGRAMS
from support.program_inspection import integers, lowered

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch import H200, Device, choose, choose_invariant
from jax_hopper_gemm.dispatch.invariance import reduces_rows
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Result
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.lowering.finish import finish_partials
from jax_hopper_gemm.testing.lowered import specs_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("launcher")]

ROWS = (
    (*range(1, 34), 48, 63, 64, 65, 100, 127, 128, 129, 192, 200, 255, 256, 257, 384, 511, 512)
    if ALL
    else (1, 8, 9, 16, 17, 33, 64, 65, 128, 129, 200, 257, 512)
)


def half(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def order(spec: GemmSpec, reduces: bool) -> tuple[Any, ...]:
    """Returns what the order of a row's sums follows from."""
    assert not (spec.split_k or spec.k_in_turns)
    return (spec.mma_k, *((spec.tile_n, spec.epi_tile_n) if reduces else ()))


def orders(
    n: int, k: int, device: Device, graph: EpilogueGraph | None, **layouts: Any
) -> set[tuple[Any, ...]]:
    found = set()
    for m in ROWS:
        problem = replace(GemmProblem.dense(m, n, k, **layouts), epilogue=graph)
        decision = choose_invariant(problem, device)
        assert decision.spec and decision.raster_order, decision.reason
        found.add(order(decision.spec, graph is not None))
    return found


ROW_SUM = EpilogueGraph(
    1, (), (), (Result("matrix", 0, "bfloat16"), Result("row_sum", 0, "float32"))
)


@pytest.mark.parametrize("graph", [None, ROW_SUM], ids=["bare", "row_sum"])
def test_the_order_of_sums_does_not_depend_on_the_rows(graph):
    random = Random(7)
    for _ in range(12 if ALL else 6):
        n, k = 8 * random.randint(1, 1500), 8 * random.randint(1, 2500)
        b_major = random.choice(["n", "k"])
        assert len(orders(n, k, H200, graph, b_major=b_major)) == 1
    for n, k in ((4096, 4096), (512, 16384), (8192, 28672), (1536, 14336)):
        assert len(orders(n, k, H200, graph)) == 1
        assert len(orders(n, k, H200.limited_to(60), graph)) == 1


EIGHT_BITS = {"dtype": "float8_e4m3fn", "d_dtype": "bfloat16", "b_major": "k"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights": ({}, {"b_dtype": "int8"}),
    "weights with scales along K": ({}, {"b_dtype": "int4", "k_group": 128}),
    "promoted": (EIGHT_BITS, {"promoted": True}),
    "TF32": ({"dtype": "float32", "b_major": "k"}, {}),
    "TF32 from registers": ({"dtype": "float32"}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_sums_of_other_types_does_not_depend_on_the_rows(kind):
    layouts, fields = KINDS[kind]
    for n, k in ((1024, 8192), (4096, 4096), (8192, 28672)):
        found = set()
        for m in (1, 16, 32, 64, 128, 512, 4096):
            problem = replace(GemmProblem.dense(m, n, k, **layouts), **fields)
            spec = choose_invariant(problem, H200).spec
            assert spec
            found.add(order(spec, reduces=False))
        assert len(found) == 1


def test_more_rows_or_devices_do_not_change_the_columns_of_a_reducing_tile():
    columns = set()
    for m in (1, 512, 1024, 9000):
        for device in (H200, replace(H200, comm_overlap=True)):
            problem = replace(GemmProblem.dense(m, 4096, 4096), epilogue=ROW_SUM)
            spec = choose_invariant(problem, device).spec
            assert spec
            columns.add((spec.tile_n, spec.epi_tile_n))
    assert len(columns) == 1
    free = {
        spec.tile_n
        for m in (16, 512, 9000)
        if (spec := choose(replace(problem, m=m), H200, kernel_only=True).spec)
    }
    assert len(free) > 1, "which the model would take"


def test_kernels_that_split_k_are_taken_where_nobody_asks():
    problem = GemmProblem.dense(256, 1536, 14336)
    split, whole = (f(problem, H200, kernel_only=True).spec for f in (choose, choose_invariant))
    assert split and split.split_k and whole and not whole.split_k
    measured = GemmProblem.dense(512, 512, 16384)
    split, whole = (f(measured, H200, kernel_only=True).spec for f in (choose, choose_invariant))
    assert split and split.split_k and whole and not whole.split_k


SIZES = jnp.array([100, 200, 300], jnp.int32)
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "matmul": (jhg.matmul, (half(256, 14336), half(14336, 1536))),
    "epilogue": (partial(jhg.matmul, activation="gelu"), (half(256, 14336), half(14336, 1536))),
    "dot_general": (
        partial(jhg.dot_general, dimension_numbers=(((1,), (1,)), ((), ()))),
        (half(256, 14336), half(1536, 14336)),
    ),
    "einsum": (partial(jhg.einsum, "mk,kn->nm"), (half(256, 14336), half(14336, 1536))),
    "gated_linear_unit": (jhg.gated_linear_unit, (half(256, 14336), half(14336, 2, 768))),
    "ragged_dot": (
        lambda a, b, **options: jhg.ragged_dot(a, b, SIZES, **options),
        (half(1024, 512), half(3, 512, 1024)),
    ),
}


def gradients(function: Callable[..., Any], *args: Any) -> Any:
    y, pull = jax.vjp(function, *args)
    return y, pull(jnp.ones_like(y))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.usefixtures("no_tables")
def test_products_and_gradients_take_no_split_kernel(name):
    function, args = PRODUCTS[name]

    def inside(*args: Any) -> Any:
        with jhg.batch_invariant():
            return function(*args)

    for asked in (partial(function, batch_invariant=True), inside):
        specs = specs_of(partial(gradients, asked), *args)
        assert len(specs) == 3 and not any(spec.split_k for spec in specs)
    if name in ("matmul", "dot_general"):
        forced = partial(function, implementation="hopper")
        assert any(spec.split_k for spec in specs_of(forced, *args))


def test_the_argument_goes_before_the_context():
    args = half(256, 14336), half(14336, 1536)
    with jhg.batch_invariant():
        matmul = partial(jhg.matmul, implementation="hopper")
        lifted = partial(matmul, batch_invariant=False)
        assert specs_of(lifted, *args)[0].split_k
        assert not specs_of(matmul, *args)[0].split_k
        with jhg.batch_invariant(False):
            assert specs_of(matmul, *args)[0].split_k


def test_accelerated_products_have_it():
    args = half(256, 14336), half(14336, 1536)
    accelerated = jhg.accelerate(jnp.matmul, implementation="hopper")
    assert specs_of(accelerated, *args)[0].split_k
    with jhg.batch_invariant():
        assert not specs_of(accelerated, *args)[0].split_k


def test_explain_shows_the_kernel_that_it_takes():
    args = half(256, 14336), half(14336, 1536)
    found = jhg.explain(jhg.matmul, *args, batch_invariant=True)
    assert found.spec and not found.spec.split_k
    assert jhg.explain(jhg.matmul, *args).spec != found.spec


def test_partitioned_products_take_it_along():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    on = jax.sharding.NamedSharding(mesh, P("x"))
    a, b = (jax.device_put(integers((1024, 1024), "bfloat16"), on) for _ in "ab")
    said = "\\22batch_invariant\\22: true"
    assert said in lowered(partial(jhg.matmul, batch_invariant=True), a, b)
    assert "batch_invariant" not in lowered(jhg.matmul, a, b)
    gelu = partial(jhg.matmul, activation="gelu")
    assert said in lowered(partial(gelu, batch_invariant=True), a, b)


def test_results_on_other_platforms_are_xlas():
    a, b = integers((17, 64), "bfloat16"), integers((64, 32), "bfloat16")
    np.testing.assert_array_equal(jhg.matmul(a, b, batch_invariant=True), jnp.matmul(a, b))


def test_partial_sums_are_added_pair_by_pair():
    partials = np.random.default_rng(1).normal(size=(2, 7, 5)).astype(np.float32)
    found = finish_partials(Result("row_sum", 0, "float32"), jnp.asarray(partials), in_order=True)
    p = [partials[:, i] for i in range(7)]
    first = [p[0] + p[3], p[1] + p[4], p[2] + p[5], p[6]]
    expected = (first[0] + first[2]) + (first[1] + first[3])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", INVARIANT_PROGRAMS)
def test_every_program_of_the_gpu_run_has_one_order_of_sums(name):
    found = INVARIANT_PROGRAMS[name].specs()
    reduces = {reduces_rows(spec.graph) for spec in found}
    assert len(reduces) == 1
    assert len({order(spec, reduces == {True}) for spec in found}) == 1
    if reduces == {False}:
        assert len({spec.tile_m * spec.tile_n for spec in found}) > 1


# What is refused.


def test_a_product_that_no_kernel_runs_is_an_error():
    odd = half(16, 64), jax.ShapeDtypeStruct((64, 32), jnp.float32)
    with pytest.raises(NotImplementedError, match="batch_invariant=True: no kernel runs"):
        specs_of(partial(jhg.matmul, batch_invariant=True), *odd)
    wide = partial(jhg.matmul, preferred_element_type=jnp.float32, batch_invariant=True)
    with pytest.raises(NotImplementedError, match="batch_invariant=True: no kernel runs"):
        specs_of(partial(gradients, wide), half(256, 512), half(512, 256))


def test_an_epilogue_that_xla_would_finish_is_an_error():
    def cumulative(a: Any, b: Any) -> Any:
        return jhg.matmul(a, b, epilogue=partial(jnp.cumsum, axis=1), batch_invariant=True)

    with pytest.raises(NotImplementedError, match="in an order of its own"):
        specs_of(cumulative, half(256, 512), half(512, 256))


def test_xla_may_not_be_asked_for():
    a, b = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="leave implementation as None"):
        jhg.matmul(a, b, implementation="xla", batch_invariant=True)


@pytest.mark.parametrize("asked", [1, "yes"])
def test_what_is_no_bool_is_refused(asked):
    with pytest.raises(TypeError, match="expected True or False"), jhg.batch_invariant(asked):
        pass
    a, b = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 8), jnp.bfloat16)
    with pytest.raises(TypeError, match="expected True or False"):
        jhg.matmul(a, b, batch_invariant=asked)


def test_collective_products_refuse_it():
    mesh = AbstractMesh((2,), ("tp",), axis_types=(AxisType.Auto,))

    def layer(x: Any, up: Any) -> Any:
        with jhg.batch_invariant():
            return jhg.all_gather_matmul(x, up, "tp")

    mapped = jax.shard_map(
        layer, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")
    )
    with pytest.raises(NotImplementedError, match="depends on the row"):
        jax.eval_shape(mapped, half(1024, 512), half(512, 2048))
