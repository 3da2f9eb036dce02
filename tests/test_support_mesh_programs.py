"""The programs for two GPUs, and the kernels that are built for them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.mesh_programs import MESH_PROGRAMS, PRODUCTS, shares_noted

import jax_hopper_gemm as jhg

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("launcher")]


@pytest.mark.parametrize("name", MESH_PROGRAMS)
def test_every_product_of_a_share_is_a_kernel(name):
    program = MESH_PROGRAMS[name]
    specs = program.specs()
    assert len(specs) == program.launches
    cut = name in ("bias and gelu, k sharded", "experts, groups sharded", *PRODUCTS)
    cut = cut or "ragged product" in name
    assert any(spec.epilogue for spec in specs) != cut


def test_ours_are_the_plain_functions():
    program = MESH_PROGRAMS["MLP, hidden sharded"]
    arguments = program.arguments()
    with pytest.raises(NotImplementedError, match="kernels run on CUDA"):
        jax.jit(program.ours)(*arguments[1:])
    result, *gradients = jax.jit(lambda *args: program.step(program.plain, *args))(*arguments)
    assert [x.shape for x in gradients] == [x.shape for x in arguments[1:]]
    assert 0.5 < float(np.std(np.float32(result))) < 2


def test_shares_are_noted_where_a_mesh_is_set():
    found = []
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, P("x"))
    a = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16, sharding=rows)
    b = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    with jax.set_mesh(mesh), shares_noted(found):
        product = partial(jhg.matmul, implementation="hopper")
        jax.jit(product).lower(a, b).compile()
    assert len(found) == 1
