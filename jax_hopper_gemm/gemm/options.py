"""Options of a product: how it is computed, beside what it multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Implementation = Literal["hopper", "xla"] | None
Preactivation = Literal["save", "recompute"]


@dataclass(frozen=True)
class Options:
    """How a product is computed. Equal options are one key of a cache: lists become tuples.

    Attributes:
      implementation: None takes a kernel where it is the faster way, "hopper" insists on one, "xla"
        takes none.
      precision: parameter of `lax.dot_general`.
      preferred_element_type: dtype of the product, or None. As the user of a product with an
        epilogue gives it, it may be a tuple: dtypes of the results.
      preactivation: whether gradients of an epilogue find the product stored or compute it anew.
      max_sms: how many SMs a kernel may use; None: all.
    """

    implementation: Implementation = None
    precision: Any = None
    preferred_element_type: Any = None
    preactivation: Preactivation = "save"
    max_sms: int | None = None

    def __post_init__(self) -> None:
        for name in ("precision", "preferred_element_type"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
