"""Products in a program that XLA partitions over devices: each device gets its shard as a program.

    custom_call.py    the custom call, and what XLA's partitioner gets in its place
    mesh.py           the devices, and how arrays lie on them
    choose_shards.py  the choice of the shard that each device computes
    shard.py          what the program of a shard knows, and its sums over devices

It knows no product: primitives register theirs, see `primitives/*_sharded.py`.
"""

from .choose_shards import Factors as Factors
from .custom_call import TARGET as TARGET
from .custom_call import applies as applies
from .custom_call import emit as emit
from .custom_call import product_at as product_at
from .custom_call import register as register
from .shard import ShardContext as ShardContext
