"""Products of many shapes in one process: ours, the same in plain JAX, and their kernels."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

COUNT = int(os.environ.get("JAX_HOPPER_GEMM_SHAPES", 100))


def ours(a: Any, b: Any) -> Any:
    return jhg.matmul(a, b, activation="gelu", implementation="hopper")


def theirs(a: Any, b: Any) -> Any:
    return jax.nn.gelu(a @ b)


def shapes(i: int) -> list[jax.ShapeDtypeStruct]:
    """Returns those of the i-th product's operands."""
    return [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((8 * (i + 1), 64), (64, 128))]


def specs() -> list[GemmSpec]:
    """Returns the kernels of `COUNT` shapes; dispatch chooses a few, so it is asked for some."""
    some = {*range(0, COUNT, max(1, COUNT // 100)), *range(min(COUNT, 100)), COUNT - 1}
    return list(dict.fromkeys(spec for i in sorted(some) for spec in specs_of(ours, *shapes(i))))
