"""Primitives are defined in one call; a product says there what it asks for."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import source_info_util
from jax.interpreters import ad

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.product import Product
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.lowering.request import Request
from jax_hopper_gemm.primitives import define
from jax_hopper_gemm.primitives.define import Rules, define_primitive


def _scaled(x, y, *, by):
    return by * x * y


def _transposed(cotangent, x, y, *, by):
    return cotangent_of(x, scaled_p.bind(cotangent, y, by=by)), None


def cotangent_of(x, gradient):
    assert ad.is_undefined_primal(x)
    return gradient


scaled_p = define_primitive(
    "scaled", _scaled, rules=Rules(linear_in=(0,), transpose=_transposed,
    batch=lambda data, args, axes, by: (scaled_p.bind(*args, by=by), 0)),
)  # fmt: skip


def test_a_linear_operand_has_its_derivatives():
    x, y = jnp.arange(4.0), jnp.arange(4.0) + 1
    f = partial(scaled_p.bind, by=3)
    result, tangent = jax.jvp(lambda x: f(x, y), (x,), (jnp.ones(4),))
    np.testing.assert_array_equal(result, 3 * x * y)
    np.testing.assert_array_equal(tangent, 3 * y)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(f(x, y)))(x), 3 * y)
    np.testing.assert_array_equal(jax.jit(f)(x, y), 3 * x * y)


def test_the_rule_of_vmap_is_asked_where_an_operand_is_mapped():
    x = jnp.arange(8.0).reshape(2, 4)
    f = jax.vmap(partial(scaled_p.bind, by=2))
    np.testing.assert_array_equal(f(x, x), 2 * x * x)
    alone = jax.vmap(lambda _: scaled_p.bind(x, x, by=2), out_axes=None)
    np.testing.assert_array_equal(alone(x), 2 * x * x)


PRODUCT = Product(Subscripts.parse("mk,kn->mn"))


def _dot(x, y, *, product):
    return jnp.matmul(x, y)


def _request_of(avals, out_avals, *, product):
    (x, y), (out,) = avals, out_avals
    return Request(product.subscripts, x.shape, x.dtype.name, y.shape, y.dtype.name, out.dtype.name)


@pytest.fixture
def new_dot_p():
    primitive = define_primitive("new_dot", _dot, request_of=_request_of)
    yield primitive
    del define.PRODUCTS[primitive]


def test_a_new_product_is_reported_and_judged_as_a_dot(new_dot_p):
    x, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 768)))
    (found,) = jhg.explain(partial(new_dot_p.bind, product=PRODUCT), x, y).products
    assert found.taken and found.product.startswith("bf16[512,256] x bf16[256,768]")
    assert found.explanation is not None and found.explanation.problem is not None

    def block(z: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(z * new_dot_p.bind(x, y, product=PRODUCT))

    policies, z = jax.checkpoint_policies, jax.ShapeDtypeStruct((512, 768), jnp.bfloat16)
    for policy, count in ((policies.dots_saveable, 1), (policies.nothing_saveable, 2)):
        gradient = jax.grad(jax.checkpoint(block, policy=policy))
        assert str(jax.make_jaxpr(gradient)(z, x, y)).count(" new_dot[") == count


def test_equations_name_the_users_lines():
    array = jnp.zeros((64, 64), jnp.bfloat16)

    def layer(x: jax.Array) -> jax.Array:
        return jhg.gated_linear_unit(jhg.matmul(x, x), (x, x))

    (whole,) = jax.make_jaxpr(jhg.accelerate(layer))(array).jaxpr.eqns
    equations = whole.params["call_jaxpr"].jaxpr.eqns
    lines = [source_info_util.summarize(equation.source_info) for equation in equations]
    assert len(lines) == 2 and all(__file__ in line for line in lines)
