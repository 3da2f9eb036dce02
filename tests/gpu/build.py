"""Builds the kernels that the GPU tests run, on a machine that needs no GPU.

    python tests/gpu/build.py FOLDER                   # --only PART: those of some tests
    JAX_HOPPER_GEMM_CUBINS=FOLDER python -m pytest -m gpu tests/gpu

So the machine with the GPU needs no nvidia-cutlass-dsl. For an H100 set JAX_HOPPER_GEMM_GPU=H100
while building: its measured choices are others than an H200's.

Build with the jax version X that the machine with the GPU runs. Another version traces some of the
functions to other graphs, so that kernels of the random products and of the programs would be
missing from FOLDER. Where another version is installed, put X into a folder of its own, DIR:

    pip install --target DIR --no-deps jax==X jaxlib==X
    PYTHONPATH=DIR python tests/gpu/build.py FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `support`
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # `moe_programs`

import jax
import many_shapes
import nnx_step
import notebook_block
import train_recipes
from moe_programs import moe_specs
from support import (
    cutting,
    eight_bit,
    float32,
    quantization,
    quantized_groups,
    random_grouped,
    random_products,
    recipe_programs,
    sgemm,
    training_step,
)
from support.fused_programs import fused_specs
from support.grouped_programs import GROUPED_PROGRAMS
from support.invariant_programs import invariant_specs
from support.loose import loose_program_specs
from support.mesh_programs import mesh_specs
from support.operations import operation_specs
from support.policies import (
    all_specs,
    along_n,
    block_specs,
    chosen_specs,
    converted_specs,
    converted_variants,
    eight_bit_specs,
    eight_bit_variants,
    loose_specs,
    panel_specs,
    parts_specs,
    split_specs,
    stored_parts_specs,
    tf32_specs,
    transposed_specs,
)
from support.programs import PROGRAMS
from support.transformations import transformation_specs
from support.weights import number_specs, weight_specs
from tensor_parallel_programs import overlap_specs

from jax_hopper_gemm import cubin
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.gemm.spec import GemmSpec


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=None, help="processes [one a core]")
    parser.add_argument("--only", choices=PARTS, help="only some [all]")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)  # over which XLA partitions programs
    specs = dict.fromkeys(PARTS[arguments.only]() if arguments.only else everything())
    report = cubin.build(list(specs), arguments.jobs, folder=arguments.folder)
    print(report)
    return 1 if report.failures else 0


def recipes() -> list[KernelSpec]:
    small = train_recipes.Setting(128, 2, 4, 128, 8, steps=100)
    return [*recipe_programs.specs(), *train_recipes.specs(small, list(train_recipes.RECIPES))]


def of_float32() -> list[KernelSpec]:
    return [
        *parts_specs(), *stored_parts_specs(), *tf32_specs(), *float32.specs(), *sgemm.specs(),
        *(case.spec for case in (*cutting.CASES, cutting.LARGE)),
    ]  # fmt: skip


def of_8_bits() -> list[KernelSpec]:
    return [
        *eight_bit_specs(), *block_specs(), *eight_bit_variants(), *eight_bit.specs(), *recipes(),
        *quantization.specs(), *quantized_groups.specs(),
    ]  # fmt: skip


def weights() -> list[KernelSpec]:
    return [*converted_specs(), *converted_variants(), *number_specs(), *weight_specs()]


def split() -> list[GemmSpec]:
    return [*split_specs(), *(spec for spec in chosen_specs() if spec.split_k)]


def transposed() -> list[GemmSpec]:
    chosen = (spec for spec in chosen_specs() if spec.d_major == "m")
    return [*transposed_specs(), *filter(None, map(along_n, transposed_specs())), *chosen]


PARTS: dict[str, Callable[[], Iterable[KernelSpec]]] = {
    "moe": moe_specs,  # on one GPU and several
    "eight-bit": of_8_bits,
    "quantization": quantization.specs,
    "recipes": recipes,
    "overlap": overlap_specs,  # of collective products, on several GPUs
    "split": split,
    "transposed": transposed,
    "loose": lambda: [*loose_specs(), *loose_program_specs()],
    "panels": panel_specs,
    "weights": weights,
    "invariant": invariant_specs,  # of test_row_bits.py
    "float32": of_float32,
    "sgemm": sgemm.specs,
}


def everything() -> Iterator[KernelSpec]:
    for part in PARTS.values():
        yield from part()
    yield from all_specs()
    yield from chosen_specs()
    yield from chosen_specs(comm_overlap=True)
    yield from operation_specs().values()
    for program in (*PROGRAMS.values(), *GROUPED_PROGRAMS.values()):
        yield from program.specs()
    for axis in notebook_block.MESHES:
        yield from notebook_block.specs(axis)
    for module in (random_products, random_grouped, training_step, nnx_step, many_shapes):
        yield from module.specs()
    yield from mesh_specs()
    yield from fused_specs()
    yield from transformation_specs()


if __name__ == "__main__":
    sys.exit(main())
