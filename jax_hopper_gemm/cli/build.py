"""`build`: compiles kernels ahead of the programs that will ask for them."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import cubin, dispatch
from ..problem import ITEMSIZE
from . import products
from .report import print_json


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = (
        "Compiles every kernel that may be chosen, without a GPU, into the cache or into a folder "
        "for JAX_HOPPER_GEMM_CUBINS. What is there already is not built again."
    )
    parser = commands.add_parser("build", help="compile kernels ahead of time", description=text)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a folder, not the cache")
    parser.add_argument("--jobs", type=products.positive, help="processes [one a core]")
    parser.add_argument(
        "--dtype", nargs="+", choices=products.OPERAND_DTYPES, default=products.OPERAND_DTYPES,
        help="only these dtypes of A and B",
    )  # fmt: skip
    parser.add_argument(
        "--result-dtype", nargs="+", choices=tuple(ITEMSIZE), default=tuple(ITEMSIZE),
        help="only these dtypes of D",
    )  # fmt: skip
    parser.add_argument(
        "--sms", type=products.positive, default=dispatch.H200.num_sms,
        help=f"of the GPU that the kernels are for [{dispatch.H200.num_sms}: H200, H100 SXM]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    pairs = [(ab, d) for ab in args.dtype for d in args.result_dtype]
    specs = dispatch.table_specs(dispatch.Device((9, 0), args.sms), pairs)
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
    return 1 if report.failures else 0
