"""Which rows and groups of a ragged product a device has, and the sizes that say so there.

A device has a part of the rows, of the groups, or of both. Runs end where its rows do, and what
belongs to groups of other devices becomes rows of no group: 0 in a result of rows, so that the sum
over devices is the product, and left out of a contraction.

Several periods come of `jax.vmap`, which gives each as many rows: their number is a letter of its
own, "p", so that devices can have some of the periods, with their matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ..gemm.groups import GROUP, Groups
from ..gemm.subscripts import Subscripts
from ..sharding.choose_shards import Factors
from .group_sizes import run_ends

PERIODS, SIZES, ENTRIES = "p", "s", "h"  # h: groups of which each device reads all entries


def ragged_letters(subscripts: Subscripts, periods: int, *, shared: bool) -> Factors:
    """Returns the letters of a ragged product's operands, sizes last, and of its result.

    Args:
      subscripts: one of the forms.
      periods: of its runs. Of several, rows and matrices have one more axis in front.
      shared: whether all periods have the same matrices.
    """
    lhs, rhs, out = (
        PERIODS + x if periods > 1 and not (shared and GROUP in x) else x
        for x in (subscripts.lhs, subscripts.rhs, subscripts.out)
    )
    return Factors((lhs, rhs), out, (out,), others=(SIZES,), whole=SIZES, picked=GROUP)


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts of an axis. Its index may be one that only the device knows."""

    index: Any = 0
    count: int = 1


@dataclass(frozen=True)
class RaggedShard:
    """The parts of a ragged product that a device has.

    Attributes:
      rule: of the whole product.
      periods: of the periods, if there are several.
      rows: of the rows of each period.
      groups: of the groups of each period.
    """

    rule: Groups
    periods: Part = Part()
    rows: Part = Part()
    groups: Part = Part()

    @staticmethod
    def of(rule: Groups, part: Callable[[str], tuple[Any, int]]) -> RaggedShard:
        """Returns a device's shard; `part` gives for a letter its part's index and their count."""
        return RaggedShard(rule, *(Part(*part(letter)) for letter in (PERIODS, "m", GROUP)))

    def own_rule(self) -> Groups:
        """Returns which of the runs that `own_sizes` cuts belong to which group."""
        if self.groups.count == 1:
            return self.rule
        count = self.rule.count // self.groups.count
        return Groups(count + 2, count, first=1, step=count if self.rule.step else 0)

    def own_sizes(self, sizes: jax.Array, length: int) -> jax.Array:
        """Returns the sizes that cut the device's rows into runs of `own_rule`.

        Args:
          sizes: (S,) int32, of the whole product.
          length: its rows.
        """
        if self.periods.count == self.rows.count == self.groups.count == 1:
            return sizes
        periods = self.rule.periods(sizes.shape[0])
        ends = jnp.append(run_ends(sizes, length), np.int32(length))
        starts = jnp.arange(periods, dtype=np.int32) * (length // periods)
        bounds = jnp.column_stack([starts, ends.reshape(periods, self.rule.period)])
        length //= periods
        periods //= self.periods.count
        if self.periods.count > 1:
            bounds = lax.dynamic_slice_in_dim(bounds, self.periods.index * periods, periods)
        if self.groups.count > 1:
            count = self.rule.count // self.groups.count
            before = self.rule.first + self.groups.index * count
            own = lax.dynamic_slice_in_dim(bounds, before, count + 1, axis=1)
            ends = jnp.column_stack([own, bounds[:, -1:]])
        else:
            ends = bounds[:, 1:]
        rows = length // self.rows.count
        ends = jnp.clip(ends - bounds[:, :1] - self.rows.index * rows, 0, rows)
        ends += rows * jnp.arange(periods, dtype=np.int32)[:, None]
        return jnp.diff(ends.reshape(-1), prepend=np.int32(0))[:-1]
