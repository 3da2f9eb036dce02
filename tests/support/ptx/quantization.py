"""Kernels that quantize, run by their PTX."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from support.ptx.gpu import PtxGpu
from support.quantization import Case

from jax_hopper_gemm.gemm.kernel_params import result_names
from jax_hopper_gemm.gemm.quantization import QuantizeSpec
from jax_hopper_gemm.launch.plan import make_quantize_plan


def check(gpu: PtxGpu, case: Case, special: float | None = None) -> None:
    """Runs the kernels of a case and checks every number of their results, bit for bit.

    Args:
      special: a number among those to quantize; where it spoils a block's scale, values are NaN
        once they are multiplied by it.

    Raises:
      AssertionError: a result is wrong, or the case has no kernel.
      PtxError: a kernel did what it must not, such as a write behind a result.
    """
    arrays = tuple(np.asarray(x) for x in case.arguments(special))
    specs = case.specs()
    assert specs, f"{case} runs on no kernel"
    for spec in specs:
        assert isinstance(spec, QuantizeSpec)
        found = run(gpu, spec, case, arrays)
        for name, (exact, scale) in expected(spec, case, arrays).items():
            got = found[name].reshape(exact.shape)
            right = (got == exact) | np.isnan(got) & np.isnan(exact)
            right = np.where(np.isfinite(scale), right, np.isnan(got * scale))
            wrong = np.argwhere(~right)
            assert not wrong.size, (
                f"{spec.name} of {case}: {len(wrong)} of {exact.size} {name} are wrong, the first "
                f"at {wrong[0]}: {got[tuple(wrong[0])]} for {exact[tuple(wrong[0])]}"
            )


def run(
    gpu: PtxGpu, spec: QuantizeSpec, case: Case, arrays: tuple[np.ndarray, ...]
) -> dict[str, np.ndarray]:
    """Returns what a kernel writes, by name, as float32."""
    *lead, source_rows, columns = case.shape
    rows, batch = case.picked or source_rows, math.prod(lead)
    down, across = -(-rows // 128), -(-columns // 128)
    numbers = {
        "values": rows * columns,
        "transposed_values": rows * columns,
        "scales": across * rows,
        "transposed_scales": down * columns,
        "tile_scales": down * across,
    }
    names = result_names(spec)
    dtypes = {n: jnp.dtype(spec.to if n.endswith("values") else "float32") for n in names}
    results = [gpu.allocate(batch * numbers[n] * dtypes[n].itemsize) for n in names]
    for result in results:
        result.fill(0xFF)
    plan = make_quantize_plan(spec, batch, rows, columns, source_rows if spec.picked else 0)
    gpu.launch(spec, plan, [*map(gpu.upload, arrays), *results])()
    downloads = (x.download(dtypes[n]) for n, x in zip(names, results, strict=True))
    return {n: x.astype(np.float32) for n, x in zip(names, downloads, strict=True)}


def expected(
    spec: QuantizeSpec, case: Case, arrays: tuple[np.ndarray, ...]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns NumPy's numbers for each result of a kernel, as it lies; of values their scales."""
    case = replace(case, ways=spec.ways)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for (way, block), (values, scales) in zip(case.asked, case.expected(*arrays), strict=True):
        rows, columns = values.shape[-2:]
        wide = np.repeat(np.repeat(scales, block, -2), 128, -1)[..., :rows, :columns]
        prefix = "transposed_" if way else ""
        found[f"{prefix}values"] = values, wide
        if block == 1:
            found[f"{prefix}scales"] = np.swapaxes(scales, -1, -2), np.ones(1)
        else:  # of tiles, as the array lies
            found["tile_scales"] = (np.swapaxes(scales, -1, -2) if way else scales), np.ones(1)
    return {name: found[name] for name in result_names(spec)}
