"""Options of a product as a key of caches."""

from __future__ import annotations

from jax.lax import Precision

from jax_hopper_gemm.gemm.product import Options


def test_options_from_lists_hash_and_equal_those_from_tuples():
    pair, dtypes = [Precision.HIGHEST, Precision.DEFAULT], ["float32", None]
    options = Options("hopper", pair, dtypes)
    assert options == Options("hopper", tuple(pair), tuple(dtypes))
    assert hash(options) == hash(Options("hopper", tuple(pair), tuple(dtypes)))
    assert options != Options("hopper", tuple(pair), tuple(dtypes), max_sms=8)
