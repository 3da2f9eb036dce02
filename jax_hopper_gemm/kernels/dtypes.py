"""CuTe's types, by the names in `gemm.dtypes`."""

import cutlass

from ..gemm.dtypes import DTYPES

CUTE_DTYPE = {name: getattr(cutlass, row.cute) for name, row in DTYPES.items()}
