"""Epilogues: accumulator → D. One policy a file."""

from .store import StagedStore

__all__ = ["StagedStore"]
