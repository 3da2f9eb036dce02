"""Which kernel runs a problem: candidates, what is legal, what it costs, what was measured."""

from __future__ import annotations

from .choice import Decision as Decision
from .choice import choose as choose
from .choice import decided_by as decided_by
from .choice import epilogue_specs as epilogue_specs
from .choice import legal_specs as legal_specs
from .choice import load_table as load_table
from .choice import table_specs as table_specs
from .device import H200 as H200
from .device import Device as Device
from .legality import problem_violations as problem_violations
from .table import TableError as TableError
