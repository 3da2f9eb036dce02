"""Products that XLA partitions over two GPUs, and the kernels of a GPU's share.

Each is a `MeshProgram`: the result and all gradients, with ours and in plain jnp, and which letters
are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.partitioned import on_cpu

from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.ops import gated_linear_unit, matmul, ragged_dot
from jax_hopper_gemm.testing.lowered import specs_of

AXIS = "x"  # of the mesh
DEVICES = 2
EXTENTS = {"b": 4, "m": 512, "n": 768, "k": 1024, "h": 1536, "g": 8, "c": 2}
SIZES: Any = np.array(
    [100, 0, 37, 150, 1, 90, 74, 40], np.int32
)  # of "g" groups, not all of "m" rows


@dataclass(frozen=True)
class MeshProgram:
    """A function of bfloat16 arrays, sharded along some letters.

    Attributes:
      ours, plain: the function with our products, and in jnp.
      letters: a letter for each dimension of the result and of each argument.
      sharded: the letters that are sharded.
      launches: kernels of ours in the step.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    letters: tuple[str, ...]
    sharded: str
    launches: int

    def step(self, function: Callable[..., Any], cotangent: Any, *arguments: Any) -> Any:
        """The result of a function and the gradients of its arguments."""
        result, pull = jax.vjp(function, *arguments)
        return result, *pull(cotangent)

    def arguments(self) -> list[np.ndarray]:
        """Returns a cotangent and the arguments: normal numbers, weights scaled."""
        rng = np.random.default_rng(0)
        found = []
        for i, names in enumerate(self.letters):
            shape = [EXTENTS[x] for x in names]
            scale = shape[-2] ** -0.5 if i > 1 and len(shape) > 1 else 1.0
            found.append((scale * rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16))
        return found

    def partition_specs(self) -> list[P]:
        """Returns how each of `arguments` is sharded."""
        return [P(*(AXIS if x in self.sharded else None for x in names)) for names in self.letters]

    def specs(self) -> list[GemmSpec]:
        """Returns the kernels that a GPU launches for its shares, one for each launch.

        XLA partitions the program over two CPUs for that.

        Raises:
          RuntimeError: this process has no two; see `jax_num_cpu_devices`.
        """
        return self._specs(lambda *args: self.step(self.ours, *args), 0)

    def forward_specs(self) -> list[GemmSpec]:
        """Returns those of the function alone, on shares and on one GPU; raises as `specs`."""
        shapes = [
            jax.ShapeDtypeStruct([EXTENTS[x] for x in names], jnp.bfloat16)
            for names in self.letters[1:]
        ]
        return [*self._specs(self.ours, 1), *specs_of(self.ours, *shapes)]

    def _specs(self, function: Callable[..., Any], first: int) -> list[GemmSpec]:
        """Returns the kernels of a function of `arguments` from the `first` on, for shares."""
        devices = jax.devices("cpu")[:DEVICES]
        if len(devices) < DEVICES:
            raise RuntimeError(f"{DEVICES} CPU devices wanted: set jax_num_cpu_devices at first")
        mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        pairs = list(zip(self.letters, self.partition_specs(), strict=True))[first:]
        shapes = [
            jax.ShapeDtypeStruct(
                [EXTENTS[x] for x in names], jnp.bfloat16, sharding=NamedSharding(mesh, spec)
            )
            for names, spec in pairs
        ]
        found: list[GemmSpec] = []
        with shares_noted(found):
            jax.jit(lambda *args: function(*args)).lower(*shapes).compile()
        return found


@contextmanager
def shares_noted(found: list[GemmSpec]) -> Iterator[None]:
    """Partitions programs for the CPU, too, and notes the kernels of what each device runs.

    Args:
      found: takes them, one for each launch, while programs are compiled.
    """

    def noted(program: Callable[..., Any], shards: Sequence[Any]) -> Callable[..., Any]:
        found.extend(specs_of(program, *shards))
        return partial(program, implementation=None)  # CPUs run no kernel

    with on_cpu(noted):
        yield


def _hopper(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, implementation="hopper", **options)


def _gelu_mlp(x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
    hidden = _hopper(matmul, x, up, bias=up_bias, activation="gelu")
    return _hopper(matmul, hidden, down, bias=down_bias, residual=x)


def _plain_gelu_mlp(x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
    return jax.nn.gelu(x @ up + up_bias) @ down + down_bias + x


def _plain_grouped_relu(x: Any, weights: Any, bias: Any) -> Any:
    group = np.repeat(np.arange(len(SIZES)), SIZES)
    rows = jnp.pad(bias[group], ((0, x.shape[0] - len(group)), (0, 0)))
    return jax.nn.relu(jax.lax.ragged_dot(x, weights, SIZES) + rows)


def _grouped_mlp(x: Any, gate_up: Any, down: Any) -> Any:
    hidden = _hopper(gated_linear_unit, x, gate_up, group_sizes=SIZES)
    return _hopper(ragged_dot, hidden, down, SIZES)


def _plain_grouped_mlp(x: Any, gate_up: Any, down: Any) -> Any:
    gate, up = (jax.lax.ragged_dot(x, gate_up[:, :, i], SIZES) for i in range(2))
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, SIZES)


PRODUCTS = {
    f"{letter} sharded": MeshProgram(
        partial(_hopper, matmul), jnp.matmul, ("bmn", "bmk", "bkn"), letter, 3
    )
    for letter in "bmnk"
}
LAYERS = {
    **{
        f"bias and gelu, {letter} sharded": MeshProgram(
            lambda a, b, bias: _hopper(matmul, a, b, bias=bias, activation="gelu"),
            lambda a, b, bias: jax.nn.gelu(a @ b + bias),
            ("mn", "mk", "kn", "n"), letter, 3,
        )
        for letter in "mnk"
    },
    **{
        f"gated, {letter} sharded": MeshProgram(
            lambda x, gate, up: _hopper(gated_linear_unit, x, (gate, up)),
            lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up),
            ("mn", "mk", "kn", "kn"), letter, 6 if letter == "k" else 5,
        )
        for letter in "mnk"
    },
    **{
        f"MLP, {what} sharded": MeshProgram(
            _gelu_mlp, _plain_gelu_mlp, ("mk", "mk", "kh", "h", "hk", "k"), letter, 6
        )
        for what, letter in (("tokens", "m"), ("hidden", "h"))
    },
}  # fmt: skip
RAGGED = {
    **{
        f"{letter} of a ragged product sharded": MeshProgram(
            lambda x, w: _hopper(ragged_dot, x, w, SIZES),
            lambda x, w: jax.lax.ragged_dot(x, w, SIZES),
            ("mn", "mk", "gkn"), letter, 3,
        )
        for letter in "mkng"
    },
    **{
        f"bias and relu in groups, {letter} sharded": MeshProgram(
            lambda x, w, bias: _hopper(ragged_dot, x, w, SIZES, bias=bias, activation="relu"),
            _plain_grouped_relu, ("mn", "mk", "gkn", "gn"), letter, 4,
        )
        for letter in "mn"
    },
    **{
        f"experts, {what} sharded": MeshProgram(
            _grouped_mlp, _plain_grouped_mlp, ("mk", "mk", "gkch", "ghk"), letter, 6
        )
        for what, letter in (("rows", "m"), ("hidden", "h"), ("groups", "g"))
    },
}  # fmt: skip
MESH_PROGRAMS = PRODUCTS | LAYERS | RAGGED


def mesh_specs() -> list[GemmSpec]:
    """Returns the kernels of all programs, each once."""
    found = [spec for program in MESH_PROGRAMS.values() for spec in program.specs()]
    found += [spec for program in (PRODUCTS | LAYERS).values() for spec in program.forward_specs()]
    return list(dict.fromkeys(found))
