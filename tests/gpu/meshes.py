"""What tests of programs that XLA partitions over two GPUs share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from repeats import assert_same_bits
from support import bounds, tolerance
from support.collectives import collectives
from support.mesh_programs import AXIS, DEVICES

from jax_hopper_gemm.gemm.spec import GemmSpec

TARGET = 'custom_call_target="jax_hopper_gemm.v1.launch"'
OTHERS = r' dot\(|ragged-dot\(|custom_call_target="__cublas|jax_hopper_gemm.v1.partition'


@pytest.fixture
def mesh() -> Mesh:
    if len(jax.devices()) < DEVICES:
        pytest.skip(f"needs {DEVICES} GPUs")
    return Mesh(np.array(jax.devices()[:DEVICES]), (AXIS,), axis_types=(AxisType.Auto,))


def most_gpus() -> list[Any]:
    """Returns the largest power of two of this machine's GPUs; skips a test where that is one."""
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    return devices[: 1 << (min(len(devices), 8).bit_length() - 1)]


def placed(program: Any, mesh: Mesh) -> list[jax.Array]:
    pairs = zip(program.arguments(), program.partition_specs(), strict=True)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def compiled(program: Any, function: Any, arguments: list[jax.Array]) -> Any:
    return jax.jit(lambda *args: program.step(function, *args)).lower(*arguments).compile()


def runs_on_kernels(program: Any, mesh: Mesh) -> tuple[Any, str]:
    """Returns the results of a program's step, and its text, which launches kernels alone."""
    given = placed(program, mesh)
    step = compiled(program, program.ours, given)
    text = step.as_text()
    assert text.count(TARGET) == program.launches
    assert not re.search(OTHERS, text)
    return step(*given), text


def moved(program: Any) -> dict[str, int]:
    """Returns the bytes that each kind of collective gives; XLA may make one of several."""
    return {kind: size for kind, (_, size) in collectives(program.as_text()).items()}


def launched(text: str) -> Counter[str]:
    """Returns the kernels that a compiled program launches, by name, and how often."""
    return Counter(re.findall(TARGET + r".*?(jhg_\w+) M=", text))


def names(specs: Iterable[GemmSpec]) -> Counter[str]:
    return Counter(spec.name for spec in specs)


def note(program: Any, text: str, checked: Any) -> None:
    for spec in program.specs():
        assert f"{spec.name} M=" in text
        checked(spec)


def largest_errors(results: Any, exact: list[np.ndarray]) -> list[float]:
    pairs = zip(results, exact, strict=True)
    return [float(np.max(np.abs(np.float64(np.asarray(x)) - np.float64(y)))) for x, y in pairs]


def assert_within_bound(
    result: Any, expected: np.ndarray, magnitude: np.ndarray, terms: int, partial: bool
) -> None:
    """Checks a product; if `partial`, the sum of two that are rounded to bfloat16 each."""
    bound = tolerance.error_bound(expected, magnitude, terms, "bfloat16")
    if partial:
        unit = float(jnp.finfo(jnp.bfloat16).eps) / 2
        bound += (unit + unit**2) * (1 + tolerance.accumulation_error(terms)) * magnitude
    bounds.assert_within(np.asarray(result), expected, bound)


def assert_as_near_as_plain(program: Any, mesh: Mesh, results: Any) -> None:
    """Checks results of a step beside those of the plain function, both against float32's."""
    wide = [x.astype(np.float32) for x in program.arguments()]
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        exact = jax.jit(lambda *args: program.step(program.plain, *args))(*wide)
        exact = [np.asarray(x) for x in exact]
    given = placed(program, mesh)
    theirs = largest_errors(compiled(program, program.plain, given)(*given), exact)
    for got, xla, value in zip(largest_errors(results, exact), theirs, exact, strict=True):
        unit = float(np.max(np.abs(value))) * 2.0**-8  # half a unit of the last place of bfloat16
        assert got <= 1.5 * max(xla, unit), f"error {got}, XLA's {xla}"


def assert_same_bits_in_repeats(program: Any, mesh: Mesh) -> None:
    given = placed(program, mesh)
    assert_same_bits(compiled(program, program.ours, given), given, 5)
