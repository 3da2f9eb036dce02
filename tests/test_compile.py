"""Kernels compile without a GPU, and their machine code is what a GEMM on Hopper should be.

Of all kernels that run on a GPU as many are compiled as it takes for every extent of a tile and
dtype, and every pair of policies, layouts and parts of an epilogue. With
`JAX_HOPPER_GEMM_TEST_ALL=1` extents and dtypes are in pairs, too, those in which every pair of
fields of a spec occurs are compiled, and all plain ones that dispatch can choose. They go through
the user's cache, so what `python -m jax_hopper_gemm build` made, or a run before, is not compiled
again.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support import policies
from support.compiling import Code, code_of, skip_without_compiler
from support.covering import ALL
from support.cubin_samples import run_python

from jax_hopper_gemm import cubin, dispatch
from jax_hopper_gemm.cubin.elf import read_kernel
from jax_hopper_gemm.cubin.sass import find_nvdisasm
from jax_hopper_gemm.gemm.smem import SMEM_LIMIT
from jax_hopper_gemm.gemm.spec import GemmSpec

skip_without_compiler()

pytestmark = pytest.mark.compile

REGISTERS_OF_AN_SM = 65536
SPECS = list(
    dict.fromkeys(
        (
            *policies.compiled_specs(), *policies.covering_specs(),
            *policies.epilogue_covering_specs()[::8], *policies.chosen_epilogue_specs(),
            *dispatch.table_specs(dispatch.H200),
        )
    )
    if ALL
    else policies.compiled_specs()
)  # fmt: skip


@pytest.fixture(scope="session")
def machine_code(built) -> Iterator[dict[GemmSpec, Future[Code]]]:
    """The code of each kernel; nvdisasm takes long, so it runs on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {spec: pool.submit(code_of, spec, built) for spec in SPECS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_compiles_to_the_code_of_a_hopper_gemm(spec, machine_code):
    manifest, facts, _ = machine_code[spec].result()

    assert manifest.entry.startswith(spec.name)
    assert manifest.dynamic_smem_bytes <= SMEM_LIMIT
    assert manifest.registers * manifest.threads <= REGISTERS_OF_AN_SM

    assert facts.wgmma >= spec.tile_k // 16 * (spec.rows_per_warpgroup // 64)
    loaded = spec.graph.loaded
    operands = 2 + (spec.graph.accumulators - 1) - (spec.gathered is not None)
    assert facts.tma_loads >= operands + len(loaded)
    assert (facts.multicast_loads > 0) == (spec.cluster_m * spec.cluster_n > 1)
    matrices = spec.graph.matrices
    by_tma = 0 if spec.loose_d else len(matrices)
    assert facts.tma_stores >= by_tma and (facts.tma_stores > 0) == (by_tma > 0)
    assert (facts.matrix_stores > 0) == any(result.dtype != "float32" for result in matrices)

    loading, math = facts.register_budgets
    assert loading < manifest.registers <= math
    assert 128 * (loading + spec.math_warpgroups * math) <= REGISTERS_OF_AN_SM
    assert facts.highest_register < math


def test_the_same_spec_gives_the_same_bytes_in_two_processes(tmp_path):
    spec = SPECS[0]
    source = f"""
    from jax_hopper_gemm.cubin.compiler import compile_spec
    from jax_hopper_gemm.gemm.spec import GemmSpec
    print(compile_spec(GemmSpec.from_json({spec.to_json()!r})).manifest.cubin_sha256)
    """
    digests = {run_python(source, PYTHONHASHSEED=seed).split()[-1] for seed in ("1", "2")}
    assert digests == {hashlib.sha256(cubin.get(spec).cubin).hexdigest()}


def test_a_cubin_is_read_as_cuobjdump_reads_it(tmp_path):
    """NVIDIA documents the sections nowhere; its own tool is the reference."""
    cuobjdump = find_nvdisasm().with_name("cuobjdump")
    if not cuobjdump.exists():
        pytest.skip("cuobjdump is not installed; run python -m pip install nvidia-cuda-cuobjdump")
    compiled = cubin.get(next(s for s in SPECS if s.tile_scheduler == "dynamic"))
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled.cubin)
    code = read_kernel(compiled.cubin)

    usage = _output(cuobjdump, "-res-usage", path)
    assert f"Function {code.entry}:" in usage
    assert f"REG:{code.registers} STACK:{code.stack_bytes} SHARED:{code.static_smem_bytes}" in usage

    listing = _output(cuobjdump, "-elf", path)
    rows = re.findall(r"Ordinal : (\w+)\s+Offset  : (\w+)\s+Size    : (\w+)", listing)
    by_ordinal = sorted(tuple(int(word, 16) for word in row) for row in rows)
    assert [(offset, size) for _, offset, size in by_ordinal] == list(code.parameters)
    threads = re.search(r"EIATTR_REQNTID.*?Value:\s+(\w+) (\w+) (\w+)", listing, re.S)
    assert threads is not None
    assert int(threads[1], 16) * int(threads[2], 16) * int(threads[3], 16) == code.threads


def _output(program: Path, *arguments: object) -> str:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
