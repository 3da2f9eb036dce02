"""What the custom call of a product with an epilogue says."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.groups import Groups
from ..gemm.product import Product
from ..gemm.subscripts import Subscripts
from ..sharding.options import options_of_words, precision_names


@dataclass(frozen=True)
class FusedProduct:
    """A product and the function that follows, for any extents."""

    graph: EpilogueGraph  # the function
    product: Product  # it gives float32
    m: str  # letters of the rows of its result
    n: str  # letters of the columns
    in_place: int | None = None  # operand of the graph whose memory the first result may take

    def to_dict(self) -> dict[str, Any] | None:
        """Returns the call's parameters; None where the precision has no names.

        NOTE: exported programs hold them as JSON, and programs in caches are found by its text.
        """
        options, groups = self.product.options, self.product.groups
        if (precision := precision_names(options.precision)) is None:
            return None
        fields = {
            "graph": asdict(self.graph),
            "subscripts": str(self.product.subscripts),
            "m": self.m,
            "n": self.n,
            "precision": precision,
            "implementation": options.implementation,
            "max_sms": options.max_sms,
            "in_place": self.in_place,
        }
        return fields | ({"spans": astuple(groups)} if groups else {})

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> FusedProduct:
        """Returns the product that `to_dict` and JSON made `fields` of."""
        product = Product(
            Subscripts.parse(fields["subscripts"]),
            options_of_words(fields),
            groups=Groups(*fields["spans"]) if "spans" in fields else None,
        ).with_options(preferred_element_type=np.dtype(np.float32))
        graph = EpilogueGraph.from_dict(fields["graph"])
        return cls(graph, product, fields["m"], fields["n"], fields.get("in_place"))
