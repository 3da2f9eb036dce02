"""Operands of batched products whose axes lie as in what they are computed from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.program_inspection import shape

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.launch.ffi_target import TARGET
from jax_hopper_gemm.lowering.call import custom_calls
from jax_hopper_gemm.lowering.decide import decide
from jax_hopper_gemm.lowering.origins import Origin
from jax_hopper_gemm.lowering.request import Request

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("launcher")]

HEADS, SHARED, LENGTH, FEATURES = 2, 4, 1024, 128


LOGITS = shape(HEADS, LENGTH, SHARED, LENGTH)  # heads, queries, queries' heads of each, keys
VALUES = shape(HEADS, LENGTH, FEATURES)


def shares(logits: Any) -> Any:
    """Computed from a transpose of the logits, by functions of their own, too."""
    turned = jnp.where(jnp.tri(LENGTH, dtype=bool), logits.transpose(2, 0, 1, 3), -1e9)
    return jax.nn.softmax(turned.astype(jnp.float32)).astype(jnp.bfloat16)


def outcome(logits: Any, values: Any) -> Any:
    return jhg.einsum("gnts,nsh->gnth", shares(logits), values, implementation="hopper")


def of_rows(logits: Any, results: Any) -> Any:
    """Contracts queries and heads: one K, where they are neighbours."""
    return jhg.einsum("gnts,gnth->nsh", shares(logits), results, implementation="hopper")


def mirrored(logits: Any, values: Any) -> Any:
    """The keys are transposed, too: the operand is read as XLA writes it."""
    turned = jnp.exp(logits.transpose(3, 0, 2, 1))
    return jhg.einsum("sngt,nsh->ngth", turned, values, implementation="hopper")


def unturned(logits: Any, values: Any) -> Any:
    return jhg.einsum("ntgs,nsh->ntgh", jnp.exp(logits), values, implementation="hopper")


def turned_back(logits: Any, values: Any) -> Any:
    """As a gradient that a transpose leads back to the order of the logits."""
    returned = (shares(logits) * 2).transpose(1, 2, 0, 3) * 3
    return jhg.einsum("ntgs,nsh->ntgh", returned, values, implementation="hopper")


def of_either(logits: Any, values: Any) -> Any:
    """XLA computes it in one of two orders: the value's own is one of them."""
    turned = logits.reshape(LENGTH, HEADS, SHARED, LENGTH).transpose(1, 0, 2, 3)
    product = jnp.exp(turned) * logits
    return jhg.einsum("ntgs,nsh->ntgh", product, values, implementation="hopper")


PROGRAMS: dict[str, tuple[Any, tuple[Any, ...], list[int] | None]] = {
    "rows": (outcome, (LOGITS, VALUES), [1, 2, 0, 3]),
    "contracted": (of_rows, (LOGITS, shape(SHARED, HEADS, LENGTH, FEATURES)), [1, 2, 0, 3]),
    "last axis": (mirrored, (LOGITS, VALUES), None),
    "none": (unturned, (LOGITS, VALUES), None),
    "turned back": (turned_back, (LOGITS, VALUES), None),
    "of either": (of_either, (LOGITS, VALUES), None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_operand_keeps_the_order_of_what_it_is_computed_from(name: str):
    function, arguments, order = PROGRAMS[name]
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    (launch,) = custom_calls(lowered.compiler_ir("stablehlo"), TARGET)
    large = max(launch.operands, key=lambda x: len(x.type.shape))
    maker = large.owner
    if order is None:
        assert maker.name != "stablehlo.transpose"
    else:
        assert maker.name == "stablehlo.transpose"
        assert list(maker.attributes["permutation"]) == order
        assert list(large.type.shape) == [*LOGITS.shape]
    (product,) = jhg.explain(function, *arguments).products
    assert product.explanation and product.explanation.path == "hopper"
    name_of_launch = launch.attributes["mhlo.backend_config"]["name"].value
    assert name_of_launch.startswith(f"{product.explanation.spec.name} M=")


@pytest.mark.parametrize("tokens, copied", [(197, True), (200, False)])
def test_what_xla_copies_for_its_own_product_too_is_read_as_it_is(tokens: int, copied: bool):
    """As in gradients of attention: contracted axes lie among others, in rows of `tokens`."""

    def projected(x: Any, w: Any) -> Any:
        turned = x.transpose(0, 3, 1, 2)
        return jhg.einsum("bthd,ehd->bte", turned, w, implementation="hopper")

    shapes = shape(128, 16, 64, tokens), shape(1024, 16, 64)
    lowered = jax.jit(projected).trace(*shapes).lower(lowering_platforms=("cuda",))
    (launch,) = custom_calls(lowered.compiler_ir("stablehlo"), TARGET)
    (read,) = (x for x in launch.operands if len(x.type.shape) == 4)
    assert list(read.type.shape) == ([128, tokens, 16, 64] if copied else [*shapes[0].shape])


@pytest.mark.parametrize("tokens, path", [(197, "hopper"), (200, "xla")])
def test_such_an_operand_is_read_together_with_others(tokens: int, path: str):
    request = Request(
        Subscripts.parse("abe,abcd->ecd"), (128, tokens, 768), "bfloat16", (128, tokens, 24, 64),
        "bfloat16", "bfloat16", panels=(12, 12),
    )  # fmt: skip
    origins = Origin(), Origin(permutation=(0, 3, 1, 2)), Origin()
    found = decide(request, origins, dispatch.H200, kernel_only=True)
    assert found.route.path == path
    assert ("lie differently" in found.reason) == (path == "xla")
