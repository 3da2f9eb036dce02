"""Command-line arguments that describe products: extents, dtypes, layouts."""

from __future__ import annotations

import argparse
import re

from ..gemm.dtypes import RESULTS
from ..gemm.problem import GemmProblem


def shape(text: str) -> tuple[int, int, int]:
    """Returns (M, N, K) of "4096x4096x4096"."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not MxNxK, as 4096x4096x4096")
    m, n, k = map(int, text.split("x"))
    return m, n, k


def positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def dtype(text: str) -> str:
    """Returns the name of a dtype of numbers that JAX has as it is set up."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    try:
        named = np.dtype(getattr(jnp, text))
    except (AttributeError, TypeError):
        named = np.dtype(object)
    if not jnp.issubdtype(named, np.number):
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype of numbers, as bfloat16")
    if jax.dtypes.canonicalize_dtype(named) != named:
        raise argparse.ArgumentTypeError(f"{text!r} needs JAX_ENABLE_X64=1")
    return named.name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that describe a product besides M, N and K."""
    parser.add_argument("--batch", type=positive, default=1, metavar="L", help="products [1]")
    parser.add_argument(
        "--a-major", choices=("k", "m"), default="k", help="A stored (M, K) or (K, M) [k]"
    )
    parser.add_argument(
        "--b-major", choices=("n", "k"), default="n", help="B stored (K, N) or (N, K) [n]"
    )
    parser.add_argument("--dtype", type=dtype, default="bfloat16", help="of A and B [bfloat16]")
    parser.add_argument("--result-dtype", choices=RESULTS, help="of D [that of A and B]")


def problem(extents: tuple[int, int, int], args: argparse.Namespace) -> GemmProblem:
    """Returns the problem that `add_arguments` and three extents describe."""
    return GemmProblem.dense(
        *extents, args.batch, a_major=args.a_major, b_major=args.b_major, dtype=args.dtype,
        d_dtype=args.result_dtype,
    )  # fmt: skip
