"""The references of the mixture of experts, and of its kernels that GPU tests find built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import moe_programs
import numpy as np
import pytest
from jax.sharding import AxisType
from moe_programs import AXIS, SPREAD, MoeProgram, rows_written
from support.moe_reference import looped

from jax_hopper_gemm import moe
from jax_hopper_gemm.testing.lowered import specs_of

# The programs are long; what of JAX they depend on, shorter tests try in all versions.
pytestmark = pytest.mark.pure

SMALL = MoeProgram(40, 16, 24, 8, 3)
SIGMOID = replace(SMALL, score="sigmoid", scale=2.5, bias=tuple(np.linspace(0, 0.3, 8)))
CROWDED = replace(SMALL, bias=(2.0,) * 3 + (0.0,) * 5)


@pytest.mark.parametrize("program", [SMALL, SIGMOID, CROWDED, replace(SMALL, stacked=False)])
def test_xla_agrees_with_the_reference(program):
    arguments = program.arguments(dtype=np.float32)
    found = jax.jit(lambda *args: program.step(*args, implementation="xla"))(*arguments)
    for mine, exact in zip(found, program.exact(arguments), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def test_the_rounded_reference_differs_by_roundings():
    arguments = SMALL.arguments()
    for near, exact in zip(SMALL.rounded(arguments), SMALL.exact(arguments), strict=True):
        assert 0 < np.abs(near - exact).max() < 0.02 * np.abs(exact).max()
        assert np.array_equal(near, near.astype(jnp.bfloat16).astype(np.float64))


def test_the_reference_is_the_loop_over_tokens():
    arguments = SMALL.arguments(dtype=np.float32)
    np.testing.assert_allclose(SMALL.exact(arguments)[0], looped(*arguments[:-1], k=3), atol=1e-9)


def test_a_result_that_is_wrong_in_one_row_is_found():
    arguments = SMALL.arguments()
    exact = SMALL.exact(arguments)
    near = [x.astype(jnp.bfloat16) for x in exact]
    SMALL.assert_as_good(near, near, exact)
    near[1] = near[1].copy()
    near[1][7] *= 1.1
    with pytest.raises(AssertionError, match="of x: error"):
        SMALL.assert_as_good(near, exact, exact)


@pytest.mark.slow
def test_given_weights_and_choices_make_the_layer_here_and_spread():
    arguments = SMALL.arguments(dtype=np.float32)
    x, router, gate_up, down, cotangent = arguments
    routing = moe.route_tokens(x, router, SMALL.k)
    given = x, routing.weights, routing.experts, gate_up, down, cotangent
    here = jax.jit(SMALL.routed_step)(*given)
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
    spread = jax.jit(lambda *args: SMALL.routed_step(*args, mesh=mesh, exchange="all_to_all"))(
        *given
    )
    y, _, _, of_gate_up, of_down = SMALL.exact(arguments)
    for found in (here, spread):
        for i, exact in ((0, y), (3, of_gate_up), (4, of_down)):
            atol = 1e-5 * np.abs(exact).max()
            np.testing.assert_allclose(found[i], exact, rtol=0, atol=atol)


def test_no_choice_hangs_on_rounding():
    x, router, *_ = SMALL.arguments()
    logits = np.sort(x.astype(np.float64) @ router.astype(np.float64), axis=1)
    assert (logits[:, -3] - logits[:, -4]).min() > 1e-5


HLO = """
%fused_computation (p: bf16[8,4]) -> bf16[24,4] {
  ROOT %g = bf16[24,4]{1,0} gather(%p, %i)
}
ENTRY %main (p: bf16[8,4]) -> bf16[8,4] {
  %a = bf16[24,4]{1,0} fusion(%p), kind=kLoop, calls=%fused_computation
  %b = (bf16[24,4]{1,0}, u8[4]{0}) custom-call(%a), custom_call_target="jax_hopper_gemm.v1.launch"
  %c = bf16[8,3,4]{2,1,0} gather(%b, %i)
  %f = (bf16[24,1,4]{2,1,0}, f32[]) fusion(%b), kind=kLoop, calls=%other
  %d = bf16[24,8]{1,0} copy(%b)
  ROOT %e = bf16[8,4]{1,0} fusion(%c), kind=kLoop, calls=%other
}
"""


def test_rows_written_counts_what_lies_in_memory():
    assert rows_written(HLO, 24, 4) == 3
    assert rows_written(HLO, 24, 8) == 1


def nnx_step(program: MoeProgram, **options: Any) -> tuple[Any, Any]:
    """Returns the gradient of a layer of nnx as a function of its parameters, and these."""
    nnx: Any = pytest.importorskip("flax.nnx", reason="needs the extra `flax`")
    from jax_hopper_gemm import nn

    x = jnp.zeros(program.abstract()[0].shape, program.abstract()[0].dtype)
    layer = nnx.eval_shape(
        lambda: nn.MoE(
            program.features, program.hidden, num_experts=program.experts,
            experts_per_token=program.k, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options,
        )
    )  # fmt: skip
    graph, state = nnx.split(layer)

    def loss(state: Any) -> jax.Array:
        y, _ = nnx.merge(graph, state)(x, return_statistics=True)
        return (y.astype(jnp.float32) ** 2).mean()

    return jax.grad(loss), state


@pytest.mark.slow
def test_layers_of_flax_run_kernels_that_are_built():
    program = moe_programs.MOE_PROGRAMS["mixtral"]
    assert set(specs_of(*nnx_step(program))) <= set(program.specs())
    for exchange in moe_programs.EXCHANGES:
        mesh = jax.make_mesh((2,), (AXIS,), axis_types=(AxisType.Auto,))
        step = nnx_step(SPREAD, mesh=mesh, expert_axis=AXIS, exchange=exchange)
        assert set(specs_of(*step)) <= set(SPREAD.spread_specs(2, exchange))
