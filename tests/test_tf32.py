"""float32 operands in TF32: which layouts kernels read, what is transposed, what is XLA's."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import float32

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch import H200, choose
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.type_legality import type_violations
from jax_hopper_gemm.launch.plan import TensorMap, make_plan
from jax_hopper_gemm.testing.lowered import specs_of

A, B = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in float32.AB)


def test_tf32_is_the_default_where_both_operands_lie_along_k():
    along_k = jax.ShapeDtypeStruct((B.shape[1], B.shape[0]), jnp.float32)

    def product(a, b, **options):
        return jhg.einsum("mk,nk->mn", a, b, **options)

    (spec,) = specs_of(product, A, along_k)
    assert spec.rounds_operands and not spec.bf16_terms
    (named,) = specs_of(
        lambda a, b: product(a, b, precision=lax.DotAlgorithmPreset.TF32_TF32_F32), A, along_k
    )
    assert named == spec
    assert specs_of(lambda a, b: product(a, b, precision="highest"), A, along_k) == []
    (fused,) = specs_of(lambda a, b: product(a, b, epilogue=jnp.tanh), A, along_k)
    assert fused.rounds_operands and fused.epilogue


@pytest.mark.parametrize("b_major", ("k", "n"))
def test_no_rows_are_gathered_in_tf32_as_nothing_would_round_them(b_major):
    kind = ProblemType("float32", "float32", "float32", "k", b_major, grouped="m", gathered="a")
    assert [*type_violations(kind)] == [
        "no kernel rounds rows of float32 that it gathers: gather them beforehand"
    ]


def test_few_rows_and_batches_are_left_to_xla_in_tf32():
    along_k = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    for rows, by_kernel in ((8, False), (16, True)):
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
        assert bool(specs_of(partial(jhg.einsum, "mk,nk->mn"), x, along_k)) == by_kernel
    batch = jax.ShapeDtypeStruct((2, 1024, 1024), jnp.float32)
    assert specs_of(partial(jhg.einsum, "lmk,lnk->lmn"), batch, batch) == []


@pytest.mark.parametrize(
    ("subscripts", "rows", "b_major"),
    [
        ("mk,kn->mn", 256, "n"), ("km,kn->mn", 256, "n"), ("mk,kn->mn", 4096, "k"),
        ("km,kn->mn", 4096, "k"), ("mk,nk->mn", 256, "k"), ("km,nk->mn", 4096, "k"),
    ],
)  # fmt: skip
def test_b_across_k_is_transposed_or_taken_from_registers_what_takes_less(
    subscripts, rows, b_major
):
    extents = {"m": rows, "n": 4096, "k": 4096}
    operands = subscripts.removesuffix("->mn").split(",")
    shapes = (tuple(extents[x] for x in letters) for letters in operands)
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    (spec,) = specs_of(partial(jhg.einsum, subscripts, implementation="hopper"), a, b)
    assert (spec.a_major, spec.b_major) == ("k", b_major)
    assert spec.b_in_registers == (b_major == "n")


def test_gradients_of_weights_are_transposed_where_that_is_faster_in_tf32():
    x, g = (jax.ShapeDtypeStruct((16384, n), jnp.float32) for n in (4096, 4096))
    (spec,) = specs_of(partial(jhg.einsum, "km,kn->mn"), x, g)
    assert spec.rounds_operands
    x, g = (jax.ShapeDtypeStruct((2048, n), jnp.float32) for n in (256, 256))
    assert specs_of(partial(jhg.einsum, "km,kn->mn"), x, g) == []


def test_tensor_maps_round_what_is_multiplied_in_tf32():
    problem = GemmProblem.dense(256, 256, 256, b_major="k", dtype="float32")
    decision = choose(problem, H200, kernel_only=True)
    assert decision.spec and decision.raster_order
    plan = make_plan(problem, decision.spec, decision.raster_order, 132)
    maps = [param for param in plan.params if isinstance(param, TensorMap)]
    assert [tensor_map.rounds for tensor_map in maps] == [True, True, False]  # of A, B, D
    assert [tensor_map.encode()[3] for tensor_map in maps] == [11, 11, 7]
