"""Mixtures of experts as users call them, with their exact results: what GPU tests and builds run.

Each is a `MoeProgram`: a layer of given extents, its step (the result and all gradients), and the
same in float64, loops over experts without JAX. Spread over devices it is the same layer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jax_hopper_gemm import moe, ops
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.moe.expert_parallel import EXCHANGES as EXCHANGES_OF_ROWS
from jax_hopper_gemm.moe.router import sort_by_group
from jax_hopper_gemm.testing.lowered import specs_of

AXIS = "expert"
NAMES = ("y", "of x", "of the router", "of gate and up", "of down")  # of a step's results
EXCHANGES = ("gather", "all_to_all", "ragged_all_to_all")
DEVICES = (2, 4, 8)  # over which GPU tests may find experts spread


@dataclass(frozen=True)
class MoeProgram:
    """A layer and what is known of it.

    Attributes:
      tokens, features, hidden, experts, k: T, D, F, E, and how many experts a token visits.
      score, scale: as in `moe.route`; weights are renormalised.
      bias: of each expert, which takes part in the choice; or None.
      stacked: whether gate and up are one array (E, D, 2, F), else a pair.
      options: further ones of `moe.mixture_of_experts`.
    """

    tokens: int
    features: int
    hidden: int
    experts: int
    k: int
    score: moe.Score = "softmax"
    scale: float | None = None
    bias: tuple[float, ...] | None = None
    stacked: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.tokens * self.k

    @property
    def copy_bytes(self) -> int:
        """Of 16-bit tokens in the order of their experts."""
        return 2 * self.rows * self.features

    def layer(self, *args: Any, **options: Any) -> jax.Array:
        """The result of (x, router, gate_up, down); `options` come over those of the program."""
        settings: dict[str, Any] = {
            "experts_per_token": self.k, "score": self.score, "scale": self.scale,
            "selection_bias": None if self.bias is None else np.array(self.bias, np.float32),
            **self.options, **options,
        }  # fmt: skip
        x, router, gate_up, down = args
        rights = gate_up if self.stacked else (gate_up[:, :, 0], gate_up[:, :, 1])
        return moe.mixture_of_experts(x, router, rights, down, **settings)[0]

    def step(self, *args: Any, **options: Any) -> tuple[jax.Array, ...]:
        """The result of (x, router, gate_up, down, cotangent) and the gradients of the first four.

        Gate and up are one array here, (E, D, 2, F), of which a pair is cut.
        """
        return step_of(lambda *a: self.layer(*a, **options), *args)

    def copying_step(self, *args: Any) -> tuple[jax.Array, ...]:
        """`step` of the parts, of which XLA writes the tokens and cotangents by expert."""

        def layer(x: Any, router: Any, gate_up: Any, down: Any) -> jax.Array:
            routing = moe.route_tokens(x, router, self.k)
            rows = jax.lax.optimization_barrier(moe.dispatch_rows(x, routing))
            weights, sizes = moe.row_weights(routing), routing.group_sizes
            rows = moe.grouped_mlp(rows, gate_up, down, sizes, row_weights=weights)
            return moe.combine_rows(jax.lax.optimization_barrier(rows), routing)

        return step_of(layer, *args)

    def spread(self, mesh: Any, exchange: str, *args: Any, **options: Any) -> tuple[jax.Array, ...]:
        """`step` with experts and tokens spread over the axis `AXIS` of a mesh."""

        def local(*args: Any) -> jax.Array:
            return self.layer(*args, expert_axis=AXIS, exchange=exchange, **options)

        of_devices = P(AXIS)
        layer = jax.shard_map(
            local, mesh=mesh, in_specs=(of_devices, P(), of_devices, of_devices),
            out_specs=of_devices,
        )  # fmt: skip
        return step_of(layer, *args)

    def routed_step(
        self,
        x: Any,
        weights: Any,
        experts: Any,
        gate_up: Any,
        down: Any,
        cotangent: Any,
        mesh: Any = None,
        exchange: str = "",
    ) -> tuple[jax.Array, ...]:
        """The result, and gradients of all but `experts`, where weights and choices are given.

        Args:
          weights, experts: (T, k), of `moe.Routing`.
          mesh, exchange: as of `spread`; None: on one device. Kernels are among those of `step`.
        """

        def local(x: Any, weights: Any, gate_up: Any, down: Any, experts: Any) -> jax.Array:
            sizes, order, positions = sort_by_group(experts, self.experts)
            unused = moe.Statistics(*(jnp.zeros(()),) * 3)
            routing = moe.Routing(weights, experts, sizes, order, positions, unused)

            def run(rows: Any, sizes: Any, weights: Any) -> jax.Array:
                return moe.grouped_mlp(rows, gate_up, down, sizes, row_weights=weights)

            if mesh is None:
                rows = moe.dispatch_rows(x, routing)
                rows = run(rows, routing.group_sizes, moe.row_weights(routing))
                return moe.combine_rows(rows, routing)
            return EXCHANGES_OF_ROWS[exchange](x, routing, run, AXIS, down.shape[0])

        layer: Any = local
        if mesh is not None:
            layer = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        return step_of(lambda *args: layer(*args, experts), x, weights, gate_up, down, cotangent)

    def arguments(self, seed: int = 0, dtype: Any = jnp.bfloat16) -> list[np.ndarray]:
        """Returns x, router, gate_up, down and a cotangent; results are of the order of 1.

        No token's choice of experts hangs on how logits are rounded.
        """
        t, d, f, e = self.tokens, self.features, self.hidden, self.experts
        rng = np.random.default_rng(seed)

        def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
            return (scale * rng.standard_normal(shape, np.float32)).astype(dtype)

        router = normal(d, e, scale=2 * d**-0.5)
        x = normal(t, d)
        while (unclear := self._unclear(x, router)).any():
            x[unclear] = normal(int(unclear.sum()), d)
        weights = normal(e, d, 2, f, scale=d**-0.5), normal(e, f, d, scale=f**-0.5)
        return [x, router, *weights, normal(t, d)]

    def _unclear(self, x: np.ndarray, router: np.ndarray) -> np.ndarray:
        """Returns (T,): whether rounding could exchange the last expert chosen and the next."""
        if self.k == self.experts:
            return np.zeros(len(x), bool)
        x, router = x.astype(np.float64), router.astype(np.float64)
        keys = self._keys(x @ router)
        ordered = -np.sort(-keys, axis=1)
        gap = ordered[:, self.k - 1] - ordered[:, self.k]
        error = 2**-24 * x.shape[1]  # of a float32 sum of so many terms, relative to |x| @ |router|
        return gap <= 4 * error * (np.abs(x) @ np.abs(router)).max(1) + 1e-5

    def _keys(self, logits: np.ndarray) -> np.ndarray:
        """Returns what experts are chosen by: a token's scores, with the bias."""
        if self.bias is None:
            return logits
        scores = 1 / (1 + np.exp(-logits))
        if self.score == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        return scores + np.array(self.bias)

    def assert_as_good(
        self,
        results: Sequence[Any],
        others: Sequence[Any],
        exact: Sequence[np.ndarray],
        summed: dict[str, int] | None = None,
    ) -> None:
        """Asserts that results of `step` are about as near to the exact ones as others are.

        Args:
          summed: of some of `NAMES`, over how many devices parts were rounded and added up.

        Raises:
          AssertionError: the largest error is more than 1.5 times that of the others, and than
            half a unit in bfloat16's last place; each part and sum may have one such unit more.
        """
        for what, mine, other, value in zip(NAMES, results, others, exact, strict=True):
            got, theirs = (
                float(np.max(np.abs(np.asarray(x).astype(np.float64) - value)))
                for x in (mine, other)
            )
            unit = float(np.max(np.abs(value))) * 2.0**-8
            allowed = 1.5 * max(theirs, unit) + 2 * (summed or {}).get(what, 0) * unit
            assert got <= allowed, f"{what}: error {got}, of the others {theirs}"

    def specs(self) -> list[GemmSpec]:
        """Returns the kernels of the layer alone and of its step."""
        *args, cotangent = self.abstract()
        return [*specs_of(self.layer, *args), *specs_of(self.step, *args, cotangent)]

    def spread_specs(self, devices: int, exchange: str, **options: Any) -> list[GemmSpec]:
        """Returns the kernels of the step on each of so many devices, of which none is needed."""
        mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
        return specs_of(lambda *a: self.spread(mesh, exchange, *a, **options), *self.abstract())

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """Returns what `arguments` does, without values."""
        t, d, f, e = self.tokens, self.features, self.hidden, self.experts
        shapes = ((t, d), (d, e), (e, d, 2, f), (e, f, d), (t, d))
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def exact(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what `step` does, in float64."""
        return self._computed(arguments, lambda array: array)

    def rounded(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns `exact` with what is an array of 16 bits in the layer rounded to that.

        These are gate, up and hidden values, rows, and the cotangents of all of them and of the
        logits. XLA keeps some in float32 where it fuses what reads them, so its errors are no
        measure of a layer's.
        """
        dtype = arguments[0].dtype
        return self._computed(
            arguments, lambda array: array.astype(np.float32).astype(dtype).astype(np.float64)
        )

    def _computed(
        self, arguments: Sequence[np.ndarray], stored: Callable[[np.ndarray], np.ndarray]
    ) -> list[np.ndarray]:
        """Args: stored: gives an intermediate array as the layer keeps it."""
        x, router, gate_up, down, cotangent = (a.astype(np.float64) for a in arguments)
        logits = x @ router
        chosen = np.argsort(-self._keys(logits), axis=1, kind="stable")[:, : self.k]
        picked = np.take_along_axis(logits, chosen, 1)
        scores = np.exp(picked) if self.score == "softmax" else 1 / (1 + np.exp(-picked))
        total = scores.sum(1, keepdims=True)
        scale = 1.0 if self.scale is None else self.scale
        weights = scale * scores / total

        y, of_x, of_weights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
        of_gate_up, of_down = np.zeros_like(gate_up), np.zeros_like(down)
        for e in range(self.experts):
            t, slot = np.nonzero(chosen == e)
            weight, pulled = weights[t, slot][:, None], stored(cotangent[t] @ down[e].T)
            gate, up = stored(x[t] @ gate_up[e, :, 0]), stored(x[t] @ gate_up[e, :, 1])
            sigmoid = 1 / (1 + np.exp(-gate))
            silu = gate * sigmoid
            hidden = stored(weight * silu * up)
            y[t] += stored(hidden @ down[e])
            of_down[e] = hidden.T @ cotangent[t]
            of_weights[t, slot] = (pulled * silu * up).sum(1)
            of_gate = stored(weight * pulled * up * sigmoid * (1 + gate * (1 - sigmoid)))
            of_up = stored(weight * pulled * silu)
            of_x[t] += stored(of_gate @ gate_up[e, :, 0].T + of_up @ gate_up[e, :, 1].T)
            of_gate_up[e, :, 0], of_gate_up[e, :, 1] = x[t].T @ of_gate, x[t].T @ of_up

        mean = (of_weights * scores).sum(1, keepdims=True) / total
        of_picked = scale * scores / total * (of_weights - mean)  # through the quotient
        if self.score == "sigmoid":
            of_picked *= 1 - scores
        of_logits = np.zeros_like(logits)
        np.put_along_axis(of_logits, chosen, stored(of_picked), 1)
        of_x = stored(of_x) + stored(of_logits @ router.T)
        results = y, of_x, x.T @ of_logits, of_gate_up, of_down
        return [stored(result) for result in results]


def step_of(layer: Callable[..., jax.Array], *args: Any) -> tuple[jax.Array, ...]:
    """Returns a layer's result and its gradients; its cotangent is the last of `args`."""
    *primals, cotangent = args
    y, pull = jax.vjp(layer, *primals)
    return (y, *pull(cotangent))


def rows_written(text: str, rows: int, features: int) -> int:
    """Returns how many arrays of so many rows, however they are split, XLA's instructions write.

    Args:
      text: HLO of a compiled program.
    """
    fused = set(re.findall(r"calls=%?([\w.-]+)", text))  # what they compute stays in registers
    writes = "fusion|gather|copy|transpose|select|broadcast|concatenate|scatter|add|multiply"
    written = re.compile(rf" = (.*?) (?:{writes})\(")
    count, inside = 0, ""
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            inside = begins[1]
        if inside in fused or not (found := written.search(line)):
            continue
        for shape in re.findall(r"\w+\[([\d,]+)\]", found[1]):
            extents = [int(extent) for extent in shape.split(",")]
            count += extents[-1] == features and math.prod(extents) == rows * features
    return count


def ragged_dot_step(mesh: Any, lhs: Any, rhs: Any, sizes: Any, cotangent: Any) -> Any:
    """A ragged product and both gradients, each device having its share of the groups."""

    def local(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(AXIS) * rhs.shape[0]
        part = ops.ragged_dot(lhs, rhs, sizes, group_offset=first, implementation="hopper")
        return jax.lax.psum(part, AXIS)

    product = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(AXIS), P()), out_specs=P())
    y, pull = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes), lhs, rhs)
    return (y, *pull(cotangent))


RAGGED_DOT = {"lhs": (1024, 256), "rhs": (16, 256, 384), "cotangent": (1024, 384)}


def ragged_dot_specs(devices: int) -> list[GemmSpec]:
    """Returns the kernels of `ragged_dot_step` on each of so many devices."""
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    lhs, rhs, cotangent = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in RAGGED_DOT.values())
    sizes = jax.ShapeDtypeStruct(rhs.shape[:1], jnp.int32)
    return specs_of(lambda *args: ragged_dot_step(mesh, *args), lhs, rhs, sizes, cotangent)


# Qwen3-30B, Mixtral and DeepSeek-V3, scaled down, a step of decoding, and other forms of weights.
MOE_PROGRAMS: dict[str, MoeProgram] = {
    "qwen3": MoeProgram(2048, 256, 96, 128, 8),
    "mixtral": MoeProgram(1024, 256, 896, 8, 2),
    "deepseek": MoeProgram(
        1024, 256, 160, 64, 8, score="sigmoid", scale=2.5, bias=tuple(np.linspace(0, 0.3, 64))
    ),
    "decode": MoeProgram(16, 256, 192, 64, 4),
    "pair of weights": MoeProgram(1000, 264, 136, 24, 3, stacked=False),
    "recomputed": MoeProgram(1000, 264, 136, 24, 3, options={"save_preactivation": False}),
}
COPYING = ("qwen3", "mixtral")  # that run as `copying_step`, too
# What is spread over devices; the other where all tokens go to the experts of the first.
SPREAD = MoeProgram(1024, 512, 192, 32, 4)
CROWDED = replace(SPREAD, bias=(2.0,) * 4 + (0.0,) * 28)


def moe_specs() -> list[GemmSpec]:
    """Returns the kernels of all programs, and of those that are spread, each once."""
    found = [spec for program in MOE_PROGRAMS.values() for spec in program.specs()]
    for name in COPYING:
        program = MOE_PROGRAMS[name]
        found += specs_of(program.copying_step, *program.abstract())
    for program in (SPREAD, CROWDED):
        found += program.specs()
        for devices, exchange in itertools.product(DEVICES, EXCHANGES):
            found += program.spread_specs(devices, exchange)
    for devices in DEVICES:
        found += ragged_dot_specs(devices)
    return list(dict.fromkeys(found))
