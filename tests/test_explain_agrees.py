"""What `explain` says of a product is what lowering does with it."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.random_calls import random_calls

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.kernel_params import spec_from_json
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.lowering.call import Launch, launches_in
from jax_hopper_gemm.reports import ProductReport

pytestmark = pytest.mark.usefixtures("launcher", "no_tables")

CALLS, PARTS = random_calls(360, seed=21), 9


@cache
def explained(number: int) -> ProductReport:
    """Returns what is said of a call, for both tests."""
    return jhg.explain(CALLS[number].function, *CALLS[number].arguments)


def launched(function: Any, *arguments: Any, **options: Any) -> list[Launch]:
    program = jax.jit(jhg.accelerate(lambda *args: function(*args), **options)).trace(*arguments)
    return launches_in(program.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo"))


def products(launches: list[Launch]) -> list[Launch]:
    """Returns those that multiply: of operands in parts, which others cut, the last one."""
    return [launch for launch in launches if isinstance(spec_from_json(launch.spec), GemmSpec)]


def kernel_of(launch: Launch) -> tuple[Any, ...]:
    return launch.name, launch.spec, launch.plan[1:4]


def kernel_said(explanation: jhg.Explanation) -> tuple[Any, ...]:
    p, spec = explanation.problem, explanation.spec
    assert p and spec
    return f"{spec.name} M={p.m} N={p.n} K={p.k} L={p.l}", spec.to_json(), explanation.grid


def gradients_of_attention(*arrays: Any) -> Any:
    def loss(q: Any, k: Any, v: Any, out: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        heads = jnp.einsum("bhts,bshk->bthk", weights, v)
        return jnp.einsum("bthk,hkd->btd", heads, out).astype(jnp.float32).sum()

    return jax.grad(loss, range(4))(*arrays)


@pytest.mark.parametrize("fuse", [True, False])
def test_products_of_what_xla_multiplies_and_transposes(fuse: bool):
    heads, out = (1, 128, 4, 64), (4, 64, 256)
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (heads, heads, heads, out)]
    report = jhg.explain(gradients_of_attention, *arrays, fuse=fuse)
    explanations = [product.explanation for product in report.taken]
    assert {x.path for x in explanations if x} == {"hopper", "xla"}
    said = {kernel_said(x) for x in explanations if x and x.path == "hopper"}
    launches = products(launched(gradients_of_attention, *arrays, fuse=fuse))
    assert set(map(kernel_of, launches)) == said


def test_a_product_that_no_result_needs_is_not_said():
    """The gradient of a sum does not need the sum, and no product but the last one."""
    inner = jax.jit(lambda w, v, x: ((x @ w) @ v).astype(jnp.float32).sum())
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((64, 128), (128, 32), (256, 64))]
    report = jhg.explain(jax.grad(inner), *arrays, implementation="hopper")
    said = {kernel_said(x.explanation) for x in report.taken if x.explanation}
    launches = products(launched(jax.grad(inner), *arrays, implementation="hopper"))
    assert len(report.products) == len(launches) == 2 and set(map(kernel_of, launches)) == said


def check(number: int) -> str:
    """Compares what is said of a call with what it becomes, and returns its path."""
    call = CALLS[number]
    (explanation,) = (product.explanation for product in explained(number).taken)
    assert explanation
    text = f"{call}\n{explanation}"
    if explanation.path == "xla" and call.implementation == "hopper":
        with pytest.raises(NotImplementedError) as refused:
            launched(call.function, *call.arguments)
        assert explanation.source == "unsupported" and explanation.reason, text
        assert explanation.reason in str(refused.value), text
        return "refused"
    launches = set(map(kernel_of, products(launched(call.function, *call.arguments))))
    said = {kernel_said(explanation)} if explanation.path == "hopper" else set()
    assert launches == said, text
    return explanation.path


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_kernel_that_is_said_is_launched(part: int):
    paths = Counter(map(check, range(part, len(CALLS), PARTS)))
    assert min(paths["hopper"], paths["xla"]) > 0, paths


@pytest.mark.pure
@pytest.mark.slow
def test_the_draws_cover_what_decides():
    explanations = [explained(number).taken[0].explanation for number in range(len(CALLS))]
    said = list(map(str, explanations))
    specs = [x.spec for x in explanations if x and x.spec]
    assert {spec.indexed for spec in specs} == {None, "a", "b"}
    assert {spec.gathered for spec in specs} == {None, "a", "b"}
    assert {spec.grouped for spec in specs} == {None, "m", "k"}
    assert {spec.reads_parts for spec in specs} == {False, True}
    pairs = zip(CALLS, explanations, strict=True)
    assert any(call.implementation == "hopper" and x and x.path == "xla" for call, x in pairs)
    assert any(spec.epilogue for spec in specs) and any("by XLA" in text for text in said)
    for reason in ("copies an operand out of its stack first", "XLA computes the epilogue"):
        assert any(reason in text for text in said), reason
