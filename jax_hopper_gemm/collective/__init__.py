"""Collective GEMMs: products over the devices of a mesh axis that overlap with their transfers."""

from .products import all_gather_matmul as all_gather_matmul
from .products import matmul_reduce_scatter as matmul_reduce_scatter
