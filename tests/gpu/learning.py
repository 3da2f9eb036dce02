"""What tests of whole steps of training share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

STEPS = 6


def parameters(model: nnx.Module) -> Any:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def trained(model: nnx.Module, step: Callable[[], jax.Array]) -> tuple[Any, np.ndarray]:
    """Returns the model's parameters after some calls of `step`, and their losses."""
    losses = np.array([float(step()) for _ in range(STEPS)])
    return parameters(model), losses


def assert_learned_alike(
    ours: tuple[Any, np.ndarray], theirs: tuple[Any, np.ndarray], start: Any
) -> None:
    """Checks what `trained` gave, of two ways to round: parameters by how far they have moved."""
    (state, losses), (expected, their_losses) = ours, theirs
    np.testing.assert_allclose(losses, their_losses, rtol=STEPS * 2.0**-8)

    def check(found: np.ndarray, expected: np.ndarray, start: np.ndarray) -> None:
        moved = np.abs(expected - start).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=STEPS * 2.0**-6 * moved)

    jax.tree.map(check, state, expected, start)
