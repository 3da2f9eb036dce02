"""Products that read an operand, one array of a stack, within the stack."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch import H200, choose, problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import Int32, Pointer, TensorMap, make_plan
from jax_hopper_gemm.testing.lowered import specs_of

M, N, K, S = 512, 768, 512, 4
X, W, INDEX = (M, K), (K, N), jax.ShapeDtypeStruct((), jnp.int32)
XS, WS = (S, *X), (S, *W)
GROUPED = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256, grouped="m")


def indexed(function, *shapes, index=INDEX):
    """Returns which operand of each kernel of a function is one of a stack."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    exchanged = {"a": "b", "b": "a", None: None}  # where a kernel computes D's transpose
    specs = specs_of(function, *arrays, index)
    return [s.indexed if s.d_major == "n" else exchanged[s.indexed] for s in specs]


READ = {
    "right": (lambda x, ws, i: jhg.matmul(x, ws[i]), X, WS, "b"),
    "left": (lambda xs, w, i: jhg.matmul(xs[i], w), XS, W, "a"),
    "larger of two": (lambda xs, ws, i: jhg.matmul(xs[i], ws[i]), XS, WS, "b"),
    "left, as long": (lambda xs, ws, i: jhg.matmul(xs[i], ws[i]), XS, (S, K, 512), "a"),
    "transposed": (lambda x, ws, i: jhg.matmul(x, ws[i].T), X, (S, N, K), "b"),
    "exchanged": (lambda x, ws, i: jhg.einsum("mk,kn->nm", x, ws[i]), X, WS, "a"),
    "epilogue": (lambda x, ws, i: jhg.matmul(x, ws[i], activation="gelu"), X, WS, "b"),
    "function behind": (lambda x, ws, i: jhg.matmul(x, ws[i]) * 2 + 1, X, WS, "b"),
    "loop": (
        lambda x, ws, i: lax.fori_loop(0, i, lambda i, y: jhg.matmul(y, ws[i]), x),
        (M, K), (S, K, K), "b",
    ),
    "clamped": (
        lambda x, ws, i: jhg.matmul(x, lax.dynamic_slice(ws, (i, i, 0), (1, K, N))[0]), X, WS, "b",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("kernels_by_default")
@pytest.mark.parametrize("name", READ)
def test_one_array_of_a_stack_is_read_there(name):
    function, lhs, rhs, operand = READ[name]
    assert indexed(function, lhs, rhs) == [operand]


COPIED = {
    "several": (
        lambda x, ws, i: jhg.matmul(x, lax.dynamic_slice_in_dim(ws, i, 2)), (2, M, K), WS,
    ),
    "part": (lambda x, ws, i: jhg.matmul(x, ws[i, : K // 2]), (M, K // 2), WS),
    "last axis": (lambda x, ws, i: jhg.matmul(x, ws[..., i]), X, (*W, S)),
    "batch": (lambda x, ws, i: jhg.matmul(x, ws[i]), (2, *X), (S, 2, *W)),
    "two right ones": (
        lambda x, ws, i: jhg.gated_linear_unit(x, (ws[i], ws[i])), X, WS,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("kernels_by_default")
@pytest.mark.parametrize("name", COPIED)
def test_what_else_is_cut_out_is_copied(name):
    function, lhs, rhs = COPIED[name]
    assert set(indexed(function, lhs, rhs)) == {None}


def test_an_index_of_another_type_is_not_read_by_the_kernel():
    narrow = jax.ShapeDtypeStruct((), jnp.uint8)
    found = indexed(lambda x, ws, i: jhg.matmul(x, lax.dynamic_index_in_dim(ws, i)[0]), X, WS,
                    index=narrow)  # fmt: skip
    assert found == [None]


@pytest.mark.parametrize("lhs", ["r, 512", "4, r, 512"])
def test_a_symbolic_extent_is_left_to_xla(lhs):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(lhs), jnp.bfloat16)
    ws = jax.ShapeDtypeStruct(WS, jnp.bfloat16)

    def function(x, ws, i):
        return jhg.matmul(x if x.ndim == 2 else x[i], ws[i])

    checks = jhg.export_disabled_checks()
    export = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
    assert "dot_general" in export(x, ws, INDEX).mlir_module()


@pytest.mark.usefixtures("kernels_by_default")
def test_gradients_read_the_stack_too():
    def loss(x, ws, i):
        return jnp.sum(jhg.matmul(x, ws[i]).astype(jnp.float32) ** 2)

    assert sorted(map(str, indexed(jax.grad(loss, (0, 1)), X, WS))) == ["None", "b", "b"]


# Problems and plans.


def stacked(operand: str, count: int = S) -> GemmProblem:
    problem = GemmProblem.dense(M, N, K)
    return replace(problem, indexed=operand, stack=count)


@pytest.mark.parametrize("operand", ["a", "b"])
def test_the_kernel_is_that_of_one_matrix(operand):
    found, alone = choose(stacked(operand), H200), choose(GemmProblem.dense(M, N, K), H200)
    assert alone.spec and found.spec
    assert found.spec == replace(alone.spec, indexed=operand)
    assert found == replace(alone, spec=found.spec) and violations(found.spec) == []
    assert pairing_violations(stacked(operand), found.spec) == []
    (reason,) = pairing_violations(stacked(operand), alone.spec)
    assert reason == f"the kernel has indexed None, the problem {operand!r}"


@pytest.mark.parametrize("operand", ["a", "b"])
def test_the_plan_has_a_map_of_the_stack_and_where_the_index_lies(operand):
    problem = stacked(operand)
    decision = choose(problem, H200)
    assert decision.spec and decision.raster_order
    plan = make_plan(problem, decision.spec, decision.raster_order, H200.num_sms)
    maps = [param for param in plan.params if isinstance(param, TensorMap)]
    assert [x.dims[2] for x in maps] == [S if x == operand else 1 for x in "abd"]
    assert [x.buffer for x in maps] == [0, 1, 3]  # the index is 2
    pointer = plan.params.index(Pointer(2))
    assert plan.params[pointer + 1] == Int32(S)


def test_stacks_that_no_kernel_reads_are_told_apart():
    problem = stacked("a")
    assert problem_violations(problem) == []
    (reason,) = problem_violations(replace(problem, l=2))
    assert "A is one matrix of a stack, and the product has 2 matrices: copy it" in reason
    (reason,) = problem_violations(replace(problem, stack=0))
    assert "the stack has 0 matrices, not 1 to" in reason
    (reason,) = problem_violations(replace(problem, indexed="d"))
    assert reason == "one matrix of a stack is 'd', not 'a' or 'b'"
    (reason,) = problem_violations(replace(problem, a=replace(problem.a, batch_stride=M * K + 4)))
    assert "its matrices are" in reason and "not a multiple of 16" in reason
    assert choose(replace(problem, l=2), H200).spec is None
    grouped = replace(GemmProblem.grouped("m", M, N, K, 4), indexed="a")
    assert "the product has groups: copy it" in " ".join(problem_violations(grouped))


def test_kernels_of_groups_have_no_stacks():
    assert violations(GROUPED) == []
    (reason,) = violations(replace(GROUPED, indexed="a"))
    assert reason == (
        "A is one matrix of a stack, and the product has groups: copy it out of the stack"
    )
    plain = choose(GemmProblem.dense(M, N, K), H200).spec
    assert plain and violations(replace(plain, indexed="d")) == [
        "one matrix of a stack is 'd', not 'a' or 'b'"
    ]


def test_results_are_those_of_the_slice_where_no_kernel_runs():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.bfloat16)
    ws = jnp.asarray(rng.standard_normal((3, 16, 24)), jnp.bfloat16)
    found = jax.jit(lambda x, ws, i: jhg.matmul(x, ws[i]))(x, ws, 1)
    np.testing.assert_array_equal(found, jnp.matmul(x, ws[1]))
