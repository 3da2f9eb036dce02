"""The exported program `data/layer_v1.jax_export`: what it is of, and how it was written.

    PYTHONPATH=tests python -m support.stored_layer FILE

writes another. NOTE: the stored one stands for programs that users have; every later version must
read it. So keep it as it is, and add others beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import jax_hopper_gemm as jhg

# For CUDA, with its gradients; by jax 0.10.2, plans of version 2.
LAYER = Path(__file__).parents[1] / "data" / "layer_v1.jax_export"
TOKENS, WIDTH, HIDDEN, EXPERTS = 256, 128, 256, 4


def layer(x, up, bias, experts, sizes):
    hidden = jhg.matmul(x, up, bias=bias, activation="relu", implementation="hopper")
    return jhg.ragged_dot(hidden, experts, sizes, implementation="hopper")


def layer_arguments() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN,), (EXPERTS, HIDDEN, WIDTH)
    floats = [jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16) for shape in shapes]
    return [*floats, jnp.array([100, 0, 56, 90], jnp.int32)]


def write(path: Path) -> None:
    checks = jhg.export_disabled_checks()
    exported = export.export(jax.jit(layer), platforms=("cuda",), disabled_checks=checks)
    path.write_bytes(exported(*layer_arguments()).serialize(vjp_order=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
