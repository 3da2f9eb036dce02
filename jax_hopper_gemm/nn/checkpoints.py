"""Conversion of `MoE` parameters from and to other frameworks' checkpoints.

Only layouts change, no values. Arrays may be NumPy's or JAX's. Functions take one layer, so select
one of MaxText's scanned layers first; their second axis counts layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from .gate_up import from_pair, to_pair

Names = Literal["mixtral", "qwen", "packed"]

# (gate, up, down) of one expert, each stored (out, in).
EXPERT_NAMES = {"mixtral": ("w1", "w3", "w2"), "qwen": ("gate_proj", "up_proj", "down_proj")}
CORRECTION = "gate.e_score_correction_bias"


def from_maxtext(params: Mapping[str, Any], *, stacked: bool = True) -> dict[str, Any]:
    """Returns the parameters of `MoE` from those of MaxText's `MoeBlock_0`.

    Args:
      params: `gate` with `kernel` (D, E) and for DeepSeek `bias` (E,); `wi_0` and `wi_1`, gate and
        up, (E, D, F); `wo` (E, F, D).
      stacked: as in `MoE`. Without it nothing is copied.

    Raises:
      ValueError: a parameter is missing.
    """
    _require("from_maxtext", params, ("gate", "wi_0", "wi_1", "wo"))
    gate = params["gate"]
    bias = gate.get("bias")
    return _ours(gate["kernel"], params["wi_0"], params["wi_1"], params["wo"], bias, stacked)


def to_maxtext(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that `from_maxtext` takes, from parameters in either form.

    Raises:
      ValueError: a parameter is missing.
    """
    router, gate, up, down, bias = _theirs("to_maxtext", params)
    kernel = {"kernel": router} if bias is None else {"kernel": router, "bias": bias}
    return {"gate": kernel, "wi_0": gate, "wi_1": up, "wo": down}


def from_huggingface(
    state: Mapping[str, Any], *, prefix: str = "", stacked: bool = True
) -> dict[str, Any]:
    """Returns the parameters of `MoE` from the tensors of a Hugging Face checkpoint.

    It detects which of the names below exist. Hugging Face stores matrices (out, in).

    - `gate.weight` (E, D), and for DeepSeek-V3 `gate.e_score_correction_bias` (E,);
    - Mixtral: `experts.0.w1.weight` and `.w3.weight`, gate and up, (F, D), and `.w2.weight` (D, F);
    - Qwen3, DeepSeek: `experts.0.gate_proj.weight`, `.up_proj.weight` and `.down_proj.weight`;
    - packed: `experts.gate_up_proj` (E, 2 * F, D), gate first, and `experts.down_proj` (E, D, F).

    Args:
      state: tensors by name, as arrays.
      prefix: prefix of these names, such as "model.layers.0.block_sparse_moe." for Mixtral and
        "model.layers.0.mlp." for the others. Tensors without it are ignored.
      stacked: as in `MoE`.

    Raises:
      ValueError: a tensor is missing, or none of these layouts exists.
    """
    given = state
    state = {
        name[len(prefix) :]: tensor for name, tensor in state.items() if name.startswith(prefix)
    }
    _require("from_huggingface", state, ("gate.weight",), prefix, given)
    router = _transposed(state["gate.weight"])
    if "experts.gate_up_proj" in state:
        _require("from_huggingface", state, ("experts.down_proj",), prefix)
        gate, up = jnp.split(_transposed(state["experts.gate_up_proj"]), 2, axis=-1)
        down = _transposed(state["experts.down_proj"])
    else:
        expert_names = {
            match[1] for name in state if (match := re.match(r"experts\.0\.(\w+)\.", name))
        }
        layouts = [names for names in EXPERT_NAMES.values() if expert_names & {*names}]
        if not layouts:
            raise ValueError(
                f"from_huggingface: no experts after prefix {prefix!r}: expected "
                "experts.0.w1.weight, experts.0.gate_proj.weight or experts.gate_up_proj, "
                f"found {sorted(state)[:5]}"
            )
        experts = range(router.shape[1])
        names = [[f"experts.{i}.{name}.weight" for i in experts] for name in layouts[0]]
        _require("from_huggingface", state, [name for row in names for name in row], prefix)
        gate, up, down = (jnp.stack([_transposed(state[n]) for n in row]) for row in names)
    return _ours(router, gate, up, down, state.get(CORRECTION), stacked)


def to_huggingface(params: Mapping[str, Any], *, names: Names, prefix: str = "") -> dict[str, Any]:
    """Returns the tensors that `from_huggingface` reads, from parameters in either form.

    Args:
      params: of the `MoE`.
      names: "mixtral", "qwen" or "packed": see `from_huggingface`.
      prefix: precedes each name.

    Raises:
      ValueError: a parameter is missing, or `names` is none of those.
    """
    if names not in (*EXPERT_NAMES, "packed"):
        raise ValueError(
            f"to_huggingface: names is {names!r}, expected 'mixtral', 'qwen' or 'packed'"
        )
    router, *matrices, bias = _theirs("to_huggingface", params)
    gate, up, down = map(_transposed, matrices)
    state = {"gate.weight": _transposed(router)}
    if bias is not None:
        state[CORRECTION] = bias
    if names == "packed":
        state["experts.gate_up_proj"] = jnp.concatenate((gate, up), axis=1)
        state["experts.down_proj"] = down
    else:
        for name, stack in zip(EXPERT_NAMES[names], (gate, up, down), strict=True):
            state |= {f"experts.{i}.{name}.weight": matrix for i, matrix in enumerate(stack)}
    return {prefix + name: tensor for name, tensor in state.items()}


def _ours(router: Any, gate: Any, up: Any, down: Any, bias: Any, stacked: bool) -> dict[str, Any]:
    hidden = {"gate_up": from_pair(gate, up)} if stacked else {"gate": gate, "up": up}
    biases = {} if bias is None else {"selection_bias": bias}
    return {"router": router, **hidden, "down": down, **biases}


def _theirs(op: str, params: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
    """Returns router, gate, up, down and the selection bias or None."""
    stacked = "gate_up" in params
    _require(op, params, ("router", *(("gate_up",) if stacked else ("gate", "up")), "down"))
    gate, up = to_pair(params["gate_up"]) if stacked else (params["gate"], params["up"])
    return params["router"], gate, up, params["down"], params.get("selection_bias")


def _transposed(matrix: Any) -> Any:
    return jnp.swapaxes(jnp.asarray(matrix), -1, -2)


def _require(
    op: str, tensors: Mapping[str, Any], names: Any, prefix: str = "", given: Any = None
) -> None:
    missing = [prefix + name for name in names if name not in tensors]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        came = sorted(given or tensors)[:5]
        raise ValueError(f"{op}: {', '.join(missing[:3])}{more} missing, given are {came}")
