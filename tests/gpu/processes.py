"""Runs code in processes of its own, and compares what it computes with and without CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

PRELUDE = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
import jax_hopper_gemm as jhg
from support import bounds, reference

def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

def hopper(a, b):
    return jhg.matmul(a, b, implementation="hopper")

folder = sys.argv[1]
"""


def run_python(code: str, folder: object, timeout: float = 240, **environment: str) -> str:
    """Returns what a fresh process prints that runs `code` after the prelude."""
    source = PRELUDE + textwrap.dedent(code)
    return run_command("-c", source, str(folder), timeout=timeout, **environment)


def run_command(*arguments: str, timeout: float = 240, **environment: str) -> str:
    """Returns what Python prints with these arguments, in a process of its own."""
    tests = Path(__file__).resolve().parents[1]
    paths = [str(tests), str(tests.with_name("benchmarks")), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # finds `support`
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def assert_graphs_change_nothing(code: str, folder: Path, module: str) -> None:
    """Runs `code` with CUDA graphs and without: it saves the same numbers, and graphs are captured.

    Args:
      code: saves an array in its folder as "outputs".
      module: name of the jitted function's module, "jit_" before its own.
    """
    with_graphs, without = folder / "with", folder / "without"
    flags = {
        with_graphs: "--xla_gpu_enable_command_buffer=+CUSTOM_CALL "
        f"--xla_gpu_graph_min_graph_size=1 --xla_dump_to={with_graphs}",
        without: "--xla_gpu_enable_command_buffer=",
    }
    outputs = []
    for each, xla_flags in flags.items():
        each.mkdir()
        run_python(code, each, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}")
        outputs.append(np.load(each / "outputs.npy"))
    assert np.array_equal(*outputs)
    thunks = [p.read_text() for p in with_graphs.glob(f"*{module}*thunk_sequence*")]
    assert any("kCommandBuffer" in text for text in thunks), "no graph was captured"
