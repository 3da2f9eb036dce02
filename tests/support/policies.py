"""Sets of kernels in which every pair of legal choices of `GemmSpec` occurs.

One set is of plain products, the other of products with each of `graphs.STANDARD`. Bugs of a
kernel sit in single policies and in pairs of them (a schedule with a scheduler, an epilogue tile
with a result dtype). The whole space has hundreds of thousands of kernels; a pairwise covering
set has some dozens (https://doi.org/10.1145/1883612.1883618).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import cache, partial

from support.buildable import epilogue_specs
from support.choices import (
    BLOCK_CHOICES,
    CHOICES,
    CONVERTED_CHOICES,
    EIGHT_BIT_CHOICES,
    EPILOGUE_CHOICES,
    GROUPED_CHOICES,
    LARGE_CLUSTER_CHOICES,
    PARTS_CHOICES,
    STORED_PARTS_CHOICES,
    TF32_CHOICES,
    TRANSPOSED_CHOICES,
)
from support.covering import ALL, covering_subset
from support.graphs import EIGHT_BIT, STANDARD
from support.remembered import remembered
from support.traits import EXTENTS_AND_DTYPES, shown_by_code, traits_of

from jax_hopper_gemm.dispatch import H100, H200, table_specs
from jax_hopper_gemm.gemm.legality import configuration_violations, violations
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.gemm.type_legality import type_violations

GRAPHS = STANDARD | EIGHT_BIT

_ATTEMPTS = 400  # random completions tried before a pair counts as impossible
_TYPE_FIELDS = {"ab_dtype", *(field.name for field in fields_of(ProblemType))}

Specs = Callable[[], tuple[GemmSpec, ...]]


def _covering_set(*choices: dict[str, tuple]) -> Specs:
    """Returns a function: the legal specs in which each pair of choices that any has occurs."""
    return cache(lambda: _covering(*choices))


covering_specs = _covering_set(CHOICES)
epilogue_covering_specs = _covering_set(EPILOGUE_CHOICES)
large_cluster_specs = _covering_set(*LARGE_CLUSTER_CHOICES)
grouped_covering_specs = _covering_set(*GROUPED_CHOICES)
eight_bit_specs = _covering_set(*EIGHT_BIT_CHOICES)
block_specs = _covering_set(*BLOCK_CHOICES)
parts_specs = _covering_set(*PARTS_CHOICES)
stored_parts_specs = _covering_set(*STORED_PARTS_CHOICES)
converted_specs = _covering_set(*CONVERTED_CHOICES)


@cache
def stacked_specs() -> tuple[GemmSpec, ...]:
    """Returns some of `covering_specs`, with A or B one matrix of a stack."""
    stacked = tuple(
        replace(spec, indexed="b" if i % 2 else "a") for i, spec in enumerate(covering_specs()[::4])
    )
    return (*stacked, *_along_k(stacked[::3]))


@cache
def nested_specs() -> tuple[GemmSpec, ...]:
    """Returns some of the covering specs, plain and with epilogues, with a nested batch."""
    dense = (*covering_specs()[1::8], *epilogue_covering_specs()[1::6])
    nested = tuple(replace(spec, nested=True) for spec in _of_one_plane(dense))
    return (*nested, *_along_k(nested[::3]))


@cache
def short_box_specs() -> tuple[GemmSpec, ...]:
    """Returns some of the covering specs, plain and with epilogues, with boxes that end with their
    matrices and with A, B or neither evicted first."""
    alone = (s for s in (*covering_specs(), *epilogue_covering_specs()) if s.cluster_size == 1)
    streams = (
        replace(spec, short_boxes=True, evict_first=(None, "a", "b")[i % 3])
        for i, spec in enumerate(s for s in alone if "k" in (s.a_major, s.b_major))
    )
    short = _legal(streams)[::2]
    return (*short, *_along_k(short[::3]))


@cache
def split_specs() -> tuple[GemmSpec, ...]:
    """Returns some of `covering_specs`, those with epilogues or large clusters, with K split."""
    some = (*covering_specs()[::3], *epilogue_covering_specs()[::4], *large_cluster_specs()[::2])
    split = (replace(spec, tile_scheduler="static", split_k=True) for spec in some)
    return _legal(split)


@cache
def cluster_k_specs() -> tuple[GemmSpec, ...]:
    """Returns those of the covering specs, plain and with epilogues, and some that store D along M,
    whose k-tiles CTAs of a cluster can share."""
    transposed = (s for s in transposed_specs() if not (s.nested or s.indexed))
    some = itertools.islice(transposed, 0, None, 4)
    return _along_k((*covering_specs(), *epilogue_covering_specs(), *some))


def _along_k(specs: Iterable[GemmSpec]) -> tuple[GemmSpec, ...]:
    """Returns legal ones of kernels with two, four and eight CTAs for each tile."""
    return _legal(
        replace(
            spec, cluster_m=1, cluster_n=1, cluster_k=(2, 4, 8)[i % 3], tile_scheduler="single",
            warp_schedule="cooperative", split_k=False,
        )
        for i, spec in enumerate(specs)
    )  # fmt: skip


@cache
def transposed_specs() -> tuple[GemmSpec, ...]:
    """Returns legal specs that store D along M in which each pair that any such spec has occurs,
    and of some of them twins that split K, or have nested batches or short boxes."""
    covering = _covering(*TRANSPOSED_CHOICES)
    alone = [s for s in covering if s.cluster_size == 1 and "k" in (s.a_major, s.b_major)]
    found = (
        *covering,
        *(replace(s, tile_scheduler="static", split_k=True) for s in covering[::3]),
        *(replace(s, nested=True) for s in covering[1::6]),
        *(replace(s, short_boxes=True, evict_first="a") for s in alone[::2]),
        *(replace(s, indexed="b" if i % 2 else "a") for i, s in enumerate(covering[::9])),
    )
    return _legal(found)


@cache
def loose_specs() -> tuple[GemmSpec, ...]:
    """Returns some of `covering_specs`, those that split K and those with epilogues, for a D whose
    rows begin and end anywhere."""
    some = (*covering_specs()[::2], *split_specs()[::4], *epilogue_covering_specs()[::2])
    loose = (
        replace(spec, loose_d=True)
        for spec in some
        if spec.graph.matrices and all(o.kind != "matrix" for o in spec.graph.operands)
    )
    legal = _legal(loose)
    return (*legal, *_along_k(legal[::4]))


@cache
def panel_specs() -> tuple[GemmSpec, ...]:
    """Returns some of `covering_specs`, those that split K and those with epilogues, for 2 to 4
    right operands."""
    some = (*covering_specs()[::2], *split_specs()[::4], *short_box_specs()[::8])
    some += epilogue_covering_specs()[::2]
    return _legal(replace(spec, panels=2 + i % 3) for i, spec in enumerate(some))


def along_n(spec: GemmSpec) -> GemmSpec | None:
    """Returns a kernel of another tile that stores along N what one of `transposed_specs` stores
    along M, if it is plain or has an epilogue and no other trait."""
    if spec.split_k or spec.nested or spec.indexed:
        return None
    majors = {"m": "n", "n": "m", "k": "k"}
    return replace(
        spec, d_major="n", a_major=majors[spec.b_major], b_major=majors[spec.a_major],
        epilogue=spec.epilogue and spec.epilogue.transposed, tile_m=128, tile_n=64, tile_k=64,
        cluster_m=1, cluster_n=1, warp_schedule="cooperative", tile_scheduler="static",
        num_stages=3, epi_tile_n=32, epi_stages=2, short_boxes=False, evict_first=None,
    )  # fmt: skip


@cache
def eight_bit_variants() -> tuple[GemmSpec, ...]:
    """Returns some of `eight_bit_specs`, `block_specs`: K shared, nested batches, short boxes."""
    dense = [s for s in (*eight_bit_specs(), *block_specs()[::4]) if not s.grouped]
    return _variants(dense[::4], _of_one_plane(dense)[1::8], dense[::2], dense)


def _variants(
    split: Iterable[GemmSpec],
    nested: Iterable[GemmSpec],
    short: Iterable[GemmSpec],
    along_k: Iterable[GemmSpec],
) -> tuple[GemmSpec, ...]:
    """Returns legal ones of kernels with K split, with a nested batch, with short boxes, and with K
    shared within a cluster."""
    found = (
        *(replace(s, tile_scheduler="static", split_k=True) for s in split),
        *(replace(s, nested=True) for s in nested),
        *(replace(s, short_boxes=True, evict_first="b") for s in short),
    )
    return (*_legal(found), *_along_k(along_k))


def _of_one_plane(specs: Iterable[GemmSpec]) -> list[GemmSpec]:
    return [s for s in specs if all(result.planes == 1 for result in s.graph.results)]


def _legal(specs: Iterable[GemmSpec]) -> tuple[GemmSpec, ...]:
    return tuple(dict.fromkeys(spec for spec in specs if not violations(spec)))


@cache
def tf32_specs() -> tuple[GemmSpec, ...]:
    """Returns the same of float32 operands that are multiplied in TF32, some of which share K."""
    whole = _covering(*TF32_CHOICES)
    split = (replace(s, tile_scheduler="static", split_k=True) for s in whole[::6])
    return (*_legal((*whole, *split)), *_along_k(whole[::2]))


@cache
def converted_variants() -> tuple[GemmSpec, ...]:
    """Returns some of `converted_specs`: K shared, nested batches, short boxes."""
    dense = [s for s in converted_specs() if not s.grouped]
    nested = (s for s in _of_one_plane(dense)[1::4] if s.tile_m >= 64)
    return _variants(dense[::2], nested, dense, dense[1::2])


@cache
def chosen_epilogue_specs() -> tuple[GemmSpec, ...]:
    """Returns a sample of what dispatch chooses for bfloat16 operands and standard epilogues."""
    return tuple(
        spec
        for i, graph in enumerate(STANDARD.values())
        for spec in epilogue_specs(H200, [graph], ["bfloat16"])[i % 9 :: 27]
    )


@cache
def all_specs() -> tuple[GemmSpec, ...]:
    """Returns the kernels of all sets, each once."""
    sets = (
        covering_specs, stacked_specs, short_box_specs, nested_specs, split_specs,
        epilogue_covering_specs, large_cluster_specs, grouped_covering_specs, eight_bit_specs,
        eight_bit_variants, block_specs, chosen_epilogue_specs, transposed_specs, parts_specs,
        stored_parts_specs, tf32_specs, converted_specs, converted_variants, loose_specs,
        panel_specs, cluster_k_specs,
    )  # fmt: skip
    return tuple(dict.fromkeys(spec for specs in sets for spec in specs()))


@cache
def chosen_specs(*, comm_overlap: bool = False) -> tuple[GemmSpec, ...]:
    """Returns the kernels without an epilogue that dispatch may choose on an H100 or H200."""
    gpus = [replace(gpu, comm_overlap=comm_overlap) for gpu in (H200, H100)]
    return tuple(dict.fromkeys(spec for gpu in gpus for spec in table_specs(gpu)))


@cache
def compiled_specs() -> tuple[GemmSpec, ...]:
    """Returns kernels to compile: of all that run on a GPU, enough for every pair of traits.

    Unless `ALL`, of these enough for what `shown_by_code` says: a GPU has run them.
    """
    pool = dict.fromkeys(
        (
            *covering_specs(), *stacked_specs(), *short_box_specs(), *nested_specs(),
            *split_specs(), *transposed_specs(), *loose_specs(), *panel_specs(),
            *epilogue_covering_specs(), *large_cluster_specs(), *grouped_covering_specs(),
            *cluster_k_specs(), *chosen_epilogue_specs(), *chosen_specs(),
        )
    )  # fmt: skip
    pairs = covering_subset(pool, partial(shown_by_code, alone=EXTENTS_AND_DTYPES))
    return tuple(covering_subset(pairs, shown_by_code))


@cache
def compiled_weights() -> tuple[GemmSpec, ...]:
    """Returns as many of kernels that convert B as show every trait; if `ALL`, every pair."""
    pool = dict.fromkeys((*converted_specs(), *converted_variants()))
    return tuple(covering_subset(pool, shown_by_code if ALL else traits_of))


def _covering(*several: dict[str, tuple]) -> tuple[GemmSpec, ...]:
    """Returns sets that cover all pairs of legal choices, one set after the other."""
    return tuple(spec for choices in several for spec in remembered(_covering_one, choices))


def _covering_one(choices: dict[str, tuple]) -> tuple[GemmSpec, ...]:
    """Returns a set that covers all pairs of legal choices.

    Greedy: take a pair that is still missing, complete it at random, keep the completion that
    adds the most missing pairs. The same on every machine.
    """
    rng = random.Random(0)
    missing = {
        frozenset(pair)
        for (f, fs), (g, gs) in itertools.combinations(choices.items(), 2)
        for pair in itertools.product(((f, v) for v in fs), ((g, v) for v in gs))
    }
    order = sorted(missing, key=lambda pair: sorted(map(str, pair)))
    rng.shuffle(order)
    chosen: list[GemmSpec] = []
    for pair in order:
        if pair not in missing:
            continue
        completions = _complete(dict(pair), choices, rng, wanted=20)
        if not completions:
            missing.discard(pair)
            continue
        best = max(completions, key=lambda choice: len(pairs_of(choice) & missing))
        missing -= pairs_of(best)
        chosen.append(spec_of(best))
    return tuple(dict.fromkeys(chosen))


def pairs_of(choice: dict) -> set[frozenset]:
    """Returns the pairs of (field, value) that a choice of all fields holds."""
    return {frozenset(pair) for pair in itertools.combinations(choice.items(), 2)}


def spec_of(choice: dict) -> GemmSpec:
    fields = dict(choice)
    cluster_m, cluster_n = fields.pop("cluster")
    dtype = fields.pop("ab_dtype")
    fields["a_dtype"], fields["b_dtype"] = (dtype, dtype) if isinstance(dtype, str) else dtype
    if name := fields.get("epilogue"):
        fields["epilogue"] = GRAPHS[name]
    return GemmSpec(**fields, cluster_m=cluster_m, cluster_n=cluster_n)


def choice_of(spec: GemmSpec) -> dict:
    """Returns the choice that `spec_of` makes `spec` from."""
    choices = EPILOGUE_CHOICES if spec.epilogue else CHOICES
    if spec.grouped:
        choices = next(
            c for c in GROUPED_CHOICES
            if spec.grouped in c["grouped"] and ("epilogue" in c) == bool(spec.epilogue)
        )  # fmt: skip
    own = {"ab_dtype": spec.a_dtype, "cluster": (spec.cluster_m, spec.cluster_n)}
    if spec.epilogue:
        own["epilogue"] = name_of(spec)
    return {field: own[field] if field in own else getattr(spec, field) for field in choices}


def name_of(spec: GemmSpec) -> str:
    """Returns the name in `graphs.STANDARD` of a spec's epilogue; "" of a plain one."""
    return next((name for name, graph in STANDARD.items() if graph == spec.epilogue), "")


def _complete(fixed: dict, choices: dict, rng: random.Random, wanted: int) -> list[dict]:
    """Returns up to `wanted` legal choices that hold `fixed`; none if none was found."""
    found = []
    of_type = [field for field in choices if field in _TYPE_FIELDS]
    # NOTE: numbers are those of `rng.choice`, whose checks would take most of the time.
    drawn = [(f, values, len(values), len(values).bit_length()) for f, values in choices.items()]
    bits_of = rng.getrandbits
    for _ in range(_ATTEMPTS):
        choice = {}
        for field, values, count, bits in drawn:
            while (number := bits_of(bits)) >= count:
                pass
            choice[field] = values[number]
        choice |= fixed
        _settle(choice, fixed)
        if not _type_is_legal(tuple([(field, choice[field]) for field in of_type])):
            continue
        if not any(configuration_violations(spec_of(choice))):
            found.append(choice)
            if len(found) == wanted:
                break
    return found


@cache
def _type_is_legal(choice: tuple[tuple[str, object], ...]) -> bool:
    """Whether there are kernels for the type of problems that a choice names; most have none."""
    of_all = {"cluster": (1, 1), "tile_m": 64, "tile_n": 64, **dict(choice)}
    return not any(type_violations(ProblemType.of_spec(spec_of(of_all))))


def _settle(choice: dict, fixed: dict) -> None:
    """Gives what an epilogue decides its one legal value, unless that is `fixed` to another."""

    def settle(field: str, value: object) -> None:
        choice[field] = fixed.get(field, value)

    if "epilogue" not in choice:
        return
    graph = GRAPHS[choice["epilogue"]]
    if graph.matrices:
        settle("d_dtype", graph.matrices[0].dtype)
    if not graph.loaded:
        settle("epi_load_stages", 0)
