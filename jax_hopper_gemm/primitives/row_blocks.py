"""Rows in groups as whole blocks: those of each group, and zeros up to a multiple of 128.

So a product that contracts them reads transposes of 8 bits (`VARLEN_K_T` of `gemm.groups`), and no
block of scales has rows of two groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from ..gemm.groups import Groups
from ..gemm.spec import PROMOTION_K
from .group_sizes import clipped_sizes, count_up_to, run_ends


@dataclass(frozen=True)
class RowBlocks:
    """Where the rows of groups lie in blocks; those of no group do not.

    Attributes:
      sizes: of the runs there, (S,) int32.
      rows: for each row of a block the row that it is, int32; of padding one that is not there.
    """

    sizes: jax.Array
    rows: jax.Array

    def of(self, x: jax.Array) -> jax.Array:
        """Returns the rows of an array in blocks."""
        return x.at[self.rows].get(mode="fill", fill_value=0)


def row_blocks(sizes: jax.Array, groups: Groups, length: int) -> RowBlocks:
    """Returns the blocks of the rows that sizes cut into groups; `length` is that of the rows."""
    count, block = sizes.shape[0], PROMOTION_K
    number = np.arange(count, dtype=np.int32)
    place = number % groups.period - groups.first
    kept = (place >= 0) & (place < groups.count)
    own = jnp.where(kept, clipped_sizes(sizes, length), 0)
    starts = run_ends(sizes, length) - clipped_sizes(sizes, length)
    padded = -(-own // block) * block
    ends = jnp.cumsum(padded, dtype=np.int32)
    most = (length + (block - 1) * int(kept.sum())) // block  # blocks
    first = jnp.arange(most, dtype=np.int32) * block
    # Behind all groups nothing is left of the last.
    run = jnp.minimum(count_up_to(ends, first), count - 1)
    within = first - (ends - padded)[run]
    each = jnp.arange(block, dtype=np.int32)[None]
    rows: Any = (starts[run] + within)[:, None] + each
    rows = jnp.where(each < (own[run] - within)[:, None], rows, length)
    return RowBlocks(padded, rows.reshape(-1))
