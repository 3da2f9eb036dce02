"""Epilogues: accumulator → results. One job a file."""

from .driver import FusedEpilogue

__all__ = ["FusedEpilogue"]
