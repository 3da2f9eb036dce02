"""The demo: a checked, jitted GEMM with gradients, then its speed or the kernel's facts.

With a Hopper GPU the products run on our kernels, and one is timed in alternation with XLA. Without
one they run on XLA, and the demo compiles and inspects the kernel that an H200 would run, or the
GPU that JAX_HOPPER_GEMM_GPU names.
"""

from __future__ import annotations

import textwrap
import time
from dataclasses import asdict
from typing import Any

from .. import cubin, dispatch, ops
from ..cubin import sass
from ..gemm.problem import GemmProblem
from ..reports import explain
from . import doctor
from .report import CommandError, bytes_text, say, say_facts

CHECKED = GemmProblem.dense(512, 768, 1024)
CHECKED_ON_GPU = GemmProblem.dense(4096, 4096, 4096)
CHECKED_ROWS = 64  # of each result, against float64 on the host
SHOWN = GemmProblem.dense(8192, 8192, 8192)  # timed on a GPU, taken apart without one


def run() -> dict[str, Any]:
    """Runs the demo and returns what it found.

    Raises:
      CommandError: a result is farther from float64's than its dtype explains.
    """
    machine = doctor.machine_facts()
    on_gpu = machine["devices"][0]["runs_kernels"]
    version = machine["version"] or "(from its sources, not installed)"
    say_facts(f"jax_hopper_gemm {version}", doctor.described(machine))
    product = check_product(CHECKED_ON_GPU if on_gpu else CHECKED)
    say_product(product)
    did = "ran" if on_gpu else f"an {dispatch.absent_device().gpu} would take"
    say(f"\nWhich path {did}, and why")
    say(textwrap.indent(product["explanation"], "  "))
    found = {"machine": machine, "product": product}
    if on_gpu:
        found |= time_product()
        say_speed(found["speed"])
    else:
        found |= take_kernel_apart()
        say_kernel(found["kernel"])
    wrong = [name for name, result in product["results"].items() if not result["good"]]
    if wrong:
        raise CommandError(f"{', '.join(wrong)}: beyond the bound of its error", found)
    return found


def check_product(problem: GemmProblem) -> dict[str, Any]:
    """Returns the kernel of A B, and the errors of A B and its gradients over their bounds."""
    import jax
    import numpy as np

    m, n, k = problem.m, problem.n, problem.k
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [
        jax.random.normal(key, shape, problem.a_dtype)
        for key, shape in zip(keys, ((m, k), (k, n), (m, n)), strict=True)
    ]

    @jax.jit
    def product_and_gradients(a, b, dd):
        d, transpose = jax.vjp(ops.matmul, a, b)
        return d, *transpose(dd)

    results = [np.asarray(result) for result in product_and_gradients(*inputs)]
    a, b, dd = (np.asarray(x).astype(np.float64) for x in inputs)
    report = {}
    for name, left, right, result in zip(
        ("D = A B", "dA = dD B^T", "dB = A^T dD"), (a, dd, a.T), (b, b.T, dd), results, strict=True
    ):
        rows = np.random.default_rng(0).choice(len(left), CHECKED_ROWS, replace=False)
        exact, magnitude = left[rows] @ right, np.abs(left[rows]) @ np.abs(right)
        # Of float32 sums in any order (Higham, Accuracy and Stability of Numerical Algorithms,
        # section 3.1; those of tensor cores err by less), then of rounding to bfloat16.
        of_sums = left.shape[1] * 2**-24 / (1 - left.shape[1] * 2**-24)
        bound = 2**-8 * np.abs(exact) + (1 + 2**-8) * of_sums * magnitude
        worst = float(np.max(np.abs(result[rows].astype(np.float64) - exact) / bound))
        report[name] = {"error_of_bound": worst, "good": worst <= 1}
    return {
        "extents": [m, n, k],
        "dtype": problem.a_dtype,
        "explanation": str(explain(ops.matmul, *inputs[:2])),
        "results": report,
    }


def say_product(product: dict[str, Any]) -> None:
    extents = "x".join(map(str, product["extents"]))
    say_facts(
        f"\nA jitted product with gradients, {extents} {product['dtype']}, against float64",
        {
            name: f"{'good' if result['good'] else 'WRONG'}: largest error "
            f"{result['error_of_bound']:.2f} of the bound for a {product['dtype']} result"
            for name, result in product["results"].items()
        },
    )


def take_kernel_apart() -> dict[str, Any]:
    """Returns facts of the kernel that runs `SHOWN` on a GPU; compiles it if needed."""
    decision = dispatch.choose(SHOWN, dispatch.absent_device(), kernel_only=True)
    assert decision.spec is not None, decision.reason
    started = time.perf_counter()
    compiled = cubin.get(decision.spec)
    seconds = time.perf_counter() - started
    facts = {
        "name": decision.spec.name,
        "origin": compiled.origin,
        "seconds": seconds,
        "threads": compiled.manifest.threads,
        "registers": compiled.manifest.registers,
        "shared_memory_bytes": compiled.manifest.dynamic_smem_bytes,
        "cubin_bytes": len(compiled.cubin),
    }
    try:
        return {"kernel": facts | asdict(sass.sass_facts(compiled.cubin))}
    except cubin.CubinError as error:  # no disassembler
        return {"kernel": facts | {"instructions": str(error)}}


def say_kernel(kernel: dict[str, Any]) -> None:
    lines = {
        "name": kernel["name"],
        "from": f"{kernel['origin']}, {kernel['seconds']:.1f} s",
        "block": f"{kernel['threads']} threads, {kernel['registers']} registers each at launch, "
        f"{bytes_text(kernel['shared_memory_bytes'])} of shared memory",
        "cubin": bytes_text(kernel["cubin_bytes"]),
    }
    if "wgmma" in kernel:
        lines |= {
            "instructions": f"{kernel['wgmma']} HGMMA, {kernel['tma_loads']} TMA loads, "
            f"{kernel['tma_stores']} TMA stores; {kernel['instructions']} in all",
            "setmaxnreg": " and ".join(map(str, kernel["register_budgets"])),
            "spills": kernel["local_accesses"] or "none",
        }
    else:
        lines["instructions"] = kernel["instructions"]
    gpu, extents = dispatch.absent_device().gpu, f"{SHOWN.m}x{SHOWN.n}x{SHOWN.k}"
    say_facts(f"\nNo Hopper GPU here; the kernel of an {gpu} for {extents}", lines)


def time_product() -> dict[str, Any]:
    """Returns the times of `SHOWN` on this GPU, ours and XLA's in alternation."""
    from ..testing import benchmark

    makers = {name: benchmark.MAKERS[name] for name in ("auto", "xla")}
    (row,) = benchmark.run([SHOWN], ["burst"], makers)
    return {"speed": row.to_dict()}


def say_speed(speed: dict[str, Any]) -> None:
    microseconds = {name: timing["median_us"] for name, timing in speed["timings"].items()}
    lines = {
        name: f"{microseconds[key]:.1f} us, {SHOWN.flops / microseconds[key] / 1e6:.0f} TFLOP/s"
        for name, key in (("jax_hopper_gemm", "auto"), ("XLA", "xla"))
    }
    ratio = microseconds["xla"] / microseconds["auto"]
    say_facts(
        f"\n{SHOWN.m}x{SHOWN.n}x{SHOWN.k} on this GPU, single kernels in alternation with XLA",
        lines | {"XLA's time over ours": f"{ratio:.3f}"},
    )
