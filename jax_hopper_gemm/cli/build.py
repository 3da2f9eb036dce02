"""`build`: compiles kernels ahead of the programs that use them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import cubin, dispatch
from ..gemm.dtypes import HALVES, OPERANDS, RESULTS
from ..gemm.spec import GemmSpec
from . import products
from .report import CommandError, check_built, make_folder, print_json

if TYPE_CHECKING:
    from ..lowering.call import Launch


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = (
        "Compiles every kernel without an epilogue that may be chosen, or those of exported "
        "programs, without a GPU, into the cache or into a folder for JAX_HOPPER_GEMM_CUBINS. "
        "What is there already is not built again."
    )
    parser = commands.add_parser("build", help="compile kernels ahead of time", description=text)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a folder, not the cache")
    parser.add_argument(
        "--program", type=Path, nargs="+", metavar="FILE",
        help="only the kernels that these programs launch, written by jax.export's serialize()",
    )  # fmt: skip
    parser.add_argument("--jobs", type=products.positive, help="processes [one a core]")
    parser.add_argument(
        "--dtype", nargs="+", choices=OPERANDS, default=HALVES,
        help=f"only these dtypes of A and B [{' '.join(HALVES)}]",
    )  # fmt: skip
    parser.add_argument(
        "--result-dtype", nargs="+", choices=RESULTS, default=RESULTS,
        help="only these dtypes of D",
    )  # fmt: skip
    parser.add_argument(
        "--sms", type=products.positive, default=dispatch.H200.num_sms,
        help=f"of the GPU that the kernels are for [{dispatch.H200.num_sms}: H200, H100 SXM]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    make_folder(args.out or cubin.cache_dir(), "--out" if args.out else "the cache")
    cubin.prebuilt()  # refuses a variable that names no folder before any kernel is built
    if args.program:
        specs = [spec for path in args.program for spec in specs_of_program(path)]
    else:
        pairs = [(ab, d) for ab in args.dtype for d in args.result_dtype]
        alone = dispatch.Device((9, 0), args.sms)
        devices = (alone, replace(alone, comm_overlap=True))
        specs = [spec for device in devices for spec in dispatch.table_specs(device, pairs)]
        specs = list(dict.fromkeys(specs))
    report = cubin.build(specs, jobs=args.jobs, progress=not args.json, folder=args.out)
    if args.json:
        print_json(
            {
                "folder": str(report.folder or cubin.cache_dir()),
                "compiled": [spec.name for spec in report.compiled],
                "reused": [spec.name for spec in report.reused],
                "failures": {spec.name: why for spec, why in report.failures.items()},
            }
        )
    else:
        print(report)
    check_built(report)
    return 0


def specs_of_program(path: Path) -> list[GemmSpec]:
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
    specs = {_spec_of(launch): launch for launch in launches}
    if None in specs:
        raise CommandError(
            f"{path}: another version of jax_hopper_gemm made it, and the kernel of "
            f"{specs[None].name} cannot be built by this one. Build with that version, or export "
            "the program again."
        )
    return [spec for spec in specs if spec]


def _spec_of(launch: Launch) -> GemmSpec | None:
    """Returns the spec of a launch's kernel, if this version makes the same kernel."""
    try:
        spec = GemmSpec.from_json(launch.spec)
        return spec if cubin.digest_of(spec) == launch.digest else None
    except (ValueError, TypeError):  # fields of another version
        return None
