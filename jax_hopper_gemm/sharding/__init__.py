"""Products in a program that XLA partitions over devices: each device gets its share as a program.

    call.py           the custom call, and what XLA's partitioner gets in its place
    mesh.py           the devices, and how arrays lie on them
    shares.py         which share of a product each device computes
    local.py          what the program of a share knows, and its sums over devices
    fused.py          products with an epilogue: their calls, and the program of a share
    ragged.py         ragged products: likewise
    fused_product.py  what a call of a product with an epilogue says
    fused_ragged.py   the program of a share of a ragged product with an epilogue
    ragged_shares.py  the rows and groups of a ragged product that a share has

`call.py` knows no product. Lowering uses it, and what knows fused and ragged products uses
lowering: those files are imported by their names.
"""

from .choose_shards import Factors
from .custom_call import (
    TARGET,
    applies,
    emit,
    on_cpu,
    platforms_of,
    precision_names,
    precision_of,
    product_at,
    register,
)
from .shard import ShardContext

__all__ = [
    "TARGET",
    "Factors",
    "ShardContext",
    "applies",
    "emit",
    "on_cpu",
    "platforms_of",
    "precision_names",
    "precision_of",
    "product_at",
    "register",
]
