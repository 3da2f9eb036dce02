"""CuTeDSL device code. Importing this imports cutlass: only a compile does."""

from .compile import compile_cubin, parameter_names

__all__ = ["compile_cubin", "parameter_names"]
