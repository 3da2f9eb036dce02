"""Launches: all of a kernel launch but the addresses, and the FFI library that carries it out."""
