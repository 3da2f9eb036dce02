"""What a cubin says of its kernel: a reader for the few ELF sections that matter here.

A cubin is a 64-bit ELF file. `.text.NAME` holds the code of kernel NAME, `.nv.shared.NAME` its
static shared memory; `.nv.info` and `.nv.info.NAME` hold lists of attributes. NVIDIA documents
none of this; `cuobjdump -elf` prints the same fields, and the tests compare with it. Toolkits
12.x write ABI version 7, toolkits 13.x version 8.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .digest import CubinError

_EM_CUDA = 190
_SHT_NOBITS = 8

# Attributes of .nv.info: the names that cuobjdump prints, without EIATTR_.
_REQNTID = 0x10
_FRAME_SIZE = 0x11
_KPARAM_INFO = 0x17
_REGCOUNT = 0x2F
_CUDA_API_VERSION = 0x37
_HAS_PAYLOAD = 4  # EIFMT_SVAL: the record's last 16 bits count the bytes that follow


@dataclass(frozen=True)
class KernelCode:
    """The one kernel of a cubin."""

    entry: str  # symbol name
    sm: int  # compute capability it was compiled for, times 10
    toolkit: tuple[int, int]  # CUDA version of the compiler, (major, minor)
    parameters: tuple[tuple[int, int], ...]  # (offset, size) in bytes of each parameter, in order
    threads: int  # threads of a block
    registers: int  # registers of a thread at launch
    stack_bytes: int  # local memory of a thread; 0 where nothing spills
    static_smem_bytes: int  # set aside by the compiler, with the KiB that sm_90 reserves


@dataclass(frozen=True)
class _Section:
    name: str
    content: bytes
    size: int  # of a NOBITS section, too, whose content is empty
    info: int


def read_kernel(cubin: bytes) -> KernelCode:
    """Returns what the cubin's only kernel needs at launch.

    Raises:
      CubinError: not a cubin, damaged, or it holds no kernel or several.
    """
    try:
        sections = {section.name: section for section in _sections(cubin)}
        entries = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
        if len(entries) != 1:
            raise CubinError(f"expected a cubin with one kernel, found {len(entries)}: {entries}")
        entry = entries[0]
        symbol = sections[f".text.{entry}"].info & 0xFFFFFF
        of_kernel = _attributes(sections[f".nv.info.{entry}"].content)
        of_module = _attributes(sections[".nv.info"].content)
        shared = sections.get(f".nv.shared.{entry}")
        (flags,) = struct.unpack_from("<I", cubin, 48)
        (api_version,) = struct.unpack("<I", of_kernel[_CUDA_API_VERSION][0])
        threads_x, threads_y, threads_z = struct.unpack("<3I", of_kernel[_REQNTID][0])
        return KernelCode(
            entry=entry,
            sm=(flags if cubin[8] < 8 else flags >> 8) & 0xFF,  # the place depends on the ABI
            toolkit=divmod(api_version, 10),
            parameters=_parameters(of_kernel[_KPARAM_INFO]),
            threads=threads_x * threads_y * threads_z,
            registers=_by_symbol(of_module[_REGCOUNT])[symbol],
            stack_bytes=_by_symbol(of_module[_FRAME_SIZE])[symbol],
            static_smem_bytes=shared.size if shared else 0,
        )
    except (struct.error, LookupError, ArithmeticError, ValueError) as error:
        raise CubinError(f"the cubin ({len(cubin)} bytes) is damaged: {error!r}") from error


def _sections(cubin: bytes) -> Iterator[_Section]:
    if cubin[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", cubin, 18)[0] != _EM_CUDA:
        raise CubinError(f"not a cubin: {len(cubin)} bytes that begin with {cubin[:8].hex()}")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_index = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q2I2Q", cubin, table + i * entry_size) for i in range(count)]
    names_offset = headers[names_index][4]
    for name_offset, kind, _, _, offset, size, _, info, _, _ in headers:
        name = cubin[names_offset + name_offset : cubin.index(b"\0", names_offset + name_offset)]
        content = b"" if kind == _SHT_NOBITS else cubin[offset : offset + size]
        yield _Section(name.decode(), content, size, info)


def _attributes(info: bytes) -> dict[int, list[bytes]]:
    """Returns the payloads of each attribute; short ones have their value in the record itself."""
    found: dict[int, list[bytes]] = defaultdict(list)
    position = 0
    while position < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, position)
        begin, nbytes = position + 4, value if form == _HAS_PAYLOAD else 0
        position = begin + nbytes
        found[attribute].append(info[begin:position] if nbytes else value.to_bytes(2, "little"))
    return found


def _by_symbol(records: list[bytes]) -> dict[int, int]:
    """Returns an attribute's value for each symbol that has one."""
    return dict(struct.unpack("<II", record) for record in records)


def _parameters(records: list[bytes]) -> tuple[tuple[int, int], ...]:
    """Returns (offset, size) by ordinal."""
    by_ordinal = {}
    for record in records:
        _, ordinal, offset, flags = struct.unpack("<IHHI", record)
        by_ordinal[ordinal] = (offset, flags >> 18)  # the upper 14 bits are the size
    return tuple(by_ordinal[ordinal] for ordinal in range(len(records)))
