"""Checks of users' arguments; errors say what came, what was expected, and the way out."""

from .arguments import SCALARS as SCALARS
from .arguments import as_arrays as as_arrays
from .arguments import as_cotangent_dtype as as_cotangent_dtype
from .arguments import as_result_dtype as as_result_dtype
from .arguments import check_accelerated as check_accelerated
from .arguments import check_max_sms as check_max_sms
from .arguments import check_unchanged as check_unchanged
from .arguments import strong_dtype as strong_dtype
from .dense import check_einsum as check_einsum
from .dense import check_matmul as check_matmul
from .dense import checked_axes as checked_axes
from .dense import matmul_axes as matmul_axes
from .dense import one_product as one_product
from .gated import check_gated as check_gated
from .ragged import GroupArguments as GroupArguments
from .ragged import check_group_operands as check_group_operands
from .ragged import check_ragged_dot as check_ragged_dot
from .ragged import check_ragged_dot_general as check_ragged_dot_general
from .steps import call as call
from .steps import check_activated as check_activated
from .steps import check_result_dtypes as check_result_dtypes
from .steps import check_steps as check_steps
from .steps import results as results
from .wording import describe as describe
from .wording import names_itself as names_itself
