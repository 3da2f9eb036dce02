"""Our products in place of those that a function requests from JAX: `accelerate`, and a context."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax import lax
from jax.core import Tracer

from ..ops import checks
from ..ops.dense import Implementation
from ..ops.ragged import ragged_dot, ragged_dot_general
from ..ops.recipes import Recipe, as_recipe
from .rewrite_jaxpr import Rewriting, run_with_our_products

P = ParamSpec("P")
R = TypeVar("R")


def accelerate(
    function: Callable[P, R],
    *,
    implementation: Implementation = None,
    fuse: bool = True,
    recipe: Recipe | None = None,
) -> Callable[P, R]:
    """Returns a function like `function`, whose products are those of this library.

        step = jax.jit(jhg.accelerate(train_step))
        print(jhg.explain(train_step, state, batch))

    The function is traced, as by `jax.jit`, and every `jax.lax.dot_general`, `jax.numpy.matmul`,
    `dot`, `einsum`, `jax.lax.ragged_dot` and `ragged_dot_general` of two arrays of bfloat16, of
    float16, of float32, of int8 or of 8-bit floats, or of 16-bit floats by weights of 8 or 4 bits,
    in its program is replaced by ours, with the same precision, dtype and sharding of the result.
    Products of other dtypes stay, and unless `implementation` is "hopper" batches whose rows or K
    lie in several places, as of heads that share keys, if the result is larger than what is
    multiplied, as logits are: XLA stores such a result in the order that suits all that read it.
    JAX is not patched, so other functions and other threads are not affected.

    Each product takes along the elementwise operations around it where the cost model expects its
    kernel to be faster than XLA with them: bias, activation, residual, mask, cast, sums of columns
    (a bias's gradient) and of rows, statistics of a softmax, the derivative of an activation, the
    update of a weight by its gradient. Two products of one array that meet become one gated kernel,
    and so does one that is cut into halves which meet; up to four others of one array, as of query,
    key and value, that take along the same operations or none, are launched together; several
    readers of a product become several results of its kernel. What a kernel computes is not rounded
    in between, unless rows are reduced to statistics that meet it again: it sees the float32
    product, and rounds results to the dtypes of the program. So results are those of the program or
    more exact. XLA computes the rest.

    Inner programs are rewritten too: `jax.jit`, `jax.checkpoint`, `scan`, `while_loop`, `cond`,
    `shard_map`, and functions with a custom derivative, together with its rule, if the function
    itself has a product. Everything else about them stays: names, donation, unrolling, and policies
    of `jax.checkpoint`, which take our products, ragged ones too, for dots. Kernels such as
    `pallas_call`, the rules of `custom_vmap` and callbacks to the host stay unchanged.

    The result can be jitted, differentiated in any mode and order, mapped by `jax.vmap`, exported,
    and called anywhere in other programs. Outside of `jax.jit` each call traces anew.

    Args:
      function: a function of any arguments and results. Arrays anywhere in the arguments are
        traced; everything else, such as numbers, strings and `None`, is passed unchanged. It must
        have no side effects except those of JAX; for a function that changes Flax nnx modules use
        `jax_hopper_gemm.nn.accelerate`.
      implementation: None takes a kernel where it is faster; "hopper" insists on a kernel for every
        replaced product, in derivatives too; "xla" replaces none.
      fuse: whether products take operations along. False replaces products one by one, with the
        roundings of the program between them and what follows. An `accelerate` around the result,
        or `explain` of it, fuses them, unless `fuse` is False there too.
      recipe: one of `jax_hopper_gemm.recipes`, of all replaced products of 16-bit floats without
        batch axes, in derivatives of the result too. A gradient that the function itself takes is
        a product like any other: its cotangents are quantized as activations are. Arguments, and
        what casts, transposes or cuts them, are the weights.

    Raises:
      TypeError: `function` is not callable, or `fuse` no bool.
      ValueError: `implementation` is something else; or, in a call, `function` stores an array in
        an argument of a class that JAX knows as a pytree, no list, tuple or dict, and does not
        return the array. An object that `jax.jit` or `jax.vmap` makes for the call may change, as
        without `accelerate`: nobody else has it. Lists and dicts are copies, as in `jax.jit`.
      NotImplementedError: as of `matmul`, while lowering, with `implementation="hopper"`.
    """
    checks.check_accelerated("accelerate", function, implementation, fuse)
    as_recipe("accelerate", recipe)
    if implementation == "xla":
        return function

    @wraps(function)
    def accelerated(*args: P.args, **kwargs: P.kwargs) -> R:
        # Tracers of JAX make the objects of their calls; `jax.grad` hands on its caller's.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        made = caller.startswith("jax._src.interpreters.")
        leaves = map(jax.tree.leaves, _objects_in((args, kwargs)))
        held = [not (made and any(isinstance(x, Tracer) for x in own)) for own in leaves]

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            objects = [x for x, y in zip(_objects_in((args, kwargs)), held, strict=True) if y]
            before = [jax.tree.leaves(x) for x in objects]
            result = function(*args, **kwargs)
            returned = jax.tree.leaves(result)
            for x, leaves in zip(objects, before, strict=True):
                checks.check_unchanged(x, leaves + returned)
            return result

        return run_with_our_products(checked, args, kwargs, Rewriting(implementation, fuse, recipe))

    return accelerated


def _objects_in(tree: Any) -> list[Any]:
    """Returns the pytrees in a tree whose type is not a Python container."""
    return jax.tree.leaves(tree, is_leaf=lambda x: type(x) not in (dict, list, tuple, type(None)))


@contextmanager
def intercept_ragged_dot(*, implementation: Implementation = None) -> Iterator[None]:
    """Replaces `jax.lax.ragged_dot` and `ragged_dot_general` by those of this library.

        with jhg.intercept_ragged_dot():
            state = train_step(state, batch)  # calls jax.lax.ragged_dot somewhere

    It sets the attributes `jax.lax.ragged_dot` and `jax.lax.ragged_dot_general` and restores them
    on exit. So it affects code that looks them up while it is traced, in every thread of the
    process. It does not affect code that imported the functions from `jax.lax` before, nor programs
    that `jax.jit` traced before. Programs traced inside keep our products after exit. Do not leave
    the context in one thread while another is inside.

    Args:
      implementation: as in `ragged_dot`.
    """
    theirs = lax.ragged_dot, lax.ragged_dot_general
    ours: Any = (ragged_dot, ragged_dot_general)
    lax.ragged_dot, lax.ragged_dot_general = (
        wraps(function)(partial(function, implementation=implementation)) for function in ours
    )
    try:
        yield
    finally:
        lax.ragged_dot, lax.ragged_dot_general = theirs
