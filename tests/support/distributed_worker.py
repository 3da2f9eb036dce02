"""One of the processes of a distributed program: partitioned products, checked in each of them.

    python tests/support/distributed_worker.py PLATFORM PORT PROCESSES INDEX

Prints JSON: of each case the collectives of the compiled program, how many kernels of ours it
launches, and a digest of its text. On the CPU a process has two devices, else one.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

M, K, N = 512, 256, 384

# Of a, of b and of the result, over the axes that lie across ("x") and within ("y") processes.
CASES = {
    "rows": (P("x", None), P(None, "y"), P("x", "y")),
    "contracted": (P(None, "x"), P("x", None), P()),
    "contracted within": (P("y", "x"), P("x", None), P("y", None)),
    "scattered": (P(None, "x"), P("x", None), P("x", None)),
    "both": (P(None, ("x", "y")), P(("x", "y"), None), P(("x", "y"), None)),
}


def main(platform: str, port: str, processes: str, index: str) -> None:
    within = 2 if platform == "cpu" else 1
    jax.config.update("jax_platforms", platform)
    local = None
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", within)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    else:
        local = [int(index)]
    jax.distributed.initialize(
        f"localhost:{port}", int(processes), int(index), local_device_ids=local,
        initialization_timeout=120,
    )  # fmt: skip
    from jax_hopper_gemm import matmul
    from jax_hopper_gemm.sharding import custom_call

    if platform == "cpu":
        custom_call.PLATFORMS.append(("cpu",))  # each share is XLA's product
        product = matmul
    else:
        product = partial(matmul, implementation="hopper")
    assert jax.process_count() == int(processes) and jax.local_device_count() == within
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((int(processes), within), ("x", "y"), axis_types=(auto, auto))
    found = {name: run(product, mesh, *specs) for name, specs in CASES.items()}
    if platform == "cpu":
        found["layers"] = run_layers(mesh)
    print(json.dumps(found))


def run(product: Any, mesh: jax.sharding.Mesh, *specs: P) -> dict[str, Any]:
    """Runs a product and both gradients; every process checks its part of each."""
    on = [NamedSharding(mesh, spec) for spec in specs]
    rng = np.random.default_rng(0)
    a, b, g = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    arrays = [
        jax.make_array_from_callback(x.shape, s, lambda i, x=x: x[i].astype(jnp.bfloat16))
        for x, s in zip((a, b, g), on, strict=True)
    ]

    def step(a: jax.Array, b: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(product, a, b)
        return y, *pull(g)

    program = jax.jit(step, out_shardings=(on[2], on[0], on[1])).lower(*arrays).compile()
    results = program(*arrays)
    for found, exact in zip(results, (a @ b, g @ b.T, a.T @ g), strict=True):
        expected = exact.astype(jnp.bfloat16)
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    return facts_of(program.as_text() or "")


def run_layers(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Runs products with an epilogue, gated and ragged ones, and their gradients."""
    from jax_hopper_gemm import gated_linear_unit, matmul, ragged_dot

    def layers(sizes, x, up, bias, gate_up, experts):
        return (
            matmul(x, up, bias=bias, activation="relu"),
            gated_linear_unit(x, gate_up, activation="relu"),
            ragged_dot(x, experts, sizes),
        )

    def plain(sizes, x, up, bias, gate_up, experts):
        gate, value = x @ gate_up[:, 0], x @ gate_up[:, 1]
        rows = jax.lax.ragged_dot(x, experts, sizes)
        return jax.nn.relu(x @ up + bias), jax.nn.relu(gate) * value, rows

    def step(function, sizes, *floats):
        results, pull = jax.vjp(partial(function, sizes), *floats)
        return results, pull(jax.tree.map(jnp.sign, results))

    rng = np.random.default_rng(0)
    shapes = {
        (M, K): P("x"), (K, N): P(None, "y"), (N,): P("y"), (K, 2, N): P(None, None, "y"),
        (4, K, N): P(None, None, "y"),
    }  # fmt: skip
    floats = [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
    values = np.array([100, 0, 200, 150], np.int32), *floats
    arrays = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i, x=x: x[i])
        for x, spec in zip(values, (P(), *shapes.values()), strict=True)
    ]
    program = jax.jit(partial(step, layers)).lower(*arrays).compile()
    results = jax.tree.leaves(program(*arrays))
    expected = jax.tree.leaves(jax.jit(partial(step, plain))(*values))
    for found, exact in zip(results, expected, strict=True):
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(exact)[shard.index])
    return facts_of(program.as_text() or "")


def facts_of(text: str) -> dict[str, Any]:
    """Returns what is to be the same in all processes."""
    kinds = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {
        "collectives": {kind: count for kind, count in found.items() if count},
        "launches": text.count('custom_call_target="jax_hopper_gemm.v1.launch"'),
        "program": hashlib.sha256(re.sub(r"metadata=\{.*?\}", "", text).encode()).hexdigest(),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
