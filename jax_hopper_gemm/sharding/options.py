"""Options of a product as JSON, as the custom call holds them.

NOTE: exported programs hold these words, and programs in caches are found by their text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from ..gemm.product import Options


def precision_names(precision: Any) -> list[str] | None:
    """Returns a precision of `lax.dot_general_p` as JSON; None where it has no names."""
    if precision is None:
        return []
    parts = precision if isinstance(precision, tuple) else (precision,)
    return [x.name for x in parts] if all(isinstance(x, lax.Precision) for x in parts) else None


def precision_of(names: Sequence[str]) -> Any:
    """Returns the precision of these names."""
    parts = tuple(lax.Precision[name] for name in names)
    return parts if len(parts) == 2 else (*parts, None)[0]


def options_to_words(options: Options) -> dict[str, Any] | None:
    """Returns options as JSON; None where the precision has no names."""
    if (names := precision_names(options.precision)) is None:
        return None
    preferred = options.preferred_element_type
    return {
        "precision": names,
        "preferred_element_type": None if preferred is None else np.dtype(preferred).name,
        "implementation": options.implementation,
        "max_sms": options.max_sms,
    }


def options_of_words(words: Mapping[str, Any]) -> Options:
    """Returns the options that `options_to_words` made `words` of, among others."""
    preferred = words.get("preferred_element_type")
    return Options(
        implementation=words["implementation"],
        precision=precision_of(words["precision"]),
        preferred_element_type=preferred and np.dtype(jnp.dtype(preferred)),
        max_sms=words.get("max_sms"),
    )
