"""Ragged products with epilogues lowered for CUDA, on any machine: the launches left to run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.fused_models import fused_dot_of
from support.program_inspection import attributes, lowered, shape, step
from support.reachable import launches, on_matrices, reachable, results

from jax_hopper_gemm import dispatch
from jax_hopper_gemm.gemm.groups import VARLEN_M_KN, Groups
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.product import Options, Product
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.primitives.ragged_dot import hopper_ragged_dot

pytestmark = pytest.mark.usefixtures("launcher", "no_tables", "kernels")

T, D, F, G = 512, 256, 1024, 4  # tokens, model, hidden, groups


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for every problem: that of the bare dense product, with the rest in place."""
    real = dispatch.choose

    def choose(problem, device, *, kernel_only=False):
        p = problem
        bare = GemmProblem.dense(
            p.m, p.n, p.k, a_major=p.a.major, b_major=p.b.major, dtype=p.a_dtype,
            d_dtype=p.d_dtype,
        )  # fmt: skip
        decision = real(bare, device, kernel_only=True)
        if decision.spec is None:
            return decision
        spec = replace(
            decision.spec, epilogue=problem.epilogue, num_stages=3, tile_scheduler="static",
            epi_load_stages=2 if problem.graph.loaded else 0,
            grouped=problem.groups and problem.groups.axis,
            a_major=p.a.major, b_major=p.b.major, d_major=p.d.major,
        )  # fmt: skip
        return replace(decision, spec=spec)

    monkeypatch.setattr(dispatch, "choose", choose)


def fused(function, lhs, rights, sizes, *operands, subscripts="mk,gkn->mn", groups=None, **options):
    rights = rights if isinstance(rights, tuple) else (rights,)
    arguments = {name: options.pop(name) for name in ("in_place", "out_dtypes") if name in options}
    settings: dict[str, Any] = {"preferred_element_type": lhs.dtype, "implementation": "hopper"}
    product = Product(
        Subscripts.parse(subscripts), Options(**settings | options),
        groups=groups or Groups.plain(rights[0].shape[0]),
    )  # fmt: skip
    return fused_dot_of(function, (lhs, *rights), operands, product, sizes=sizes, **arguments)


def bare(x, w, sizes):
    return hopper_ragged_dot(
        x, w, sizes,
        Product(
            VARLEN_M_KN, Options("hopper", preferred_element_type=x.dtype),
            groups=Groups.plain(w.shape[0]),
        ),
    )  # fmt: skip


SIZES = shape(G, dtype=np.int32)


def gelu_mlp(save_preactivation, sizes, x, w1, b1, w2, b2):
    options = {"save_preactivation": save_preactivation}
    y = fused(lambda acc, b: jax.nn.gelu(acc + b), x, w1, sizes, b1[:, None], **options)
    return fused(lambda acc, b: acc + b, y, w2, sizes, b2[:, None], **options)


def swiglu_mlp(save_preactivation, sizes, x, *weights):
    *w1, w2 = weights
    subscripts = "mk,gkn->mn" if len(w1) == 2 else "mk,gkcn->mn"
    y = fused(
        lambda gate, up: gate * jax.lax.logistic(gate) * up, x, tuple(w1), sizes,
        subscripts=subscripts, save_preactivation=save_preactivation,
    )  # fmt: skip
    return bare(y, w2, sizes)


def trained(mlp, sizes, cotangent, *args):
    return step(partial(mlp, sizes), cotangent, *args)


GELU = [shape(T, D), shape(G, D, F), shape(G, F), shape(G, F, D), shape(G, D)]
MATRIX = "matrix bfloat16"


def work_on_matrices(program: str) -> list[str]:
    """Returns what XLA computes on whole matrices; a reshape moves nothing."""
    return [name for name in on_matrices(program) if name != "stablehlo.reshape"]


def found_in(program: str) -> Counter[Any]:
    return Counter((spec.grouped, tuple(results(spec))) for spec in launches(program))


def test_a_gelu_mlp_runs_its_products_and_sums_of_biases():
    mlp = partial(gelu_mlp, True)
    program = lowered(partial(trained, mlp), SIZES, shape(T, D), *GELU)
    assert found_in(program) == {
        ("m", (MATRIX, MATRIX)): 1,  # activated, and what is saved
        ("m", (MATRIX,)): 3,  # the second product; data gradients, one through the activation
        ("k", (MATRIX,)): 2,
        ("k", ("matrix float32",)): 2,  # gradients of biases
    }
    assert work_on_matrices(program) == []
    loaded = Counter(tuple(o.kind for o in spec.graph.operands) for spec in launches(program))
    assert loaded == {("row",): 2, ("matrix",): 1, (): 5}  # biases, and what was saved


def test_recomputing_costs_a_product_and_saves_a_matrix():
    mlp = partial(gelu_mlp, False)
    program = lowered(partial(trained, mlp), SIZES, shape(T, D), *GELU)
    assert found_in(program)[("m", (MATRIX,))] == 5
    assert work_on_matrices(program) == []


@pytest.mark.parametrize(
    "weights, counts",
    [
        (
            [shape(G, D, 2, F)],
            {
                ("m", (MATRIX,) * 3): 1,  # activated, gate and up
                ("m", (MATRIX,) * 2): 1,  # gradients of gate and up, one array
                ("m", (MATRIX,)): 2,
                ("k", (MATRIX,)): 2,
            },
        ),
        (
            [shape(G, D, F), shape(G, D, F)],
            {
                ("m", (MATRIX,) * 3): 1,
                ("m", (MATRIX,) * 2): 1,
                ("m", (MATRIX,)): 3,  # the gradients of x add up in the second product
                ("k", (MATRIX,)): 3,
            },
        ),
    ],
)
def test_a_swiglu_mlp_runs_its_products_and_nothing_more(weights, counts):
    mlp = partial(swiglu_mlp, True)
    args = [shape(T, D), shape(T, D), *weights, shape(G, F, D)]
    program = lowered(partial(trained, mlp), SIZES, *args)
    assert found_in(program) == counts
    assert work_on_matrices(program) == []
    if len(weights) == 2:
        (aliased,) = [o for o in reachable(program) if "output_operand_alias" in o.text]
        assert "operand_index = 2" in aliased.text


def test_operands_are_read_as_they_lie():
    def layer(sizes, x, w, row, column, scalar, full, by_group, factor):
        return fused(
            lambda acc, *xs: acc * xs[2] * xs[5] + xs[0] + xs[1] + xs[3] + xs[4],
            x, w, sizes, row, column, scalar, full, by_group, factor,
        )  # fmt: skip

    args = [
        shape(T, D), shape(G, D, F), shape(F), shape(T, 1), shape(dtype=jnp.float32), shape(T, F),
        shape(G, 1, F), shape(G, 1, 1, dtype=jnp.float32),
    ]  # fmt: skip
    program = lowered(layer, SIZES, *args)
    (spec,) = launches(program)
    assert Counter(o.kind for o in spec.graph.operands) == {
        "row": 2, "column": 1, "scalar": 2, "matrix": 1,
    }  # fmt: skip
    assert work_on_matrices(program) == []


def test_rows_of_no_group_reach_what_xla_goes_on_with():
    """A matrix that the function does not leave 0 there is not stored for XLA."""

    def layer(sizes, x, w):
        def function(acc):
            y = jnp.exp(acc)
            return y, jnp.sum(y, 0), jnp.sum(jnp.square(acc), 1)

        return fused(function, x, w, sizes)

    (spec,) = launches(lowered(layer, SIZES, shape(T, D), shape(G, D, F)))
    assert results(spec) == [MATRIX, "matrix float32", "row_sum"]
    (exp,) = [i for i, node in enumerate(spec.graph.nodes, 1) if node.op == "exp"]
    first, second, _ = spec.graph.results
    assert (first.value, second.value) == (exp, 0)


def test_a_mapped_product_is_one_launch_for_all_rows():
    def layer(x, w, b, sizes):
        return fused(lambda acc, b: jnp.tanh(acc + b), x, w, sizes, b[:, None])

    mapped = jax.vmap(layer, (0, None, None, 0))
    args = [shape(2, T, D), shape(G, D, F), shape(G, F), shape(2, G, dtype=np.int32)]
    program = lowered(mapped, *args)
    (spec,) = launches(program)
    assert results(spec) == [MATRIX] and spec.grouped == "m"
    assert f"M={2 * T}" in attributes(program, "name")[0]
    assert f"L={G}" in attributes(program, "name")[0]
    own = jax.vmap(layer, (0, 0, None, 0))
    program = lowered(own, args[0], shape(2, G, D, F), *args[2:])
    assert f"L={2 * G}" in attributes(program, "name")[0]


def test_other_sizes_are_not_the_products():
    """An epilogue by other groups than the product's runs outside of its kernel."""

    def loss(sizes, others, x, w1, b1, w2):
        y = fused(lambda acc, b: jax.nn.silu(acc + b), x, w1, sizes, b1[:, None])
        return bare(y, w2, others)

    args = [shape(T, D), *GELU[:4]]
    same = lowered(lambda sizes, ct, *a: step(partial(loss, sizes, sizes), ct, *a), SIZES, *args)
    other = lowered(
        lambda sizes, others, ct, *a: step(partial(loss, sizes, others), ct, *a),
        SIZES, SIZES, *args,
    )  # fmt: skip
    loaded = [
        Counter(tuple(o.kind for o in spec.graph.operands) for spec in launches(program))
        for program in (same, other)
    ]
    assert loaded == [{("row",): 1, ("matrix",): 1, (): 5}, {("row",): 1, (): 6}]
    assert work_on_matrices(same) == [] and work_on_matrices(other) != []
