"""Interoperability: `accelerate`, checkpoint policies, interception of `lax.ragged_dot`."""

from __future__ import annotations

from .accelerate import accelerate as accelerate
from .checkpoint_policy import checkpoint_policy as checkpoint_policy
from .intercept import intercept_ragged_dot as intercept_ragged_dot
