"""What tests of the JAX side share: exact data, and programs lowered for CUDA on any machine."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

LAUNCH = "stablehlo.custom_call @jax_hopper_gemm.v1.launch"
THEIRS = {"dot_general", "ragged_dot_general"}
OURS = {"hopper_dot", "hopper_ragged_dot", "hopper_fused"}


def script_at(path: Path) -> Any:
    """Returns the module that a script is, whatever its folder."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def integers(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> jax.Array:
    """Returns integers from -2 to 2, whose sums of products are exact in every float."""
    values = np.random.default_rng([seed, *shape]).integers(-2, 3, shape)
    return jax.device_put(values.astype(dtype))


def normal(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> jax.Array:
    """Returns random normal numbers; nothing is compiled for them, as `jnp.asarray` would."""
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jax.device_put(values.astype(dtype))


def shape(*extents: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, dtype)


def equations(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Yields all equations of a function's program, those of programs in it after what has them."""

    def inside(jaxpr: Any) -> Iterator[Any]:
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if equation.primitive.name != "accelerated":  # which stands for those of its program
                yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from inside(inner)

    return inside(jax.make_jaxpr(function)(*args))


def operations(function: Callable[..., Any], *args: Any) -> Counter[str]:
    return Counter(equation.primitive.name for equation in equations(function, *args))


def products(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Returns how many products of a program are ours and how many JAX's."""
    found = list(equations(function, *args))
    theirs = sum(equation.primitive.name in THEIRS for equation in found)
    return sum(map(products_of, found)), theirs


def products_of(equation: Any) -> int:
    """Returns how many products of ours an equation is."""
    if equation.primitive.name == "hopper_dots":
        return len(equation.params["functions"] or equation.outvars)
    return int(equation.primitive.name in OURS)


def lowered(function: Callable[..., Any], *args: Any) -> str:
    """Returns the program for CUDA, without transposes whose result nothing uses."""
    fresh = jax.jit(lambda *args: function(*args))  # JAX keeps what it lowered for a function
    text = fresh.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    for name in re.findall(r"(%\d+) = stablehlo.transpose", text):
        if len(re.findall(rf"{name}\b", text)) == 1:
            text = re.sub(rf".*{name} = stablehlo.transpose.*\n", "", text)
    return text


def step(mlp, cotangent, *args):
    """Returns the results of a model and its gradients."""
    y, back = jax.vjp(mlp, *args)
    return y, back(cotangent)


def attributes(program: str, name: str) -> list[str]:
    """Returns a string attribute of every launch in `program`."""
    found = re.findall(rf'\b{name} = "(.*?)"(?=[,}}])', program)
    return [text.replace(r"\22", '"') for text in found]


def run_fresh(source: str, *args: str, **environment: str) -> str:
    """Returns what `source` prints in a new process on the CPU; fails where it raises."""
    process = subprocess.run(
        [sys.executable, "-c", source, *args],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


# The beginning of a program for `run_fresh`: a mesh of eight CPUs, and events of JAX's persistent
# cache in the folder that is its argument.
CACHED_ON_MESH = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_hopper_gemm as jhg
from jax_hopper_gemm.sharding import custom_call

custom_call.PLATFORMS.append(("cpu",))
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
auto = jax.sharding.AxisType.Auto
mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(auto, auto))
sharded = lambda shape, *spec: jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
"""


def same(found: Any, expected: Any) -> None:
    """Asserts that two trees hold equal arrays."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)
