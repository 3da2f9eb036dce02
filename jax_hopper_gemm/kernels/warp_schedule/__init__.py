"""Warp schedules: how the math warpgroups share tiles and take turns. One policy a file."""

from .cooperative import Cooperative, NoTurn
from .pingpong import Pingpong

WARP_SCHEDULES = {"cooperative": Cooperative, "pingpong": Pingpong}

__all__ = ["WARP_SCHEDULES", "Cooperative", "NoTurn", "Pingpong"]
