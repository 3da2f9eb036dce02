"""What the machine code of a kernel does: counts of the instructions that tell a good GEMM.

Read with `nvdisasm`, of the wheel nvidia-cuda-nvdisasm or of an installed CUDA toolkit.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .digest import CubinError

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z0-9_.]+)([^;]*);")
_REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True)
class SassFacts:
    """Instructions of a kernel."""

    wgmma: int  # warpgroup matrix products (HGMMA, QGMMA, IGMMA)
    tma_loads: int  # bulk tensor loads (UTMALDG)
    multicast_loads: int  # those of them that serve several CTAs of a cluster
    tma_stores: int  # bulk tensor stores (UTMASTG)
    matrix_stores: int  # transposing stores to shared memory (STSM)
    register_budgets: tuple[int, ...]  # registers that warps ask for (USETMAXREG), in order
    local_accesses: int  # loads and stores of local memory (LDL, STL): spills
    highest_register: int  # the largest register number
    instructions: int  # all of them


def sass_facts(cubin: bytes) -> SassFacts:
    """Returns the facts of a cubin; errors as of `disassemble`."""
    return parse_sass(disassemble(cubin))


def disassemble(cubin: bytes) -> str:
    """Returns the code of a cubin as SASS text.

    Raises:
      CubinError: no nvdisasm, or it cannot read the cubin.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Without an analysis that it gives up for these files, which takes a third of its time.
        command = [str(find_nvdisasm()), "-c", "--no-dataflow", file.name]
        # Not the process's environment, which another thread may change while it is read.
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    if done.returncode:
        raise CubinError(f"nvdisasm cannot read the cubin: {done.stderr.strip()}")
    return done.stdout


def parse_sass(text: str) -> SassFacts:
    """Returns the facts of what `nvdisasm -c` printed."""
    found = _INSTRUCTION.findall(text)
    mnemonics = Counter(mnemonic.split(".")[0] for mnemonic, _ in found)
    loads = [mnemonic for mnemonic, _ in found if mnemonic.startswith("UTMALDG")]
    budgets = [operands for mnemonic, operands in found if mnemonic.startswith("USETMAXREG")]
    registers = [int(number) for _, operands in found for number in _REGISTER.findall(operands)]
    return SassFacts(
        wgmma=sum(mnemonics[name] for name in ("HGMMA", "QGMMA", "IGMMA")),
        tma_loads=len(loads),
        multicast_loads=sum("MULTICAST" in mnemonic for mnemonic in loads),
        tma_stores=mnemonics["UTMASTG"],
        matrix_stores=mnemonics["STSM"],
        register_budgets=tuple(int(operands.split()[-1], 0) for operands in budgets),
        local_accesses=mnemonics["LDL"] + mnemonics["STL"],
        highest_register=max(registers, default=0),
        instructions=len(found),
    )


def find_nvdisasm() -> Path:
    """Returns the path of nvdisasm, or raises a CubinError that says how to install it."""
    nvidia = importlib.util.find_spec("nvidia")  # the namespace that NVIDIA's wheels share
    roots = nvidia.submodule_search_locations if nvidia else None
    for root in roots or []:
        for path in sorted(Path(root).glob("*/bin/nvdisasm"), reverse=True):
            return path
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if found := shutil.which("nvdisasm") or shutil.which("nvdisasm", path=f"{toolkit}/bin"):
        return Path(found)
    raise CubinError("nvdisasm is not installed; run python -m pip install nvidia-cuda-nvdisasm")
