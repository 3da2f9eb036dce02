"""The collectives of a compiled program: their kinds, the devices they join, and their bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
OPERATION = re.compile(rf"^ *(?:ROOT )?(\S+) = (.*?) ({KINDS})(-start|-done|)\((.*)$", re.MULTILINE)
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")
ITEMSIZES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s32": 4, "u32": 4}


class Collective(NamedTuple):
    """A collective operation."""

    kind: str  # one of `KINDS`
    # The devices that exchange with each other, as positions in the mesh; empty where all do, or
    # the text does not say.
    groups: frozenset[frozenset[int]]
    size: int  # bytes of its results on a device


def collectives_in(program: str) -> Iterator[Collective]:
    """Yields the collectives of an HLO program's text.

    An operation with several results, which XLA makes of several operations, is one. What a
    `-start` gives holds operands, too: that of its `-done` counts.
    """
    started: dict[str, frozenset[frozenset[int]]] = {}
    for name, results, kind, part, rest in OPERATION.findall(program):
        if part == "-start":
            started[name] = _groups(rest)
            continue
        operand = re.search(r"%[\w.-]+", rest)
        groups = started.get(operand[0], frozenset()) if part and operand else _groups(rest)
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", results)
        size = sum(ITEMSIZES[x] * prod(map(int, filter(None, s.split(",")))) for x, s in arrays)
        yield Collective(kind, groups, size)


def _groups(text: str) -> frozenset[frozenset[int]]:
    """Returns the groups in an operation's text.

    They are written as `{{0,1},{2,3}}`, as `[2,2]<=[4]` with a permutation or without, or as
    `mesh['i'=2,'j'=2] {'j'}`.
    """
    groups: Any = ()
    if found := LISTED.search(text):
        groups = [map(int, x.split(",")) for x in re.findall(r"[\d,]+(?=\})", found[1])]
    elif found := COUNTED.search(text):
        shape, extents, order = (
            [int(n) for n in x.split(",")] if x else [] for x in found.groups()
        )
        devices = np.arange(prod(extents)).reshape(extents)
        groups = devices.transpose(order or None).reshape(shape).tolist()
    elif found := NAMED.search(text):
        extents = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", found[1])}
        joined = [list(extents).index(name) for name in re.findall(r"'(\w+)'", found[2])]
        devices = np.arange(prod(extents.values())).reshape(tuple(extents.values()))
        last = np.moveaxis(devices, joined, range(-len(joined), 0))
        groups = last.reshape(-1, prod(devices.shape[axis] for axis in joined)).tolist()
    return frozenset(map(frozenset, groups))
