"""What users of `ragged_dot` and `ragged_dot_general` read when their arguments do not fit."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ragged import LHS, RHS, SIZES, K, N, T, numbers

import jax_hopper_gemm as jhg

RAGGED: Any = jhg.ragged_dot  # taken with arguments of other types than it declares
GENERAL: Any = jhg.ragged_dot_general
COLUMNS, C = jnp.zeros((T, N)), jnp.zeros((len(SIZES), K, N))
SUM = numbers(([0], [0]), ([], []), 0, None)
ROWS = numbers(([1], [1]), ([], []), 0, 0)
BATCH = numbers(([1], [1]), ([0], [0]), 0, None)

ERRORS = [
    (lambda: jhg.ragged_dot(LHS[0], RHS, SIZES), ValueError,
     "ragged_dot: lhs is f32[3], expected (M, K)"),
    (lambda: jhg.ragged_dot(LHS[None], RHS[0], SIZES[None]), ValueError,
     "ragged_dot: lhs is f32[1,12,3], expected (M, K): other axes are ragged_dot_general's; "
     "rhs is f32[3,4], expected (G, K, N); "
     "group_sizes is i32[1,3], expected (G,): other axes are ragged_dot_general's"),
    (lambda: jhg.ragged_dot(LHS, RHS.swapaxes(1, 2), SIZES), ValueError,
     "ragged_dot: K differs: lhs is f32[12,3], rhs is f32[3,4,3]. Is rhs stored (G, N, K)? "
     "Pass jnp.swapaxes(rhs, 1, 2)"),
    (lambda: jhg.ragged_dot(LHS, RHS[:2], SIZES), ValueError,
     "ragged_dot: G differs: rhs is f32[2,3,4], group_sizes is i32[3]. Does rhs hold some of "
     "the groups? Say from which one on with group_offset"),
    (lambda: jhg.ragged_dot(LHS, RHS, SIZES[:2]), ValueError,
     "ragged_dot: G differs: rhs is f32[3,3,4], group_sizes is i32[2]"),
    (lambda: jhg.ragged_dot(LHS, RHS, SIZES[:2], group_offset=0), ValueError,
     "ragged_dot: G differs: rhs is f32[3,3,4], group_sizes is i32[2]: group_sizes are those of "
     "all groups"),
    (lambda: jhg.ragged_dot(LHS, RHS, SIZES.astype("float32")), TypeError,
     "ragged_dot: group_sizes is f32[3], expected integers"),
    (lambda: RAGGED(LHS, RHS, [3, 0, 5]), TypeError,
     "ragged_dot: group_sizes is a list, expected an array: convert it with jnp.asarray"),
    (lambda: jhg.ragged_dot(LHS, RHS, np.array([3, -2, 5])), ValueError,
     "ragged_dot: group_sizes has a negative size, -2: expected 0 or more"),
    (lambda: jhg.ragged_dot(LHS, RHS, SIZES, group_offset=jnp.zeros(2)), TypeError,
     "ragged_dot: group_offset is f32[2], expected integers; "
     "group_offset is f32[2], expected a scalar or (1,)"),
    (lambda: jhg.ragged_dot(LHS, RHS, SIZES, group_offset=np.array([4])), ValueError,
     "ragged_dot: group_offset is 4, expected the number of a group: group_sizes is i32[3]"),
    (lambda: RAGGED(LHS, RHS, SIZES, implementation="pallas"), ValueError,
     "ragged_dot: implementation is 'pallas', expected None, 'hopper' or 'xla'"),
    (lambda: jhg.ragged_dot(LHS, RHS, SIZES, implementation="hopper"), NotImplementedError,
     "implementation='hopper': the kernels run on CUDA, and this program is lowered for another "
     "platform. With implementation=None it runs on either."),
    (lambda: GENERAL(LHS, RHS, SIZES, (((1,), (1,)), ((), ()))), TypeError,
     "ragged_dot_general: ragged_dot_dimension_numbers is a tuple, expected a "
     "jax.lax.RaggedDotDimensionNumbers"),
    (lambda: GENERAL(LHS, RHS, SIZES, numbers(([1], [2]), ([], []), 0, 0)), ValueError,
     "ragged_dot_general: contracting axes (1,) and (2,) have extents (3,) and (4,): "
     "lhs is f32[12,3], rhs is f32[3,3,4]"),
    (lambda: GENERAL(LHS, RHS, SIZES, numbers(([1], [1]), ([], []), 2, 0)), ValueError,
     "ragged_dot_general: lhs_ragged_dimensions is (2,), expected one axis of lhs, f32[12,3]"),
    (lambda: GENERAL(LHS, RHS, SIZES, numbers(([1], [1]), ([], []), 0.5, 0)), TypeError,
     "ragged_dot_general: lhs_ragged_dimensions is (0.5,), expected a sequence of axes"),
    (lambda: GENERAL(LHS, RHS, SIZES, numbers(([1], [1]), ([], []), 0, 0),
                     preferred_element_type=("float32",)), TypeError,
     "ragged_dot_general: preferred_element_type is ('float32',), expected a dtype such as "
     "jnp.float32 or None"),
    (lambda: GENERAL(LHS, RHS, SIZES, numbers(([1], [1]), ([], []), 0, 1)), ValueError,
     "ragged_dot_general: rhs_group_dimensions is (1,), expected one axis of rhs, f32[3,3,4], "
     "that is neither contracted nor a batch axis: the ragged axis is a free one of lhs"),
    (lambda: GENERAL(LHS, LHS, SIZES, numbers(([0], [0]), ([], []), 0, 1)), ValueError,
     "ragged_dot_general: rhs_group_dimensions is (1,), expected none: the ragged axis is a "
     "contracted one"),
    (lambda: GENERAL(LHS, LHS, SIZES, numbers(([0], [0]), ([], []), 0, None), group_offset=0),
     ValueError,
     "ragged_dot_general: group_offset came, and rhs has no axis of groups that it could be "
     "into"),
    (lambda: GENERAL(jnp.zeros((2, T, K)), RHS, SIZES[None], numbers(([2], [1]), ([], []), 1, 0)),
     ValueError,
     "ragged_dot_general: group_sizes is i32[1,3], expected (G,) or (2, G): lhs is f32[2,12,3]"),
    (lambda: GENERAL(LHS, RHS, SIZES[0], numbers(([1], [1]), ([], []), 0, 0)), ValueError,
     "ragged_dot_general: group_sizes is a scalar, i32[], expected (G,)"),
    (lambda: GENERAL(LHS, RHS[:2], SIZES, numbers(([1], [1]), ([], []), 0, 0)), ValueError,
     "ragged_dot_general: G differs: rhs is f32[2,3,4], group_sizes is i32[3]. Does rhs hold "
     "some of the groups? Say from which one on with group_offset"),
    (
        lambda: GENERAL(
            jnp.zeros((5, T, K)), jnp.zeros((5, T, N)), SIZES,
            numbers(([0, 1], [0, 1]), ([], []), 1, None), implementation="hopper",
        ),
        NotImplementedError,
        "implementation='hopper': no kernel runs ragged_dot_general: it contracts axes outside of "
        "the ragged one",
    ),
    (lambda: GENERAL(LHS, COLUMNS, SIZES, SUM, c=C[0]), ValueError,
     "ragged_dot_general: c is f32[3,4], expected the result's shape (3, 3, 4)"),
    (lambda: GENERAL(LHS, COLUMNS, SIZES, SUM, c=jnp.swapaxes(C, 1, 2), alpha=jnp.ones(2)),
     ValueError, "ragged_dot_general: alpha is f32[2], expected a number or a scalar array; c is "
     "f32[3,4,3], expected the result's shape (3, 3, 4)"),
    (lambda: GENERAL(LHS, COLUMNS, SIZES, SUM, beta=2.0), ValueError,
     "ragged_dot_general: beta came without c: it is the factor of c in alpha * product + "
     "beta * c"),
    (lambda: GENERAL(LHS, COLUMNS, SIZES, SUM, c=C.astype(np.int32)), ValueError,
     "ragged_dot_general: c is i32[3,3,4], whose dtype the result takes and which cannot hold "
     "the product of f32[12,3] and f32[12,4]: convert c, or pass preferred_element_type"),
    (lambda: GENERAL(LHS, COLUMNS, SIZES, SUM, c="gradients"), TypeError,
     "ragged_dot_general: c is a str, expected an array: convert it with jnp.asarray"),
    (lambda: GENERAL(LHS, RHS, SIZES, ROWS, c=jnp.zeros((T, N)), beta=2.0), ValueError,
     "ragged_dot_general: beta, c came, and the ragged axis is a free one of lhs: call "
     "ragged_dot with epilogue=lambda y, beta, c: y + beta * c, epilogue_operands=(beta, c,)"),
    (lambda: GENERAL(LHS, RHS, SIZES, ROWS, alpha=2.0), ValueError,
     "ragged_dot_general: alpha came, and the ragged axis is a free one of lhs: call "
     "ragged_dot with epilogue=lambda y, alpha: alpha * y, epilogue_operands=(alpha,)"),
    (lambda: GENERAL(LHS, LHS, SIZES, BATCH, c=jnp.zeros(T)), ValueError,
     "ragged_dot_general: c came, and the ragged axis is a batch one: call dot_general, which "
     "this product is, with an epilogue"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, message", ERRORS)
def test_the_message_says_what_came_and_the_way_out(call, error, message):
    with pytest.raises(error, match=re.escape(message) + r"(\n|$)"):
        call()


def test_errors_are_raised_while_tracing():
    with pytest.raises(ValueError, match="K differs: lhs is f32"):
        jax.eval_shape(jhg.ragged_dot, LHS, RHS.swapaxes(1, 2), SIZES)
