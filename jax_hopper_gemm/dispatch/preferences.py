"""Where XLA is expected to be faster than any kernel of ours, and why.

One function a rule; each returns its reason or None. A measured table entry overrules them.
"""

from __future__ import annotations

from collections.abc import Callable

from ..problem import GemmProblem
from .cost import Estimate, roofline_ns
from .device import Device

Preference = Callable[[GemmProblem, Estimate, Device], str | None]

THIN = 16  # rows or columns of D up to which XLA won all measurements, by 2 to 30 %
SPLIT_K_EXTENT = 4096  # K from which splitting it over SMs pays for adding the parts
SPLIT_K_RATIO = 1.8  # times the roofline


def thin(problem: GemmProblem, best: Estimate, device: Device) -> str | None:
    """Products that are nearly matrix times vector: XLA has kernels without tensor cores."""
    m, n = problem.m, problem.n
    if min(m, n) > THIN:
        return None
    return f"D is {m}x{n}: up to {THIN} rows or columns it is nearly a matrix-vector product"


def needs_split_k(problem: GemmProblem, best: Estimate, device: Device) -> str | None:
    """Long K over too few tiles to keep the SMs busy: cuBLAS splits K, we do not."""
    ratio = best.ns / roofline_ns(problem)
    if problem.k < SPLIT_K_EXTENT or best.tiles > device.num_sms or ratio < SPLIT_K_RATIO:
        return None
    return (
        f"K={problem.k} over {best.tiles} tiles keeps {device.num_sms} SMs waiting (expected "
        f"{ratio:.1f} times the least possible time): it wants split-K, which XLA has"
    )


XLA_PREFERENCES: tuple[Preference, ...] = (thin, needs_split_k)
