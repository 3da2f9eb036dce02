"""What the custom calls of products say, as JSON.

NOTE: exported programs hold these words, and programs in caches are found by their text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.groups import Groups
from ..gemm.product import Options, Product
from ..gemm.subscripts import Subscripts

# By name; "DEFAULT" is that of `Precision`.
PRECISIONS = {**lax.DotAlgorithmPreset.__members__, **lax.Precision.__members__}


def precision_names(precision: Any) -> list[str] | None:
    """Returns a precision of `lax.dot_general_p` as JSON; None where it has no names."""
    if precision is None:
        return []
    parts = precision if isinstance(precision, tuple) else (precision,)
    named = all(isinstance(x, lax.Precision | lax.DotAlgorithmPreset) for x in parts)
    return [x.name for x in parts] if named else None


def options_to_words(options: Options) -> dict[str, Any] | None:
    """Returns options as JSON; None where the precision has no names."""
    if (names := precision_names(options.precision)) is None:
        return None
    preferred = options.preferred_element_type
    invariant = {"batch_invariant": True} if options.batch_invariant else {}
    return invariant | {
        "precision": names,
        "preferred_element_type": None if preferred is None else np.dtype(preferred).name,
        "implementation": options.implementation,
        "max_sms": options.max_sms,
    }


def options_of_words(words: Mapping[str, Any]) -> Options:
    """Returns the options that `options_to_words` made `words` of, among others."""
    preferred = words.get("preferred_element_type")
    precision = tuple(PRECISIONS[name] for name in words["precision"])
    return Options(
        implementation=words["implementation"],
        precision=precision if len(precision) == 2 else (*precision, None)[0],
        preferred_element_type=preferred and np.dtype(jnp.dtype(preferred)),
        max_sms=words.get("max_sms"),
        batch_invariant=words.get("batch_invariant", False),
    )


@dataclass(frozen=True)
class FusedProduct:
    """A product and the function that follows, for any extents."""

    graph: EpilogueGraph  # the function
    product: Product  # it gives float32
    m: str  # letters of the rows of its result
    n: str  # letters of the columns
    # Of the first results, the operand of the graph whose memory each may take.
    in_place: tuple[int | None, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the call's parameters. The precision must have names."""
        options, groups = self.product.options, self.product.groups
        fields = {
            "graph": asdict(self.graph),
            "subscripts": str(self.product.subscripts),
            "m": self.m,
            "n": self.n,
            "precision": precision_names(options.precision),
            "implementation": options.implementation,
            "max_sms": options.max_sms,
            "in_place": self.in_place,
        }
        fields |= {"spans": astuple(groups)} if groups else {}
        return fields | ({"batch_invariant": True} if options.batch_invariant else {})

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> FusedProduct:
        """Returns the product that `to_dict` and JSON made `fields` of."""
        product = Product(
            Subscripts.parse(fields["subscripts"]),
            options_of_words(fields),
            groups=Groups(*fields["spans"]) if "spans" in fields else None,
        ).with_options(preferred_element_type=np.dtype(np.float32))
        graph = EpilogueGraph.from_dict(fields["graph"])
        in_place = fields.get("in_place", ())
        if not isinstance(in_place, list):  # exported programs may say that of the first alone
            in_place = () if in_place is None else (in_place,)
        return cls(graph, product, fields["m"], fields["n"], tuple(in_place))
