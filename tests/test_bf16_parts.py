"""Products of float32 by bfloat16 parts: the arithmetic, the places in memory, requests."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import cutting, float32, tolerance
from support.program_inspection import LAUNCH, lowered

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch import H200, choose, choose_invariant
from jax_hopper_gemm.gemm.bf16_parts import (
    LEFT_OUT,
    PRESETS,
    PROMOTED_K,
    RUN_K,
    STEPS,
    TILE_K,
    VECTOR,
    Cutter,
    accumulator_sets,
    num_parts,
    products,
    stored_k,
)
from jax_hopper_gemm.gemm.cutting import CutSpec, place_of
from jax_hopper_gemm.gemm.kernel_params import param_list, spec_from_json
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.product import Options
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import make_cut_plan
from jax_hopper_gemm.primitives.call_words import options_of_words, options_to_words
from jax_hopper_gemm.testing.lowered import all_specs_of, specs_of

TILE_M, TILE_N = 128, 192
MAJORS = list(itertools.product("km", "nk"))


def parts_of(x: np.ndarray, count: int) -> list[np.ndarray]:
    parts = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16).astype(np.float32))
        x = x - parts[-1]
    return parts


@pytest.mark.parametrize("terms", PRESETS)
def test_the_terms_leave_out_no_more_than_they_say(terms):
    rng = np.random.default_rng(0)
    a, b = (np.exp2(rng.uniform(0, 1, 200_000)).astype(np.float32) for _ in range(2))
    a_parts, b_parts = (parts_of(x, num_parts(terms)) for x in (a, b))
    kept = sum(a_parts[i].astype(np.float64) * b_parts[j] for i, j in products(terms))
    exact = a.astype(np.float64) * b
    worst = np.max(np.abs(kept - exact) / exact)
    assert len(products(terms)) == terms and products(terms)[-1] == (0, 0)
    assert LEFT_OUT[terms] / 8 <= worst <= LEFT_OUT[terms]


def cut_off(x: np.ndarray) -> np.ndarray:
    """Returns float64 as float32, cut off."""
    rounded = x.astype(np.float32)
    beyond = np.abs(rounded.astype(np.float64)) > np.abs(x)
    return np.where(beyond, np.nextafter(rounded, np.float32(0)), rounded)


def emulated(a: np.ndarray, b: np.ndarray, terms: int) -> np.ndarray:
    """Returns a @ b as a kernel computes it: sums of 16 of K, cut off, promoted now and then."""
    a_parts, b_parts = (parts_of(x, num_parts(terms)) for x in (a, b))
    acc = np.zeros((len(a), b.shape[1]), np.float32)
    for first in range(0, a.shape[1], PROMOTED_K[terms]):
        sums = [np.zeros_like(acc) for _ in range(2)]
        for k in range(first, min(first + PROMOTED_K[terms], a.shape[1]), 16):
            for i, j in products(terms):
                of_others = i + j > 0 and accumulator_sets(terms) > 2
                term = a_parts[i][:, k : k + 16].astype(np.float64) @ b_parts[j][k : k + 16]
                sums[of_others] = cut_off(sums[of_others] + term)
        acc = acc + (sums[0] + sums[1])
    return acc


@pytest.mark.parametrize("terms", PRESETS)
def test_a_long_sum_has_the_digits_of_its_terms(terms):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 8192), (8192, 32)))
    exact, magnitude = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b)
    error = emulated(a, b, terms) - exact
    assert np.linalg.norm(error) <= float32.NORMS[terms] * np.linalg.norm(exact)
    summation: Any = f"bf16x{terms}"
    assert (np.abs(error) <= tolerance.accumulation_error(8192, summation) * magnitude).all()


def stage(matrix: np.ndarray, along_k: bool) -> np.ndarray:
    """Returns float32 (rows, TILE_K) as TMA leaves it in shared memory, in words.

    Boxes of 128 bytes a row, of which 16-byte pieces are exchanged by the row's number modulo 8.
    """
    rows = len(matrix)
    words = np.full(rows * TILE_K, np.nan, np.float32)
    for row, k in itertools.product(range(rows), range(TILE_K)):
        linear = row * 32 + k if along_k else row // 32 * 1024 + k * 32 + row % 32
        words[linear ^ (linear >> 5 & 7) << 2] = matrix[row, k]
    return words


def read_parts(words: np.ndarray, along_k: bool) -> np.ndarray:
    """Returns (TILE_N, TILE_K) as wgmma reads it: rows of 64 bytes along K, else of 128 along N."""
    found = np.empty((TILE_N, TILE_K), words.dtype)
    for n, p in itertools.product(range(TILE_N), range(TILE_K)):
        if along_k:
            linear = n * 32 + p
            found[n, p] = words[linear ^ (linear >> 6 & 3) << 3]
        else:
            linear = n // 64 * 2048 + p * 64 + n % 64
            found[n, p] = words[linear ^ (linear >> 6 & 7) << 3]
    return found


def seen_a(cutter: Cutter, words: np.ndarray, threads: int) -> np.ndarray:
    """Returns A as the fragments of all threads have it, (rows, TILE_K)."""
    found = np.full((threads // 2, TILE_K), np.nan, np.float32)
    for thread, step in itertools.product(range(threads), range(STEPS)):
        row, lane = thread // 32 * 16 + thread % 32 // 4, thread % 4
        places = [at + i for at, n in cutter.a_words(thread, step) for i in range(n)]
        order = itertools.product(range(2), range(2), range(2))
        for place, (below, half, pair) in zip(places, order, strict=True):
            found[row + 8 * below, 16 * step + 8 * half + 2 * lane + pair] = words[place]
    return found


def seen_b(cutter: Cutter, words: np.ndarray) -> np.ndarray:
    """Returns B as wgmma reads what all threads write, (TILE_N, TILE_K)."""
    written = np.full(TILE_N * TILE_K, np.nan, np.float32)
    for thread, block in itertools.product(range(cutter.threads), range(TILE_N // 64)):
        for n, k in cutter.b_vectors(thread):
            source = cutter.b_offset(n, k) + block * 64 * TILE_K
            offsets = cutter.part_offsets(n, k)
            length = VECTOR // len(offsets)
            for i, offset in enumerate(offsets):
                target = offset + block * 64 * TILE_K
                assert np.isnan(written[target : target + length]).all()
                first = source + i * length
                written[target : target + length] = words[first : first + length]
    return read_parts(written, cutter.b_along_k)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("threads", (128, 256))
def test_a_stage_is_multiplied_whole(a_major, b_major, threads):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, (rows, TILE_K)) for rows in (threads // 2, TILE_N))
    cutter = Cutter(a_major == "k", b_major == "k", threads)
    found_a = seen_a(cutter, stage(a, cutter.a_along_k), threads)
    found_b = seen_b(cutter, stage(b, cutter.b_along_k))
    assert (found_a @ found_b.T == a @ b.T).all()


def conflicts(words: list[int], width: int) -> int:
    """Returns the most words of a bank that one transaction of 128 bytes would need."""
    group = 32 // width
    most = 0
    for first in range(0, 32, group):
        touched = {word + i for word in words[first : first + group] for i in range(width)}
        banks = [word % 32 for word in touched]
        most = max(most, max(map(banks.count, banks)))
    return most


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
def test_no_bank_is_asked_twice(a_major, b_major):
    cutter = Cutter(a_major == "k", b_major == "k", 256)
    for warp in range(8):
        threads = range(32 * warp, 32 * warp + 32)
        for step in range(STEPS):
            lines = [cutter.a_words(thread, step) for thread in threads]
            for number in range(len(lines[0])):
                width = lines[0][number][1]
                assert conflicts([line[number][0] for line in lines], width) == 1
        vectors = [cutter.b_vectors(thread) for thread in threads]
        for number in range(len(vectors[0])):
            places = [v[number] for v in vectors]
            assert conflicts([cutter.b_offset(*place) for place in places], VECTOR) == 1
            targets = [cutter.part_offsets(*place) for place in places]
            for i in range(len(targets[0])):
                width = 2 // len(targets[0])
                assert conflicts([target[i] // 2 for target in targets], width) == 1


def problem_of(terms: int, size: int = 4096, **given: Any) -> GemmProblem:
    return replace(GemmProblem.dense(size, size, size, dtype="float32", **given), bf16_terms=terms)


@pytest.mark.parametrize("terms", PRESETS)
@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("size", (256, 4096))
def test_dispatch_runs_every_layout(terms, a_major, b_major, size):
    """A large product on operands that were cut before, a small one on those that a kernel cuts."""
    spec = choose(problem_of(terms, size, a_major=a_major, b_major=b_major), H200).spec
    assert spec and violations(spec) == []
    assert (spec.bf16_terms, spec.reads_parts) == (terms, size == 4096)


@pytest.mark.parametrize("axis", (0, 1))
@pytest.mark.parametrize("terms", (3, 6))
def test_parts_lie_in_runs_and_add_up_to_the_number(axis, terms):
    length, count = RUN_K + 36, num_parts(terms)
    x = np.random.default_rng(0).standard_normal((length, 8)).astype(np.float32)
    cut = float32.parts_along(x if axis == 0 else x.T, axis, terms).astype(np.float64)
    assert cut.shape[axis] == stored_k(length, terms)
    runs = np.moveaxis(cut, axis, 0).reshape(2, count, RUN_K, 8)
    found = runs.sum(1).reshape(-1, 8)
    assert np.abs(found[:length] - x).max() <= 2.0 ** (-8 * count) * np.abs(x).max()
    assert not found[length:].any()
    assert np.array_equal(runs[:, 0].reshape(-1, 8)[:length], x.astype(jnp.bfloat16))
    places = [[place_of(k, part, count) for k in range(length)] for part in range(count)]
    parts = np.moveaxis(cut, axis, 0)[np.array(places)]
    assert np.array_equal(parts.sum(0), found[:length])


def test_operands_are_cut_along_k_before_the_launch():
    shapes = (3, 4096, 4002), (3, 4002, 4096)
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def product(a: Any, b: Any) -> Any:
        return jhg.matmul(a, b, precision=float32.preset(3), implementation="hopper")

    *cuts, spec = all_specs_of(product, a, b)
    assert cuts == [CutSpec(2, "columns", aligned=False), CutSpec(2, "rows")]
    assert isinstance(spec, GemmSpec) and spec.reads_parts
    stored = 2 * 63 * RUN_K
    launches = re.findall(rf"{LAUNCH}.*", lowered(product, a, b))
    for line, ends in zip(
        launches, ("-> tensor<3x4096x{}xbf16>", "-> tensor<3x{}x4096xbf16>"), strict=False
    ):
        assert ends.format(stored) in line
    assert f"(tensor<3x4096x{stored}xbf16>, tensor<3x{stored}x4096xbf16>)" in launches[2]


def test_a_product_that_leaves_sms_to_others_is_cut_by_the_kernel_that_multiplies_it():
    spec = choose(problem_of(3), H200.limited_to(100)).spec
    assert spec and spec.cuts_operands


@pytest.mark.parametrize("m", (1, 100, 1024, 8192))
def test_however_many_rows_there_are_their_sums_have_one_order(m):
    problem = replace(GemmProblem.dense(m, 4096, 4096, dtype="float32"), bf16_terms=3)
    spec = choose_invariant(problem, H200).spec
    assert spec and spec.cuts_operands


def test_a_matrix_of_a_stack_is_cut_by_the_kernel_that_multiplies_it():
    for indexed in ("a", "b"):
        spec = choose(replace(problem_of(3), indexed=indexed, stack=4), H200).spec
        assert spec and spec.cuts_operands and violations(spec) == []


def test_kernels_that_cut_have_plans():
    for case in cutting.CASES:
        assert spec_from_json(case.spec.to_json()) == case.spec
        plan = make_cut_plan(case.spec, *case.shape)
        assert [p.kind for p in plan.params] == [p.kind for p in param_list(case.spec)]
    assert make_cut_plan(CutSpec(2, "rows"), 3, 65, 136).grid == (3 * 2 * 2, 1, 1)
    for parts, along, aligned in ((1, "rows", True), (2, "depth", True), (2, "rows", False)):
        with pytest.raises(ValueError, match="no kernel cuts so"):
            CutSpec(parts, along, aligned)  # type: ignore


def test_what_kernels_that_read_parts_do_not():
    spec = choose(problem_of(6), H200).spec
    assert spec and spec.reads_parts
    for reason, fields in {
        "tile_k 32 of bfloat16 parts is not 64": {"tile_k": 32},
        "schedule them cooperatively": {"warp_schedule": "pingpong"},
        "do not split K": {"split_k": True},
        "groups": {"grouped": "m"},
        "a matrix of a stack": {"indexed": "b"},
    }.items():
        assert any(reason in text for text in violations(replace(spec, **fields))), reason


def test_what_no_kernel_does():
    spec = choose(problem_of(6, 1024), H200).spec
    assert spec and spec.cuts_operands
    for reason, fields in {
        "tile_k 64 of bfloat16 parts is not 32": {"tile_k": 64},
        "tile_m 256 of bfloat16 parts is not 64 or 128": {"tile_m": 256},
        "tile_n 96 of bfloat16 parts is not a multiple of 64": {"tile_n": 96},
        "schedule them cooperatively": {"warp_schedule": "pingpong"},
        "do not split K": {"split_k": True},
        "4 products of bfloat16 parts, not 3, 6 or 9": {"bf16_terms": 4},
        "float32 is cut into bfloat16 parts": {"a_dtype": "bfloat16"},
        "promoted already": {"promoted": True},
        "take epilogue tiles of 16 columns": {"tile_n": 128, "epi_tile_n": 32},
        "A is float32, which tensor cores read along K alone": {"bf16_terms": 0, "a_major": "m"},
    }.items():
        assert any(reason in text for text in violations(replace(spec, **fields))), reason


@pytest.mark.parametrize("name", float32.PROGRAMS)
def test_products_run_on_kernels(name):
    program = float32.PROGRAMS[name]
    specs = [spec for spec in program.specs() if isinstance(spec, GemmSpec)]
    assert specs and {spec.bf16_terms for spec in specs} == {program.terms}
    assert all(spec.reads_parts == name.startswith("cut before") for spec in specs)


A, B = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in float32.AB)
# In TF32 XLA is expected to take 0.7 times as long as kernels.
OF_SHORT_K = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((520, 64), (64, 336))]


@pytest.mark.parametrize("precision", (None, "default", "high", "highest", "F32_F32_F32"))
def test_other_precisions_are_left_to_xla(precision):
    assert specs_of(lambda a, b: jhg.matmul(a, b, precision=precision), *OF_SHORT_K) == []


def test_other_operands_are_left_to_xla():
    a, b = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (A, B))
    precision = float32.preset(3)
    assert specs_of(lambda a, b: jhg.matmul(a, b, precision=precision), a, b) == []


def test_an_epilogue_is_part_of_the_kernel():
    def layer(a: Any, b: Any, bias: Any) -> Any:
        precision = float32.preset(3)
        return jhg.matmul(a, b, bias=bias, activation="gelu", precision=precision)

    (spec,) = specs_of(layer, A, B, jax.ShapeDtypeStruct((float32.N,), jnp.float32))
    assert spec.epilogue and spec.bf16_terms == 3


@pytest.mark.parametrize("size", (1, 8))
def test_the_gradient_of_an_epilogue_is_part_of_the_product_before_it(size):
    def loss(a: Any, b: Any, c: Any) -> Any:
        precision = float32.preset(6)
        hidden = jhg.matmul(a, b, activation="gelu", precision=precision)
        return jnp.sum(jhg.matmul(hidden, c, precision=precision))

    shapes = *float32.AB, (float32.N, 256)
    arrays = (jax.ShapeDtypeStruct((size * m, size * n), jnp.float32) for m, n in shapes)
    specs = specs_of(jax.grad(loss, argnums=(0, 1, 2)), *arrays)
    assert {spec.bf16_terms for spec in specs} == {6}
    (fused,) = (spec for spec in specs if spec.epilogue and spec.graph.loaded)
    assert fused.reads_parts == (size > 1)


def test_a_kernel_is_explained():
    explained = jhg.explain(jhg.matmul, A, B, precision=float32.preset(6))
    assert "bf16x6" in str(explained)
    assert "in TF32 our best kernel" in str(jhg.explain(jhg.matmul, *OF_SHORT_K))


@pytest.mark.parametrize("precision", (float32.preset(6), (lax.Precision.HIGHEST,) * 2, None))
def test_words_keep_a_precision(precision):
    words = options_to_words(Options(precision=precision))
    assert words and options_of_words(words).precision == precision
