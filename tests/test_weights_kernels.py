"""Which kernels run products of weights of 8 and 4 bits, and which operands they convert on chip.

A row of `TABLE` is one of the table in docs/quantized.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from support.weights import PROGRAMS

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

pytestmark = pytest.mark.slow

S = jax.ShapeDtypeStruct


class Row(NamedTuple):
    """A product, and how kernels run it."""

    function: Any
    arguments: tuple[Any, ...]
    converted: str = ""  # the operand that passes through registers: "left", "right" or none
    scales: int = 0  # elements of K that share a scale in the mainloop
    follows: bool = False  # whether scales are an epilogue's operands


def _w(dtype: Any, block: int | None = None, shape: Any = (512, 384), axis: int = 0) -> Any:
    blocks: list[int | None] = [1] * len(shape)
    blocks[axis] = block
    return jax.eval_shape(lambda: jhg.quantize(jnp.zeros(shape), dtype, blocks))


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return S(shape, dtype)


def _dot(left: int, right: int) -> Any:
    return partial(jhg.dot_general, dimension_numbers=(((left,), (right,)), ((), ())))


def _cast(x: Any, w: Any, **how: Any) -> Any:
    return jhg.matmul(x, w.astype(x.dtype), **how)


E4M3, X, SIZES = jnp.float8_e4m3fn, _array(256, 512), S((4,), jnp.int32)
WIDE = partial(jhg.matmul, preferred_element_type=jnp.bfloat16)
TABLE = {
    "16 x 16": Row(jhg.matmul, (X, _array(512, 384))),
    "8 x 8": Row(WIDE, (_array(256, 512, dtype=E4M3), _array(512, 384, dtype=E4M3))),
    "8 x 8, blocks": Row(WIDE, (_w(E4M3, 128, (256, 512), 1), _w(E4M3, 128))),
    "16 x 8, K first": Row(jhg.matmul, (X, _w(jnp.int8)), "right", follows=True),
    "16 x 8, K last": Row(_dot(1, 1), (X, _w(jnp.int8, None, (384, 512), 1)), "right", 0, True),
    "16 x e4m3": Row(jhg.matmul, (X, _w(E4M3)), "right", follows=True),
    "16 x e5m2": Row(jhg.matmul, (X, _w(jnp.float8_e5m2)), "right", follows=True),
    "16 x 4": Row(jhg.matmul, (X, _w(jnp.int4)), "right", follows=True),
    "float16 x 4": Row(
        jhg.matmul, (_array(256, 512, dtype=jnp.float16), _w(jnp.int4)), "right", follows=True
    ),
    "16 x 8, M first": Row(_dot(0, 0), (_array(512, 256), _w(jnp.int8)), "right", follows=True),
    "8 x 16": Row(
        jhg.matmul, (_w(jnp.int8, None, (256, 512), 1), _array(512, 384)), follows=True
    ),
    "8 x 16 into (N, M)": Row(
        lambda w, x, **how: jhg.einsum("mk,kn->nm", w.astype(x.dtype), x, **how),
        (_array(384, 512, dtype=jnp.int8), _array(512, 256)), "left",
    ),
    "8 x 16 by einsum": Row(
        partial(jhg.einsum, "nk,mk->mn"), (_w(jnp.int8, 64, (384, 512), 1), X), "left", 64
    ),
    "16 x 8 cast": Row(_cast, (X, _array(512, 384, dtype=jnp.int8)), "right"),
    **{
        f"16 x {dtype.__name__}, {block} along K": Row(
            jhg.matmul, (X, _w(dtype, block)), "right", block
        )
        for dtype in (jnp.int8, jnp.int4, E4M3) for block in (32, 64, 128)
    },
    "8 x 16, groups along K": Row(
        jhg.matmul, (_w(jnp.int8, 64, (256, 512), 1), _array(512, 384))
    ),
    "16 x 8, a scale an element of K": Row(
        jhg.matmul, (X, jax.eval_shape(lambda: jhg.Quantized(
            jnp.zeros((512, 384), jnp.int8), jnp.ones((512, 384), jnp.float32)))),
    ),
    "batches": Row(
        jhg.matmul, (_array(3, 256, 512), _w(jnp.int8, 64, (3, 512, 384), 1)), "right", 64
    ),
    "rows in groups": Row(
        jhg.ragged_dot, (X, _w(jnp.int8, 64, (4, 512, 384), 1), SIZES), "right", 64
    ),
    "dgrad": Row(
        lambda x, w, **how: jax.grad(lambda x: jnp.sum(jhg.matmul(x, w, **how)))(x),
        (X, _w(jnp.int8)), "right",
    ),
    "dgrad, groups along K": Row(
        lambda x, w, **how: jax.grad(lambda x: jnp.sum(jhg.matmul(x, w, **how)))(x),
        (X, _w(jnp.int8, 64)),
    ),
    "a reduction follows": Row(
        partial(jhg.matmul, epilogue=jnp.max), (X, _w(jnp.int8)), follows=True
    ),
    "gate and up": Row(
        jhg.gated_linear_unit, (X, _w(jnp.int8, None, (512, 2, 384), 0)), "right", follows=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_is_converted_on_chip(name):
    row = TABLE[name]
    (spec,) = specs_of(partial(row.function, implementation="hopper"), *row.arguments)
    assert converted(spec, row) == row.converted
    assert spec.k_group == row.scales
    assert any(o.kind in ("row", "column") for o in spec.graph.operands) == row.follows


def converted(spec: GemmSpec, row: Row) -> str:
    """Returns the operand that becomes 16 bits in registers, which kernels call B."""
    if not spec.b_in_registers:
        return ""
    left, _, *_ = row.arguments
    narrow = left.values if isinstance(left, jhg.Quantized) else left
    return "left" if narrow.dtype.name == spec.b_dtype else "right"


@pytest.mark.parametrize(
    ("m", "dtype", "block", "on_chip"),
    [
        (16, jnp.int4, 32, True), (256, jnp.int4, 32, True), (4096, jnp.int4, 32, False),
        (4096, jnp.int8, 128, False), (4096, jnp.int8, None, True), (4096, jnp.int4, None, True),
    ],
)  # fmt: skip
def test_scales_of_groups_are_multiplied_by_xla_where_rows_are_many(m, dtype, block, on_chip):
    """Each tile of rows waits for its sums to be scaled; XLA's pass is one, for all of them."""
    arguments = _array(m, 8192), _w(dtype, block, (8192, 8192))
    explained = jhg.explain(jhg.matmul, *arguments, implementation="hopper")
    (spec,) = specs_of(partial(jhg.matmul, implementation="hopper"), *arguments)
    assert explained.spec == spec and spec.b_in_registers == on_chip
    assert ("XLA converts an operand to 16 bits first" in explained.reason) != on_chip
    with jhg.batch_invariant():
        (spec,) = specs_of(jhg.matmul, *arguments)
    assert spec.b_in_registers  # for any number of rows


@pytest.mark.parametrize(
    ("m", "n", "in_turns"),
    [
        (1, 8192, True), (32, 6144, True), (32, 4096, True), (64, 8192, True), (1, 28672, False),
        (64, 28672, False),
    ],
)  # fmt: skip
def test_warpgroups_take_turns_where_each_sm_has_a_tile_of_few_rows_or_part_of_its_k(
    m, n, in_turns
):
    arguments = _array(m, 8192), _w(jnp.int4, None, (8192, n))
    (spec,) = specs_of(partial(jhg.matmul, implementation="hopper"), *arguments)
    assert spec.k_in_turns == in_turns
    assert spec.cluster_k == (2 if n == 4096 else 1)
    assert not (spec.k_in_turns and spec.split_k)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "gradient"])
def test_explain_says_what_lowering_does(name):
    program = PROGRAMS[name]
    arguments = program.arguments("int4", "k64", jnp.bfloat16)
    report = jhg.explain(lambda *args: program.function(*args), *arguments)
    (product,) = report.products
    assert product.explanation
    assert [product.explanation.spec] == program.specs("int4", "k64", jnp.bfloat16)
