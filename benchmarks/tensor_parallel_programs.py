"""A tensor-parallel MLP, forwards and backwards, in the forms that benchmarks and tests compare.

Rows of tokens are split over the devices outside of the layer, columns of the hidden values inside:
the first product wants the rows of all devices, the second leaves each device a part of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_hopper_gemm.collective import all_gather_matmul, matmul_reduce_scatter
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.lowering.devices import lowering_shard
from jax_hopper_gemm.ops import contexts, matmul
from jax_hopper_gemm.testing.lowered import specs_of

AXIS = "tp"
IN_SPECS = P(AXIS), P(None, AXIS), P(AXIS), P(AXIS)  # of x, up, down and the cotangent
OUT_SPECS = P(AXIS), P(AXIS), P(None, AXIS), P(AXIS)  # of y and the gradients of x, up and down
ACTIVATIONS: dict[str, Callable] = {"relu": jax.nn.relu, "gelu": jax.nn.gelu}


@dataclass(frozen=True)
class Mlp:
    """(T, D) tokens through (D, H) and (H, D), bfloat16."""

    tokens: int
    features: int
    hidden: int
    activation: str = "relu"

    @property
    def flops(self) -> int:
        """Of a step: three products for each of the two."""
        return 3 * 2 * 2 * self.tokens * self.features * self.hidden

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of x, up, down and the cotangent of y."""
        t, d, h = self.tokens, self.features, self.hidden
        return (t, d), (d, h), (h, d), (t, d)

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Returns normal random numbers, those of matrices scaled to keep results near 1."""
        rng = np.random.default_rng(seed)
        scales = 1.0, self.features**-0.5, self.hidden**-0.5, 1.0
        return [
            (scale * rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)
            for shape, scale in zip(self.shapes, scales, strict=True)
        ]

    def step(self, form: str, mesh: Any, **options: Any) -> Any:
        """Returns a function of x, up, down and the cotangent of y: y, and the three gradients.

        Args:
          form: a name in `FORMS`.
          mesh: with the one axis `AXIS`.
          options: of `jax.jit`.
        """
        layer = FORMS[form](mesh, self.activation)

        def step(x: Any, up: Any, down: Any, cotangent: Any) -> tuple[Any, ...]:
            y, pull = jax.vjp(layer, x, up, down)
            return (y, *pull(cotangent))

        on = partial(map, partial(NamedSharding, mesh))
        return jax.jit(
            step, in_shardings=tuple(on(IN_SPECS)), out_shardings=tuple(on(OUT_SPECS)), **options
        )

    def specs(self, form: str, devices: int) -> list[GemmSpec]:
        """Returns the kernels of a step on each of so many devices, of which none is needed."""
        if form == "automatic":  # XLA asks for the shards' products when it compiles
            shares = Mlp(self.tokens, self.features, self.hidden // devices, self.activation)
            alone = AbstractMesh((1,), (AXIS,), axis_types=(AxisType.Auto,))
            with lowering_shard():
                return specs_of(shares.step("local", alone), *shares.abstract())
        mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
        return specs_of(self.step(form, mesh), *self.abstract())

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in self.shapes]


@dataclass(frozen=True)
class Ring:
    """A collective product with its gradients, of numbers -1, 0 and 1 whose sums are exact.

    Attributes:
      product: the function of x, w and the axis.
      shapes, specs: of x, w and the result, bfloat16.
      launches: on each of so many devices, of the product and its gradients together.
    """

    product: Callable
    shapes: tuple[tuple[int, int], ...]
    specs: tuple[P, ...]
    launches: Callable[[int], int]

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Returns x, w and the cotangent of the result."""
        rng = np.random.default_rng(seed)
        return [rng.integers(-1, 2, shape).astype(jnp.bfloat16) for shape in self.shapes]

    def step(self, mesh: Any, max_sms: int | None = None) -> Callable:
        """Returns a function of x, w and the cotangent: the result, and both gradients."""
        x, w, out = self.specs

        def local(x: Any, w: Any) -> Any:
            with contexts.max_sms(max_sms):
                return self.product(x, w, AXIS, implementation="hopper")

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(x, w), out_specs=out)

        def step(x: Any, w: Any, cotangent: Any) -> tuple[Any, ...]:
            y, pull = jax.vjp(mapped, x, w)
            return (y, *pull(cotangent))

        return step

    def launched(self, devices: int, max_sms: int | None = None) -> list[GemmSpec]:
        """Returns the kernels of a step on each of so many devices, of which none is needed."""
        mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
        abstract = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in self.shapes]
        return specs_of(self.step(mesh, max_sms), *abstract)


COLUMNS = P(None, AXIS)
RINGS = {
    "all_gather_matmul": Ring(
        all_gather_matmul, ((128, 128), (128, 256), (128, 256)), (P(AXIS), COLUMNS, COLUMNS),
        lambda n: n + 2 * n + 1,
    ),
    "matmul_reduce_scatter": Ring(
        matmul_reduce_scatter, ((128, 256), (256, 128), (128, 128)), (COLUMNS, P(AXIS), P(AXIS)),
        lambda n: 2 * n + n + 1,
    ),
}  # fmt: skip
TESTED = Mlp(1024, 512, 2048, "gelu")
TESTED_LIMITS = None, 16


def overlap_specs() -> list[GemmSpec]:
    """Returns the kernels that the GPU tests of overlapped products run, on 2, 4 or 8 GPUs."""
    found = [spec for n in (2, 4, 8) for form in ("gathered", "overlapped")
             for spec in TESTED.specs(form, n)]  # fmt: skip
    for n in (2, 4, 8):
        for ring in RINGS.values():
            for max_sms in TESTED_LIMITS:
                found += ring.launched(n, max_sms)
    return list(dict.fromkeys(found))


def mesh_of(devices: int) -> Mesh:
    """Returns the mesh of the first devices."""
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,), axis_types=(AxisType.Auto,))


Layer = Callable[[Any, Any, Any], Any]


def _plain(x: Any, up: Any, activation: str) -> Any:
    return ACTIVATIONS[activation](jnp.matmul(x, up))


def _ours(x: Any, up: Any, activation: str) -> Any:
    return matmul(x, up, activation=ACTIVATIONS[activation])


def _sharded(activated: Callable, product: Callable, mesh: Any, activation: str) -> Layer:
    """The layer as XLA's partitioner sees it: annotations alone."""

    def layer(x: Any, up: Any, down: Any) -> Any:
        hidden = activated(x, up, activation)
        hidden = lax.with_sharding_constraint(hidden, NamedSharding(mesh, P(None, AXIS)))
        return lax.with_sharding_constraint(product(hidden, down), NamedSharding(mesh, P(AXIS)))

    return layer


def _mapped(local: Callable, mesh: Any, activation: str) -> Layer:
    layer = partial(local, activation=activation)
    return jax.shard_map(layer, mesh=mesh, in_specs=IN_SPECS[:3], out_specs=OUT_SPECS[0])


def _local(mesh: Any, activation: str) -> Layer:
    return lambda x, up, down: matmul(_ours(x, up, activation), down)


def _gathered(x: Any, up: Any, down: Any, *, activation: str) -> Any:
    rows = lax.all_gather(x, AXIS, tiled=True)
    part = matmul(_ours(rows, up, activation), down)
    return lax.psum_scatter(part, AXIS, tiled=True)


def _overlapped(x: Any, up: Any, down: Any, *, activation: str) -> Any:
    hidden = all_gather_matmul(x, up, AXIS, activation=ACTIVATIONS[activation])
    return matmul_reduce_scatter(hidden, down, AXIS)


FORMS: dict[str, Callable[[Any, str], Layer]] = {
    "jnp": partial(_sharded, _plain, jnp.matmul),  # XLA's products, sharded by annotation
    "automatic": partial(_sharded, _ours, matmul),  # ours, likewise
    "gathered": partial(_mapped, _gathered),  # ours in shard_map, collectives before and after
    "overlapped": partial(_mapped, _overlapped),  # ours in shard_map, in rings
    "local": _local,  # for one device
}
