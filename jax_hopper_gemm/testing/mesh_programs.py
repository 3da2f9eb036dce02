"""Products that XLA partitions over two GPUs, and the kernels of one GPU's share.

Each is a `MeshProgram`: the result and all gradients, with ours and in plain jnp, and which letters
are sharded. One GPU's share is the same step on its shards, so that a machine without GPUs can
tell its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..ops import matmul
from ..spec import GemmSpec
from .lowered import specs_of

AXIS = "x"  # of the mesh
DEVICES = 2
EXTENTS = {"b": 4, "m": 512, "n": 768, "k": 1024}


@dataclass(frozen=True)
class MeshProgram:
    """A function of bfloat16 arrays, sharded along some letters.

    Attributes:
      ours, plain: the function with our products, and in jnp.
      letters: a letter for each dimension of the result and of each argument.
      sharded: the letters that are sharded.
      launches: kernels of ours in the step.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    letters: tuple[str, ...]
    sharded: str
    launches: int

    def step(self, function: Callable[..., Any], cotangent: Any, *arguments: Any) -> Any:
        """The result of a function and the gradients of its arguments."""
        result, pull = jax.vjp(function, *arguments)
        return result, *pull(cotangent)

    def arguments(self) -> list[np.ndarray]:
        """Returns a cotangent and the arguments."""
        rng = np.random.default_rng(0)
        return [
            rng.standard_normal([EXTENTS[x] for x in names], np.float32).astype(jnp.bfloat16)
            for names in self.letters
        ]

    def partition_specs(self) -> list[P]:
        """Returns how each of `arguments` is sharded."""
        return [P(*(AXIS if x in self.sharded else None for x in names)) for names in self.letters]

    def specs(self) -> list[GemmSpec]:
        """Returns the kernels that a GPU launches for its share."""
        shards = [
            jax.ShapeDtypeStruct(
                [EXTENTS[x] // (DEVICES if x in self.sharded else 1) for x in names], jnp.bfloat16
            )
            for names in self.letters
        ]
        return specs_of(lambda *args: self.step(self.ours, *args), *shards)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return matmul(a, b, implementation="hopper")


PRODUCTS = {
    f"{letter} sharded": MeshProgram(_matmul, jnp.matmul, ("bmn", "bmk", "bkn"), letter, 3)
    for letter in "bmnk"
}
MESH_PROGRAMS = PRODUCTS
