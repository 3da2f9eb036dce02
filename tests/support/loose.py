"""Products of which some rows are no multiples of 16 bytes, and the kernels that they take."""

from __future__ import annotations

from jax_hopper_gemm.dispatch import H200
from jax_hopper_gemm.gemm.product import Options
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.lowering.request import Request
from jax_hopper_gemm.lowering.route import Route, route

# Subscripts, and the extents of A and B. Rows of D, of A, of B, of both operands, of a batch.
LOOSE_PRODUCTS = (
    ("mk,nk->mn", (200, 136), (333, 136)),
    ("mk,kn->mn", (200, 133), (133, 264)),
    ("mk,kn->mn", (72, 520), (520, 257)),
    ("mk,nk->mn", (130, 77), (51, 77)),
    ("km,kn->mn", (301, 99), (301, 33)),
    ("bqd,bkd->bqk", (3, 197, 64), (3, 197, 64)),
    ("bqk,bkd->bqd", (3, 197, 197), (3, 197, 64)),
    ("m,mn->n", (523,), (523, 61)),
)


def loose_route(
    subscripts: str, lhs: tuple[int, ...], rhs: tuple[int, ...], *, kernel_only: bool = True
) -> Route:
    """Returns how a bfloat16 product runs on an H200."""
    parsed, dtype = Subscripts.parse(subscripts), "bfloat16"
    options = Options(implementation="hopper" if kernel_only else None)
    request = Request(parsed, lhs, dtype, rhs, dtype, dtype, options)
    return route(request, H200, kernel_only=kernel_only)


def loose_program_specs() -> list[GemmSpec]:
    """Returns the kernels of `LOOSE_PRODUCTS`."""
    routes = (loose_route(*product) for product in LOOSE_PRODUCTS)
    return [route.spec for route in routes if route.spec]
