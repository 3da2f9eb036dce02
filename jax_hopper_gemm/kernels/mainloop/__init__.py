"""Mainloops: stages of A and B in shared memory → accumulator. One policy a file."""

from .gather import GatheredMainloop
from .tma import SharedSharedMainloop


def make_mainloop(spec, atom_layout_m):
    """Returns the mainloop of `spec`, whose tiles `atom_layout_m` warpgroups share."""
    return (GatheredMainloop if spec.gathered else SharedSharedMainloop)(spec, atom_layout_m)


__all__ = ["GatheredMainloop", "SharedSharedMainloop", "make_mainloop"]
