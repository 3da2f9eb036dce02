"""What the custom call of a product with an epilogue says."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.groups import Groups
from ..gemm.subscripts import Subscripts
from ..sharding.custom_call import precision_of
from .accumulators import Accumulate


@dataclass(frozen=True)
class FusedProduct:
    """A product and the function that follows, for any extents.

    Attributes:
      graph: the function.
      subscripts: of the product.
      m, n: letters of the rows and columns of its result.
      precision: as `precision_names` has it.
      implementation, max_sms: as in `Accumulate`.
      in_place: the operand of the graph whose memory the first result may take.
      groups: of a ragged product.
    """

    graph: EpilogueGraph
    subscripts: Subscripts
    m: str
    n: str
    precision: list[str]
    implementation: str | None
    max_sms: int | None = None
    in_place: int | None = None
    groups: Groups | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the call's parameters.

        NOTE: exported programs hold them as JSON, and programs in caches are found by its text.
        """
        fields = asdict(self) | {"subscripts": str(self.subscripts)}
        del fields["groups"]
        return fields if self.groups is None else fields | {"spans": astuple(self.groups)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> FusedProduct:
        """Returns the product that `to_dict` and JSON made `fields` of."""
        graph = EpilogueGraph.from_dict(fields["graph"])
        groups = Groups(*fields["spans"]) if "spans" in fields else None
        subscripts = Subscripts.parse(fields["subscripts"])
        others = {name: x for name, x in fields.items() if name != "spans"}
        return cls(**others | {"graph": graph, "subscripts": subscripts, "groups": groups})

    def accumulate(self, groups: Groups | None = None) -> Accumulate:
        """Returns how accumulators of shards are computed; `groups` are those of the share."""
        precision = precision_of(self.precision)
        return Accumulate(
            self.subscripts, np.dtype(np.float32), precision, None, self.implementation, groups,
            max_sms=self.max_sms,
        )  # fmt: skip
