"""Exported programs: what `jax.export` must be told, and which kernels they launch."""

from __future__ import annotations

import jax
from jax import export
from jax.extend.mlir import ir
from jax.interpreters import mlir

from .. import sharding
from ..launch.ffi_target import TARGET
from ..lowering.call import Launch, custom_calls, launches_in


def launches_of(exported: export.Exported) -> list[Launch]:
    """Returns the launches of an exported program, without those of its derivatives.

    Raises:
      ValueError: XLA will partition products of it over devices; only then it is known which
        kernels run.
    """
    with mlir.make_ir_context():
        module = ir.Module.parse(exported.mlir_module())
        if list(custom_calls(module, sharding.TARGET)):
            raise ValueError(
                f"{exported.fun_name} is partitioned over {exported.nr_devices} devices where it "
                "is loaded, and its kernels are chosen there"
            )
        return launches_in(module)


def stored_programs(content: bytes) -> list[export.Exported]:
    """Returns the programs in what `Exported.serialize` wrote: a function, then its derivatives."""
    programs = [export.deserialize(bytearray(content))]
    while programs[-1].has_vjp():
        programs.append(programs[-1].vjp())
    return programs


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the `disabled_checks` that `jax.export.export` wants for our products.

    JAX keeps exported programs to custom calls whose stability it vouches for. The target of this
    library carries a version in its name, and its attributes hold all that a launch needs. The
    process that runs the program on a GPU must `import jax_hopper_gemm`, which registers it.
    """
    targets = TARGET, sharding.TARGET
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
