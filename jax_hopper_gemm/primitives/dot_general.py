"""The `lax.dot_general_p` that a product stands for."""

from __future__ import annotations

from typing import Any

from ..gemm.product import Product
from ..gemm.subscripts import DotGeneral
from ..lowering.devices import permuted_sharding


def dot_general_of(product: Product) -> tuple[DotGeneral, dict[str, Any]]:
    """Returns the `lax.dot_general_p` that a `hopper_dot_p` stands for, and its parameters."""
    precision, subscripts = product.options.precision, product.subscripts
    # A precision may tell the operands apart: only one that does not lets them change places.
    same = precision is None or (isinstance(precision, tuple) and precision[0] == precision[1])
    dot = subscripts.dot_general(may_swap=same)
    order = tuple(map(subscripts.out.index, dot.out))
    return dot, product.options.of_dot() | {
        "dimension_numbers": dot.dimension_numbers,
        "out_sharding": permuted_sharding(product.out_sharding, order),
    }
