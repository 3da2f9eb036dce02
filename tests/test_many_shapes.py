"""Many shapes in one process: memory is let go with JAX's, threads do not disturb each other."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.random_calls import Call, random_calls

import jax_hopper_gemm as jhg
from jax_hopper_gemm.fusion import memo
from jax_hopper_gemm.testing.lowered import launches_of

pytestmark = pytest.mark.usefixtures("launcher")


def lower(m: int) -> None:
    """Lowers a product with an epilogue for CUDA."""

    def function(a, b, bias):
        return jhg.matmul(a, b, bias=bias, activation=jax.nn.gelu, implementation="hopper")

    shapes = (m, 64), (64, 128), (128,)
    assert launches_of(function, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))


@pytest.mark.slow
def test_what_is_remembered_of_jaxprs_is_let_go_with_the_caches_of_jax():
    lower(8)
    token, context = memo.trace_context(), weakref.ref(memo._context(memo._KEY))
    assert context() is not None and token is memo.trace_context()
    jax.clear_caches()
    gc.collect()
    assert context() is None


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def launches(call: Call) -> list[object]:
    try:
        return [*launches_of(lambda *args: call.function(*args), *call.arguments)]
    except NotImplementedError:  # implementation="hopper", and no kernel runs it
        return []


@pytest.mark.slow
def test_threads_that_lower_at_once_get_what_one_alone_gets(hasty):
    calls = random_calls(10, seed=5)
    alone = [launches(call) for call in calls]
    assert sum(map(len, alone)) > 3
    jax.clear_caches()

    def work(thread: int) -> None:
        for i in range(len(calls)):
            at = (i + 5 * thread) % len(calls)
            assert launches(calls[at]) == alone[at]
            if i == 5 and thread == 0:
                jax.clear_caches()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.slow
def test_shapes_that_run_on_the_host_leave_no_more_behind_than_those_of_plain_jax():
    """Some; `tests/gpu/many_shapes.py` is a command for thousands."""
    script = Path(__file__).with_name("gpu") / "many_shapes.py"
    command = [sys.executable, str(script), "6", "--plain", "2", "--host"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ours \d+/10, .* objects, .* MiB of the host", done.stdout, re.M)) == 6
