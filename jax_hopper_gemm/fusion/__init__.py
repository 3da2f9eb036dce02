"""From a JAX function of a product to what a kernel computes of it and what XLA does after it."""

from .cut import Fusion as Fusion
from .cut import fuse as fuse
from .flatten import NotFusable as NotFusable
from .graph_to_jax import evaluate as evaluate
from .segments import GroupedRows as GroupedRows
