"""The choices of `GemmSpec`'s fields that covering sets of kernels are made of: see `policies`.

A value that is added here is tested with all others.
"""

from __future__ import annotations

import itertools

from support.graphs import EIGHT_BIT, STANDARD

from jax_hopper_gemm.gemm.dtypes import RESULTS

# Every value of every field; A and B have one dtype, the cluster's two extents are one choice.
CHOICES: dict[str, tuple] = {
    "ab_dtype": ("bfloat16", "float16"),
    "d_dtype": RESULTS,
    "a_major": ("k", "m"),
    "b_major": ("n", "k"),
    "tile_m": (64, 128, 192, 256),
    "tile_n": tuple(range(16, 257, 16)),
    "tile_k": (64, 128),
    "cluster": ((1, 1), (2, 1), (1, 2), (2, 2)),
    "warp_schedule": ("cooperative", "pingpong"),
    "tile_scheduler": ("single", "static", "dynamic"),
    "num_stages": (2, 3, 4, 5, 7),
    "epi_tile_n": (16, 32, 64),
    "epi_stages": (2, 3, 4),
}

# The same of a product with an epilogue, which is named; it fixes d_dtype where it has a matrix,
# and the loads' depth counts only where it loads.
EPILOGUE_CHOICES: dict[str, tuple] = {
    **CHOICES,
    "tile_n": (32, 48, 64, 96, 128, 160, 192, 256),
    "num_stages": (2, 3, 4),
    "epi_stages": (2, 3),
    "epilogue": tuple(STANDARD),
    "epi_load_stages": (0, 2, 3, 4),
}

# The same of clusters of four and eight.
_LARGE_CLUSTERS = {
    "cluster": ((4, 1), (1, 4), (4, 2), (2, 4)), "tile_n": (48, 64, 96, 128, 192, 256),
    "num_stages": (2, 4), "epi_stages": (2,),
}  # fmt: skip
LARGE_CLUSTER_CHOICES: tuple[dict[str, tuple], ...] = (
    {**CHOICES, **_LARGE_CLUSTERS},
    {**EPILOGUE_CHOICES, **_LARGE_CLUSTERS, "epilogue": ("bias_gelu_saved", "residual_float32")},
)

# The same of kernels that store D along M.
TRANSPOSED_CHOICES: tuple[dict[str, tuple], ...] = (
    {**CHOICES, "d_major": ("m",)},
    {
        **EPILOGUE_CHOICES,
        "d_major": ("m",),
        "epilogue": (
            "bias", "bias_gelu_saved", "bias_silu", "residual", "residual_float32", "alpha_beta",
            "scaled_rows", "masked_vectors", "two_matrices",
        ),
    },
    {**CHOICES, **_LARGE_CLUSTERS, "d_major": ("m",)},
)  # fmt: skip

# The same of grouped products, by the axis: of plain ones and of those with an epilogue.
_OF_ROWS = {
    "a_major": ("k",), "cluster": ((1, 1), (1, 2), (2, 1)),
    "tile_scheduler": ("static", "dynamic"), "grouped": ("m",), "gathered": (None, "a"),
}  # fmt: skip
_OF_CONTRACTION = {
    "a_major": ("m",), "b_major": ("n",), "tile_scheduler": ("static", "dynamic"),
    "grouped": ("k",), "gathered": (None, "a", "b"),
}  # fmt: skip
_FEWER = {"tile_n": (16, 32, 48, 64, 96, 128, 160, 192, 256), "num_stages": (2, 3, 4, 7)}
GROUPED_CHOICES: tuple[dict[str, tuple], ...] = (
    {**CHOICES, **_FEWER, **_OF_ROWS},
    {**CHOICES, **_FEWER, **_OF_CONTRACTION},
    {
        **EPILOGUE_CHOICES,
        **_OF_ROWS,
        "epilogue": (
            "bias", "bias_gelu_saved", "bias_silu", "residual", "residual_float32", "alpha_beta",
            "scaled_rows", "masked", "masked_vectors", "two_matrices", "planes", "gated_silu",
            "row_sum",
        ),
    },
    {
        **EPILOGUE_CHOICES,
        **_OF_CONTRACTION,
        "epilogue": (
            "bias", "residual_float32", "alpha_beta", "scaled_rows", "masked", "planes",
            "column_sum",
        ),
    },
)  # fmt: skip

# The same of operands of 8 bits, which lie along K; D may have 8 bits, too.
_F8 = ("float8_e4m3fn", "float8_e5m2")
_OF_8_BITS = {
    "ab_dtype": (*_F8, _F8, _F8[::-1], "int8"),
    "d_dtype": (*RESULTS, *_F8, "int32"),
    "a_major": ("k",), "b_major": ("k",), "tile_k": (128, 256), "promoted": (False, True),
    "tile_n": (16, 48, 96, 128, 160, 192, 256), "num_stages": (2, 3, 5), "epi_stages": (2, 3),
}  # fmt: skip
EIGHT_BIT_CHOICES: tuple[dict[str, tuple], ...] = (
    {**CHOICES, **_OF_8_BITS},
    {
        **EPILOGUE_CHOICES,
        **_OF_8_BITS,
        "d_dtype": (*RESULTS, *_F8, "int8", "int32"),
        "epilogue": ("bias_gelu_saved", "residual", "everything", "planes", "router", *EIGHT_BIT),
    },
    {**CHOICES, **_OF_ROWS, **_OF_8_BITS, "gathered": (None,)},
    {**CHOICES, **_OF_CONTRACTION, **_OF_8_BITS, "gathered": (None,)},
    {
        **EPILOGUE_CHOICES,
        **_OF_CONTRACTION,
        **_OF_8_BITS,
        "gathered": (None,),
        "epilogue": ("alpha_beta", "scaled_rows", "residual_float32"),
    },
)

_OF_BLOCKS = {
    "tile_k": (128,), "promoted": (True,), "a_block": (1, 128),
    "b_block": (1, 128), "num_stages": (2, 4), "epi_stages": (2,),
    "tile_n": (16, 96, 128, 160, 192),
    "ab_dtype": (_F8[0], _F8, "int8"), "d_dtype": ("bfloat16", "float32", _F8[0]),
}  # fmt: skip
_PROMOTED_IN_TURNS = {
    "tile_m": (64,),
    "tile_n": (32, 64, 128, 256),
    "num_stages": (4, 6, 8),
    "warp_schedule": ("cooperative",),
}
BLOCK_CHOICES: tuple[dict[str, tuple], ...] = (
    {**CHOICES, **_OF_8_BITS, **_OF_BLOCKS},
    {**CHOICES, **_OF_ROWS, **_OF_8_BITS, **_OF_BLOCKS, "gathered": (None,)},
    {**CHOICES, **_OF_CONTRACTION, **_OF_8_BITS, **_OF_BLOCKS, "gathered": (None,)},
    {**CHOICES, **_OF_8_BITS, **_OF_BLOCKS, **_PROMOTED_IN_TURNS},
    {
        **EPILOGUE_CHOICES, **_OF_8_BITS, **_OF_BLOCKS, **_PROMOTED_IN_TURNS, "a_block": (0, 1),
        "b_block": (0, 128), "epilogue": ("residual", "alpha_beta", "gated_silu"),
    },
)  # fmt: skip

# Of float32 operands, by bfloat16 parts.
_OF_PARTS = {
    "ab_dtype": ("float32",), "bf16_terms": (3, 6, 9), "tile_m": (64, 128), "tile_k": (32,),
    "tile_n": (64, 128, 192, 256), "warp_schedule": ("cooperative",), "num_stages": (2, 3, 5),
    "epi_stages": (2,),
}  # fmt: skip
PARTS_CHOICES: tuple[dict[str, tuple], ...] = (
    {**CHOICES, **_OF_PARTS},
    {**EPILOGUE_CHOICES, **_OF_PARTS},
    {**CHOICES, **_OF_ROWS, **_OF_PARTS},
    {**CHOICES, **_OF_CONTRACTION, **_OF_PARTS},
)
# The same where the parts are in memory.
_OF_STORED_PARTS = {
    "ab_dtype": ("bfloat16",), "bf16_terms": (3, 6, 9), "tile_m": (64, 128, 192), "tile_k": (64,),
    "tile_n": (64, 128, 160, 192, 208), "warp_schedule": ("cooperative",), "num_stages": (3, 5),
    "epi_stages": (2,),
}  # fmt: skip
STORED_PARTS_CHOICES: tuple[dict[str, tuple], ...] = (
    {**CHOICES, **_OF_STORED_PARTS},
    {**EPILOGUE_CHOICES, **_OF_STORED_PARTS},
)

# The same as they are, in TF32.
_OF_TF32 = {
    "ab_dtype": ("float32",), "a_major": ("k",), "b_major": ("k",), "tile_k": (32, 64),
    "tile_n": (16, 32, 96, 128, 160, 192, 256), "num_stages": (2, 3, 5), "epi_stages": (2,),
}  # fmt: skip
# Those where B lies across K, and passes through registers.
_ACROSS = {
    "ab_dtype": ("float32",), "a_major": ("k",), "b_major": ("n",), "epi_stages": (2,),
    "tile_m": (16, 32, 64, 128, 256), "tile_n": (128, 256), "tile_k": (32, 64, 128),
    "warp_schedule": ("cooperative",), "num_stages": (2, 3, 4),
}  # fmt: skip
_ACROSS_IN_TURNS = {
    **_ACROSS, "tile_m": (16, 32, 64), "tile_n": (64,), "tile_k": (64, 128), "num_stages": (4,),
}  # fmt: skip
TF32_CHOICES: tuple[dict[str, tuple], ...] = (
    {**CHOICES, **_OF_TF32},
    {
        **EPILOGUE_CHOICES,
        **_OF_TF32,
        "epilogue": ("bias_gelu_saved", "residual", "everything", "gated_silu", "row_sum"),
    },
    {**CHOICES, **_OF_ROWS, **_OF_TF32, "gathered": (None,)},
    {**CHOICES, **_ACROSS},
    {**EPILOGUE_CHOICES, **_ACROSS, "epilogue": ("bias_gelu_saved", "residual", "gated_silu")},
    {**CHOICES, **_OF_ROWS, **_ACROSS, "gathered": (None,)},
    {**CHOICES, **_ACROSS_IN_TURNS},
)

# The same where B is converted on its way to the tensor cores.
_CONVERTED = {
    "ab_dtype": tuple(itertools.product(("bfloat16", "float16"), (*_F8, "int8", "int4"))),
    "tile_m": (16, 32, 64, 128, 256), "tile_n": (128, 256), "warp_schedule": ("cooperative",),
    "num_stages": (2, 3, 4, 6), "k_group": (0, 32, 64, 128),
}  # fmt: skip
_IN_TURNS = {
    **_CONVERTED,
    "ab_dtype": (
        ("bfloat16", "int4"), ("float16", "int4"), ("bfloat16", "int8"),
        ("float16", "float8_e4m3fn"),
    ),
    "tile_m": (16, 32, 64), "tile_n": (64,), "tile_k": (64, 128, 256),
    "num_stages": (4, 6, 8), "k_group": (0,),
}  # fmt: skip
CONVERTED_CHOICES: tuple[dict[str, tuple], ...] = (
    {**CHOICES, **_CONVERTED},
    {**CHOICES, **_OF_ROWS, **_CONVERTED},
    {
        **EPILOGUE_CHOICES,
        **_CONVERTED,
        "k_group": (0,),
        "epilogue": (
            "bias", "bias_gelu_saved", "residual", "residual_float32", "alpha_beta", "scaled_rows",
            "masked", "masked_vectors", "two_matrices", "planes", "gated_silu",
        ),
    },
    {**CHOICES, **_IN_TURNS, "k_group": (0, 32, 64, 128)},
    {**EPILOGUE_CHOICES, **_IN_TURNS, "tile_n": (64, 128), "epilogue": ("residual", "gated_silu")},
)  # fmt: skip
