"""GEMM kernels for NVIDIA Hopper, called from JAX."""
