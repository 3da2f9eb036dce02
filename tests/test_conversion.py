"""How math threads read and widen 8- and 4-bit numbers, run on the CPU as the GPU runs it.

A NumPy array stands for a register: one element a thread of a warpgroup.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from jax_hopper_gemm.gemm import conversion
from jax_hopper_gemm.gemm.conversion import Held
from jax_hopper_gemm.gemm.wgmma_fragment import position_of

THREADS = np.arange(128, dtype=np.int64)
LANES = THREADS % 32
POSITION = position_of(THREADS)
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def pick(x, mask, flip):
    return (x & np.uint32(mask)) ^ np.uint32(flip)


def fma(half: str):
    """Returns a fused multiply-add of pairs; of these numbers float64 holds all sums exactly."""
    dtype = HALVES[half]

    def of_pairs(*pairs):
        shape = np.shape(pairs[0])
        halves = (np.broadcast_to(np.asarray(x, np.uint32), shape) for x in pairs)
        x, y, z = (
            np.ascontiguousarray(each).view(np.uint16).view(dtype).astype(np.float64)
            for each in halves
        )
        return (x * y + z).astype(dtype).view(np.uint16).view(np.uint32)

    return of_pairs


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("bits", "place"), [(8, 0), (4, 0), (4, 4)])
def test_integers_become_floats_that_count_units(bits, place, half):
    """Whatever lies above and below the numbers' bits."""
    numbers = np.arange(-(1 << (bits - 1)), 1 << (bits - 1))
    low, high = (x.ravel() for x in np.meshgrid(numbers, numbers))
    mask = ((1 << bits) - 1) << place
    garbage = 0xA5A5 & ~mask
    pairs = ((high << place & mask | garbage) << 16 | (low << place & mask) | garbage).astype(
        np.uint32
    )
    widening = conversion.Widening(bits, half)
    widened = widening.widen(pairs, place, pick, fma(half))
    found = np.ascontiguousarray(widened, np.uint32).view(np.uint16).view(HALVES[half])
    found = found.astype(np.float64) / widening.unit
    assert np.array_equal(found[::2], low)
    assert np.array_equal(found[1::2], high)


def stage_of(matrix: np.ndarray, bits: int, width: int, *, along_k: bool) -> np.ndarray:
    """Returns the bytes of a stage that TMA fills with a matrix (N, K) of unsigned numbers.

    Boxes of `width` bytes lie one behind the other, each with the hardware's swizzle: chunks of
    16 bytes change places within 128 bytes by the number of these 128 bytes.
    """
    lines = matrix if along_k else matrix.T
    if bits == 4:
        lines = lines[:, ::2] | lines[:, 1::2] << 4
    if bits == 32:
        lines = np.ascontiguousarray(lines).view(np.uint8)
    boxes = [lines[:, i : i + width].ravel() for i in range(0, lines.shape[1], width)]
    flat = np.concatenate(boxes).astype(np.uint8)
    stage = np.zeros_like(flat)
    for chunk in range(flat.size // 16):
        line, place = divmod(chunk, 8)
        target = line * 8 + (place ^ (line % (width // 16)))
        stage[16 * target : 16 * target + 16] = flat[16 * chunk : 16 * chunk + 16]
    return stage


def load(stage: np.ndarray, address: np.ndarray, nbytes: int) -> np.ndarray:
    parts = [stage[address + i].astype(np.int64) << (8 * i) for i in range(nbytes)]
    return np.sum(parts, axis=0)


def ldmatrix_transposed(stage: np.ndarray, address: np.ndarray) -> list[np.ndarray]:
    """PTX ISA, `ldmatrix.x4.trans`: lanes 8i to 8i + 7 name the rows of the i-th matrix."""
    registers = []
    for i in range(4):
        halves = []
        for k in range(2):  # a lane's two rows
            row = LANES % 4 * 2 + k
            named = address[THREADS // 32 * 32 + 8 * i + row]
            halves.append(load(stage, named + 2 * (LANES // 4), 2))
        registers.append(halves[0] | halves[1] << 16)
    return registers


CASES = [
    (held, columns, tile_k, span)
    for held, columns, tile_k in itertools.product(
        (Held(8, False), Held(8, True), Held(4, False), Held(4, False, joined=2), Held(4, True)),
        (64, 128, 256),
        (64, 128),
    )
    for span in range(0, columns // (64 * held.joined) * 64 * held.joined, 64 * held.joined)
]


@pytest.mark.parametrize(("held", "columns", "tile_k", "span"), CASES)
def test_a_thread_reads_what_wgmma_wants_of_its_columns(held, columns, tile_k, span):
    """PTX ISA, "Register fragments for wgmma.m64nNk16": element a of A is (row, k)."""
    bits, along_k = held.bits, held.along_k
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 1 << bits, (columns, tile_k), dtype=np.uint8)
    line = (tile_k if along_k else columns) * bits // 8
    width = next(x for x in (128, 64, 32) if line % x == 0)
    stage = stage_of(matrix, bits, width, along_k=along_k)
    mask = (1 << bits) - 1
    own = {
        (block, h): span + held.column(POSITION, block, h)
        for block, h in itertools.product(range(held.joined), range(2))
    }
    columns_of_all = np.concatenate([own[of] for of in sorted(own)])
    assert sorted(np.unique(columns_of_all)) == list(range(span, span + 64 * held.joined))
    in_order = [own[of] for of in sorted(own)]
    for i in range(len(in_order)):
        first = in_order[i - i % held.neighbours]
        assert (in_order[i] == first + i % held.neighbours).all()
    for k16, block, h, i in itertools.product(
        range(tile_k // 16), range(held.joined), range(2), range(2)
    ):
        if along_k:
            first = (16 * k16 + 8 * i) * bits // 8
            chunk = first // 16 * 16
            column = span + 16 * POSITION.warp
            offset = conversion.offset_along_k(POSITION, column, h, chunk, width, columns)
            at = offset + first - chunk + POSITION.quad_lane * (bits // 4)
            word = load(stage, at, bits // 4)
        else:
            slab = (span + held.slab(POSITION)) * bits // 8
            start = conversion.offset_along_n(LANES, slab, width, tile_k)
            address = start + k16 // 2 * conversion.LDMATRIX_K * width
            word = ldmatrix_transposed(stage, address)[2 * (k16 % 2) + i]
        pairs = held.spread(word, POSITION, block, h) >> held.place(h)
        k = 16 * k16 + 8 * i + 2 * POSITION.quad_lane
        assert np.array_equal(pairs & mask, matrix[own[block, h], k])
        assert np.array_equal((pairs >> 16) & mask, matrix[own[block, h], k + 1])


@pytest.mark.parametrize(("columns", "tile_k"), ((64, 32), (128, 64), (256, 128)))
def test_a_thread_reads_float32_as_wgmma_wants_it_and_from_banks_of_its_own(columns, tile_k):
    """PTX ISA, "Register fragments for wgmma.m64nNk8": of K a thread has quad_lane and 4 more."""
    held, width = Held(32, False), 128
    matrix = np.arange(columns * tile_k, dtype=np.uint32).reshape(columns, tile_k)
    words = stage_of(matrix, 32, width, along_k=False).view(np.uint32)
    for span in range(0, columns, 64):
        own = [span + held.column(POSITION, 0, h) for h in range(2)]
        assert sorted(np.concatenate(own)) == sorted([*range(span, span + 64)] * 4)
        assert np.array_equal(own[0] + 1, own[1])
        assert np.array_equal(held.chunk(POSITION, 2), (own[0] - span) // 32)
        for k8, i in itertools.product(range(tile_k // 8), range(2)):
            start = conversion.offset_along_n(POSITION.quad_lane + 4 * i, 4 * own[0], width, tile_k)
            at = (start + 8 * k8 * width) // 4
            for h in range(2):
                k = 8 * k8 + 4 * i + POSITION.quad_lane
                assert np.array_equal(words[at + h], matrix[own[h], k])
            for half in at.reshape(-1, 16):  # threads whose 8 bytes are read at once
                assert len(np.unique((half[:, None] + np.arange(2)) % 32)) == 32
