"""What users call: JAX's own products, on kernels for Hopper where there is one."""

from __future__ import annotations

from .accelerate import accelerate as accelerate
from .checkpoint import checkpoint_policy as checkpoint_policy
from .dense import dot_general as dot_general
from .dense import einsum as einsum
from .dense import matmul as matmul
from .explain import Explanation as Explanation
from .explain import explain as explain
from .explain import explain_gated_linear_unit as explain_gated_linear_unit
from .explain import supports as supports
from .gated import gated_linear_unit as gated_linear_unit
from .intercept import intercept_ragged_dot as intercept_ragged_dot
from .limit import max_sms as max_sms
from .product_report import FoundProduct as FoundProduct
from .product_report import ProductReport as ProductReport
from .product_report import report_products as report_products
from .ragged import ragged_dot as ragged_dot
from .ragged import ragged_dot_general as ragged_dot_general
