"""NumPy names of dtypes → CuTe's types."""

import cutlass

CUTE_DTYPE = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "bool": cutlass.Uint8,  # one byte an element, 0 or 1
    "int32": cutlass.Int32,
}
