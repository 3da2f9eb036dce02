"""The exported programs in `data/`: how they were written, and how they are read.

    python tests/stored_programs.py

writes them anew. NOTE: they stand for programs that users have exported. A program that was once
stored must be read by every later version, so write another file rather than this one again.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import jax_hopper_gemm as jhg

FOLDER = Path(__file__).with_name("data")
LAYER = FOLDER / "layer_v1.jax_export"  # for CUDA, with its gradients; jax 0.10.2, plans version 2
TOKENS, WIDTH, HIDDEN, EXPERTS = 256, 128, 256, 4


def layer(x, up, bias, experts, sizes):
    hidden = jhg.matmul(x, up, bias=bias, activation="relu", implementation="hopper")
    return jhg.ragged_dot(hidden, experts, sizes, implementation="hopper")


def arguments() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN,), (EXPERTS, HIDDEN, WIDTH)
    floats = [jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16) for shape in shapes]
    return [*floats, jnp.array([100, 0, 56, 90], jnp.int32)]


def write() -> None:
    checks = jhg.export_disabled_checks()
    exported = export.export(jax.jit(layer), platforms=("cuda",), disabled_checks=checks)
    FOLDER.mkdir(exist_ok=True)
    LAYER.write_bytes(exported(*arguments()).serialize(vjp_order=1))


if __name__ == "__main__":
    write()
