"""The demo: a jitted product with gradients, checked; then its speed, or the kernel's facts.

With a Hopper GPU the product runs on our kernels and is timed beside XLA's. Without one it runs
on XLA, and the kernel that an H200 would run is compiled and taken apart.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from .. import cubin, dispatch, ops
from ..problem import GemmProblem
from . import doctor
from .report import print_facts, print_json

CHECKED_ROWS = 64  # of each result, against float64 on the host
SHOWN = GemmProblem.dense(4096, 4096, 4096)  # timed on a GPU, taken apart without one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    machine = doctor.machine_facts()
    if not args.json:
        print_facts(f"jax_hopper_gemm {machine['version']}", doctor.described(machine))
    on_gpu = machine["devices"][0]["runs_kernels"]
    product = check_product(SHOWN if on_gpu else GemmProblem.dense(512, 768, 1024))
    if not args.json:
        print()
        print_facts(
            f"A jitted product with gradients: {product['extents']}, {product['dtype']}",
            {
                name: f"{result['path']}, error {result['error']:.2f} of what float32 "
                f"accumulation allows: {'good' if result['good'] else 'WRONG'}"
                for name, result in product["results"].items()
            },
        )
    shown = time_product() if on_gpu else take_kernel_apart()
    if args.json:
        print_json({"machine": machine, "product": product, "kernel": shown})
    else:
        print()
        print_facts(shown.pop("title"), shown)
    return 0 if all(result["good"] for result in product["results"].values()) else 1


def check_product(problem: GemmProblem) -> dict[str, Any]:
    """Returns how A B and its two gradients ran, and their errors as a share of the bound."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ..testing import tolerance

    m, n, k = problem.m, problem.n, problem.k
    shapes = {"a": (m, k), "b": (k, n), "dd": (m, n)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    inputs = [
        jax.random.normal(key, shape, problem.ab_dtype)
        for key, shape in zip(keys, shapes.values(), strict=True)
    ]

    @jax.jit
    def product_and_gradients(a, b, dd):
        d, transpose = jax.vjp(ops.matmul, a, b)
        return d, *transpose(dd)

    results = [np.asarray(result) for result in product_and_gradients(*inputs)]
    a, b, dd = (np.asarray(x).astype(np.float64) for x in inputs)
    products = {"D = A B": (a, b), "dA = dD Bᵀ": (dd, b.T), "dB = Aᵀ dD": (a.T, dd)}
    report = {}
    for (name, (left, right)), result in zip(products.items(), results, strict=True):
        rows = np.random.default_rng(0).choice(len(left), CHECKED_ROWS, replace=False)
        worst = tolerance.worst(
            result[rows],
            left[rows] @ right,
            np.abs(left[rows]) @ np.abs(right),
            k=left.shape[1],
            summation="float32",
        )
        report[name] = {"error": worst.ratio, "good": worst.ratio <= 1}
    return {"extents": f"{m}x{n}x{k}", "dtype": problem.ab_dtype, "results": report}


def take_kernel_apart() -> dict[str, Any]:
    """Returns facts of the kernel that an H200 runs for `SHOWN`; compiles it if need be."""
    decision = dispatch.choose(SHOWN, dispatch.H200, kernel_only=True)
    assert decision.spec is not None, decision.reason
    started = time.perf_counter()
    compiled = cubin.get(decision.spec)
    seconds = time.perf_counter() - started
    manifest = compiled.manifest
    facts = {
        "title": f"The kernel of an H200 for {extents(SHOWN)}, {SHOWN.ab_dtype}",
        "name": manifest.name,
        "came from": f"{compiled.origin}, in {seconds:.1f} s",
        "size": bytes_text(len(compiled.cubin)),
        "threads": f"{manifest.threads}, {manifest.registers} registers each at launch",
        "shared memory": bytes_text(manifest.dynamic_smem_bytes),
    }
    try:
        code = sass.sass_facts(compiled.cubin)
    except cubin.CubinError as error:
        return facts | {"instructions": f"not shown: {error}"}
    return facts | {
        "instructions": f"{code.wgmma} HGMMA, {code.tma_loads} TMA loads, {code.tma_stores} TMA "
        f"stores, {code.instructions} in all",
        "setmaxnreg": ", ".join(map(str, code.register_budgets)),
        "spills": code.local_accesses or "none",
    }
