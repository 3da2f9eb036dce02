"""Warp schedules: how the math warpgroups share tiles and take turns. One policy a file."""

from .cooperative import Cooperative
from .pingpong import Pingpong

WARP_SCHEDULES = {"cooperative": Cooperative, "pingpong": Pingpong}

__all__ = ["WARP_SCHEDULES", "Cooperative", "Pingpong"]
