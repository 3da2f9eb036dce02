"""Epilogue steps: the user's arguments as one function of the product and its operands.

The functions are plain data: equal arguments give equal functions, and so one trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from ..gemm.product import Options
from . import checks
from .activations import Activation

# The type of what a product's function returns: its epilogue's results, or without one an array.
if TYPE_CHECKING:
    from typing_extensions import TypeVar  # before Python 3.13 `typing` has no default

    Results = TypeVar("Results", default=jax.Array)
else:
    Results = TypeVar("Results")

SCALES = ("lhs_scale", "rhs_scale")  # those of quantized operands, which the user does not name
OFFSET = "offset"  # what zero points of an operand add to the product
NAMED = (*SCALES, OFFSET, "alpha", "c", "beta", "bias", "residual")  # operands of `Steps`, in order
FACTORS = ("alpha", "beta")


@dataclass(frozen=True)
class Steps:
    """`epilogue(activation(alpha * product + beta * c + bias) + residual, *others)`."""

    op: str  # the function that the user called, for messages
    named: tuple[str, ...] = ()  # the arguments of `NAMED` that are set: the first operands
    activation: Activation | None = None
    epilogue: Callable[..., Any] | None = None
    permutation: tuple[int, ...] | None = None  # of the axes of what the epilogue gets

    @property
    def plain(self) -> bool:
        """Whether nothing follows the product."""
        return not self.named and self.activation is None and self.epilogue is None

    def after(self, product: Any, operands: tuple[Any, ...], dtype: Any, dtypes: Any) -> Any:
        """Returns a product and what follows it, computed by XLA; the dtypes are as in `traced`."""
        if self.plain:
            return product
        return traced(self, (product,), operands, dtype, dtypes).apply(product)

    def dtypes(self, preferred: Any, default: Any) -> tuple[Any, Any, Any]:
        """Returns the dtypes of a product, of what follows it, and of several results or None.

        Args:
          preferred: the user's dtype, or one for each result; None: the default.
        """
        several = preferred if isinstance(preferred, tuple) else None
        whole = jnp.dtype(default if preferred is None or several else preferred)
        return whole if self.plain else jnp.dtype("float32"), whole, several

    def __call__(self, product: jax.Array, *operands: jax.Array) -> Any:
        terms = {x: _as(product, y) for x, y in zip(self.named, operands, strict=False)}
        y = product
        for name in SCALES:
            y = y * terms[name] if name in terms else y
        if OFFSET in terms:
            y = y - terms[OFFSET]
        if "alpha" in terms:
            y = terms["alpha"] * y
        if "c" in terms:
            y = y + (terms["beta"] * terms["c"] if "beta" in terms else terms["c"])
        if "bias" in terms:
            y = y + terms["bias"]
        y = activated(self.op, self.activation, y)
        if "residual" in terms:
            y = y + terms["residual"]
        if self.epilogue is None:
            return y
        y = y if self.permutation is None else lax.transpose(y, self.permutation)
        return checks.call(self.op, "epilogue", self.epilogue, y, *operands[len(terms) :])


@dataclass(frozen=True)
class Gate:
    """`scale * activation(gate + gate_bias) * (up + up_bias)`, with or without biases and scale."""

    op: ClassVar[str] = "gated_linear_unit"
    named: ClassVar[tuple[str, ...]] = ()
    permutation: ClassVar[None] = None

    activation: Activation | None = None
    scaled: bool = False  # whether the last operand is the scale
    factors: int = 0  # how many of the first ones are factors: of gate, of up, and a third of both

    def __call__(self, gate: jax.Array, up: jax.Array, *operands: jax.Array) -> jax.Array:
        for i, factor in enumerate(operands[: self.factors]):
            gate = gate if i == 1 else gate * _as(gate, factor)
            up = up if i == 0 else up * _as(up, factor)
        operands = operands[self.factors :]
        biases = operands[: len(operands) - self.scaled]
        if biases:
            gate, up = (y + _as(y, b) for y, b in zip((gate, up), biases, strict=True))
        hidden = activated(self.op, self.activation, gate) * up
        return _as(hidden, operands[-1]) * hidden if self.scaled else hidden


def with_range(options: Options, steps: Steps | Gate, x: Any) -> Options:
    """Returns options by which cotangents keep their range.

    Those of products with scaled weights come times scales, which are too small for float16. They
    stay float32, but where the user says otherwise or takes a kernel or an error.

    Args:
      x: an operand of the product.
    """
    scaled = not set(SCALES).isdisjoint(steps.named) or getattr(steps, "factors", 0)
    float16 = scaled and jnp.result_type(x) == jnp.float16
    if not float16 or options.cotangent_dtype or options.insists or options.by_jax:
        return options
    return replace(options, cotangent_dtype=np.dtype(np.float32))


def named_in(terms: Mapping[str, Any], *arrays: Any) -> tuple[str, ...]:
    """Returns `Steps.named` for the operands that are set, by name.

    A factor of 1 is left out, but for 1.0 where the product is one of `arrays` of integers: floats
    come of it. Every other factor is an operand, so that no value needs its own kernel.
    """
    integers = arrays and not any(jnp.issubdtype(jnp.result_type(x), np.inexact) for x in arrays)
    scalars = int if integers else checks.SCALARS
    ones = [x for x in FACTORS if isinstance(terms.get(x), scalars) and terms[x] == 1]
    return tuple(x for x in NAMED if x in terms and x not in ones)


def activated(op: str, activation: Activation | None, y: jax.Array) -> jax.Array:
    if activation is None:
        return y
    out = checks.call(op, "activation", activation, y)
    checks.check_activated(op, out, y)
    return out


def _as(y: jax.Array, operand: jax.Array) -> jax.Array:
    """Returns an operand in the dtype that a sum of floats is computed in, and of the rank of `y`.

    It broadcasts even where the user tells `jax.numpy` not to promote ranks.
    """
    if jnp.issubdtype(y.dtype, np.inexact):
        operand = lax.convert_element_type(operand, y.dtype)
    missing = range(y.ndim - operand.ndim)
    return lax.expand_dims(operand, missing) if operand.ndim and missing else operand


def result_dtypes(function: Steps | Gate, preferred: Any) -> tuple[Any, ...] | None:
    """Returns the dtypes of all results by the user's `preferred` ones; None where it names none.

    A single one is that of the product's own result, and says nothing of an epilogue's.
    """
    if preferred is None or isinstance(preferred, tuple):
        return preferred
    if isinstance(function, Steps) and function.epilogue is not None:
        return None
    return (jax.dtypes.canonicalize_dtype(preferred),)


@dataclass(frozen=True)
class Traced:
    """A function of products, traced once for the types of its results."""

    function: Callable[..., Any]  # of the products and `operands`
    operands: tuple[Any, ...]  # all, with the arrays that the user's function closes over
    dtypes: tuple[Any, ...]  # of the results
    shapes: tuple[tuple[Any, ...], ...]  # of the results
    several: bool  # whether the user's function returns a tuple

    def apply(self, *products: jax.Array) -> Any:
        """Returns the results of the function, computed by XLA from the products."""
        results = self.function(*products, *self.operands)
        flat = results if isinstance(results, tuple) else (results,)
        cast = tuple(map(lax.convert_element_type, flat, self.dtypes))
        return self.structured(cast)

    def in_place(self, named: tuple[str, ...], product: Any) -> tuple[int, ...]:
        """Returns which operand the first result may overwrite: `c`, if alike; `named` has it."""
        if "c" not in named:
            return ()
        index = named.index("c")
        c = self.operands[index]
        taken = (jnp.shape(c), jnp.result_type(c))
        alike = taken == (product.shape, self.dtypes[0]) and product.shape == self.shapes[0]
        return (index,) if alike else ()

    def structured(self, results: Sequence[Any]) -> Any:
        """Returns the results as the user's function would."""
        return tuple(results) if self.several else results[0]


def traced(
    function: Any,
    products: Sequence[Any],
    operands: Sequence[Any],
    product_dtype: Any,
    preferred: Any,
) -> Traced:
    """Traces a function of products.

    A result with the shape and dtype of an epilogue's argument is converted to `product_dtype`;
    every other result keeps its dtype. If not None, `preferred` has the dtypes of the results.

    Args:
      function: `Steps`, `Gate` or `Settled`, of the products and operands.
      products: arrays or `jax.ShapeDtypeStruct`s.
    """
    closed, avals, several = program(function, products, operands)
    checks.check_result_dtypes(function.op, avals, preferred)
    (shape,), (dtype,) = {x.shape for x in products}, {x.dtype for x in products}
    if function.permutation is not None:
        shape = tuple(shape[axis] for axis in function.permutation)
    dtypes = tuple(
        wanted or (product_dtype if (x.shape, x.dtype) == (shape, dtype) else x.dtype)
        for x, wanted in zip(avals, preferred or [None] * len(avals), strict=True)
    )
    if closed.consts:
        function = partial(evaluate, closed, len(products) + len(operands))
    return Traced(
        function,
        (*operands, *closed.consts),
        tuple(map(jnp.dtype, dtypes)),
        tuple(x.shape for x in avals),
        several,
    )


def program(
    function: Any, products: Sequence[Any], operands: Sequence[Any]
) -> tuple[Any, Any, bool]:
    """Returns a function's jaxpr, types of its results, and whether it returns a tuple."""
    several = []

    def flat(*args: Any) -> tuple[Any, ...]:
        out = function(*args)
        results = checks.results(function.op, out)
        several.append(isinstance(out, tuple))
        return results

    closed, avals = jax.make_jaxpr(flat, return_shape=True)(*products, *operands)
    return closed, avals, several[-1]


def evaluate(closed: Any, num_inputs: int, *args: jax.Array) -> tuple[jax.Array, ...]:
    """Evaluates a program on its inputs, followed by its constants."""
    return tuple(eval_jaxpr(closed.jaxpr, args[num_inputs:], *args[:num_inputs]))
