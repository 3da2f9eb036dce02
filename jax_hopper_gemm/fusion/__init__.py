"""Epilogue fusion: a JAX function of a product becomes a kernel's graph and XLA's leftover."""

from .cut import Fusion as Fusion
from .cut import fuse as fuse
from .flatten import NotFusable as NotFusable
from .graph_to_jax import evaluate as evaluate
from .graph_to_jax import reduced_by as reduced_by
from .segments import GroupedRows as GroupedRows
