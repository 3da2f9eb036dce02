"""GEMM kernels for NVIDIA Hopper, called from JAX."""

from __future__ import annotations

from . import moe as moe
from .collective import all_gather_matmul as all_gather_matmul
from .collective import matmul_reduce_scatter as matmul_reduce_scatter
from .config import FallbackWarning as FallbackWarning
from .lowering import export_disabled_checks as export_disabled_checks
from .ops import Explanation as Explanation
from .ops import FoundProduct as FoundProduct
from .ops import ProductReport as ProductReport
from .ops import accelerate as accelerate
from .ops import checkpoint_policy as checkpoint_policy
from .ops import dot_general as dot_general
from .ops import einsum as einsum
from .ops import explain as explain
from .ops import explain_gated_linear_unit as explain_gated_linear_unit
from .ops import gated_linear_unit as gated_linear_unit
from .ops import intercept_ragged_dot as intercept_ragged_dot
from .ops import matmul as matmul
from .ops import max_sms as max_sms
from .ops import ragged_dot as ragged_dot
from .ops import ragged_dot_general as ragged_dot_general
from .ops import report_products as report_products
from .ops import supports as supports
