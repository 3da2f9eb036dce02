"""Kernels of grouped products compile without a GPU, and their machine code does what it should."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from support import lanes, policies
from support.compiling import code_of, skip_without_compiler
from support.grouped import Layout, problem_of

from jax_hopper_gemm.gemm.kernel_params import PARAM_BYTES, Gather
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import make_plan

skip_without_compiler()

pytestmark = pytest.mark.compile

SPECS = [spec for spec in policies.compiled_specs() if spec.grouped]


@pytest.fixture(params=SPECS, ids=lambda spec: spec.name)
def kernel(request, built):
    spec = request.param
    return spec, *code_of(spec, built)


def test_grouped_kernel_keeps_to_its_registers(kernel):
    *_, facts, code = kernel
    assert not re.search(r"\b(STL|LDL)\b", code)
    _, math = facts.register_budgets
    assert facts.highest_register < math


def test_it_multiplies_by_wgmma_and_moves_by_tma(kernel):
    *_, code = kernel
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG"):
        assert re.search(rf"\b{instruction}\b", code), instruction


def test_what_ends_with_a_group_moves_through_span_maps(kernel):
    spec, _, _, code = kernel
    loads, stores = (set(re.findall(rf"{name}\.(\d)D", code)) for name in ("UTMALDG", "UTMASTG"))
    assert stores == {"4" if spec.grouped == "m" else "3"}
    matrices = any(operand.kind == "matrix" for operand in spec.graph.operands)
    vectors = {"2"} if len(spec.graph.loaded) > matrices else set()
    if spec.grouped == "m":
        assert loads == {"3"} | vectors
    else:
        assert loads == {"4"} | vectors | ({"3"} if matrices else set())


def test_parameters_are_those_of_the_plan(kernel):
    spec, manifest, *_ = kernel
    problem = problem_of(spec, Layout.plain(5), 512, 768, 640)
    plan = make_plan(problem, spec, RasterOrder(), num_sms=132)
    planned = [PARAM_BYTES[parameter.kind] for parameter in plan.params]
    assert [parameter.size for parameter in manifest.parameters] == planned


@pytest.mark.parametrize(("source", "stride"), [(4194304, 8192), (2**31 - 1, 2**30 - 8)])
def test_gathered_rows_are_copied_from_where_they_lie_beyond_2_31_elements(
    source, stride, monkeypatch
):
    """The loader's arithmetic, on integers that raise where the device's would wrap around."""
    module = pytest.importorskip("jax_hopper_gemm.kernels.mainloop.gather")
    indices = [0, source - 1, -1, source // 2, -(2**31)]
    copied = []
    load = SimpleNamespace(load=lambda at, _: lanes.Int32(indices[int(at)]))
    instead = {
        "Int32": lanes.Int32,
        "Int64": lanes.Int64,
        "select_": lambda condition, x, y: x if condition else y,
        "smaller": min,
        "cute": SimpleNamespace(arch=load),
        "copy_piece": lambda _, address, nbytes: copied.append((int(address), int(nbytes))),
    }
    tma = SimpleNamespace(nbytes=0, view=lambda *_: None)
    spec = GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, grouped="m", gathered="a"
    )
    producer = module.GatherProducer(spec, tma)
    for name, function in instead.items():
        monkeypatch.setattr(module, name, function)
    args = SimpleNamespace(
        tma_ab=(SimpleNamespace(toint=lambda: lanes.Int64(2**48)), None),
        gather=Gather(0, *map(lanes.Int32, (source, stride, stride))),
        raster=SimpleNamespace(length=lanes.Int32(len(indices))),
    )
    view = producer.partition_for_load(args, SimpleNamespace(sA=None), None, None)
    for i in range(len(indices)):
        row = producer._row(view, lanes.Int32(i))
        piece = producer._source(view, lanes.Int32(stride - 8))
        producer._copy_piece(view, None, piece, row, row >= 0)
    addresses = [2**48 + 2 * (row * stride + stride - 8) for row in indices]
    assert [nbytes for _, nbytes in copied] == [16, 16, 0, 16, 0]
    exists = [0, 1, 3]
    assert [copied[i][0] for i in exists] == [addresses[i] for i in exists]
