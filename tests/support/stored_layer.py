"""Exported programs and their kernels in `data/`, those of one layer: `layer_v1.jax_export`, ...

    PYTHONPATH=tests python -m support.stored_layer FILE.jax_export

writes another, and beside it FILE.zip: a folder of kernels as `build --program` leaves it, but for
their code, which is a stand-in. NOTE: the stored ones stand for what users have; every later
version of the same major version must run them. So keep them as they are, and add two files a
release.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from support.cubin_samples import sample_cubin, sample_manifest
from support.launches_on_cpu import parameter_bytes

import jax_hopper_gemm as jhg
from jax_hopper_gemm.cubin import Parameter
from jax_hopper_gemm.cubin.store import Store
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.lowering.call import Launch
from jax_hopper_gemm.sharding.export import launches_of, stored_programs

# For CUDA, with its gradients. v1: by jax 0.10.2, plans of version 2.
DATA = Path(__file__).parents[1] / "data"
LAYER = DATA / "layer_v1.jax_export"
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
    write_kernels(path)


def write_kernels(program: Path) -> None:
    with TemporaryDirectory() as folder:
        for launch in launches_of_all(program):
            spec, sizes = GemmSpec.from_json(launch.spec), parameter_bytes(launch.plan)
            ends = itertools.accumulate(sizes, initial=0)
            places = tuple(zip(ends, sizes, strict=False))
            manifest = replace(
                sample_manifest(spec), spec=launch.spec, entry=spec.name,
                parameters=tuple(Parameter(f"p{i}", *place) for i, place in enumerate(places)),
            )  # fmt: skip
            cubin = sample_cubin(entry=spec.name, threads=spec.threads, places=places)
            Store(Path(folder), "prebuilt").write(launch.digest, cubin, manifest)
        shutil.make_archive(str(program.with_suffix("")), "zip", folder)


def kernels_of(program: Path, folder: Path) -> None:
    """Unpacks the kernels that were stored with a program."""
    shutil.unpack_archive(program.with_suffix(".zip"), folder)


def launches_of_all(program: Path) -> list[Launch]:
    return [x for each in stored_programs(program.read_bytes()) for x in launches_of(each)]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
