"""What dispatch knows of a GPU: enough to choose a kernel where there is none."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

Gpu = Literal["H100", "H200"]
GPU_VARIABLE = "JAX_HOPPER_GEMM_GPU"


@dataclass(frozen=True)
class Device:
    """A kind of GPU."""

    compute_capability: tuple[int, int]  # major and minor; the kernels need (9, 0)
    num_sms: int  # streaming multiprocessors that kernels may use
    limited: bool = False  # whether it has more of them, so that a kernel must keep to these
    comm_overlap: bool = False  # whether transfers between devices may hold SMs while a kernel runs
    gpu: Gpu = "H200"  # whose measured choices it takes

    @property
    def key(self) -> str:
        """The name of its table of measured choices: "h200_132"."""
        return f"{self.gpu.lower()}_{self.num_sms}"

    def limited_to(self, max_sms: int | None) -> Device:
        """Returns the device for kernels that may use `max_sms` of its SMs; None: all."""
        if max_sms is None or max_sms >= self.num_sms:
            return self
        return replace(self, num_sms=max_sms, limited=True)


H200 = Device((9, 0), 132)
H100 = replace(H200, gpu="H100")  # the SXM module: same SMs, less memory bandwidth
GPUS = {"H100": H100, "H200": H200}


def gpu_of(kind: str) -> Gpu:
    """Returns whose measured choices a GPU takes; `kind` is its full name."""
    return "H100" if any(name in kind for name in ("H100", "H800")) else "H200"


def absent_device() -> Device:
    """Returns the GPU that kernels are chosen for where there is none: the variable's, or an H200.

    Raises:
      ValueError: JAX_HOPPER_GEMM_GPU names another GPU.
    """
    name = os.environ.get(GPU_VARIABLE) or "H200"
    if name not in GPUS:
        raise ValueError(f"{GPU_VARIABLE} is {name!r}; expected one of {', '.join(GPUS)}")
    return GPUS[name]


# Rates that the model of time (`cost`) counts with.
CYCLES_PER_NS = 1.755  # the clock under load; cycles are of this clock
LINE_BYTES = 128  # of L2; a row of a TMA box costs every line it touches
L2_BYTES = 50e6
MEMORY_BYTES_PER_NS = 4300.0  # measured; 4800 on the datasheet
SM_BYTES_PER_CYCLE = 78.0  # fitted: what an SM takes in, its own loads and multicasts
L2_BYTES_PER_CYCLE = {"H100": 7500.0, "H200": 8200.0}  # fitted: the lines that all SMs ask of L2
FMA_UNITS = 128  # of an SM, for float32
MMA_FLOPS = 4096  # of an SM's tensor cores, each cycle, with operands of 16 bits
ISSUE_CYCLES = 1.3  # assumed: of an instruction of one warp, stalls included
