"""Which thread has which element, and where it lies in a staged tile."""

from __future__ import annotations

import re

import pytest

from jax_hopper_gemm.gemm.conversion import swizzled
from jax_hopper_gemm.gemm.dtypes import DTYPES
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.gemm.wgmma_fragment import owner_of
from jax_hopper_gemm.viz.fragments import (
    ROWS,
    bank_conflicts,
    fragment_element,
    staged_offset,
    stmatrix_row,
)

pytestmark = pytest.mark.pure

# Staged tiles that kernels have: columns, and the dtype of the result.
STAGED = [(columns, dtype) for columns in (16, 32, 64) for dtype in ("bfloat16", "float32")]


def swizzle_of(columns: int, dtype: str) -> int:
    spec = GemmSpec("bfloat16", "bfloat16", dtype, "k", "n", 128, 128, epi_tile_n=columns)
    return spec.epi_box(dtype).swizzle


@pytest.mark.parametrize("columns", [8, 16, 24, 256])
def test_each_element_has_one_owner(columns):
    elements = [fragment_element(t, v) for t in range(128) for v in range(columns // 2)]
    assert sorted(elements) == [(r, c) for r in range(ROWS) for c in range(columns)]


def test_owner_is_the_inverse_of_element():
    for thread in range(128):
        for value in range(128):
            assert owner_of(*fragment_element(thread, value)) == (thread, value)


@pytest.mark.parametrize(
    ("thread", "value", "element"),
    [  # as the figure of the PTX ISA has them
        (0, 0, (0, 0)), (0, 1, (0, 1)), (0, 2, (8, 0)), (0, 4, (0, 8)), (3, 1, (0, 7)),
        (4, 0, (1, 0)), (31, 3, (15, 7)), (32, 0, (16, 0)), (127, 127, (63, 255)),
    ],
)  # fmt: skip
def test_fragment_is_that_of_the_instruction(thread, value, element):
    assert fragment_element(thread, value) == element


@pytest.mark.parametrize("first_value", [0, 8, 24])
def test_stmatrix_stores_what_its_lanes_hold(first_value):
    """Matrix i takes pair i of each lane; its lane 4r + c holds elements 2c, 2c + 1 of row r."""
    for matrix in range(4):
        for lane in range(32):
            row, column = stmatrix_row(8 * matrix + lane // 4, first_value)
            for half in range(2):
                held = fragment_element(lane, first_value + 2 * matrix + half)
                assert held == (row, column + 2 * (lane % 4) + half)


@pytest.mark.parametrize(("columns", "dtype"), STAGED)
def test_staged_tile_has_one_place_for_each_element(columns, dtype):
    itemsize, swizzle = DTYPES[dtype].itemsize, swizzle_of(columns, dtype)
    offsets = [staged_offset(r, c, itemsize, swizzle) for r in range(ROWS) for c in range(columns)]
    assert sorted(offsets) == list(range(0, ROWS * columns * itemsize, itemsize))


@pytest.mark.parametrize("columns", [16, 32, 64])
def test_stmatrix_meets_no_bank_conflict(columns):
    swizzle = swizzle_of(columns, "bfloat16")
    plain = []
    for first_value in range(0, columns // 2, 8):
        for warp in range(4):
            for matrix in range(4):
                rows = [stmatrix_row(8 * matrix + i, first_value) for i in range(8)]
                rows = [(16 * warp + row, column) for row, column in rows]
                assert bank_conflicts([staged_offset(*at, 2, swizzle) for at in rows], 16) == 1
                plain.append(bank_conflicts([r * swizzle + 2 * c for r, c in rows], 16))
    assert set(plain) == {swizzle // 16}  # what it would meet without the swizzle


def test_bank_conflicts_are_counted():
    assert bank_conflicts([0, 128, 256], 4) == 3
    assert bank_conflicts([0, 0, 4], 4) == 1
    assert bank_conflicts([0, 16, 128 + 16], 16) == 2


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_swizzle_is_its_own_inverse_and_stays_in_its_row(swizzle):
    for offset in range(0, 4096, 4):
        moved = swizzled(offset, swizzle)
        assert swizzled(moved, swizzle) == offset
        assert moved // swizzle == offset // swizzle and moved % 16 == offset % 16


@pytest.mark.compile
@pytest.mark.parametrize(("columns", "dtype"), STAGED)
def test_arithmetic_is_that_of_the_kernels_layouts(columns, dtype, monkeypatch):
    """The compiler's own layouts of accumulator and staged tile, element by element."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    found = layouts_of_the_compiler(columns, dtype)
    itemsize, swizzle = DTYPES[dtype].itemsize, swizzle_of(columns, dtype)
    for row in range(ROWS):
        for column in range(columns):
            offset = staged_offset(row, column, itemsize, swizzle)
            assert found["staged"][row, column] == offset
    for thread in range(128):
        for value in range(columns // 2):
            row, column = fragment_element(thread, value)
            assert found["accumulator"][thread, value] == row + ROWS * column


def layouts_of_the_compiler(columns: int, dtype: str) -> dict[str, dict[tuple[int, int], int]]:
    """Returns bytes into the staged tile by (row, column), indices into C by (thread, value)."""
    import cutlass
    import cutlass.cute as cute
    import cutlass.tensor_utils as tensor_utils
    import cutlass.utils.hopper_helpers as sm90
    from cutlass.cute.nvgpu import warpgroup

    found: dict[str, dict[tuple[int, int], int]] = {}
    cute_dtype = getattr(cutlass, {"bfloat16": "BFloat16", "float32": "Float32"}[dtype])

    def indices(layout, rows, columns):
        return {
            (row, column): int(cute.crd2idx((row, column), layout))
            for row in range(rows)
            for column in range(columns)
        }

    @cute.jit
    def trace():
        kind = sm90.get_smem_layout_atom(tensor_utils.LayoutEnum.ROW_MAJOR, cute_dtype, columns)
        atom = warpgroup.make_smem_layout_atom(kind, cute_dtype)
        staged = cute.tile_to_shape(atom, (ROWS, columns), order=(0, 1))
        bits, base, shift = map(int, re.findall(r"\d+", str(staged.inner)))
        found["staged"] = {
            at: place ^ (place >> shift & ((1 << bits) - 1) << base)
            for at, index in indices(staged.outer, ROWS, columns).items()
            for place in [index * cute_dtype.width // 8]
        }
        mma = sm90.make_trivial_tiled_mma(
            cutlass.BFloat16, cutlass.BFloat16, cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.K, cutlass.Float32, (1, 1, 1), (ROWS, columns),
        )  # fmt: skip
        found["accumulator"] = indices(mma.tv_layout_C, 128, columns // 2)

    cute.compile(trace)
    return found
