"""Runs JAX's own tests with this library's products in the place of JAX's.

    python tests/others/run_jax.py PATH_TO_JAX            # the list below
    python tests/others/run_jax.py PATH_TO_JAX lax_test.py -k Dot

PATH_TO_JAX holds `tests/` of the installed version, as `git clone --branch jax-v0.10.2
https://github.com/jax-ml/jax` makes it; absl-py and hypothesis must be installed. The tests see our
functions as `jax.lax.dot_general`, `ragged_dot`, `ragged_dot_general`, `jax.numpy.matmul` and
`einsum`; JAX's own modules keep theirs. README.md beside this file lists what was run and seen.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A file and the tests of it that have products.
SUITES = (
    ("lax_numpy_einsum_test.py", ""),
    ("lax_test.py", "dot or Dot or ragged or Ragged"),
    ("lax_autodiff_test.py", ""),
    ("lax_vmap_test.py", ""),
    ("lax_numpy_test.py", "dot or Dot or matmul or Matmul or einsum or Einsum"),
    ("jet_test.py", "dot or mlp or conv"),
    ("checkify_test.py", ""),
    ("shard_map_test.py", ""),
    ("pjit_test.py", ""),
    ("export_test.py", ""),
)


def run(root: Path, suites: Sequence[tuple[str, str]], more: Sequence[str] = ()) -> int:
    """Runs suites one after the other; returns 1 if one fails."""
    failed = []
    for file, names in suites:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "run_jax", "--tb=line", *more]
        command += ["-W", "default", f"tests/{file}", *(["-k", names] if names else [])]
        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        }
        print(f"== {file} {names}", flush=True)
        if subprocess.run(command, cwd=root, env=environment).returncode:
            failed.append(file)
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def pytest_configure(config: Any) -> None:
    """Makes this module a plugin of pytest: before the tests import JAX's names."""
    import jax

    import jax_hopper_gemm as jhg

    del config
    theirs, ours = {}, {}
    for place, names in (
        (jax.lax, ("dot_general", "ragged_dot", "ragged_dot_general")),
        (jax.numpy, ("matmul", "einsum")),
    ):
        for name in names:
            theirs[place, name] = getattr(place, name)
            ours[place, name] = replacement(getattr(jhg, name), theirs, ours)
    put(ours)


def put(functions: dict[tuple[Any, str], Any]) -> None:
    for (place, name), function in functions.items():
        setattr(place, name, function)


def replacement(function: Any, theirs: dict[Any, Any], ours: dict[Any, Any]) -> Any:
    """Returns our function, inside of which JAX's names are JAX's own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        put(theirs)
        try:
            return function(*args, **kwargs)
        finally:
            put(ours)

    return call


if __name__ == "__main__":
    path, *words = sys.argv[1:] or sys.exit(__doc__)
    chosen = [(words[0], "")] if words else SUITES
    sys.exit(run(Path(path), chosen, words[1:]))
