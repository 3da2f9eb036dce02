"""A kernel that evaluates a graph on arrays, one thread an element: to read its machine code."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_hopper_gemm.cubin.sass import disassemble, parse_sass
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph
from jax_hopper_gemm.kernels.epilogue.op_codegen import Elements

THREADS = 128
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z0-9_.]+)")
# What runs at 128 lanes a clock of an SM or at 64, of the instructions that do arithmetic.
_ARITHMETIC = {
    "FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP", "FSET", "FCHK", "FRND", "LOP3", "PLOP3",
    "SEL", "SHF", "IADD3", "ISETP", "IMAD", "HADD2", "HFMA2", "F2FP", "F2F", "F2I", "I2F", "I2FP",
    "DFMA", "DMUL", "DADD", "DSETP", "PRMT",
}  # fmt: skip


@dataclass(frozen=True)
class Code:
    """Instructions that evaluating a graph once takes, over those of a graph that copies.

    Attributes:
      mufu: of the unit for approximate functions, 16 lanes a clock.
      arithmetic: of all other arithmetic.
      local_accesses, calls: of local memory; of subroutines.
      names: how often each instruction of the kernel occurs, by full name.
    """

    mufu: int
    arithmetic: int
    local_accesses: int
    calls: int
    names: Counter[str]


class Kernel:
    def __init__(self, graph: EpilogueGraph):
        self.graph = graph

    @cute.kernel
    def kernel(self, inputs, outputs):
        x, y, z, w = inputs
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        elements = Elements(self.graph, self.read((x, y, z, w), i), lambda v: v, lambda v: v)
        results = len(self.graph.results)
        for r in cutlass.range_constexpr(results):  # pyright: ignore[reportPrivateImportUsage]
            number = self.graph.results[r].value
            outputs[r][i] = elements.value(number, 0)

    def read(self, arrays, i):
        def value(leaf, v):
            loaded = arrays[leaf][i]
            operand = self.graph.operand(leaf)
            return loaded != 0.0 if operand and operand.dtype == "bool" else loaded

        return value

    @cute.jit
    def launch(self, x, y, z, w, p, q, stream):
        layout = cute.make_layout(1 << 20)
        inputs = tuple(cute.make_tensor(pointer, layout) for pointer in (x, y, z, w))
        outputs = tuple(cute.make_tensor(pointer, layout) for pointer in (p, q))
        self.kernel(inputs, outputs).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def compile_elementwise(graph: EpilogueGraph) -> bytes:
    """Returns a cubin that evaluates up to two results on up to four float32 arrays."""
    pointers = (cute.runtime.make_ptr(Float32, 16, cute.AddressSpace.gmem) for _ in range(6))
    with tempfile.TemporaryDirectory() as workdir:
        compiled = cute.compile(
            Kernel(graph).launch, *pointers, cute.runtime.make_fake_stream(),
            options=f"--gpu-arch sm_90a --keep-cubin --dump-dir {workdir}",
        )  # fmt: skip
        return compiled.__cubin__


def code_of(graph: EpilogueGraph) -> Code:
    """Returns the code that evaluating `graph` at one element takes."""
    text = disassemble(compile_elementwise(graph))
    names = Counter(_INSTRUCTION.findall(text))
    kinds = Counter[str]()
    for name, count in names.items():
        kinds[name.split(".")[0]] += count
    addressing = names["IMAD.WIDE"] + names["IMAD.MOV.U32"] + names["IMAD.WIDE.U32"]
    return Code(
        mufu=kinds["MUFU"],
        arithmetic=sum(kinds[name] for name in _ARITHMETIC) - addressing,
        local_accesses=parse_sass(text).local_accesses,
        calls=kinds["CALL"],
        names=names,
    )
