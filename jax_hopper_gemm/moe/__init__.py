"""Mixture of experts: router, the experts' grouped GEMMs, and expert parallelism."""

from .expert_parallel import Exchange as Exchange
from .layer import grouped_mlp as grouped_mlp
from .layer import mixture_of_experts as mixture_of_experts
from .router import Routing as Routing
from .router import Score as Score
from .router import Statistics as Statistics
from .router import combine_rows as combine_rows
from .router import dispatch_rows as dispatch_rows
from .router import load_balancing_loss as load_balancing_loss
from .router import route as route
from .router import route_tokens as route_tokens
from .router import router_z_loss as router_z_loss
from .router import row_weights as row_weights
