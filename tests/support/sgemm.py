"""Products of float32 by FMA units: kernels, problems, the chains of operations of a result."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm import simt
from jax_hopper_gemm.gemm.problem import GemmProblem, Major, MatrixLayout
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

MAJORS: tuple[tuple[Major, Major], ...] = (("k", "n"), ("k", "k"), ("m", "n"), ("m", "k"))
TILES = ((128, 128), (64, 64), (64, 128), (128, 64), (256, 128))
# M, N, K and L. The first are those of the example that the kernel follows; prime numbers; less
# than a vector, a tile, a k-tile.
EXTENTS = {
    4: ((256, 128, 64, 1), (132, 260, 97, 3), (4, 4, 1, 1), (60, 388, 40, 2), (516, 8, 33, 1)),
    1: ((257, 131, 61, 1), (127, 263, 101, 3), (1, 1, 1, 1), (3, 389, 16, 2), (509, 2, 7, 1)),
}
LETTERS = tuple(product(("mk", "km"), ("kn", "nk"), ("mn", "nm")))  # all eight orders of axes
PROGRAM_EXTENTS = ({"m": 256, "n": 128, "k": 64}, {"m": 257, "n": 127, "k": 61})


def spec_of(
    a_major: Major, b_major: Major, width: int, tile: tuple[int, int] = (128, 128), tile_k: int = 16
) -> GemmSpec:
    return GemmSpec(
        "float32", "float32", "float32", a_major, b_major, *tile, tile_k, tile_scheduler="single",
        num_stages=simt.NUM_STAGES[tile_k], simt_width=width,
    )  # fmt: skip


def kernels() -> list[GemmSpec]:
    """Returns a kernel of every layout, width and tile, and some of other k-tiles and rings."""
    found = [
        spec_of(*majors, width, tile) for tile in TILES for majors in MAJORS for width in (4, 1)
    ]
    found += [
        spec_of(*majors, width, tile_k=tile_k)
        for tile_k in (8, 32)
        for majors in MAJORS
        for width in (4, 1)
    ]
    return [*found, replace(spec_of("m", "n", 4), num_stages=2)]


def problem_of(
    spec: GemmSpec, m: int, n: int, k: int, batches: int = 1, gap: int = 0
) -> GemmProblem:
    """Returns a problem for a kernel, with so many vectors behind each line and matrix."""
    apart = gap * spec.simt_width

    def layout(major: Major, contiguous: int, other: int) -> MatrixLayout:
        line = contiguous + apart
        return MatrixLayout(major, line, line * other + apart if batches > 1 else 0)

    return replace(
        GemmProblem.dense(m, n, k, batches, dtype="float32"),
        a=layout("k", k, m) if spec.a_major == "k" else layout("m", m, k),
        b=layout("n", n, k) if spec.b_major == "n" else layout("k", k, n),
        d=layout("n", n, m),
        simt=True,
    )


def problems(spec: GemmSpec) -> list[GemmProblem]:
    """Returns problems at the edges of a kernel, with gaps and without."""
    extents = EXTENTS[spec.simt_width]
    if spec.simt_width == 1:  # a gap of one makes lines of any length
        return [problem_of(spec, *x, gap=i % 2) for i, x in enumerate(extents)]
    return [problem_of(spec, *x, gap=3 * (i % 2)) for i, x in enumerate(extents)]


def chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns (L, M, N), the chains of fused multiply-adds that `gemm.simt` promises.

    A long double holds a product of float32 and, but for one case in 2**40, tells on which side of
    a float32 the sum lies.
    """
    wide_a, wide_b = a.astype(np.longdouble), b.astype(np.longdouble)
    assert np.finfo(np.longdouble).nmant >= 63, "long double is no wider than float64"
    total = np.zeros((*a.shape[:2], b.shape[2]), np.float32)
    for k in range(a.shape[2]):
        total = (total + wide_a[:, :, k, None] * wide_b[:, k, None, :]).astype(np.float32)
    return total


def einsum(letters: tuple[str, str, str], a: Any, b: Any) -> Any:
    subscripts = f"{letters[0]},{letters[1]}->{letters[2]}"
    return jhg.einsum(subscripts, a, b, precision="highest", implementation="hopper")


def gradients(a: Any, b: Any, cotangent: Any) -> Any:
    _, pullback = jax.vjp(partial(einsum, ("mk", "kn", "mn")), a, b)
    return pullback(cotangent)


def arrays(letters: tuple[str, ...], extents: dict[str, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [tuple(extents[x] for x in labels) for labels in letters]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def specs() -> list[GemmSpec]:
    """Returns the kernels that a GPU run needs."""
    found = kernels()
    for extents in PROGRAM_EXTENTS:
        for letters in LETTERS:
            found += specs_of(partial(einsum, letters), *arrays(letters[:2], extents))
        found += specs_of(gradients, *arrays(("mk", "kn", "mn"), extents))
    batch = jnp.zeros((3, 64, 64))
    found += specs_of(partial(einsum, ("lmk", "lkn", "lmn")), batch, batch)
    return list(dict.fromkeys(found))
