"""`build`: compiles kernels ahead of the programs that use them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from .. import cubin, dispatch
from ..gemm.dtypes import HALVES, OPERANDS, RESULTS
from ..gemm.kernel_params import KernelSpec
from . import products
from .report import CommandError, built, json_option, make_folder, say

SMS = dispatch.H200.num_sms


@click.command("build")
@click.option("--out", type=Path, metavar="FOLDER", help="A folder, not the cache.")
@click.option(
    "--program", type=Path, multiple=True, metavar="FILE",
    help="Only the kernels that these programs launch, written by jax.export's serialize().",
)  # fmt: skip
@click.option("--jobs", type=products.POSITIVE, help="Processes [one a core].")
@click.option(
    "--dtype", type=products.DtypeType(OPERANDS), multiple=True, default=HALVES,
    help="Only these dtypes of A and B [bf16 and f16].",
)  # fmt: skip
@click.option(
    "--result-dtype", type=products.DtypeType(RESULTS), multiple=True, default=RESULTS,
    help="Only these dtypes of D.",
)  # fmt: skip
@click.option(
    "--sms", type=products.POSITIVE, default=SMS,
    help=f"Of the GPU that the kernels are for [{SMS}: H100 SXM and H200].",
)  # fmt: skip
@json_option
def command(
    out: Path | None, program: tuple[Path, ...], jobs: int | None, dtype: tuple[str, ...],
    result_dtype: tuple[str, ...], sms: int,
) -> dict[str, Any]:  # fmt: skip
    """Compile kernels ahead of time, without a GPU.

    Every kernel without an epilogue that may be chosen, or those of exported programs, into the
    cache or into a folder for JAX_HOPPER_GEMM_CUBINS. What is there already is not built again.
    Options that name several things are repeated.
    """
    make_folder(out or cubin.cache_dir(), "--out" if out else "the cache")
    cubin.prebuilt()  # refuses a variable that names no folder before any kernel is built
    if program:
        specs = [spec for path in program for spec in specs_of_program(path)]
    else:
        pairs = [(ab, d) for ab in dtype for d in result_dtype]
        alone = [replace(gpu, num_sms=sms) for gpu in (dispatch.H100, dispatch.H200)]
        devices = [replace(gpu, comm_overlap=overlap) for gpu in alone for overlap in (False, True)]
        specs = [spec for device in devices for spec in dispatch.table_specs(device, pairs)]
    report = cubin.build(specs, jobs=jobs, progress=not say.silent, folder=out)
    return built(report)


def specs_of_program(path: Path) -> list[KernelSpec]:
    """Returns the kernels that an exported program launches.

    Raises:
      CommandError: the file is no exported program, or this version cannot build its kernels.
    """
    from ..sharding.export import launches_of, stored_programs

    try:
        programs = stored_programs(path.read_bytes())
        launches = [launch for program in programs for launch in launches_of(program)]
    except Exception as error:  # JAX refuses a damaged file in many ways
        raise CommandError(f"{path}: no kernels can be read from it: {error!r}") from error
    if not launches:
        raise CommandError(f"{path}: it launches no kernel of this library")
    specs = {cubin.spec_of(launch.digest, launch.spec): launch for launch in launches}
    if None in specs:
        raise CommandError(
            f"{path}: another version of jax_hopper_gemm made it, and the kernel of "
            f"{specs[None].name} cannot be built by this one. Build with that version, or export "
            "the program again."
        )
    return [spec for spec in specs if spec]
