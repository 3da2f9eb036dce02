"""The collectives of a compiled program, as `jax_hopper_gemm.testing` counts them."""

from __future__ import annotations

from jax_hopper_gemm.testing.collectives import collectives as collectives
from jax_hopper_gemm.testing.collectives import run_counted as run_counted
