"""Lowering: from a product in a JAX program to the launch of a kernel, or to XLA's own product."""
