"""Programs that were compiled before, in processes that have kernels, a compiler, or neither."""

from __future__ import annotations

import importlib.util

import pytest
from processes import run_python

PRODUCT = """
events = []
jax.monitoring.register_event_listener(lambda event, **kwargs: events.append(event))
a, b = np.ones((264, 512), jnp.bfloat16), np.full((512, 328), 2, jnp.bfloat16)
try:
    product = jax.jit(hopper)(a, b)
    assert np.array_equal(product, np.full((264, 328), 1024, jnp.bfloat16))
    said = "right"
except jax.errors.JaxRuntimeError as error:
    said = str(error).replace(chr(10), " ")
hits, misses = (events.count(f"/jax/compilation_cache/cache_{x}") for x in ("hits", "misses"))
print(hits, misses, "cutlass" in sys.modules, said)
"""


@pytest.fixture
def environment(tmp_path):
    """JAX's persistent cache, which keeps everything, and a cache of cubins that is empty."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_HOPPER_GEMM_CACHE": str(tmp_path / "cubins"),
    }


def test_the_second_process_compiles_nothing(tmp_path, environment):
    hits, misses, *_, said = run_python(PRODUCT, tmp_path, **environment).split(maxsplit=3)
    assert (int(hits), said) == (0, "right") and int(misses) > 0
    hits, misses, compiler, said = run_python(PRODUCT, tmp_path, **environment).split(maxsplit=3)
    assert (misses, compiler, said) == ("0", "False", "right") and int(hits) > 0


def test_a_cached_program_takes_its_kernel_from_the_users_cache(tmp_path, environment):
    run_python(PRODUCT, tmp_path, **environment)
    run_python(
        """
        from jax_hopper_gemm import cubin
        from jax_hopper_gemm.cubin import lookup
        from jax_hopper_gemm.testing.lowered import specs_of

        a, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((264, 512), (512, 328)))
        for spec in specs_of(hopper, a, b):
            found = cubin.get(spec)
            lookup.user_cache().write(cubin.digest_of(spec), found.cubin, found.manifest)
        """,
        tmp_path,
        **environment,
    )
    (tmp_path / "nothing").mkdir()
    environment["JAX_HOPPER_GEMM_CUBINS"] = str(tmp_path / "nothing")
    _, misses, compiler, said = run_python(PRODUCT, tmp_path, **environment).split(maxsplit=3)
    assert (misses, compiler, said) == ("0", "False", "right")


def test_a_cached_program_whose_kernel_is_gone_is_served_or_says_why_not(tmp_path, environment):
    run_python(PRODUCT, tmp_path, **environment)
    (tmp_path / "nothing").mkdir()
    environment["JAX_HOPPER_GEMM_CUBINS"] = str(tmp_path / "nothing")
    environment["JAX_HOPPER_GEMM_CACHE"] = str(tmp_path / "cold")
    said = run_python(PRODUCT, tmp_path, **environment).split(maxsplit=3)[3]
    if importlib.util.find_spec("cutlass"):
        assert said == "right"
        assert list((tmp_path / "cold").glob("*.cubin"))
    else:
        assert "no cubin of jhg_gemm_" in said
        assert "JAX_HOPPER_GEMM_CUBINS" in said and str(tmp_path / "cold") in said


def test_a_serialised_executable_runs_in_a_fresh_process(tmp_path):
    run_python(
        """
        import pickle
        from jax.experimental import serialize_executable

        def program(a, b):
            product, pull = jax.vjp(hopper, a, b)
            return product, pull(product)

        a, b = normal(0, (264, 512)), normal(1, (512, 328))
        compiled = jax.jit(program).lower(a, b).compile()
        with open(folder + "/executable", "wb") as file:
            pickle.dump(serialize_executable.serialize(compiled), file)
        np.savez(folder + "/results", *(x.view("u2") for x in jax.tree.leaves(compiled(a, b))))
        """,
        tmp_path,
    )
    imported = run_python(
        """
        import pickle
        from jax.experimental import serialize_executable

        with open(folder + "/executable", "rb") as file:
            program = serialize_executable.deserialize_and_load(
                *pickle.load(file), execution_devices=jax.devices()[:1]
            )
        found = jax.tree.leaves(program(normal(0, (264, 512)), normal(1, (512, 328))))
        saved = np.load(folder + "/results.npz")
        assert len(found) == 3
        for one, other in zip(found, saved.values(), strict=True):
            assert np.array_equal(one.view("u2"), other) and np.any(other != 0)
        print([m for m in sys.modules if m == "cutlass"])
        """,
        tmp_path,
    )
    assert imported == "[]"
