"""From a JAX function of a product to what a kernel computes of it and what XLA does after it."""

from .evaluate import evaluate as evaluate
from .flatten import NotFusable as NotFusable
from .fusion import Fusion as Fusion
from .fusion import fuse as fuse
from .groups import GroupedRows as GroupedRows
