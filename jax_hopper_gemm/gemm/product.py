"""A product for any extents: what is multiplied, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from .groups import Groups, gate_up_letter
from .recipes import ByRecipe
from .subscripts import Subscripts

Implementation = Literal["hopper", "xla"] | None


@dataclass(frozen=True)
class Options:
    """How a product is computed. Equal options are one key of a cache: lists become tuples."""

    # None takes a kernel where it is the faster way, "hopper" insists on one, "xla" takes none.
    implementation: Implementation = None
    precision: Any = None  # parameter of `lax.dot_general`
    # The product's dtype, or None; with an epilogue it may be a tuple: dtypes of the results.
    preferred_element_type: Any = None
    save_preactivation: bool = True  # else gradients compute the product anew
    # In which dtype cotangents enter the products of the gradients; None: as they come.
    cotangent_dtype: Any = None
    max_sms: int | None = None  # how many SMs a kernel may use; None: all
    # Whether a row's bits depend neither on the number of rows nor on the others; needs a kernel.
    batch_invariant: bool = False
    recipe: ByRecipe | None = None  # by which the operands are quantized

    def __post_init__(self) -> None:
        for name in ("precision", "preferred_element_type"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        try:
            hash(self.precision)
        except TypeError:  # an array, say, in its place
            raise TypeError(
                f"precision is a {type(self.precision).__name__}, expected what jax.numpy.matmul "
                "takes, such as jax.lax.Precision.HIGHEST or its name"
            ) from None

    @property
    def insists(self) -> str | None:
        """The argument by which the user takes a kernel or, on a GPU, an error; None: no one."""
        if self.implementation == "hopper":
            return "implementation='hopper'"
        return "batch_invariant=True" if self.batch_invariant else None

    @property
    def by_jax(self) -> bool:
        """Whether the product, with its gradients, is JAX's own."""
        return self.implementation == "xla" and not (self.cotangent_dtype or self.recipe)

    def of_dot(self) -> dict[str, Any]:
        """Returns those options that JAX's own products have, as their arguments."""
        names = ("precision", "preferred_element_type")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Product:
    """The static parameters of a product of two arrays."""

    # A ragged product has one of the forms in `gemm.groups`, or "mk,gkcn->mn" where its weights
    # hold gate and up.
    subscripts: Subscripts
    options: Options = Options()
    out_sharding: Any = None  # that of the result
    # Of a ragged product, which runs of its rows belong to which group. The sizes that cut the
    # rows are one more operand, behind the right one.
    groups: Groups | None = None
    # How many axes `vmap` put in front of those of a ragged product with an epilogue: of the left
    # operand, the sizes and the result, and of the right operands unless all share them, which
    # those of a contraction do not.
    batch: int = 0
    # Letters of axes that `vmap` added to a product without groups. A recipe takes what lies along
    # them for so many arrays.
    mapped: str = ""

    @property
    def gate_up(self) -> str:
        """The letter that tells gate from up in a right operand that holds both, or ""."""
        return gate_up_letter(self.subscripts) if self.groups else self.subscripts.gate_up

    @property
    def num_sizes_operands(self) -> int:
        """How many operands hold sizes of groups: 1 or 0."""
        return 1 if self.groups else 0

    def gate_up_axis(self) -> int | None:
        """Returns the axis of gate and up in a result that holds both; None where none does."""
        if not self.gate_up:
            return None
        return self.batch + 1 if self.groups else self.subscripts.with_gate_up()[1]

    def with_options(self, **named: Any) -> Product:
        return replace(self, options=replace(self.options, **named))
