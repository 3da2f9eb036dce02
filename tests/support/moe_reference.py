"""A mixture of experts, written out: by loops in float64, and densely for gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.program_inspection import normal


def weights_of(tokens: int, features: int, experts: int, hidden: int, seed: int = 0) -> Any:
    """Returns x, router, gate_up and down of a small layer, float32."""
    shapes = [(tokens, features), (features, experts), (experts, features, 2, hidden),
              (experts, hidden, features)]  # fmt: skip
    return [normal(shape, seed=seed) for shape in shapes]


def looped(x: Any, router: Any, gate_up: Any, down: Any, k: int, score: str = "softmax",
           normalize: bool = True, bias: Any = 0.0) -> np.ndarray:  # fmt: skip
    """Returns the layer's result, token by token and expert by expert in float64."""
    x, router, gate_up, down = (np.asarray(a, np.float64) for a in (x, router, gate_up, down))
    y = np.zeros_like(x)
    for t, token in enumerate(x):
        logits = token @ router
        scores = np.exp(logits) / np.exp(logits).sum()
        if score == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        chosen = np.argsort(-(scores + bias), kind="stable")[:k]
        weights = scores[chosen] / (scores[chosen].sum() if normalize else 1)
        for weight, e in zip(weights, chosen, strict=True):
            gate, up = token @ gate_up[e, :, 0], token @ gate_up[e, :, 1]
            y[t] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
    return y


def dense(x: Any, router: Any, gate_up: Any, down: Any, k: int) -> jax.Array:
    """Returns the layer's result by running every expert on every token."""
    probabilities = jax.nn.softmax(x @ router)
    weights, experts = jax.lax.top_k(probabilities, k)
    weights = weights / weights.sum(-1, keepdims=True)
    share = jnp.zeros_like(probabilities).at[jnp.arange(len(x))[:, None], experts].set(weights)
    gate, up = jnp.einsum("td,edif->itef", x, gate_up)
    y = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, down)
    return jnp.einsum("te,ted->td", share, y)


def assert_close(ours: Any, theirs: Any) -> None:
    """Asserts trees of float32 arrays equal to 1e-5 of each one's largest element."""
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        mine, other = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5 * max(1, np.abs(other).max()))
