"""Which kernel runs a problem: candidates, what is legal, what it costs, what was measured."""

from __future__ import annotations

from .candidates import legal_specs as legal_specs
from .candidates import table_specs as table_specs
from .choice import Decision as Decision
from .choice import choose as choose
from .choice import choose_invariant as choose_invariant
from .cost import estimate as estimate
from .cost import fma_ns as fma_ns
from .cost import pass_ns as pass_ns
from .cost import widening_ns as widening_ns
from .device import H100 as H100
from .device import H200 as H200
from .device import Device as Device
from .device import absent_device as absent_device
from .device import gpu_of as gpu_of
from .legality import problem_violations as problem_violations
from .model import slower_than_in_tf32 as slower_than_in_tf32
from .table import TableError as TableError
from .table import tables_of as tables_of
