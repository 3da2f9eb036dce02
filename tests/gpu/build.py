"""Builds the kernels that the GPU tests run, on a machine that needs no GPU.

    python tests/gpu/build.py FOLDER
    JAX_HOPPER_GEMM_CUBINS=FOLDER python -m pytest -m gpu tests/gpu

So the machine with the GPU needs no nvidia-cutlass-dsl.

Build with the jax version X that the machine with the GPU runs. Another version traces some of the
functions to other graphs, so that kernels of the random products and of the programs would be
missing from FOLDER. Where another version is installed, put X into a folder of its own, DIR:

    pip install --target DIR --no-deps jax==X jaxlib==X
    PYTHONPATH=DIR python tests/gpu/build.py FOLDER
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
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
    eight_bit,
    float32,
    random_grouped,
    random_products,
    recipe_programs,
    sgemm,
    training_step,
)
from support.fused_programs import FUSED_PROGRAMS
from support.grouped_programs import GROUPED_PROGRAMS
from support.invariant_programs import invariant_specs
from support.loose import loose_program_specs
from support.mesh_programs import mesh_specs
from support.operations import operation_specs
from support.policies import (
    along_n,
    block_specs,
    chosen_epilogue_specs,
    converted_specs,
    converted_variants,
    covering_specs,
    eight_bit_specs,
    eight_bit_variants,
    epilogue_covering_specs,
    grouped_covering_specs,
    loose_specs,
    nested_specs,
    parts_specs,
    short_box_specs,
    split_specs,
    stacked_specs,
    tf32_specs,
    transposed_specs,
)
from support.programs import PROGRAMS
from support.transformations import transformation_specs
from support.weights import number_specs, weight_specs
from tensor_parallel_programs import overlap_specs

from jax_hopper_gemm import cubin
from jax_hopper_gemm.dispatch import H200, table_specs
from jax_hopper_gemm.gemm.spec import GemmSpec


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=None, help="processes [one a core]")
    parser.add_argument(
        "--moe",
        action="store_true",
        help="only those of mixtures of experts, on one GPU and several",
    )
    parser.add_argument("--eight-bit", action="store_true", help="only those of operands of 8 bits")
    parser.add_argument("--recipes", action="store_true", help="only those of test_recipes.py")
    parser.add_argument(
        "--overlap", action="store_true", help="only those of collective products, on several GPUs"
    )
    parser.add_argument(
        "--split", action="store_true", help="only those that split K, without a traced epilogue"
    )
    parser.add_argument(
        "--transposed", action="store_true", help="only those of test_transposed_kernels.py"
    )
    parser.add_argument("--loose", action="store_true", help="only those of test_loose_kernels.py")
    parser.add_argument("--weights", action="store_true", help="only those that convert weights")
    parser.add_argument("--invariant", action="store_true", help="only those of test_row_bits.py")
    parser.add_argument("--float32", action="store_true", help="only those of float32 operands")
    parser.add_argument("--sgemm", action="store_true", help="of these only those for FMA units")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)  # over which XLA partitions programs
    if arguments.moe:
        specs = moe_specs()
    elif arguments.overlap:
        specs = overlap_specs()
    elif arguments.invariant:
        specs = list(dict.fromkeys(invariant_specs()))
    elif arguments.weights:
        specs = list(dict.fromkeys(converted()))
    elif arguments.split:
        specs = [*split_specs(), *(spec for spec in table_specs(H200) if spec.split_k)]
    elif arguments.transposed:
        twins = (along_n(spec) for spec in transposed_specs())
        specs = [
            *transposed_specs(), *(spec for spec in twins if spec),
            *(spec for spec in table_specs(H200) if spec.d_major == "m"),
        ]  # fmt: skip
    elif arguments.loose:
        specs = [*loose_specs(), *loose_program_specs()]
    elif arguments.sgemm:
        specs = sgemm.specs()
    elif arguments.float32:
        specs = float32_specs()
    elif arguments.eight_bit:
        specs = [
            *eight_bit_specs(), *block_specs(), *eight_bit_variants(), *eight_bit.specs(),
            *recipe_specs(),
        ]  # fmt: skip
    elif arguments.recipes:
        specs = recipe_specs()
    else:
        specs = all_specs()
    report = cubin.build(specs, arguments.jobs, folder=arguments.folder)
    print(report)
    return 1 if report.failures else 0


def recipe_specs() -> list[GemmSpec]:
    small = train_recipes.Setting(128, 2, 4, 128, 8, steps=100)
    trained = train_recipes.specs(small, list(train_recipes.RECIPES))
    return list(dict.fromkeys([*recipe_programs.specs(), *trained]))


def float32_specs() -> list[GemmSpec]:
    return [*parts_specs(), *tf32_specs(), *float32.specs(), *sgemm.specs()]


def all_specs() -> list[GemmSpec]:
    return list(
        dict.fromkeys(
            (
                *covering_specs(),
                *stacked_specs(),
                *short_box_specs(),
                *nested_specs(),
                *split_specs(),
                *transposed_specs(),
                *(spec for spec in map(along_n, transposed_specs()) if spec),
                *epilogue_covering_specs(),
                *chosen_epilogue_specs(),
                *grouped_covering_specs(),
                *table_specs(H200),
                *table_specs(replace(H200, comm_overlap=True)),
                *operation_specs().values(),
                *(spec for program in PROGRAMS.values() for spec in program.specs()),
                *random_products.specs(),
                *random_grouped.specs(),
                *(spec for program in GROUPED_PROGRAMS.values() for spec in program.specs()),
                *moe_specs(),
                *mesh_specs(),
                *training_step.specs(),
                *(spec for program in FUSED_PROGRAMS.values() for spec in program.specs()),
                *nnx_step.specs(),
                *(spec for axis in notebook_block.MESHES for spec in notebook_block.specs(axis)),
                *transformation_specs(),
                *invariant_specs(),
                *overlap_specs(),
                *many_shapes.specs(),
                *eight_bit_specs(),
                *block_specs(),
                *eight_bit.specs(),
                *converted(),
                *recipe_specs(),
                *float32_specs(),
            )
        )
    )


def converted() -> list[GemmSpec]:
    return [*converted_specs(), *converted_variants(), *number_specs(), *weight_specs()]


if __name__ == "__main__":
    sys.exit(main())
