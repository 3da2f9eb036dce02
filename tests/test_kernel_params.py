"""The kernel's parameters: one list, that plan and manifest follow."""

from __future__ import annotations

import pytest
from support.policies import (
    covering_specs,
    epilogue_covering_specs,
    grouped_covering_specs,
    stacked_specs,
)

from jax_hopper_gemm.gemm.kernel_params import KernelArgs, kernel_params, map_args, param_list
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import Raster, RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch import plan

pytestmark = pytest.mark.pure

SPECS = (
    *covering_specs(), *stacked_specs(), *epilogue_covering_specs(), *grouped_covering_specs()
)  # fmt: skip


def test_each_parameter_has_a_name_of_its_own():
    for spec in SPECS:
        names = [param.name for param in param_list(spec)]
        assert len(set(names)) == len(names), spec.name


def test_parameters_fit_the_constant_bank():
    """4 KiB, which the launcher counts on."""
    for spec in SPECS:
        assert sum(-(-param.nbytes // 8) * 8 for param in param_list(spec)) <= 4096


def test_a_tensor_map_has_a_contiguous_mode_and_no_mode_twice():
    for spec in SPECS:
        for param in param_list(spec):
            is_map = param.kind == "tensor_map"
            assert is_map == bool(param.modes) == bool(param.contiguous)
            assert param.contiguous in param.modes
            assert len(set(param.modes)) == len(param.modes)


def test_things_keep_their_place_in_the_structure():
    spec = GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256, tile_scheduler="dynamic"
    )
    args = map_args(lambda param: param.name, kernel_params(spec))
    assert isinstance(args, KernelArgs) and isinstance(args.raster, Raster)
    assert args.tma_ab == ("a", "b") and args.results == ("d0",) and args.operands is None
    assert args.raster.fast == "raster_fast" and args.tile_counter == "tile_counter"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"q": plan.Int32(1)}, r"alone has \['q'\]"),
        ({"k_tiles": plan.Pointer(0)}, "k_tiles: the kernel takes int32, the plan has pointer"),
    ],
)
def test_a_plan_that_does_not_fit_the_kernel_is_no_plan(values, message, monkeypatch):
    in_kernel_order = plan.in_kernel_order
    monkeypatch.setattr(
        plan, "in_kernel_order", lambda spec, planned: in_kernel_order(spec, planned | values)
    )
    spec = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256)
    with pytest.raises(AssertionError, match=message):
        plan.make_plan(GemmProblem.dense(512, 512, 512), spec, RasterOrder(), 132)
