"""What `explain` and errors say of the products of a function."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.program_inspection import LAUNCH, integers, lowered, operations

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

X, W = integers((16, 16), "bfloat16"), integers((16, 16), "bfloat16", seed=1)
SIZES = jnp.array([3, 0, 9])
GROUPS = integers((3, 16, 8), "bfloat16")


def bf16(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.bfloat16)


def block(x: Any, w: Any, hashes: Any) -> Any:
    h = jnp.einsum("bk,kn->nb", x, w).T
    scores = x.astype("int16") @ hashes

    def step(carry: Any, _: Any) -> Any:
        return jnp.tanh(carry @ w), None

    return lax.scan(step, h, length=3)[0], scores


def test_a_product_without_a_line_has_none_in_the_text():
    assert "\n      at " not in str(jhg.explain(jnp.matmul, X, W))
    assert "\n      at jit(matmul)\n" in str(jhg.explain(jax.jit(jhg.matmul), X, W))


SHAPES = bf16(4096, 4096), bf16(4096, 4096), jax.ShapeDtypeStruct((4096, 8), jnp.int16)


@pytest.mark.usefixtures("launcher")
def test_the_report_says_where_each_product_is_and_what_runs_it():
    report = jhg.explain(block, *SHAPES, fuse=False)
    first, scores, second = report.products
    assert [x.taken for x in report.products] == [True, False, True]
    assert (report.taken, report.left) == ((first, second), (scores,))
    lines = [x.line for x in report.products]
    start = block.__code__.co_firstlineno
    for line, number in zip(lines, (1, 2, 5), strict=True):
        assert f"{__file__.rsplit('/', 1)[-1]}:{start + number}:" in line
    assert (first.within, second.within) == ((), ("scan of 3",))
    expected = jhg.explain(jhg.matmul, *SHAPES[:2])
    assert second.explanation == expected
    assert (second.path, second.reason) == (expected.path, expected.reason)
    text = str(report)
    assert text.startswith("3 products: ") and "1 not replaced" in text
    for word in ("i16[4096,4096] x i16[4096,8]", "scan of 3 > ", "no kernel multiplies int16"):
        assert word in text


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("precision", "kernels"), [(None, 1), ("highest", 0), ("BF16_BF16_F32_X6", 3)]
)
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_a_product_of_float32_runs_as_that_of_matmul(b_major: str, precision: Any, kernels: int):
    """In TF32 one of three is faster by a kernel: both operands of B's gradient lie across K."""

    def step(multiply: Callable[..., Any], a: Any, b: Any) -> Any:
        def loss(a: Any, b: Any) -> Any:
            return jnp.sum(multiply(a, b.T if b_major == "k" else b) ** 2)

        with jax.default_matmul_precision(precision):
            return jax.value_and_grad(loss, (0, 1))(a, b)

    shapes = [jax.ShapeDtypeStruct((1536, 1536), jnp.float32)] * 2
    specs = specs_of(partial(step, jhg.matmul), *shapes)
    assert len(specs) == kernels
    assert specs_of(jhg.accelerate(partial(step, jnp.matmul), fuse=False), *shapes) == specs


def test_a_ragged_product_is_found_where_the_user_asks_for_it():
    def function(x: Any) -> Any:
        return lax.ragged_dot(x, GROUPS, SIZES)

    (found,) = jhg.explain(function, X).taken
    assert f":{function.__code__.co_firstlineno + 1}:" in found.line
    assert __file__.rsplit("/", 1)[-1] in found.line
    assert found.product.endswith("rows in 3 groups")


@pytest.mark.parametrize("operation", [operator.add, operator.mul])
def test_a_sum_with_a_ragged_product_is_no_zero_in_rows_of_no_group(operation: Any):
    def function(x: Any, y: Any) -> Any:
        return operation(lax.ragged_dot(x, GROUPS, SIZES), y)

    (found,) = jhg.explain(function, X, jnp.ones_like(X @ GROUPS[0])).products
    zeros = "not fused: no kernel computes add, convert_element_type, as rows of no group are 0"
    assert found.fused.startswith(zeros) == (operation is operator.add)


def test_a_transpose_of_a_product_becomes_part_of_it():
    def function(x: Any, w: Any) -> Any:
        y = x @ w
        return (y @ w).T, y.T, y  # the second is not the only user of its product

    assert operations(jhg.accelerate(function), X, W) == {"hopper_dot": 2, "transpose": 1}


@pytest.mark.parametrize(
    ("subscripts", "shapes", "taken"),
    [
        ("btd,ndh->btnh", ((2, 64, 128), (4, 128, 64)), True),
        ("bsd,ckdh->cbskh", ((2, 64, 128), (2, 4, 128, 64)), True),
        ("btkgd,bskd->bkgts", ((2, 64, 2, 4, 16), (2, 64, 2, 16)), False),
    ],
)
def test_a_batch_whose_rows_lie_apart_is_left_to_xla(subscripts, shapes, taken):
    """Weights of heads are no batch: XLA would transpose them."""
    (found,) = jhg.explain(partial(jnp.einsum, subscripts), *(bf16(*x) for x in shapes)).products
    assert found.taken == taken


@pytest.mark.usefixtures("launcher")
def test_the_report_agrees_with_lowering():
    report = jhg.explain(block, *SHAPES, implementation="hopper")
    program = lowered(jhg.accelerate(block, implementation="hopper"), *SHAPES)
    assert program.count(LAUNCH) == sum(x.path == "hopper" for x in report.products) == 2
    assert "stablehlo.transpose" not in program


def test_the_report_knows_what_is_ours_already():
    def function(x: Any, w: Any) -> Any:
        return jhg.matmul(x, w, activation="gelu") @ w

    report = jhg.explain(function, *SHAPES[:2])
    assert [x.taken for x in report.products] == [True, True]
    assert "with an epilogue" in report.products[0].product
    again = jhg.explain(jhg.accelerate(function), *SHAPES[:2])
    assert [x.product for x in again.products] == [x.product for x in report.products]


@pytest.mark.usefixtures("launcher")
def test_hopper_insists_and_names_the_product():
    odd = bf16(64, 5, 7), bf16(5, 7, 64)
    product = partial(jnp.tensordot, axes=2)
    function = jhg.accelerate(product, implementation="hopper")
    with pytest.raises(NotImplementedError, match="implementation='hopper'"):
        lowered(function, *odd)
    assert LAUNCH not in lowered(jhg.accelerate(product), *odd)
    (found,) = jhg.explain(product, *odd).products
    assert (found.taken, found.path) == (True, "xla")
    text = str(jhg.explain(product, *odd))
    assert text.startswith("1 product: 0 on kernels, 1 on XLA, 0 not replaced")
