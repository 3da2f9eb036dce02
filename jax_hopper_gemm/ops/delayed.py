"""Delayed scaling: scales from the largest magnitudes of former steps, kept as Flax keeps them.

The state of a product is an argument of the function that is differentiated, and its "gradient" is
the next state: it takes the state's place (Flax: the collection `_overwrite_with_gradient`). So a
tensor is quantized in one pass, by a scale that is known before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..fusion.jaxprs import abstract, varying_together
from ..gemm.product import Options, Product
from ..gemm.recipes import E4M3, Float8
from ..gemm.subscripts import Subscripts
from ..primitives.auto_axes import in_auto_axes, is_explicit, stated_sharding
from ..primitives.by_recipe import Operand, Operands, multiplied
from ..primitives.dot import hopper_dot
from ..primitives.quantize import largest_magnitude, rounded, scale_of
from .contexts import in_contexts
from .dense_run import INLINE
from .quantized import STATIC, dtype_name, storable, tell_flax
from .steps import Steps

ACTIVATIONS, WEIGHTS, COTANGENTS = range(3)


@storable
@dataclass(frozen=True)
class DelayedScaling:
    """One scale for each tensor, from its largest magnitudes at former steps.

    A recipe with a state: one for each product, of `matmul` and `dot_general`. Differentiate by it
    too; what comes as its gradient is the state of the next step. So products by it have a first
    derivative alone, in reverse mode.

        state = recipes.DelayedScaling.initial()
        dw, state = jax.grad(loss, (0, 1))(w, state, x)  # jhg.matmul(x, w, recipe=state)

    Numbers beyond the largest one become it, which a scale of former steps may let happen. JAX adds
    gradients up, and so it would add the states of several calls: of products that share a state,
    of mapped examples, of steps of a loop that reads one state, or of batches that are accumulated.

    Inside `jax.shard_map` devices that share a state get the largest magnitudes of all; with
    `check_vma=False` JAX does not tell who shares one, and adds the states up.

    Attributes:
      scale: (3,) float32, of activations, weights and cotangents, as last used.
      amax_history: (3, length) float32, the largest magnitudes of as many steps: the last one,
        then from the oldest on. The next scale is their maximum / the largest number of the dtype.
      gradients: dtype of cotangents; activations and weights are float8_e4m3fn.
    """

    scale: jax.Array
    amax_history: jax.Array
    gradients: Float8 = field(default="float8_e5m2", metadata=STATIC)

    __post_init__ = tell_flax

    @classmethod
    def initial(cls, length: int = 1024, gradients: Float8 = "float8_e5m2") -> DelayedScaling:
        """Returns the state before the first step: scales of 1, no magnitude seen."""
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise ValueError(
                f"DelayedScaling.initial: length is {length!r}, expected an int from 1"
            )
        scale, history = np.ones(3, np.float32), np.zeros((3, length), np.float32)
        name: Any = gradients if isinstance(gradients, str) else dtype_name(gradients)
        return cls(jnp.asarray(scale), jnp.asarray(history), name)

    def current_scale(self, number: int) -> jax.Array:
        """Returns the scale of a tensor at this step.

        No finite magnitude above 0 in the history: the scale stays.
        """
        dtype = self.gradients if number == COTANGENTS else E4M3
        largest = largest_magnitude(self.amax_history[number])
        known = (largest > 0) & jnp.isfinite(largest)
        return jnp.where(known, scale_of(largest, dtype), self.scale[number])

    def updated(self, scales: Sequence[Any], amaxes: Sequence[Any]) -> DelayedScaling:
        """Returns the state after a step, of its scales and largest magnitudes.

        Inside `jax.shard_map` devices that have one state have shards of one tensor, whose largest
        magnitude is the largest of theirs.
        """
        amax, history = jnp.stack(varying_together(*amaxes)), self.amax_history
        amax_axes, own_axes = (jax.typeof(x).manual_axis_type.varying for x in (amax, history))
        if shared := tuple(amax_axes - own_axes):
            amax = lax.pmax(amax, shared)
        history = jnp.roll(history, -1, 1).at[:, 0].set(amax)
        return replace(self, scale=jnp.stack(scales), amax_history=history)


@dataclass(frozen=True)
class _Rule:
    """What is static of a product; `options` have its dtype."""

    op: str
    subscripts: Subscripts
    options: Options
    out_sharding: Any

    def multiply(self, product: Product, *pairs: Any) -> Any:
        """Returns a product of two pairs of values and scales."""
        if is_explicit(pairs):  # axes may be merged
            like = abstract(partial(hopper_dot, product=product), *(x for x, _ in pairs))
            inside = partial(self.multiply, replace(product, out_sharding=None))
            return in_auto_axes(inside, like.sharding, *pairs)
        subscripts, dtype = product.subscripts, product.options.preferred_element_type
        left, right = (
            Operand(x, letters, scale.reshape((1,) * x.ndim))
            for (x, scale), letters in zip(pairs, (subscripts.lhs, subscripts.rhs), strict=True)
        )
        return multiplied(Operands(left, (right,), product, blocks=False).aligned(), dtype)

    def gradient(self, subscripts: Subscripts, like: Any, values: Any, *pairs: Any) -> Any:
        """Returns the gradient of an operand, of the dtype of `like` and sharded as `values`."""
        options = replace(
            self.options, precision=(lax.Precision.HIGHEST,) * 2, preferred_element_type=like.dtype
        )
        sharding = stated_sharding(jax.typeof(values))
        return self.multiply(Product(subscripts, options, sharding), *pairs)

    def forward(self, x: Any, w: Any, state: DelayedScaling) -> Any:
        """Returns the product, then what the backward pass needs: 8 bits of an element."""
        found = [_quantized(a, state, i, E4M3) for i, a in enumerate((x, w))]
        pairs, amaxes = zip(*found, strict=True)
        y = self.multiply(Product(self.subscripts, self.options, self.out_sharding), *pairs)
        like = tuple(jnp.zeros((), a.dtype) for a in (x, w))
        return y, (pairs, amaxes, state, like)

    def backward(self, residuals: Any, dy: Any) -> Any:
        (x, w), amaxes, state, (x_like, w_like) = residuals
        ct, last = _quantized(dy, state, COTANGENTS, state.gradients)
        dx = self.gradient(self.subscripts.transpose_lhs(), x_like, x[0], ct, w)
        dw = self.gradient(self.subscripts.transpose_rhs(), w_like, w[0], ct, x)
        scales = [scale for _, scale in (x, w, ct)]
        return dx, dw, state.updated(scales, [*amaxes, last])


def _quantized(x: Any, state: DelayedScaling, number: int, dtype: str) -> Any:
    """Returns values with their scale, and the largest magnitude."""
    wide, scale = x.astype(jnp.float32), state.current_scale(number)
    return (rounded(wide / scale, dtype), scale), largest_magnitude(wide)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: Any, w: Any, state: DelayedScaling, rule: _Rule) -> Any:
    return rule.forward(x, w, state)[0]


_product.defvjp(
    lambda x, w, state, rule: _once(rule.forward, rule.op, x, w, state),
    lambda rule, residuals, dy: _once(rule.backward, rule.op, residuals, dy),
)
_traced = jax.jit(_product, static_argnums=(3,), inline=INLINE)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _once(function: Callable[..., Any], op: str, *arrays: Any) -> Any:
    """Calls a rule's function, whose own derivative is an error."""
    return function(*arrays)


@_once.defjvp
def _(function: Any, op: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{op}: with DelayedScaling a product has a first derivative in reverse mode alone, as the "
        "gradient of its state is a rule: take another recipe where you differentiate twice"
    )


def run_delayed(
    state: DelayedScaling,
    arrays: tuple[Any, Any],
    dimension_numbers: Any,
    steps: Steps,
    following: tuple[Any, ...],
    options: Options,
    out_sharding: Any,
) -> Any:
    """Returns a product by delayed scaling, and what follows it, as in `run_quantized`.

    Args:
      arrays: floats; the right one is the weights.
      options: `preferred_element_type` None is the promoted dtype of the operands.
    """
    x, w = map(jnp.asarray, arrays)
    dtype, whole, several = steps.dtypes(options.preferred_element_type, jnp.result_type(x, w))
    options = in_contexts(replace(options, preferred_element_type=dtype))
    subscripts = Subscripts.of_dot_general(dimension_numbers, x.ndim, w.ndim)
    x, w, *_ = varying_together(x, w, state.scale, state.amax_history)  # as the product does
    if out_sharding is not None:  # as JAX completes it
        by_jax = partial(lax.dot_general, dimension_numbers=dimension_numbers)
        out_sharding = abstract(partial(by_jax, out_sharding=out_sharding), x, w).sharding
    product = _traced(x, w, state, _Rule(steps.op, subscripts, options, out_sharding))
    return steps.after(product, following, whole, several)
