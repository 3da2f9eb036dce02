"""A drawing of the routing of tokens to experts."""

from __future__ import annotations

from typing import Any

from .canvas import cell, frame, plain_colour, subplots


def draw_routing(routing: Any, tokens: int = 16) -> Any:
    """Draws the first tokens' experts with their weights, and the number of rows of each expert.

    Args:
      routing: a result of `jax_hopper_gemm.moe.route`.
      tokens: number of tokens to show.
    """
    experts, weights = routing.experts.tolist(), routing.weights.tolist()
    sizes = routing.group_sizes.tolist()
    tokens = min(tokens, len(experts))
    figure, (chosen, groups) = subplots(1, 2, (12, 0.9 + 0.28 * tokens), width_ratios=[1.2, 1])
    for token in range(tokens):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            cell(chosen, expert, token, plain_colour(expert), f"{weight:.2f}")
    frame(chosen, len(sizes), tokens, aspect="auto")
    chosen.set_xticks([i + 0.5 for i in range(len(sizes))], [str(i) for i in range(len(sizes))])
    chosen.set_xlabel("expert")
    chosen.set_ylabel("token")
    chosen.set_title(f"the first {tokens} of {len(experts)} tokens, and what each choice weighs")
    colours = [plain_colour(expert) for expert in range(len(sizes))]
    bars = groups.bar(range(len(sizes)), sizes, color=colours)
    groups.bar_label(bars, fontsize=8)
    groups.axhline(sum(sizes) / len(sizes), color="black", linestyle="--", linewidth=1)
    groups.set_xticks(range(len(sizes)))
    groups.set_xlabel("expert; dashed: the mean")
    groups.set_title("rows of each expert: the sizes of the groups")
    return figure
