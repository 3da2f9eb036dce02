"""Interoperability: `accelerate` and the interception of `lax.ragged_dot`."""

from .accelerate import accelerate as accelerate
from .accelerate import intercept_ragged_dot as intercept_ragged_dot
