"""How the accumulators of a product with an epilogue are computed outside of its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax

from ..gemm.groups import Groups, gate_up_letter
from ..gemm.subscripts import Subscripts
from ..lowering.shardings import padded_partitions, with_partitions
from .dot import hopper_dot, reference_dot
from .ragged_dot import hopper_ragged_dot


@dataclass(frozen=True)
class Accumulate:
    """How accumulators are computed, outside of any kernel's epilogue.

    Attributes:
      subscripts: as in `canonical.as_gemm`; of a ragged product, one of the forms, or
        "mk,gkcn->mn" where weights hold gate and up.
      dtype: of the accumulators.
      precision, out_sharding, implementation, max_sms: as in `hopper_dot`.
      groups: of a ragged product, which runs of rows belong to which group. The sizes that cut
        the rows are one more operand, behind the right ones.
      batch: number of axes that `vmap` put in front of those of a ragged product: of the left
        operand, the sizes and the result, and of the right operands unless all share them, which
        those of a contraction do not.
    """

    subscripts: Subscripts
    dtype: Any
    precision: Any
    out_sharding: Any
    implementation: str | None
    groups: Groups | None = None
    batch: int = 0
    max_sms: int | None = None

    @property
    def stacked(self) -> bool:
        """Whether the right operand holds gate and up."""
        return bool(gate_up_letter(self.subscripts) if self.groups else self.subscripts.gate_up)

    @property
    def sizes(self) -> int:
        """How many operands stand between the right ones and the function's: 1 or 0."""
        return 1 if self.groups else 0

    def plane_axis(self) -> int | None:
        """Returns the axis of gate and up in `together`'s result; None where there is none."""
        if self.stacked and self.groups:
            return self.batch + 1
        return self.subscripts.with_gate_up()[1] if self.stacked else None

    def together(self, lhs: Any, right: Any, *sizes: Any, by_xla: bool = False) -> Any:
        """Returns one product: with gate and up stacked, an array of both.

        With `by_xla` no kernel takes part.
        """
        if self.groups:
            return self._ragged(lhs, right, *sizes, by_xla=by_xla)
        subscripts, sharding = self.subscripts, self.out_sharding
        if self.stacked:
            subscripts, axis = subscripts.with_gate_up()
            if sharding is not None:
                parts = list(padded_partitions(sharding, len(self.subscripts.out)))
                sharding = with_partitions(sharding, (*parts[:axis], None, *parts[axis:]))
        return (reference_dot if by_xla else hopper_dot)(
            lhs, right, subscripts=subscripts, precision=self.precision,
            preferred_element_type=self.dtype, out_sharding=sharding,
            implementation=self.implementation, max_sms=self.max_sms,
        )  # fmt: skip

    def _ragged(self, lhs: Any, right: Any, sizes: Any, *, by_xla: bool) -> Any:
        assert self.groups
        subscripts, shared = self.subscripts, right.ndim == len(self.subscripts.rhs)
        if self.stacked:  # their columns side by side
            right = right.reshape(*right.shape[:-2], -1)
            subscripts = subscripts.without(gate_up_letter(subscripts))
        product = partial(
            hopper_ragged_dot, subscripts=subscripts, groups=self.groups, precision=self.precision,
            preferred_element_type=self.dtype,
            implementation="xla" if by_xla else self.implementation, max_sms=self.max_sms,
        )  # fmt: skip
        for _ in range(self.batch):
            product = jax.vmap(product, (0, None if shared else 0, 0))
        found = product(lhs, right, sizes)
        return found.reshape(*found.shape[:-1], 2, -1) if self.stacked else found

    def __call__(
        self, lhs: Any, rights: Sequence[Any], *sizes: Any, by_xla: bool = False
    ) -> list[Any]:
        """Returns the accumulators, an array each."""
        arrays = [self.together(lhs, right, *sizes, by_xla=by_xla) for right in rights]
        return unstacked(arrays, self.plane_axis())


def unstacked(arrays: Sequence[Any], axis: int | None) -> list[Any]:
    """Returns `arrays` with the planes of the first, along `axis`, apart."""
    if axis is None:
        return list(arrays)
    planes = [lax.index_in_dim(arrays[0], i, axis, keepdims=False) for i in range(2)]
    return [*planes, *arrays[1:]]
