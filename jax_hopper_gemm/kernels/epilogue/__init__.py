"""Epilogues: accumulator → results. One job a file."""

from .fused import FusedEpilogue

__all__ = ["FusedEpilogue"]
