"""Measured choices as JSON data: read, check, look up, write; and those that a process uses.

    {"version": 2,
     "device": {"gpu": "H200", "compute_capability": [9, 0], "num_sms": 132},
     "entries": [
       {"m": 4096, "n": 4096, "k": 4096, "l": 1, "a_major": "k", "b_major": "n",
        "a_dtype": "bfloat16", "b_dtype": "bfloat16", "d_dtype": "bfloat16",
        "prefer": "kernel",
        "kernel": {"tile_m": 128, "tile_n": 256, "tile_k": 64, "cluster_m": 1, ...},
        "raster_order": {"along": "m", "swizzle": 8},
        "kernel_us": 172.1, "xla_us": 174.7}]}

`kernel` holds the fields of `GemmSpec` that the problem does not fix, of `_OPTIONAL` ones those
that are not the default. An entry that prefers "xla" names our best kernel too, for callers who
insist on one. Times are medians, or null. The entry of a grouped product has "grouped", "m" or "k",
besides: its "l" groups have "m" rows, or a K of "k", on average.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from ..gemm.legality import violations
from ..gemm.problem import GemmProblem, Major, VarlenAxis
from ..gemm.problem_type import ProblemType
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from .device import GPUS, Device
from .legality import pairing_violations

TABLE_VERSION = 2
PACKAGED = Path(__file__).parent / "tables"
TABLE_VARIABLE = "JAX_HOPPER_GEMM_TABLE"


# What decided a choice; "unsupported": no kernel of ours can run the problem.
Source = Literal["table", "model", "user table", "unsupported"]


class TableError(ValueError):
    """A table file that cannot be used; the message says which entry and why."""


@dataclass(frozen=True)
class Key:
    """The problems that an entry is for; strides do not matter to the choice.

    A product with an epilogue has the key of the plain product of the same arithmetic: a gated
    one that of twice its columns; one of gathered rows that of rows that lie together. Of a
    grouped product `l` counts the groups, and `m` or `k` is the mean size of a group, rounded to a
    power of two.
    """

    m: int
    n: int
    k: int
    l: int  # noqa: E741
    a_major: Major
    b_major: Major
    a_dtype: str
    b_dtype: str
    d_dtype: str
    grouped: VarlenAxis | None = None

    @classmethod
    def of(cls, problem: GemmProblem) -> Key:
        p, m, k, l = problem, problem.m, problem.k, problem.l  # noqa: E741  as in GemmProblem
        axis = None
        if p.groups:
            axis, l = p.groups.axis, max(1, p.groups.total)  # noqa: E741
            m, k = (_rounded(m / l), k) if axis == "m" else (m, _rounded(k / l))
        n = p.n * p.graph.accumulators
        dtypes = p.a_dtype, p.b_dtype, p.d_dtype
        return cls(m, n, k, l, p.a.major, p.b.major, *dtypes, axis)

    def problem(self) -> GemmProblem:
        """Returns the problem of this key with compact operands, of a matrix for each group."""
        if self.grouped:
            m = self.m * self.l if self.grouped == "m" else self.m
            k = self.k * self.l if self.grouped == "k" else self.k
            problem = GemmProblem.grouped(
                self.grouped, m, self.n, k, self.l, b_major=self.b_major, d_dtype=self.d_dtype
            )
        else:
            problem = GemmProblem.dense(
                self.m, self.n, self.k, self.l,
                a_major=self.a_major, b_major=self.b_major, d_dtype=self.d_dtype,
            )  # fmt: skip
        return replace(problem, a_dtype=self.a_dtype, b_dtype=self.b_dtype)


def _rounded(size: float) -> int:
    """Returns the power of two that is nearest in proportion, at least 1."""
    return 2 ** max(0, round(math.log2(size)))


@dataclass(frozen=True)
class Entry:
    """One measured choice. Times are microseconds, None where not measured."""

    key: Key
    prefer: Literal["kernel", "xla"]
    spec: GemmSpec
    raster_order: RasterOrder
    kernel_us: float | None = None
    xla_us: float | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """The measured choices for one kind of GPU. Compared by identity, so it can be a cache key."""

    device: Device
    entries: Mapping[Key, Entry]
    origin: str  # where it comes from, for `explain`
    source: Source = "user table"  # "table" if it is the packaged one

    @classmethod
    def of(cls, device: Device, entries: Iterable[Entry] = (), origin: str = "") -> Table:
        """Returns a table; of two entries for one key the later holds."""
        return cls(device, MappingProxyType({entry.key: entry for entry in entries}), origin)


@functools.lru_cache(maxsize=8)
def packaged_table(device: Device) -> Table:
    """Returns the table that ships with the package, empty where none does."""
    path = PACKAGED / f"{device.key}.json"
    table = read_table(path) if path.exists() else Table.of(device)
    return replace(table, origin=device.key, source="table")


def read_table(path: str | os.PathLike[str]) -> Table:
    """Returns the table stored in `path`.

    Raises:
      TableError: the file cannot be read, is no such table, or holds an entry that no kernel can
        serve.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(
            f"table {path}: {error}. Write one with `python -m jax_hopper_gemm tune`."
        ) from error
    try:
        _expect_fields(document, {"version", "device", "entries"})
        if document["version"] != TABLE_VERSION:
            came = f"version is {document['version']!r}"
            raise _Bad(f"{came}, this library reads {TABLE_VERSION}: tune again")
        device = _device(document["device"])
        rows = _expect(document["entries"], list, "entries")
    except _Bad as bad:
        raise TableError(f"table {path}: {bad}") from None
    entries: dict[Key, Entry] = {}
    for index, row in enumerate(rows):
        try:
            entry = _entry(row)
            if entry.key in entries:
                raise _Bad("a second entry for the same problem: keep one of them")
        except _Bad as bad:
            raise TableError(f"table {path}, entry {index}: {bad}") from None
        entries[entry.key] = entry
    return Table.of(device, entries.values(), str(path))


def read_or_start(path: Path, device: Device, option: str) -> Table:
    """Returns the table at `path`, which an `option` of the command names, or an empty one.

    Raises:
      ValueError: the table is for another kind of GPU, or damaged (`TableError`).
    """
    if not path.exists():
        return Table.of(device, (), str(path))
    existing = read_table(path)
    if existing.device != device:
        raise ValueError(
            f"{path} is for {existing.device.key}, this GPU is {device.key}: "
            f"choose another {option}"
        )
    return existing


def write_table(table: Table, path: str | os.PathLike[str]) -> None:
    """Writes `table`, sorted, one entry a line; the file changes at once or not at all.

    Dense products come first, those of groups follow, each by their extents.
    """
    device = table.device
    head = {"gpu": device.gpu, "compute_capability": list(device.compute_capability)}
    head |= {"num_sms": device.num_sms}
    rows = sorted(table.entries.values(), key=lambda x: (x.key.grouped or "", astuple(x.key)))
    lines = ",\n".join("  " + json.dumps(_row(entry)) for entry in rows)
    text = (
        f'{{"version": {TABLE_VERSION},\n "device": {json.dumps(head)},\n'
        f' "entries": [\n{lines}\n ]}}\n'
    )
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


_KEY_FIELDS = {field.name for field in fields(Key)}
# Fields that a kernel has where they are not the default, and their types.
_OPTIONAL: dict[str, type] = {
    "short_boxes": bool, "evict_first": str, "split_k": bool, "d_major": str, "cluster_k": int,
}  # fmt: skip
_DEFAULTS = {field.name: field.default for field in fields(GemmSpec)}
_FIXED = {field.name for field in fields(ProblemType)}  # by the problem, a plain product
_SPEC_FIELDS = _DEFAULTS.keys() - _FIXED - _OPTIONAL.keys() - {"epi_load_stages"}
_ENTRY_FIELDS = _KEY_FIELDS | {"prefer", "kernel", "raster_order", "kernel_us", "xla_us"}


def _row(entry: Entry) -> dict[str, Any]:
    key = {name: value for name, value in vars(entry.key).items() if value is not None}
    kernel = {name: value for name, value in vars(entry.spec).items() if name in _SPEC_FIELDS}
    named = ((name, getattr(entry.spec, name)) for name in _OPTIONAL)
    kernel |= {name: value for name, value in named if value != _DEFAULTS[name]}
    return {
        **key,
        "prefer": entry.prefer,
        "kernel": kernel,
        "raster_order": vars(entry.raster_order),
        "kernel_us": entry.kernel_us,
        "xla_us": entry.xla_us,
    }


def _entry(row: Any) -> Entry:
    grouped = {"grouped"} & row.keys() if type(row) is dict else set()
    _expect_fields(row, _ENTRY_FIELDS - {"grouped"} | grouped)
    if grouped and row["grouped"] not in ("m", "k"):
        raise _Bad(f"grouped is {row['grouped']!r}, not 'm' or 'k'; dense products have none")
    for name in ("m", "n", "k", "l"):
        if _expect(row[name], int, name) < 1:
            raise _Bad(f"{name} is {row[name]}, not at least 1")
    for name, majors in (("a_major", "mk"), ("b_major", "nk")):
        if _expect(row[name], str, name) not in tuple(majors):
            raise _Bad(f"{name} is {row[name]!r}, not one of {list(majors)}")
    for name in ("a_dtype", "b_dtype", "d_dtype"):
        _expect(row[name], str, name)
    key = Key(**{name: row[name] for name in _KEY_FIELDS & row.keys()})
    if row["prefer"] not in ("kernel", "xla"):
        raise _Bad(f"prefer is {row['prefer']!r}, not 'kernel' or 'xla'")
    kernel = row["kernel"]
    named = _OPTIONAL.keys() & kernel.keys() if type(kernel) is dict else set()
    _expect_fields(kernel, _SPEC_FIELDS | named, "kernel has")
    for name, value in kernel.items():
        policy = str if name in ("warp_schedule", "tile_scheduler") else int
        _expect(value, _OPTIONAL.get(name, policy), name)
    as_run = key.problem().as_stored(kernel.get("d_major", "n"))
    spec = GemmSpec(**vars(ProblemType.of(as_run)) | kernel)
    if reasons := violations(spec) or pairing_violations(key.problem(), spec):
        raise _Bad("no kernel runs it: " + "; ".join(reasons))
    times = {name: _microseconds(row[name], name) for name in ("kernel_us", "xla_us")}
    prefer = cast(Literal["kernel", "xla"], row["prefer"])
    return Entry(key, prefer, spec, _raster_order(row["raster_order"]), **times)


def _raster_order(value: Any) -> RasterOrder:
    _expect_fields(value, {"along", "swizzle"}, "raster_order has")
    if value["along"] not in ("m", "n"):
        raise _Bad(f"raster_order along is {value['along']!r}, not 'm' or 'n'")
    if not 1 <= _expect(value["swizzle"], int, "swizzle") <= 16:
        raise _Bad(f"raster_order swizzle is {value['swizzle']}, not 1 to 16")
    return RasterOrder(**value)


def _device(value: Any) -> Device:
    _expect_fields(value, {"gpu", "compute_capability", "num_sms"}, "device has")
    if value["gpu"] not in [*GPUS]:
        raise _Bad(f"gpu is {value['gpu']!r}, not one of {', '.join(GPUS)}")
    capability = _expect(value["compute_capability"], list, "compute_capability")
    if len(capability) != 2 or not all(type(part) is int for part in capability):
        raise _Bad(f"compute_capability is {capability}, not [major, minor]")
    if _expect(value["num_sms"], int, "num_sms") < 1:
        raise _Bad(f"num_sms is {value['num_sms']}, not at least 1")
    return Device((capability[0], capability[1]), value["num_sms"], gpu=value["gpu"])


def _microseconds(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise _Bad(f"{name} is {value!r}, not a positive number of microseconds or null")
    return float(value)


class _Bad(Exception):
    """What is wrong with a part of a table; the reader adds where it stands."""


def _expect(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise _Bad(f"{name} is {value!r}, not of type {kind.__name__}")
    return value


def _expect_fields(value: Any, names: set[str], subject: str = "it has") -> None:
    if type(value) is not dict:
        raise _Bad(f"{subject} no fields: it is {value!r}, expected an object with {sorted(names)}")
    missing, unknown = sorted(names - value.keys()), sorted(value.keys() - names)
    if missing or unknown:
        raise _Bad(f"{subject} missing fields {missing} and unknown fields {unknown}")


def tables_of(device: Device) -> tuple[Table, ...]:
    """Returns the tables for a kind of GPU, the first of which that has a problem decides.

    Those of an H200 are the last of any GPU of as many SMs.
    """
    devices = (device,) if device.gpu == "H200" else (device, replace(device, gpu="H200"))
    tables = ((d, table) for d in devices for table in (*_environment_tables(), packaged_table(d)))
    return tuple(table for d, table in tables if table.device == d)


@functools.cache
def _environment_tables() -> tuple[Table, ...]:
    path = os.environ.get(TABLE_VARIABLE)
    if not path:
        return ()
    try:
        return (read_table(path),)
    except TableError as error:
        raise TableError(f"{error} (the path comes from {TABLE_VARIABLE})") from error
