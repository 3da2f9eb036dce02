"""Tables of measured choices that a process uses: the user's, and the packaged one after them."""

from __future__ import annotations

import os
import threading

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
        self._lock = threading.Lock()
        self._loaded: tuple[Table, ...] = ()
        self._environment: tuple[Table, ...] | None = None

    def add(self, table: Table) -> None:
        with self._lock:
            self._loaded = (table, *self._loaded)

    def current(self) -> tuple[Table, ...]:
        environment = self._environment
        if environment is None:
            with self._lock:
                environment = self._environment = self._read_environment()
        return self._loaded + environment

    def _read_environment(self) -> tuple[Table, ...]:
        path = os.environ.get(TABLE_VARIABLE)
        if not path:
            return ()
        try:
            return (read_table(path),)
        except TableError as error:
            raise TableError(f"{error} (the path comes from {TABLE_VARIABLE})") from error


_tables = UserTables()
