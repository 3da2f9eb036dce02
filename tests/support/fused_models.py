"""Models on products with an epilogue, beside plain JAX of the same arguments; transformations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from jax_hopper_gemm.fusion.jaxprs import abstract, varying_together
from jax_hopper_gemm.gemm.groups import is_varlen_k
from jax_hopper_gemm.gemm.product import Options, Product
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.primitives.accumulators import accumulators_of
from jax_hopper_gemm.primitives.define import accumulator_dtype
from jax_hopper_gemm.primitives.fused_dot import fused_dot


def fused_dot_of(function, factors, operands, product, *, out_dtypes=None, sizes=None, **arguments):
    """`fused_dot` of a function of any results, which may close over arrays, as `ops.steps` has it.

    Without `out_dtypes` results like the product are cast to its dtype, others keep theirs.
    """
    dtype, operands = product.options.preferred_element_type, tuple(map(jnp.asarray, operands))
    wide = product.with_options(preferred_element_type=accumulator_dtype(dtype))
    count, of_groups = len(factors), () if sizes is None else (sizes,)
    together = varying_together(*factors, *of_groups)
    factors, of_groups = together[:count], together[count:]
    products = abstract(partial(accumulators_of, wide, by_xla=True), factors[0], factors[1:],
                        *of_groups)  # fmt: skip
    rows = sizes is not None and not is_varlen_k(product.subscripts)
    like = products[0].update(weak_type=False)
    seen = [
        like.update(shape=(like.shape[0], x.shape[2]), dtype=x.dtype) if rows and x.ndim == 3 else x
        for x in operands
    ]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*products, *seen)
    results, structure = jax.tree.flatten(shapes)
    plain, count = (like.shape, like.dtype), len(products) + len(operands)
    out_dtypes = out_dtypes or [dtype if (x.shape, x.dtype) == plain else x.dtype for x in results]

    def flat(*args):
        return eval_jaxpr(closed.jaxpr, args[count:], *args[:count])

    found = fused_dot(
        flat, factors, (*operands, *closed.consts), product, out_dtypes=out_dtypes, sizes=sizes,
        **arguments,
    )  # fmt: skip
    return jax.tree.unflatten(structure, found)


def fused(function, lhs, rights, *operands, subscripts="mk,kn->mn", out_sharding=None, **options):
    rights = rights if isinstance(rights, tuple) else (rights,)
    arguments = {name: options.pop(name) for name in ("in_place", "out_dtypes") if name in options}
    settings: dict[str, Any] = {"preferred_element_type": jnp.result_type(lhs, *rights)}
    product = Product(Subscripts.parse(subscripts), Options(**settings | options), out_sharding)
    return fused_dot_of(function, (lhs, *rights), operands, product, **arguments)


def normal(*shape: int, seed: int = 0, dtype: Any = "float32", scale: float = 1.0) -> jax.Array:
    values = np.random.default_rng([seed, *shape]).normal(scale=scale, size=shape)
    return jax.device_put(values.astype(dtype))


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.04 * x**3)))


def gate(a, b):
    return a * jax.nn.sigmoid(a) * b


def gelu_mlp(options, x, w1, b1, w2, b2):
    y = fused(lambda acc, b: gelu(acc + b), x, w1, b1, **options)
    return fused(lambda acc, b: acc + b, y, w2, b2, **options)


def plain_gelu_mlp(x, w1, b1, w2, b2):
    return gelu(x @ w1 + b1) @ w2 + b2


def pair(options, x, w1, w2):
    return fused(gate, x, (w1, w2), **options)


def plain_pair(x, w1, w2):
    return gate(x @ w1, x @ w2)


def stacked(options, x, w):
    return fused(gate, x, w, subscripts="mk,kcn->mn", **options)


def plain_stacked(x, w):
    both = jnp.einsum("mk,kcn->mcn", x, w)
    return gate(both[:, 0], both[:, 1])


def several(options, x, w, b, r, s):
    def function(acc, b, r, s):
        y = jnp.exp(-jnp.square(acc * s + b)) + r
        return y, y.sum(0), jnp.sin(acc)

    y, total, sine = fused(function, x, w, b, r, s, subscripts="btk,kn->btn", **options)
    return y * total + sine


def plain_several(x, w, b, r, s):
    acc = jnp.einsum("btk,kn->btn", x, w)
    y = jnp.exp(-jnp.square(acc * s + b)) + r
    return y * y.sum(0) + jnp.sin(acc)


MODELS = {
    "gelu": (gelu_mlp, plain_gelu_mlp, [(3, 4), (4, 5), (5,), (5, 2), (2,)]),
    "pair": (pair, plain_pair, [(3, 4), (4, 5), (4, 5)]),
    "stacked": (stacked, plain_stacked, [(3, 4), (4, 2, 5)]),
    "several": (several, plain_several, [(2, 3, 4), (4, 5), (5,), (2, 3, 5), ()]),
}


def model(
    name: str, options: dict[str, Any] | None = None, dtype: Any = "float32", models: Any = MODELS
):
    ours, plain, shapes = models[name]
    arrays = [normal(*shape, seed=i, dtype=dtype, scale=0.5) for i, shape in enumerate(shapes)]
    return partial(ours, options or {}), plain, arrays


def assert_close(ours, theirs, tolerance: float = 1e-5) -> None:
    """Float32 throughout: what differs is the order of sums, and of a few products."""

    def check(x, y):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        scale = max(1.0, float(np.abs(y).max(initial=0)))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)

    jax.tree.map(check, ours, theirs)


def squared(function, *args):
    return (function(*args) ** 2).sum()


def everything(args):
    return tuple(range(len(args)))


TRANSFORMS = {
    "value": lambda f, args: f(*args),
    "grad": lambda f, args: jax.grad(partial(squared, f), everything(args))(*args),
    "grad of one": lambda f, args: jax.grad(partial(squared, f), len(args) - 1)(*args),
    "jacfwd": lambda f, args: jax.jacfwd(f, everything(args))(*args),
    "jacrev": lambda f, args: jax.jacrev(f, everything(args))(*args),
    "hessian": lambda f, args: jax.hessian(partial(squared, f), everything(args))(*args),
    "jacrev of jacrev": lambda f, args: jax.jacrev(jax.grad(partial(squared, f), 1), 1)(*args),
    "grad of grad": lambda f, args: jax.grad(
        lambda *a: sum((g**2).sum() for g in jax.grad(partial(squared, f), everything(args))(*a)),
        everything(args),
    )(*args),
    "jvp of grad": lambda f, args: jax.jvp(
        jax.grad(partial(squared, f), everything(args)), args, args
    ),
    "linearize": lambda f, args: jax.linearize(f, *args)[1](*args),
    "linear_transpose of vjp": lambda f, args: jax.linear_transpose(
        lambda ct: jax.vjp(f, *args)[1](ct), f(*args)
    )(tuple(args)),
    "checkpoint": lambda f, args: jax.grad(partial(squared, jax.checkpoint(f)), everything(args))(
        *args
    ),
    "checkpoint, all saved": lambda f, args: jax.grad(
        partial(squared, jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)),
        everything(args),
    )(*args),
}


def axes_of(shapes, *places):
    """Yields for each set of places the axes along which arguments are mapped."""
    for chosen in places:
        yield [min(len(shapes[i]), 1) if i in chosen else None for i in range(len(shapes))]
