"""Mixture of experts: routing, the experts' products, and experts spread over devices."""

from __future__ import annotations

from .exchange import Exchange as Exchange
from .experts import grouped_mlp as grouped_mlp
from .layer import mixture_of_experts as mixture_of_experts
from .routing import Routing as Routing
from .routing import Score as Score
from .routing import Statistics as Statistics
from .routing import combine_rows as combine_rows
from .routing import dispatch_rows as dispatch_rows
from .routing import load_balancing_loss as load_balancing_loss
from .routing import route as route
from .routing import router as router
from .routing import router_z_loss as router_z_loss
from .routing import row_weights as row_weights
