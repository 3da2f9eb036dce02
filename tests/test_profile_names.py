"""What a profile shows of a product: the scopes around it, and which kernel runs."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.spec import GemmSpec

pytestmark = pytest.mark.usefixtures("launcher")


def layer(x, up, experts, sizes):
    with jax.named_scope("dense"):
        hidden = jhg.matmul(x, up, activation="gelu", implementation="hopper")
    with jax.named_scope("experts"):
        y = jhg.ragged_dot(hidden, experts, sizes, implementation="hopper")
    return y.astype(jnp.float32).sum()


def names_of_launches(function) -> dict[str, str]:
    """Returns for the name of each launch's operation which kernel it launches."""
    shapes = (256, 128), (128, 256), (4, 256, 128)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.jit(function).trace(*args, jax.ShapeDtypeStruct((4,), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def named(place: str) -> str:
        while not place.startswith('"jit('):
            place = places[re.findall(r"#loc\d*", place)[0]]
        return place.split('"')[1]

    launch = re.compile(r'custom_call @jax_hopper.* name = "(\S+) .*loc\((#loc\d*)\)')
    return {named(place): kernel for kernel, place in launch.findall(text)}


def test_launches_have_the_names_of_the_scopes_around_them():
    assert {name: kernel.split("_")[1] for name, kernel in names_of_launches(layer).items()} == {
        "jit(layer)/dense/hopper_fused": "gemm",
        "jit(layer)/experts/hopper_ragged_dot": "grouped",
    }


def test_launches_of_gradients_have_them_too():
    names = names_of_launches(jax.grad(layer, (0, 1, 2)))
    assert "jit(layer)/jvp(dense)/hopper_fused" in names
    backward = {name.removeprefix("jit(layer)/") for name in names if "transpose" in name}
    assert backward == {
        "transpose(jvp(dense))/epilogue",
        "transpose(jvp(dense))/hopper_dot",
        "transpose(jvp(experts))/hopper_ragged_dot",
    }


def test_the_documented_name_is_that_of_a_kernel():
    spec = GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, cluster_m=2,
        warp_schedule="pingpong", tile_scheduler="dynamic", num_stages=6, grouped="m",
    )  # fmt: skip
    page = Path(__file__).parents[1] / "docs" / "transformations.md"
    assert f"    {spec.name}_l2_tanh_" in page.read_text()


def test_equal_launches_have_the_lines_of_their_own_products():
    def two(x, w):
        y = jhg.matmul(x, w, epilogue=rows_sum, implementation="hopper")
        z = jhg.matmul(x * 2, w, epilogue=rows_sum, implementation="hopper")
        return y, z

    def rows_sum(y):
        return y.sum(-1)

    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (128, 1024))]
    lowered = jax.jit(two).trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text(debug_info=True)
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def lines(place: str) -> set[int]:
        found = {int(n) for n in re.findall(rf"{Path(__file__).name}\":(\d+)", place)}
        return found.union(*(lines(places[x]) for x in re.findall(r"#loc\d+", place)))

    start = two.__code__.co_firstlineno
    for operation in ("custom_call @jax_hopper", "stablehlo.reduce"):
        found = [lines(x) for x in re.findall(rf"{operation}.*loc\((#loc\d+)\)", text)]
        assert [{start + 1, start + 2} & x for x in found] == [{start + 1}, {start + 2}]
