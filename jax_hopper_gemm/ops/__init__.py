"""The public functions: JAX's own products, on Hopper kernels where there is one."""

from . import recipes as recipes
from .contexts import batch_invariant as batch_invariant
from .contexts import max_sms as max_sms
from .dense import dot_general as dot_general
from .dense import einsum as einsum
from .dense import matmul as matmul
from .gated import gated_linear_unit as gated_linear_unit
from .quantized import Quantized as Quantized
from .quantized import quantize as quantize
from .ragged import ragged_dot as ragged_dot
from .ragged import ragged_dot_general as ragged_dot_general
