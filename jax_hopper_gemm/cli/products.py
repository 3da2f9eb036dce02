"""Command-line parameters that describe products: extents, suites, dtypes, layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from ..gemm.dtypes import OPERANDS, RESULTS, short_name
from ..gemm.problem import GemmProblem

Extents = tuple[int, int, int]


class PositiveType(click.ParamType):
    """A number from 1."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if re.fullmatch(r"[1-9]\d*", str(value)):
            return int(value)
        return self.fail(f"{value!r} is not a positive number.", param, ctx)


POSITIVE = PositiveType()


class ExtentsType(click.ParamType):
    """MxNxK, as 4096x4096x4096."""

    name = "MxNxK"

    def convert(self, value: Any, param: Any, ctx: Any) -> Extents:
        if found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", str(value)):
            m, n, k = map(int, found.groups())
            return m, n, k
        return self.fail(f"{value!r} is not MxNxK, as 4096x4096x4096.", param, ctx)


class ProductsType(ExtentsType):
    """MxNxK, or the name of a suite."""

    name = "MxNxK|SUITE"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from ..testing import shapes

        if value in shapes.SUITES:
            return value
        if re.match(r"\d", str(value)):
            return super().convert(value, param, ctx)
        names = ", ".join(shapes.SUITES)
        return self.fail(
            f"{value!r} is neither MxNxK, as 4096x4096x4096, nor a suite: {names}.", param, ctx
        )


class DtypeType(click.Choice):
    """A dtype by JAX's short name, as explain prints it, or by its whole name."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = {short_name(name): name for name in names}
        super().__init__([*self.names])

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        short = value if value in self.names else short_name(str(value))
        known = short in self.names and value in (short, self.names[short])
        return self.names[super().convert(short if known else value, param, ctx)]


_OPTIONS = (
    click.option(
        "--batch", "l", type=POSITIVE, default=1, metavar="L", help="Products of a batch [1]."
    ),
    click.option(
        "--a-major", type=click.Choice(["k", "m"]), default="k",
        help="A is stored (M, K) or (K, M) [k].",
    ),
    click.option(
        "--b-major", type=click.Choice(["n", "k"]), default="n",
        help="B is stored (K, N) or (N, K) [n].",
    ),
    click.option("--dtype", type=DtypeType(OPERANDS), default="bf16", help="Of A and B [bf16]."),
    click.option(
        "--result-dtype", "d_dtype", type=DtypeType((*RESULTS, "int32")),
        help="Of D [that of A and B].",
    ),
)  # fmt: skip


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that describe a product besides M, N and K, as in `GemmProblem.dense`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def problems(wanted: Sequence[Extents | str], **described: Any) -> list[GemmProblem]:
    """Returns the problems of extents and of suites, each once."""
    from ..testing import shapes

    one = partial(GemmProblem.dense, **described)
    found = [shapes.suite(x) if isinstance(x, str) else (one(*x),) for x in wanted]
    return list(dict.fromkeys(x for some in found for x in some))
