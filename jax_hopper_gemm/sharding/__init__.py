"""Products in a program that XLA partitions over devices: each device gets its shard as a program.

    custom_call.py    the custom call, and what XLA's partitioner gets in its place
    mesh.py           the devices, and how arrays lie on them
    choose_shards.py  the choice of the shard that each device computes
    options.py        options of a product as JSON
    shard.py          what the program of a shard knows, and its sums over devices

It knows no product: primitives register theirs, see `primitives/*_sharded.py`.
"""

from .choose_shards import Factors
from .custom_call import (
    TARGET,
    applies,
    emit,
    on_cpu,
    platforms_of,
    product_at,
    register,
)
from .options import options_of_words, options_to_words, precision_names, precision_of
from .shard import ShardContext

__all__ = [
    "TARGET",
    "Factors",
    "ShardContext",
    "applies",
    "emit",
    "on_cpu",
    "options_of_words",
    "options_to_words",
    "platforms_of",
    "precision_names",
    "precision_of",
    "product_at",
    "register",
]
