"""Times tile schedulers while other work holds some of the SMs.

    python benchmarks/held_sms.py

A kernel that spins, with so much shared memory that no other CTA fits beside it, stands for a
collective or another stream. 8192 x 8192 x 8192, tiles of 128x256x64, cooperative; medians of
five launches on an otherwise idle GPU. Needs cupy, for the spinning kernel.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from itertools import product

from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec, RasterOrder
from jax_hopper_gemm.testing import direct
from jax_hopper_gemm.testing.gpu import Gpu

cupy = importlib.import_module("cupy")

SPIN = """
extern "C" __global__ void spin(long long nanoseconds) {
  extern __shared__ char held[];
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
  held[0] = 0;
}
"""
SPIN_NANOSECONDS = 12_000_000  # longer than any of the products
SPIN_SMEM = 200 * 1024
HELD = (0, 4, 16)
LAUNCHES = 5


def main() -> int:
    gpu = Gpu()
    problem = GemmProblem.dense(8192, 8192, 8192)
    operands = [gpu.random("bfloat16", 8192 * 8192, seed) for seed in (0, 1)]
    operands.append(gpu.allocate(2 * 8192 * 8192))
    spin = cupy.RawKernel(SPIN, "spin")
    spin.max_dynamic_shared_size_bytes = SPIN_SMEM
    other, ours = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))

    def timed(launch: direct.Launch, held: int) -> float:
        cupy.cuda.Device().synchronize()
        time.sleep(0.05)
        if held:
            spin((held,), (128,), (SPIN_NANOSECONDS,), shared_mem=SPIN_SMEM, stream=other)
            time.sleep(0.001)
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(ours)
        launch(ours.ptr)
        end.record(ours)
        end.synchronize()
        return cupy.cuda.get_elapsed_time(start, end) * 1e3

    print("cluster  scheduler " + "".join(f"  {held:2} SMs held" for held in HELD) + "  (us)")
    for cluster_m, scheduler in product((1, 2), ("single", "static", "dynamic")):
        spec = GemmSpec(
            "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256, 64, cluster_m, 1,
            tile_scheduler=scheduler, num_stages=4, epi_tile_n=32, epi_stages=4,
        )  # fmt: skip
        launch = direct.prepare(gpu, problem, spec, RasterOrder("m", 8), operands)
        medians = [statistics.median(timed(launch, h) for _ in range(LAUNCHES)) for h in HELD]
        print(f"{cluster_m}x1      {scheduler:9} " + "".join(f"{us:13.0f}" for us in medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
