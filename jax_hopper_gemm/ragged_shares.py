"""Which rows and groups of a ragged product a device has, and the sizes that say so there.

A device has a part of the rows, of the matrices, or of both. Spans end where its rows do, and what
belongs to the matrices of others becomes rows of no group: 0 in a result of rows, so that the sum
over devices is the product, and left out of a contraction.

Several periods come from `jax.vmap` alone, which gives each as many rows. Where they have matrices
of their own, rows and matrices are cut alike: letter "p" counts periods in the axes of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from .contraction import split
from .span_sizes import span_ends
from .spans import Spans

PERIODS = "p"


class Part(NamedTuple):
    """One of `count` equal parts of an axis: an integer, or one that only the device knows."""

    index: Any = 0
    count: int = 1


@dataclass(frozen=True)
class RaggedShare:
    """The parts of a ragged product that a device has.

    Attributes:
      spans: of the whole product.
      periods: of the periods, where each has matrices of its own.
      rows: of the rows; if `periods` is cut, of those of a period, and then of one alone.
      groups: of the groups of each period.
    """

    spans: Spans
    periods: Part = Part()
    rows: Part = Part()
    groups: Part = Part()

    def local_spans(self) -> Spans:
        """Returns which of the spans that `local_sizes` cuts belong to which group."""
        if self.groups.count == 1:
            return self.spans
        count = self.spans.count // self.groups.count
        return Spans(count + 2, count, first=1, step=count if self.spans.step else 0)

    def local_sizes(self, sizes: jax.Array, length: int) -> jax.Array:
        """Returns the sizes that cut the device's rows into `local_spans`.

        Args:
          sizes: (S,) int32, of the whole product.
          length: its rows.
        """
        spans = self.spans
        periods = spans.periods(sizes.shape[0])
        ends = jnp.append(span_ends(sizes, length), np.int32(length)).reshape(periods, spans.period)
        if self.periods.count > 1:
            periods //= self.periods.count
            ends = jax.lax.dynamic_slice_in_dim(ends, self.periods.index * periods, periods)
        if self.groups.count > 1:
            ends = self._ends_of_groups(ends)
        rows = length // (self.periods.count * self.rows.count)
        first = (self.periods.index * self.rows.count + self.rows.index) * rows
        ends = jnp.clip(ends.reshape(-1) - first, 0, rows)
        return jnp.diff(ends, prepend=np.int32(0))[:-1].astype(np.int32)

    def _ends_of_groups(self, ends: jax.Array) -> jax.Array:
        """Returns the ends of what is before the device's groups, of these, and of the rest.

        Args:
          ends: (periods, spans of a period).
        """
        periods, period = ends.shape
        starts = jnp.roll(ends.reshape(-1), 1).at[0].set(0).reshape(periods, period)[:, :1]
        count = self.spans.count // self.groups.count
        before = self.spans.first + self.groups.index * count
        bounds = jnp.concatenate([starts, ends], 1)
        own = jax.lax.dynamic_slice_in_dim(bounds, before, count + 1, axis=1)
        return jnp.concatenate([own, ends[:, -1:]], 1)


