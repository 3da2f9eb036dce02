"""CuTeDSL device code. Importing this imports cutlass: only a compile does."""

from .compile import compile_cubin

__all__ = ["compile_cubin"]
