"""The vocabulary of a GEMM: problems, specs, epilogue graphs, and arithmetic that kernels share.

Nothing here imports jax or cutlass.
"""
