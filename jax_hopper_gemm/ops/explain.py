"""`explain` and `supports`: which path a product takes and why, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from .. import dispatch
from ..lowering import launcher_violation
from ..plan import ceil_div, max_clusters
from ..primitive import hopper_dot_p, product_of
from ..problem import GemmProblem
from ..routing import Product, current_device, route
from ..spec import GemmSpec, Traversal
from .dense import Implementation, dot_general, matmul


@dataclass(frozen=True)
class Explanation:
    """How a product runs. `str` makes it a report.

    Attributes:
      product: what was asked, as text.
      device: the kind of GPU it was decided for.
      path: "hopper" (a kernel of this library) or "xla".
      reason: why.
      source: what decided: "table", "user table", "model", "request" (by `implementation`), or
        "unsupported" where no kernel can run the product.
      problem: the product as the kernel sees it, where it has that form. A and B may have
        changed places, so that the result's last axis is N.
      spec, traversal: the kernel and its order of tiles; None with "xla".
      grid: thread blocks launched, (x, y, z).
      waves: rounds of tiles that the busiest SM computes.
    """

    product: str
    device: dispatch.Device
    path: str
    reason: str
    source: str
    problem: GemmProblem | None = None
    spec: GemmSpec | None = None
    traversal: Traversal | None = None
    grid: tuple[int, int, int] | None = None
    waves: int | None = None

    def __str__(self) -> str:
        major, minor = self.device.compute_capability
        lines = {
            "product": self.product,
            "device": f"compute capability {major}.{minor}, {self.device.num_sms} SMs",
            "path": self.path,
            "because": f"{self.reason} ({self.source})",
        }
        if p := self.problem:
            lines["problem"] = (
                f"M={p.m} N={p.n} K={p.k} L={p.l}, A {p.a.major}-major, B {p.b.major}-major"
            )
        if (spec := self.spec) and (traversal := self.traversal):
            lines["kernel"] = spec.name
            lines["tile"] = (
                f"{spec.tile_m}x{spec.tile_n}x{spec.tile_k}, cluster "
                f"{spec.cluster_m}x{spec.cluster_n}, {spec.num_stages} stages, "
                f"{spec.warp_schedule}, {spec.tile_scheduler} scheduler"
            )
            lines["traversal"] = f"along {traversal.along}, swizzle {traversal.swizzle}"
            lines["grid"] = f"{self.grid}, {self.waves} {'wave' if self.waves == 1 else 'waves'}"
        return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


def explain(
    a: Any,
    b: Any,
    *,
    dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    implementation: Implementation = None,
) -> Explanation:
    """Returns how `matmul(a, b, ...)` runs on this process's GPU, or on an H200 where it has none.

    Operands of a lowered program that are transposes are read as they lie in memory, which this
    cannot see: pass the stored arrays and `dimension_numbers`.

    Args:
      a, b: arrays or `jax.ShapeDtypeStruct`s.
      dimension_numbers: if not None, explains `dot_general(a, b, dimension_numbers, ...)`.
      precision, preferred_element_type, out_sharding, implementation: as in `matmul`.

    Raises:
      ValueError, TypeError: as `matmul` or `dot_general` would.
    """
    options = {
        "dimension_numbers": dimension_numbers,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    product, device = _product(a, b, options), current_device()
    if implementation == "xla":
        return Explanation(str(product), device, "xla", "implementation='xla'", "request")
    found = route(product, device, kernel_only=implementation == "hopper")
    found = found.unless(launcher_violation())
    if found.path == "xla":
        problem = found.gemm.problem if found.gemm else None
        return Explanation(str(product), device, "xla", found.reason, found.source, problem)
    assert found.gemm and found.spec and found.plan
    tiles = found.gemm.problem.l
    tiles *= ceil_div(found.gemm.problem.m, found.spec.tile_m * found.spec.cluster_m)
    tiles *= ceil_div(found.gemm.problem.n, found.spec.tile_n * found.spec.cluster_n)
    return Explanation(
        str(product), device, "hopper", found.reason, found.source, found.gemm.problem,
        found.spec, found.traversal, found.plan.grid,
        waves=ceil_div(tiles, max_clusters(found.spec, device.num_sms)),
    )  # fmt: skip


def supports(
    a: Any,
    b: Any,
    *,
    dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> tuple[bool, str]:
    """Returns whether a kernel can run `matmul(a, b, ...)`, and why or why not.

    That it can does not make it the faster way: `explain` says which path is taken.

    Args:
      as in `explain`.
    """
    found = explain(
        a, b, dimension_numbers=dimension_numbers, precision=precision,
        preferred_element_type=preferred_element_type, out_sharding=out_sharding,
        implementation="hopper",
    )  # fmt: skip
    return found.path == "hopper", found.reason


def _product(a: Any, b: Any, options: dict[str, Any]) -> Product:
    """Returns the one product that a call becomes."""

    def call(a: Any, b: Any) -> jax.Array:
        if options["dimension_numbers"] is None:
            return matmul(a, b, **{k: v for k, v in options.items() if k != "dimension_numbers"})
        return dot_general(a, b, **options)

    equations = jax.make_jaxpr(call)(a, b).jaxpr.eqns
    (dot,) = (e for e in equations if e.primitive is hopper_dot_p)
    (lhs, rhs), (out,) = ([v.aval for v in variables] for variables in (dot.invars, dot.outvars))
    return product_of(lhs, rhs, out, dot.params)
