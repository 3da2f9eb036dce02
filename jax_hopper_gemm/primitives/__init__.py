"""JAX primitives: what products are while a program is traced, with derivatives and `vmap`."""
