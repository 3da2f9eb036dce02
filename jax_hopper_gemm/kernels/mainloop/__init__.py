"""Mainloops: stages of A and B in shared memory → accumulator. One policy a file."""

from .ss import SharedSharedMainloop

__all__ = ["SharedSharedMainloop"]
