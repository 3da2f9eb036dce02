"""Programs with epilogues lowered for CUDA, on any machine: which launches are left to run."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from support.fused_models import fused_dot_of
from support.program_inspection import attributes, lowered, shape, step
from support.reachable import launches, on_matrices, reachable, results

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch
from jax_hopper_gemm.gemm.product import Options, Product
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.lowering import fallback

pytestmark = pytest.mark.usefixtures("launcher", "no_tables", "kernels")

T, D, F = 512, 256, 1024  # tokens, model, hidden


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for every problem: that of the bare product, with the epilogue in place."""
    real = dispatch.choose

    def choose(problem, device, *, kernel_only=False):
        if problem.epilogue is None:
            return real(problem, device, kernel_only=kernel_only)
        bare = replace(problem, epilogue=None, operands=(), up_offset=None)
        decision = real(bare, device, kernel_only=True)
        if decision.spec is None:
            return decision
        stages = 2 if problem.graph.loaded else 0
        spec = replace(
            decision.spec, epilogue=problem.epilogue, epi_load_stages=stages, num_stages=3
        )
        return replace(decision, spec=spec)

    monkeypatch.setattr(dispatch, "choose", choose)


def fused(function, lhs, rights, *operands, subscripts="mk,kn->mn", out_sharding=None, **options):
    rights = rights if isinstance(rights, tuple) else (rights,)
    arguments = {name: options.pop(name) for name in ("in_place", "out_dtypes") if name in options}
    settings: dict[str, Any] = {"preferred_element_type": lhs.dtype, "implementation": "hopper"}
    product = Product(Subscripts.parse(subscripts), Options(**settings | options), out_sharding)
    return fused_dot_of(function, (lhs, *rights), operands, product, **arguments)


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.04 * x**3)))


def gelu_mlp(save_preactivation, x, w1, b1, w2, b2):
    y = fused(lambda acc, b: gelu(acc + b), x, w1, b1, save_preactivation=save_preactivation)
    return fused(lambda acc, b: acc + b, y, w2, b2, save_preactivation=save_preactivation)


def swiglu_mlp(save_preactivation, x, *weights):
    *w1, w2 = weights
    subscripts = "mk,kn->mn" if len(w1) == 2 else "mk,kcn->mn"
    y = fused(
        lambda gate, up: gate * jax.lax.logistic(gate) * up, x, tuple(w1), subscripts=subscripts,
        save_preactivation=save_preactivation,
    )  # fmt: skip
    return jhg.matmul(y, w2, implementation="hopper")


GELU = [shape(T, D), shape(D, F), shape(F), shape(F, D), shape(D)]


def test_a_gelu_mlp_runs_its_products_and_nothing_more():
    program = lowered(partial(step, partial(gelu_mlp, True)), shape(T, D), *GELU)
    found = Counter(tuple(results(spec)) for spec in launches(program))
    assert found == {
        ("matrix bfloat16", "matrix bfloat16"): 1,  # activated, and what is saved
        ("matrix bfloat16",): 4,  # the second product; three gradients
        ("matrix bfloat16", "column_sum"): 1,  # through the activation, and the bias
    }
    assert on_matrices(program) == []
    sums = [o for o in reachable(program) if o.name == "stablehlo.reduce"]
    sizes = [re.findall(r"\(tensor<([\dx]+)x\w+>", o.text)[0] for o in sums]
    # The parts of the first bias's gradient, and all of the second's; XLA drops sums of one row.
    assert sorted(x for x in sizes if x.count("x") > 1 or not x.startswith("1x")) == [
        f"1x{T // 64}x{F}",
        f"{T}x{D}",
    ]


def test_recomputing_costs_a_product_and_saves_a_matrix():
    program = lowered(partial(step, partial(gelu_mlp, False)), shape(T, D), *GELU)
    found = Counter(tuple(results(spec)) for spec in launches(program))
    assert found == {("matrix bfloat16",): 6, ("matrix bfloat16", "column_sum"): 1}
    assert on_matrices(program) == []


@pytest.mark.parametrize(
    "weights, counts",
    [
        (
            [shape(D, 2, F)],
            {
                ("matrix bfloat16",) * 3: 1,  # activated, gate and up
                ("matrix bfloat16",) * 2: 1,  # gradients of gate and up, one array
                ("matrix bfloat16",): 4,
            },
        ),
        (
            [shape(D, F), shape(D, F)],
            {
                ("matrix bfloat16",) * 3: 1,
                ("matrix bfloat16",) * 2: 1,
                ("matrix bfloat16",): 6,  # the gradients of x add up in the second product
            },
        ),
    ],
)
def test_a_swiglu_mlp_runs_its_products_and_nothing_more(weights, counts):
    mlp = partial(swiglu_mlp, True)
    program = lowered(partial(step, mlp), shape(T, D), shape(T, D), *weights, shape(F, D))
    assert Counter(tuple(results(spec)) for spec in launches(program)) == counts
    assert on_matrices(program) == []


def test_the_gradient_of_a_pairs_left_operand_adds_up_in_place():
    mlp = partial(swiglu_mlp, True)
    args = [shape(T, D), shape(T, D), shape(D, F), shape(D, F), shape(F, D)]
    program = lowered(partial(step, mlp), *args)
    (aliased,) = [o for o in reachable(program) if "output_operand_alias" in o.text]
    (spec,) = map(GemmSpec.from_json, attributes(aliased.text, "spec"))
    assert [(o.kind, o.dtype) for o in spec.graph.operands] == [("matrix", "bfloat16")]
    assert "operand_index = 2" in aliased.text


def test_nothing_is_saved_for_a_bias_and_a_residual():
    def layer(x, w, b, r):
        return fused(lambda acc, b, r: acc + b + r, x, w, b, r)

    args = [shape(T, D), shape(D, F), shape(F), shape(T, F)]
    program = lowered(partial(step, layer), shape(T, F), *args)
    assert [results(spec) for spec in launches(program)] == [["matrix bfloat16"]] * 3
    assert on_matrices(program) == []


def test_an_epilogue_reads_its_operands_as_they_lie():
    def layer(x, w, row, column, scalar, full):
        return fused(
            lambda acc, *xs: acc * xs[2] + xs[0] + xs[1] + xs[3], x, w, row, column, scalar, full
        )

    args = [shape(T, D), shape(D, F), shape(F), shape(T, 1), shape(dtype=jnp.float32), shape(T, F)]
    program = lowered(layer, *args)
    (spec,) = launches(program)
    assert {(o.kind, o.dtype) for o in spec.graph.operands} == {
        ("row", "bfloat16"), ("column", "bfloat16"), ("scalar", "float32"), ("matrix", "bfloat16"),
    }  # fmt: skip


def test_a_16_bit_scalar_is_widened_for_the_kernel():
    program = lowered(lambda x, w, s: fused(lambda acc, s: acc * s, x, w, s), *GELU[:2], shape())
    (spec,) = launches(program)
    assert [(o.kind, o.dtype) for o in spec.graph.operands] == [("scalar", "float32")]
    assert "stablehlo.convert" in [o.name for o in reachable(program)]


def test_a_swapped_product_makes_a_row_of_a_column():
    def layer(x, w, b):
        return fused(lambda acc, b: acc + b[:, None], x, w, b, subscripts="mk,kn->nm")

    (spec,) = launches(lowered(layer, shape(T, D), shape(D, F), shape(F)))
    assert [o.kind for o in spec.graph.operands] == ["column"]

    def layer_of_rows(x, w, b):
        return fused(lambda acc, b: acc + b, x, w, b, subscripts="mk,kn->nm")

    (spec,) = launches(lowered(layer_of_rows, shape(T, D), shape(D, F), shape(T)))
    assert [o.kind for o in spec.graph.operands] == ["row"]


def test_leading_axes_are_rows_unless_an_operand_tells_them_apart():
    def layer(x, w, b):
        return fused(lambda acc, b: acc + b, x, w, b, subscripts="btk,kn->btn")

    args = [shape(4, 128, D), shape(D, F)]
    program = lowered(layer, *args, shape(F))
    assert "M=512" in attributes(program, "name")[0]
    program = lowered(layer, *args, shape(4, 1, F))
    assert "M=128" in attributes(program, "name")[0] and "L=4" in attributes(program, "name")[0]
    (spec,) = launches(program)
    assert [o.kind for o in spec.graph.operands] == ["row"]


def test_the_epilogue_takes_the_accumulator_where_a_gradient_was_rounded():
    mlp = partial(gelu_mlp, True)
    program = lowered(partial(step, mlp), shape(T, D), *GELU)
    (spec,) = [spec for spec in launches(program) if "column_sum" in results(spec)]
    converts = [node for node in spec.graph.nodes if node.op == "convert"]
    assert converts == []


def test_a_used_product_is_not_computed_twice():
    def both(ct, x, w, b):
        _, back = jax.vjp(lambda h: fused(lambda acc, b: gelu(acc + b), h, w, b), x)
        cotangent = jhg.matmul(ct, w, implementation="hopper")
        return cotangent * 2, back(cotangent)

    program = lowered(both, shape(T, D), *GELU[:3])
    # What the derivative needs, the cotangent and, of what XLA makes of it, the gradient of x.
    assert [results(spec) for spec in launches(program)] == [["matrix bfloat16"]] * 3
    nodes = [[node.op for node in spec.graph.nodes] for spec in launches(program)]
    assert sorted(nodes) == [[], [], ["add"]]


def test_without_a_kernel_hopper_says_why():
    with pytest.raises(NotImplementedError, match="no kernel runs .* with an epilogue: .*"):
        lowered(lambda x, w: fused(jnp.tanh, x, w), shape(T, D), shape(D, F, dtype=jnp.float16))
    gated = partial(fused, lambda gate, up: gate * up, subscripts="mk,kcn->nm")
    with pytest.raises(NotImplementedError, match="ends with an axis of the left operand"):
        lowered(gated, shape(T, D), shape(D, 2, F))
    flipped = partial(fused, lambda acc, r: acc + r.T)
    with pytest.raises(NotImplementedError, match="axes are in another order"):
        lowered(flipped, shape(T, D), shape(D, F), shape(F, T))


def test_a_fallback_is_reported(monkeypatch):
    monkeypatch.setenv(fallback.ON_FALLBACK_VARIABLE, "warn")
    layer = partial(fused, jnp.tanh, implementation=None)
    with pytest.warns(jhg.FallbackWarning, match="XLA runs .* with an epilogue: .*float16"):
        program = lowered(layer, shape(T, D), shape(D, F, dtype=jnp.float16))
    assert "dot_general" in program and launches(program) == []


def test_other_platforms_run_the_function():
    def layer(implementation, x, w):
        return fused(jnp.tanh, x, w, implementation=implementation)

    def text(implementation, platforms):
        traced = jax.jit(partial(layer, implementation)).trace(*GELU[:2])
        return traced.lower(lowering_platforms=platforms).as_text()

    assert "launch" not in text(None, ("cpu",))
    with pytest.raises(NotImplementedError, match="lowered for another platform"):
        text("hopper", ("cpu",))


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_by_default")
def test_a_program_for_several_platforms_holds_both():
    def layer(x, w1, b1, w2, b2, g):
        return step(lambda *a: mlp(*a), g, x, w1, b1, w2, b2)

    def mlp(x, w1, b1, w2, b2):
        y = fused(lambda acc, b: gelu(acc + b), x, w1, b1, implementation=None)
        return fused(lambda acc, b: acc + b, y, w2, b2, implementation=None)

    program = export.export(
        jax.jit(layer), platforms=("cpu", "cuda"), disabled_checks=jhg.export_disabled_checks()
    )(*GELU, shape(T, D))
    assert program.mlir_module().count("jax_hopper_gemm.v1.launch") == 6
    again = export.deserialize(program.serialize())
    numbers = [jnp.ones(a.shape, a.dtype) for a in (*GELU, shape(T, D))]
    y, _ = again.call(*numbers)
    assert y.shape == (T, D)


def test_a_program_for_cuda_survives_export():
    program = export.export(
        jax.jit(partial(step, partial(gelu_mlp, True))), platforms=("cuda",),
        disabled_checks=jhg.export_disabled_checks(),
    )(shape(T, D), *GELU)  # fmt: skip
    again = export.deserialize(program.serialize())
    launched = program.mlir_module().count("jax_hopper_gemm.v1.launch")
    assert launched >= 6 and again.mlir_module().count("jax_hopper_gemm.v1.launch") == launched


def test_an_aliased_operand_is_named_in_the_launch():
    layer = partial(fused, lambda acc, c: acc + c, in_place=(0,), out_dtypes=("float32",))
    c = shape(T, F, dtype=jnp.float32)

    def lowered(layer, *args, donated=()):
        program = jax.jit(layer, donate_argnums=donated).trace(*args)
        return program.lower(lowering_platforms=("cuda",)).as_text()

    program = lowered(layer, shape(T, D), shape(D, F), c, donated=2)
    assert "output_operand_alias" in program
    program = lowered(lambda x, w, c: layer(x, w, -c), shape(T, D), shape(D, F), c)
    assert "output_operand_alias" in program  # not the caller's
    program = lowered(layer, shape(T, D), shape(D, F), c)  # the caller keeps it
    assert "output_operand_alias" not in program
    program = lowered(layer, shape(T, D), shape(D, F), shape(T, F), donated=2)  # another dtype
    assert "output_operand_alias" not in program

    def layer_of_one(x, w):
        x = jnp.sin(x)
        return fused(lambda acc, c: acc + c, x, w, x, in_place=(0,), out_dtypes=("bfloat16",))

    program = lowered(layer_of_one, shape(D, D), shape(D, D))  # it is multiplied, too
    assert "output_operand_alias" not in program


def test_results_that_nothing_reads_are_not_computed():
    def layer(x, w):
        _, tanh = fused(lambda acc: (acc, jnp.tanh(acc)), x, w)
        return tanh

    (spec,) = launches(lowered(layer, *GELU[:2]))
    assert results(spec) == ["matrix bfloat16"]


def test_a_saved_product_that_is_a_result_already_is_stored_once():
    def layer(x, w):
        return fused(lambda acc: (jnp.tanh(acc), acc), x, w)

    program = lowered(lambda g, h, x, w: jax.vjp(layer, x, w)[1]((g, h)), shape(T, F), shape(T, F),
                      *GELU[:2])  # fmt: skip
    assert ["matrix bfloat16"] in [results(spec) for spec in launches(program)]
    assert ["matrix bfloat16"] * 2 not in [results(spec) for spec in launches(program)]


def test_a_gradient_takes_the_place_of_a_product_that_xla_would_run(monkeypatch):
    def backward(ct, x, w, b, w2):
        _, back = jax.vjp(lambda h: fused(lambda acc, b: gelu(acc + b), h, w, b), x)
        return back(jhg.einsum("mn,kn->mk", ct, w2))

    arguments = shape(T, D), *GELU[:4]
    kernels = launches(lowered(backward, *arguments))
    choose = dispatch.choose

    def bare_products_to_xla(problem, device, *, kernel_only=False):
        if problem.epilogue is None and not kernel_only:
            return dispatch.Decision(None, None, "XLA is faster", "table")
        return choose(problem, device, kernel_only=kernel_only)

    monkeypatch.setattr(dispatch, "choose", bare_products_to_xla)
    program = lowered(backward, *arguments)
    fused_ones = [spec for spec in launches(program) if spec.graph.nodes]
    assert fused_ones == [spec for spec in kernels if spec.graph.nodes]
    assert len(fused_ones) == 2  # what the derivative needs, and the derivative
    assert on_matrices(program) == []


def test_xla_runs_what_would_read_a_float32_product_again():
    def softmax(implementation):
        product = partial(fused, jax.nn.softmax, implementation=implementation)
        return launches(lowered(product, shape(T, D), shape(D, F)))

    assert softmax(None) == []
    assert [results(spec) for spec in softmax("hopper")] == [["matrix float32", "row_sumexp"]]


@pytest.mark.parametrize(
    "function, stored",
    [
        (jax.nn.relu, "matrix bfloat16"),
        (jax.nn.relu6, "matrix bfloat16"),  # a mask
        (jax.nn.hard_swish, "matrix float32"),
        (lambda z: jnp.clip(z, -1, 1), "matrix float32"),
    ],
)
@pytest.mark.parametrize("save_preactivation", [True, False])
def test_kernels_compute_a_derivative_that_jumps(function, stored, save_preactivation):
    def mlp(x, w1, b1, w2):
        y = fused(
            lambda acc, b: function(acc + b), x, w1, b1, save_preactivation=save_preactivation
        )
        return jhg.matmul(y, w2, implementation="hopper")

    program = lowered(partial(step, mlp), shape(T, D), *GELU[:4])
    (first, *_) = [results(spec) for spec in launches(program) if spec.graph.operands]
    assert first == ["matrix bfloat16"] + [stored] * save_preactivation
    assert on_matrices(program) == []
