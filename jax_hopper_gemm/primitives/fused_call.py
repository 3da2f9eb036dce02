"""What the custom call of a product with an epilogue says."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.groups import Spans
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
      spans: of a ragged product.
    """

    graph: EpilogueGraph
    subscripts: Subscripts
    m: str
    n: str
    precision: list[str]
    implementation: str | None
    max_sms: int | None = None
    in_place: int | None = None
    spans: Spans | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the call's parameters.

        NOTE: exported programs hold them as JSON, and programs in caches are found by its text.
        """
        fields = asdict(self) | {"subscripts": str(self.subscripts)}
        if self.spans is None:
            del fields["spans"]
        else:
            fields["spans"] = astuple(self.spans)
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> FusedProduct:
        """Returns the product that `to_dict` and JSON made `fields` of."""
        graph = EpilogueGraph.from_dict(fields["graph"])
        spans = Spans(*fields["spans"]) if "spans" in fields else None
        subscripts = Subscripts.parse(fields["subscripts"])
        return cls(**fields | {"graph": graph, "subscripts": subscripts, "spans": spans})

    def accumulate(self, spans: Spans | None = None) -> Accumulate:
        """Returns how accumulators of shards are computed; `spans` are those of the share."""
        precision = precision_of(self.precision)
        return Accumulate(
            self.subscripts, np.dtype(np.float32), precision, None, self.implementation, spans,
            max_sms=self.max_sms,
        )  # fmt: skip
