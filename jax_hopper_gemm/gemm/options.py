"""Options of a product: how it is computed, beside what it multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Implementation = Literal["hopper", "xla"] | None
Preactivation = Literal["save", "recompute"]


@dataclass(frozen=True)
class Options:
    """How a product is computed. Equal options are one key of a cache: lists become tuples."""

    # None takes a kernel where it is the faster way, "hopper" insists on one, "xla" takes none.
    implementation: Implementation = None
    precision: Any = None  # parameter of `lax.dot_general`
    # The product's dtype, or None; with an epilogue it may be a tuple: dtypes of the results.
    preferred_element_type: Any = None
    preactivation: Preactivation = "save"  # gradients find the product stored or compute it anew
    max_sms: int | None = None  # how many SMs a kernel may use; None: all

    def __post_init__(self) -> None:
        for name in ("precision", "preferred_element_type"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    def of_dot(self) -> dict[str, Any]:
        """Returns those options that JAX's own products have, as their arguments."""
        names = ("precision", "preferred_element_type")
        return {name: getattr(self, name) for name in names}
