"""Tables of measured choices that a process uses: the user's, and the packaged one after them."""

from __future__ import annotations

import functools
import os

from .device import Device
from .table import Table, TableError, packaged_table, read_table

TABLE_VARIABLE = "JAX_HOPPER_GEMM_TABLE"


def load_table(path: str | os.PathLike[str]) -> Table:
    """Adds a user's table for this process; it precedes those loaded before and the packaged one.

    It serves the kind of GPU that it names and no other.

    Raises:
      TableError: the file cannot be read or holds an entry that no kernel can serve.
    """
    table = read_table(path)
    _tables.add(table)
    return table


def tables_of(device: Device) -> tuple[Table, ...]:
    """Returns the tables for a kind of GPU, the first of which that has a problem decides.

    Raises:
      TableError: the table that JAX_HOPPER_GEMM_TABLE names cannot be used.
    """
    tables = (*_tables.current(), packaged_table(device))
    return tuple(table for table in tables if table.device == device)


class UserTables:
    """The user's tables, latest first; the environment's is read when first needed."""

    def __init__(self) -> None:
        self._loaded: list[Table] = []
        self._environment = functools.cache(_environment_tables)

    def add(self, table: Table) -> None:
        self._loaded.insert(0, table)

    def current(self) -> tuple[Table, ...]:
        return (*self._loaded, *self._environment())


def _environment_tables() -> tuple[Table, ...]:
    path = os.environ.get(TABLE_VARIABLE)
    if not path:
        return ()
    try:
        return (read_table(path),)
    except TableError as error:
        raise TableError(f"{error} (the path comes from {TABLE_VARIABLE})") from error


_tables = UserTables()
