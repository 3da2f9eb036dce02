"""`accelerate` for functions of nnx modules, which keeps their changes to modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from flax import nnx

from .. import interop, reports
from ..ops.dense import Implementation
from ..ops.recipes import Recipe

P = ParamSpec("P")
R = TypeVar("R")

TAG = "jax_hopper_gemm.accelerate"  # of nnx's context, in which objects keep their identity


def accelerate(
    function: Callable[P, R],
    *,
    implementation: Implementation = None,
    fuse: bool = True,
    recipe: Recipe | None = None,
) -> Callable[P, R]:
    """`jax_hopper_gemm.accelerate` for functions of Flax nnx modules and optimizers.

        @nnx.jit
        @nn.accelerate
        def train_step(model, optimizer, x, y):
            loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
            optimizer.update(model, gradients)
            return loss

    As with `nnx.jit`, modules may share variables, and the function's changes to its arguments
    persist after the call: parameters, statistics, counts of random numbers, intermediates.

    Args:
      function: a function of modules, optimizers and anything else, positional or by keyword.
        Modules that it closes over must not change.
      implementation, fuse, recipe: as in `jax_hopper_gemm.accelerate`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `jax_hopper_gemm.accelerate`.
    """
    options: dict[str, Any] = {"implementation": implementation, "fuse": fuse, "recipe": recipe}
    if implementation == "xla" or not callable(function):
        return interop.accelerate(function, **options)
    pure = interop.accelerate(_pure(function), **options)

    @wraps(function)
    def accelerated(*args: P.args, **kwargs: P.kwargs) -> R:
        with nnx.update_context(TAG):
            outputs = pure(nnx.to_tree((args, kwargs), ctxtag=TAG))
            _, result = nnx.from_tree(outputs, ctxtag=TAG, is_inner=False)
            return result

    return accelerated


def explain(
    function: Callable[..., Any],
    /,
    *args: Any,
    implementation: Implementation = None,
    fuse: bool = True,
    recipe: Recipe | None = None,
    **kwargs: Any,
) -> reports.ProductReport:
    """`jax_hopper_gemm.explain` for functions of nnx modules, which stay unchanged.

    Modules that share variables need this function.

    Args:
      function: as in `accelerate`, or what `accelerate` or `nnx.jit` made of it.
      *args, **kwargs: the function's; modules may be those of `nnx.eval_shape`.
      implementation, fuse, recipe: those of `accelerate`.

    Raises:
      ValueError, TypeError: as the function would.
    """
    if callable(function):
        function = _pure(function)
    with nnx.update_context(TAG):
        arguments = nnx.to_tree((args, kwargs), ctxtag=TAG)
        return reports.explain(
            function, arguments, implementation=implementation, fuse=fuse, recipe=recipe
        )


def _pure(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a pure function: from trees of arguments to trees of changed arguments and results.

    Trees are those of `nnx.to_tree`, within `nnx.update_context(TAG)`.
    """

    @wraps(function)
    def pure(arguments: Any) -> Any:
        args, kwargs = nnx.from_tree(arguments, ctxtag=TAG, is_inner=True)
        result = function(*args, **kwargs)
        return nnx.to_tree((_objects_in((args, kwargs)), result), ctxtag=TAG)

    return pure


def _objects_in(tree: Any) -> Any:
    """Returns the tree with None in place of leaves that are neither modules nor variables."""

    def is_object(x: Any) -> bool:
        return isinstance(x, nnx.Variable | nnx.Pytree)

    return jax.tree.map(lambda x: x if is_object(x) else None, tree, is_leaf=is_object)
