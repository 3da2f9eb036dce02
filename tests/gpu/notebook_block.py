"""The transformer block of notebook 04, as its cells define it, and the kernels of its shares."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.mesh_programs import shares_noted

from jax_hopper_gemm import nn
from jax_hopper_gemm.gemm.spec import GemmSpec

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "04_sharded_transformer.ipynb"
DEFINING = ("class Block", "def train_step")  # what the cells hold that are run
NAMES = {
    "P": P, "dataclass": dataclass, "jax": jax, "jnp": jnp, "nnx": nnx, "np": np, "optax": optax,
}  # fmt: skip

MESHES = {"data": (2, 1), "tensor": (1, 2)}  # extents of the axes, by which one has both devices
PRODUCTS = 27  # of a step; three may be one launch, and small ones run on XLA


def mesh_of(name: str, devices: Any) -> Mesh:
    extents = MESHES[name]
    devices = np.array(devices[: np.prod(extents)]).reshape(extents)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def defined() -> Any:
    """Returns what the notebook defines: `made`, `train_step`, `batches`, `SIZES` and the rest.

    Within `jax.set_mesh`; `model` and `optimizer` of it lie on that mesh.
    """
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    found = NAMES | {"mesh": jax.sharding.get_mesh()}
    for cell in cells:
        source = "".join(cell["source"])
        if any(line in source for line in DEFINING):
            exec(compile(source, str(NOTEBOOK), "exec"), found)
    return SimpleNamespace(**found)


def lowered(notebook: Any) -> Any:
    """Returns the accelerated step of training, lowered, of what `defined` gave."""
    step: Any = nnx.jit(nn.accelerate(notebook.train_step))
    return step.lower(notebook.model, notebook.optimizer, next(notebook.batches(0)))


def specs(name: str) -> list[GemmSpec]:
    """Returns the kernels that a GPU launches in a step, one for each launch.

    XLA partitions the program over two CPUs for that; see `jax_num_cpu_devices`.
    """
    found: list[GemmSpec] = []
    with jax.set_mesh(mesh_of(name, jax.devices("cpu"))), shares_noted(found):
        lowered(defined()).compile()
    return found
