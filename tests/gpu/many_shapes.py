"""Products of many shapes in one process: what they leave behind, ours and the same in plain JAX.

    python tests/gpu/many_shapes.py 10000             on a GPU
    python tests/gpu/many_shapes.py 10000 --host      on the CPU, over the stand-in of the driver

On the host programs are lowered for CUDA, loaded, and launched by the C++ launcher; only the GPU's
work is missing. A line for each tenth says what has grown since the start: objects of Python, bytes
of the host and of the GPU, which other processes should leave alone. Of plain JAX fewer products
run, and what the later half of them left behind is reckoned for as many as ours. The exit status is
1 where ours grow more than JAX's and some slack.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    for folder in ("tests", "benchmarks", "."):
        sys.path.append(str(Path(__file__).resolve().parents[2] / folder))

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.kernel_params import param_list
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

COUNT = int(os.environ.get("JAX_HOPPER_GEMM_SHAPES", 100))
# Memories of bounded size, XLA's pool, what an allocator keeps.
SLACK = np.array([300_000, 64 << 20, 64 << 20])
DISTINCT = 2**16
KEPT = 100  # programs between two times that JAX's caches are cleared
PARAM_BYTES = {"tensor_map": 128, "int32": 4, "pointer": 8}

Program = Callable[[int], object]  # compiles and runs the i-th product


def ours(a: Any, b: Any) -> Any:
    return jhg.matmul(a, b, activation="gelu", implementation="hopper")


def theirs(a: Any, b: Any) -> Any:
    return jax.nn.gelu(a @ b)


def shapes(i: int) -> list[jax.ShapeDtypeStruct]:
    """Returns those of the i-th product's operands; all of the first `DISTINCT` differ."""
    rows = 8 * (i % DISTINCT + 1)
    return [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((rows, 16), (16, 32))]


def specs() -> list[GemmSpec]:
    """Returns the kernels of `COUNT` shapes; dispatch chooses a few, so it is asked for some."""
    some = {*range(0, COUNT, max(1, COUNT // 100)), *range(min(COUNT, 100)), COUNT - 1}
    return list(dict.fromkeys(spec for i in sorted(some) for spec in specs_of(ours, *shapes(i))))


def compiled(function: Callable[..., Any]) -> Program:
    """Returns a function that compiles and runs the i-th product of `function`."""

    def run(i: int) -> None:
        operands = [jax.device_put(np.ones(x.shape, x.dtype)) for x in shapes(i)]
        jax.block_until_ready(jax.jit(function)(*operands))

    return run


def on_the_host(function: Callable[..., Any], folder: Path) -> Program:
    """Returns the same of programs for CUDA, run on the CPU over the stand-in in `folder`."""
    from support.launches_on_cpu import runnable

    host, checks = _host(folder), jhg.export_disabled_checks()

    def run(i: int) -> None:
        host.driver.reset()  # its record of calls
        host.launcher.resolved.clear()
        program = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
        compiled(runnable(program(*shapes(i))).call)(i)

    return run


@cache
def _host(folder: Path) -> Any:
    from support.launches_on_cpu import LaunchesOnCpu

    host = LaunchesOnCpu(folder)

    @cache
    def load(digest: str, spec_json: str) -> int:
        sizes = [PARAM_BYTES[p.kind] for p in param_list(GemmSpec.from_json(spec_json))]
        return host.driver.add_kernel_of(sizes)

    host.launcher.resolve = load
    return host


def left(free: Callable[[], int]) -> np.ndarray:
    """Returns the objects of Python, the bytes of the host, and those of the GPU.

    Args:
      free: returns the free bytes of the GPU.
    """
    jax.clear_caches()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return np.array([len(gc.get_objects()), pages * resource.getpagesize(), -free()])


def growth(run: Program, count: int, free: Callable[[], int]) -> Iterator[np.ndarray]:
    """Yields what `left` has grown by, after each tenth of so many products."""
    for i in range(3):  # what the first ones import and load
        run(i)
    before = left(free)
    for i in range(count):
        run(i)
        if (i + 1) % KEPT == 0:  # what is kept at once decides what the allocator holds later
            jax.clear_caches()
        if (i + 1) % max(1, count // 10) == 0:
            yield left(free) - before


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int)
    parser.add_argument("--plain", type=int, help="products of plain JAX [a quarter as many]")
    parser.add_argument("--host", action="store_true", help="no GPU, the stand-in of the driver")
    arguments = parser.parse_args()
    found: list[np.ndarray] = []
    with tempfile.TemporaryDirectory() as name:
        folder, free = Path(name), lambda: 0
        if arguments.host:
            from fake_driver.harness import build_fakes

            jax.config.update("jax_platforms", "cpu")
            build_fakes(folder)
            os.environ["JAX_HOPPER_GEMM_LIBCUDA"] = str(folder / "fake_cuda.so")
        else:
            from support.gpu import Gpu

            gpu = Gpu()
            free = lambda: int(gpu.call("cuMemGetInfo")[0])  # noqa: E731
        plain = arguments.plain or arguments.count // 4
        for function, count in ((theirs, plain), (ours, arguments.count)):
            start = time.monotonic()
            run = on_the_host(function, folder) if arguments.host else compiled(function)
            tenths = list[np.ndarray]()
            for tenth, grown in enumerate(growth(run, count, free), 1):
                tenths.append(grown)
                objects, host, device = map(int, grown)
                print(
                    f"{function.__name__} {tenth}/10, {time.monotonic() - start:.0f} s: "
                    f"{objects:+} objects, {host / 2**20:+.1f} MiB of the host, "
                    f"{device / 2**20:+.1f} MiB of the GPU",
                    flush=True,
                )
            found.append(tenths[-1])
            if function is theirs:
                late = len(tenths) // 2
                of_each = (tenths[-1] - tenths[-late - 1]) / max(1, late * count / len(tenths))
                found[0] = found[0] + np.maximum(of_each, 0) * (arguments.count - count)
    return 0 if (found[1] < found[0] + SLACK).all() else 1


if __name__ == "__main__":
    sys.exit(main())
