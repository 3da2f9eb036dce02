"""The launch that cuts float32 into bfloat16 parts."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp

from ..gemm.bf16_parts import num_parts, stored_k
from ..gemm.cutting import VECTOR, CutSpec
from ..launch.ffi_target import TARGET
from ..launch.pass_plans import make_cut_plan
from .attributes import launch_attributes


def cut_along(x: jax.Array, first: int, end: int, terms: int) -> jax.Array:
    """Returns the bfloat16 parts of float32 for so many terms, stored as `bf16_parts` describes.

    A kernel writes them, so this is for programs on a GPU.

    Args:
      first, end: the axes that are K, which the result has as one.
    """
    outer, k, inner = x.shape[:first], prod(x.shape[first:end]), x.shape[end:]
    batch, rows, columns = (prod(outer), k, prod(inner)) if inner else (1, prod(outer), k)
    along = "rows" if inner else "columns"
    spec = CutSpec(num_parts(terms), along, aligned=bool(inner) or columns % VECTOR == 0)
    attributes = launch_attributes(
        spec, make_cut_plan(spec, batch, rows, columns), f"B={batch} R={rows} C={columns}"
    )
    parts = jax.ShapeDtypeStruct((*outer, stored_k(k, terms), *inner), jnp.bfloat16)
    return jax.ffi.ffi_call(TARGET, parts)(x, **attributes)
