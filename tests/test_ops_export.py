"""`jax.export`: one program for CPU and CUDA, read back in another process."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.program_inspection import LAUNCH, integers, run_fresh

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes

pytestmark = pytest.mark.usefixtures("launcher")

A, B = integers((256, 256), "bfloat16"), integers((256, 512), "bfloat16", seed=1)
BIAS, WEIGHTS = integers((512,), "bfloat16"), integers((256, 2, 256), "bfloat16", seed=2)
EXPERTS = integers((4, 256, 512), "bfloat16", seed=3)
SIZES = jax.device_put(np.array([100, 0, 56, 90], np.int32))
ROW_BY_ROW = (((1,), (0,)), ((), ()))


# Of each operation: our function, the same in plain JAX, and its arguments, rows first.
OPERATIONS = {
    "matmul": (jhg.matmul, jnp.matmul, (A, B)),
    "dot_general": (
        partial(jhg.dot_general, dimension_numbers=ROW_BY_ROW),
        partial(jax.lax.dot_general, dimension_numbers=ROW_BY_ROW),
        (A, B),
    ),
    "epilogue": (
        lambda a, b, bias, **options: jhg.matmul(a, b, bias=bias, activation="relu", **options),
        lambda a, b, bias: jax.nn.relu(a @ b + bias),
        (A, B, BIAS),
    ),
    "gated": (
        partial(jhg.gated_linear_unit, activation="relu"),
        lambda x, weights: jax.nn.relu(x @ weights[:, 0]) * (x @ weights[:, 1]),
        (A, WEIGHTS),
    ),
    "ragged": (jhg.ragged_dot, jax.lax.ragged_dot, (A, EXPERTS, SIZES)),
}


def loss(a, b):
    return jhg.matmul(a, b, preferred_element_type=jnp.float32).sum()


def exported(function, platforms=("cpu", "cuda"), args=(A, B)):
    checks = jhg.export_disabled_checks()
    fresh = jax.jit(lambda *args: function(*args))
    return export.export(fresh, platforms=platforms, disabled_checks=checks)(*args)


def launches(program: export.Exported) -> int:
    return program.mlir_module().count(LAUNCH)


@pytest.mark.usefixtures("kernels_by_default")
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids="+".join)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_and_its_gradients_survive_a_round_trip(name, platforms):
    ours, theirs, args = OPERATIONS[name]
    stored = exported(ours, platforms, args).serialize(vjp_order=1)
    program = export.deserialize(stored)
    assert launches(program) == 1
    assert launches(program.vjp()) >= 2  # gradients of two operands, and what they need anew
    if "cpu" not in platforms:
        return
    product = jax.jit(program.call)(*args)
    np.testing.assert_array_equal(product, ours(*args))
    wide = [x if x is SIZES else np.asarray(x, np.float32) for x in args]
    np.testing.assert_array_equal(product, np.asarray(theirs(*wide)).astype(product.dtype))

    def gradients(function):
        cotangent = jnp.sign(product)
        floats = [x for x in args if x is not SIZES]
        sizes = args[len(floats) :]
        return jax.jit(jax.vjp(lambda *x: function(*x, *sizes), *floats)[1])(cotangent)

    jax.tree.map(np.testing.assert_array_equal, gradients(program.call), gradients(ours))


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids="+".join)
@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_of_a_symbolic_number_are_multiplied_by_xla(name, platforms, monkeypatch):
    ours, _, args = OPERATIONS[name]
    symbolic = (jax.ShapeDtypeStruct(export.symbolic_shape("rows, 256"), jnp.bfloat16), *args[1:])
    program = export.deserialize(exported(ours, platforms, symbolic).serialize(vjp_order=1))
    assert launches(program) == launches(program.vjp()) == 0
    if "cpu" in platforms:
        few = np.asarray(A)[:7], *args[1:]
        np.testing.assert_array_equal(jax.jit(program.call)(*few), ours(*few))
    with pytest.raises(NotImplementedError, match="symbolic"):
        exported(partial(ours, implementation="hopper"), ("cuda",), symbolic)
    monkeypatch.setenv("JAX_HOPPER_GEMM_ON_FALLBACK", "error")
    with pytest.raises(NotImplementedError, match="an extent is symbolic"):
        exported(ours, platforms, symbolic)


def layers(x, weights):
    """A loop, products that `accelerate` would fuse, and one whose contracted axes are two."""
    up, down = weights[:, 0], weights[:, 1]
    h = jax.lax.scan(lambda h, _: (jax.nn.silu(h @ up) @ down + h, None), x, length=2)[0]
    gated = jax.nn.softmax((x @ up).astype(jnp.float32)).astype(x.dtype) * (h @ down)
    ragged = jax.nn.relu(jax.lax.ragged_dot(gated, EXPERTS, SIZES))
    return jnp.einsum("mgk,ngk->mn", x.reshape(-1, 4, 64), x.reshape(-1, 4, 64)), ragged


def mixture(x, weights):
    router = weights[:, 0, :4]
    gate_up, down = weights[None].repeat(4, 0), EXPERTS[:, :, :256]
    return jhg.moe.mixture_of_experts(x, router, gate_up, down, experts_per_token=2)[0]


def squares(function):
    def of(x, weights):
        results = jax.tree.leaves(function(x, weights))
        return sum(jnp.mean(y.astype(jnp.float32) ** 2) for y in results)

    return of


def by_blocks(x, weights):
    return jhg.matmul(x, weights[:, 0], recipe=recipes.BlockScaling())


@pytest.mark.parametrize("ours", [
    jhg.accelerate(layers), jhg.accelerate(jax.grad(squares(layers))),
    jhg.accelerate(layers, fuse=False), mixture, jax.grad(squares(by_blocks), (0, 1)),
])  # fmt: skip
def test_a_program_may_have_rows_of_a_symbolic_number(ours):
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 256"), jnp.bfloat16)
    x, weights = np.asarray(A)[:48] / 8, np.asarray(WEIGHTS) / 32
    found = jax.jit(exported(ours, args=(rows, weights)).call)(x, weights)
    by_us = jax.jit(ours)(x, weights)
    for result, expected in zip(*map(jax.tree.leaves, (found, by_us)), strict=True):
        result, expected = np.float32(result), np.float32(expected)
        assert np.linalg.norm(result - expected) <= 0.02 * np.linalg.norm(expected)


QUANTIZED = {
    "rows": lambda x, w: (jhg.quantize(x, block=(1, 128)), jhg.quantize(w, block=(128, 128))),
    "blocks of rows": lambda x, w: (jhg.quantize(x, block=(128, 128)), jhg.quantize(w)),
    "contracted": lambda x, w: (
        jhg.quantize(x.T, block=(1, 128)), jhg.quantize(x, block=(128, 128)),
    ),
    "weights": lambda x, w: (x.T, jhg.quantize(x, jnp.int8, (128, 1))),
    "zero points": lambda x, w: (x.T, jhg.quantize(x, jnp.int8, (128, 1), symmetric=False)),
}  # fmt: skip


@pytest.mark.parametrize("rows", ["rows, 256", "2*rows + 3, 256"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_blocks_may_be_of_a_symbolic_number(kind, rows):
    def product(x, w):
        return jhg.matmul(*QUANTIZED[kind](x, w))

    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(rows), jnp.bfloat16)
    functions = exported(product, args=(symbolic, B)).call, product
    found, expected = (np.float32(jax.jit(f)(np.asarray(A)[:201], B)) for f in functions)
    np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_explain_tells_of_symbolic_extents():
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 256"), jnp.bfloat16)
    for found in (
        jhg.explain(jhg.matmul, rows, B),
        jhg.explain(jhg.matmul, rows, B, bias=BIAS, activation="relu"),
        jhg.explain(jhg.ragged_dot, rows, EXPERTS, SIZES),
        jhg.explain(jhg.gated_linear_unit, rows, WEIGHTS),
    ):
        assert (found.path, found.source) == ("xla", "unsupported")
        assert "symbolic" in found.reason and "rows" in found.product
    assert jhg.explain(jhg.matmul, rows, B, implementation="hopper").path == "xla"


@pytest.mark.slow
def test_a_program_for_both_platforms_runs_in_a_fresh_process(tmp_path):
    program = exported(lambda a, b: (jhg.matmul(a, b), *jax.grad(loss, (0, 1))(a, b)))
    (tmp_path / "program").write_bytes(program.serialize(vjp_order=1))
    np.savez(tmp_path / "operands", a=A.astype(jnp.float32), b=B.astype(jnp.float32))
    source = (
        "import sys, pathlib, numpy as np, jax, jax.numpy as jnp\n"
        "from jax import export\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "program = export.deserialize((folder / 'program').read_bytes())\n"
        "operands = np.load(folder / 'operands.npz')\n"
        "a, b = (jnp.asarray(operands[x], jnp.bfloat16) for x in 'ab')\n"
        "out = [x.astype(jnp.float32) for x in jax.jit(program.call)(a, b)]\n"
        "np.savez(folder / 'results', *out)\n"
        "print('jax_hopper_gemm' in sys.modules)\n"
    )
    assert run_fresh(source, str(tmp_path)) == "False\n"  # the CPU's part needs nothing of ours
    with np.load(tmp_path / "results.npz") as results:
        product, grad_a, grad_b = results.values()
    np.testing.assert_array_equal(product, jnp.matmul(A, B).astype(jnp.float32))
    ones = np.ones((256, 512), np.float32)
    np.testing.assert_array_equal(grad_a, jnp.asarray(ones @ np.asarray(B, "f4").T, "bfloat16"))
    np.testing.assert_array_equal(grad_b, jnp.asarray(np.asarray(A, "f4").T @ ones, "bfloat16"))


def test_export_for_cuda_needs_no_gpu_and_the_disabled_check():
    function = lambda a, b: jhg.matmul(a, b, implementation="hopper")  # noqa: E731
    assert exported(function, ("cuda",)).mlir_module().count(LAUNCH) == 1
    with pytest.raises(ValueError, match="jax_hopper_gemm.v1.launch"):
        export.export(jax.jit(function), platforms=("cuda",))(A, B)


@pytest.mark.parametrize("rows", ["256", "rows"])
def test_ragged_products_of_a_symbolic_batch_are_multiplied_by_xla(rows):
    def mapped(product, x, w, sizes):
        return jax.vmap(product, (0, None, 0))(x, w, sizes)

    ours = partial(mapped, partial(jhg.ragged_dot, activation="relu", bias=EXPERTS[:, 0]))
    shapes = export.symbolic_shape(f"batch, {rows}, 256")
    symbolic = jax.ShapeDtypeStruct(shapes, jnp.bfloat16), EXPERTS
    symbolic += (jax.ShapeDtypeStruct((shapes[0], 4), jnp.int32),)
    program = export.deserialize(exported(ours, ("cpu", "cuda"), symbolic).serialize())
    sizes = np.array([[100, 0, 56, 90], [0, 0, 0, 0], [300, 7, 1, 2]], np.int32)
    x = integers((3, 256, 256), "bfloat16", seed=4)
    np.testing.assert_array_equal(program.call(x, EXPERTS, sizes), ours(x, EXPERTS, sizes))


@pytest.mark.parametrize("name", ["weights", "zero points", "packed", "state", "routing"])
def test_a_stored_program_takes_and_returns_what_is_ours(name):
    """As `Quantized` weights, of which it keeps whether they are packed."""
    wide = np.maximum(np.asarray(EXPERTS)[0], 0)
    argument = jax.jit({
        "weights": lambda w: jhg.quantize(w, jnp.int8, (None, 1)),
        "zero points": lambda w: jhg.quantize(w, jnp.int4, (128, 1), symmetric=False),
        "packed": lambda w: jhg.quantize(w, jnp.int4, (128, 1)).pack_weights(),
        "state": lambda _: recipes.DelayedScaling.initial(4, "float8_e4m3fn"),
        "routing": lambda _: jhg.moe.route(A[:, :8].astype(jnp.float32), 2),
    }[name])(wide)  # fmt: skip

    def function(x, argument):
        if name == "routing":
            return x, argument
        if name == "state":
            return jhg.matmul(x, wide, recipe=argument), argument
        return jhg.matmul(x, argument), argument

    program = exported(function, args=(A, argument))
    program = export.deserialize(program.serialize(vjp_order=1))
    (y, again), (expected, _) = program.call(A, argument), jax.jit(function)(A, argument)
    np.testing.assert_array_equal(y, expected)
    assert jax.tree.structure(again) == jax.tree.structure(argument)
    jax.tree.map(np.testing.assert_array_equal, again, argument)
