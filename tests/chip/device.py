"""What runs products and checks them: a GPU, or the host in its place (`test_chip.py`)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from chip import structs
from chip.arena import Batch, Placed, Room
from jax_hopper_gemm.cubin import digest_of
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch import ffi_library
from jax_hopper_gemm.launch.plan import LaunchPlan

SOURCES = Path(__file__).parent
POISON = 0xFF
NOTHING = 2**64 - 1
SCRATCH, TABLES = 1 << 29, 1 << 27  # bytes
REPORT = np.dtype([("wrong", "u8"), ("first", "u8")])
STREAMS = 8  # products of a batch run beside each other, each on one of them


class DeviceError(RuntimeError):
    """A CUDA call or a kernel failed: this process can run nothing more."""


@dataclass(frozen=True)
class Failure:
    """A product that went wrong.

    Attributes:
      outside: bytes that were written outside of arrays.
    """

    seed: int
    what: str
    outside: int = 0


Launch = Callable[[Placed, int | None], str | None]


class Profile:
    """Seconds by what they were spent on."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Adds the time since the last call, of any name."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0) + now - self._last
        self._last = now


def build(folder: Path, compiler: str) -> None:
    """Compiles `checker.so` and `ffi_host.so` into a folder.

    Args:
      compiler: "nvcc" for a GPU, or a C++ compiler for the host in its place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = ["-arch=sm_90", "-Xcompiler", "-fPIC"] if compiler == "nvcc" else ["-xc++", "-fPIC"]
    common = ["-O2", "-std=c++17", "-shared"]
    host = [os.environ.get("CXX", "c++"), "-fPIC", "-isystem", jax.ffi.include_dir()]
    for command, source in (
        ([compiler, *target], SOURCES / "checker.cu"),
        (host, SOURCES.parent / "fake_driver" / "ffi_host.cc"),
    ):
        output = str(folder / f"{source.stem}.so")
        subprocess.run([*command, *common, str(source), "-o", output], check=True)


class Checker:
    """`checker.cu`, and its memory.

    Args:
      path: the library by `build`.
      arena: bytes for the arrays of products.
    """

    def __init__(self, path: Path, arena: int):
        self._library = ctypes.CDLL(str(path))
        i64, at = ctypes.c_int64, ctypes.c_void_p
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "sizes": (i64, [ctypes.c_int]), "allocate": (at, [i64]),
            "upload": (None, [at, at, i64]), "download": (None, [at, at, i64]),
            "set": (None, [at, ctypes.c_int, i64]), "synchronize": (ctypes.c_char_p, []),
            "visit": (None, [ctypes.c_int, at, at, at, i64, at]), "sweep": (None, [at, i64, at]),
            "stream": (at, []),
        }  # fmt: skip
        for name, (result, arguments) in signatures.items():
            function = getattr(self._library, f"chip_{name}")
            function.restype, function.argtypes = result, arguments
        found = [self._library.chip_sizes(i) for i in range(len(structs.STRUCTS))]
        assert found == [struct.itemsize for struct in structs.STRUCTS], (
            f"structs have {found} bytes"
        )
        self.arena_bytes = arena
        self.arena, self._scratch, self._tables = (
            self._allocate(nbytes) for nbytes in (arena, SCRATCH, TABLES)
        )
        self._library.chip_set(self.arena, POISON, arena)
        self._streams = [self._library.chip_stream() for _ in range(STREAMS)]
        self._begun: tuple[Batch, int, list[Failure]] | None = None
        self.profile: Profile | None = None

    def _allocate(self, nbytes: int) -> int:
        address = self._library.chip_allocate(nbytes)
        if not address:
            raise DeviceError(f"{nbytes} bytes cannot be allocated")
        return address

    def batch(self) -> Batch:
        """Returns an empty batch on all of the memory."""
        return Batch(
            Room(self.arena, self.arena_bytes),
            Room(self._scratch, SCRATCH),
            Room(self._tables, TABLES),
        )

    def run(self, batch: Batch, launch: Launch) -> list[Failure]:
        """Fills a batch's arrays, launches its products and checks all they wrote.

        Args:
          launch: enqueues a product on a stream; returns what kept it from that.

        Raises:
          DeviceError: a kernel failed.
        """
        self.begin(batch, launch)
        return self.finish()

    def begin(self, batch: Batch, launch: Launch) -> None:
        """Does what `run` does and does not wait for it."""
        assert self._begun is None
        library, products = self._library, batch.products
        described = batch.stage(np.array(batch.arrays, structs.ARRAY))
        problems = batch.stage(np.array(batch.problems, structs.PROBLEM))
        chunks = [(batch.stage(of), len(of)) for of in batch.chunks()]
        blank = np.zeros(len(products) + 1, REPORT)
        blank["first"] = NOTHING
        reports = batch.stage(blank)
        staged = batch.staged()
        library.chip_upload(self._tables, staged.ctypes.data, staged.nbytes)

        def visit(phase: int) -> None:
            library.chip_visit(phase, described, problems, *chunks[phase], reports)

        visit(structs.FILL)
        self._lap("GPU: fill")
        visit(structs.REFERENCE)
        self._lap("GPU: reference")
        failures = []
        for i, product in enumerate(products):
            if reason := launch(product, self._streams[i % STREAMS]):
                failures.append(Failure(product.trial.seed, f"not launched: {reason}"))
        self._lap("launches and their kernels")
        visit(structs.CHECK)
        self._lap("GPU: check")
        used = min(batch.arena.next + (1 << 16), self.arena + self.arena_bytes) - self.arena
        library.chip_sweep(self.arena, used // 4 * 4, reports + blank.nbytes - REPORT.itemsize)
        self._lap("GPU: sweep")
        self._begun = batch, reports, failures

    def finish(self) -> list[Failure]:
        """Waits for what was begun, if anything was, and returns what went wrong."""
        if self._begun is None:
            return []
        (batch, reports, failures), self._begun = self._begun, None
        self.synchronize()
        found = np.zeros(len(batch.products) + 1, REPORT)
        self._library.chip_download(found.ctypes.data, reports, found.nbytes)
        return [*failures, *self._failures(batch, found)]

    def _lap(self, name: str) -> None:
        """Waits, and counts the time since the last one, where a profile is asked for."""
        if self.profile:
            self.synchronize()
            self.profile.lap(name)

    def sweep(self) -> int:
        """Returns how many bytes of the whole arena are not poison, and poisons them."""
        blank = np.array([(0, NOTHING)], REPORT)
        self._library.chip_upload(self._tables, blank.ctypes.data, blank.nbytes)
        self._library.chip_sweep(self.arena, self.arena_bytes // 4 * 4, self._tables)
        self.synchronize()
        self._library.chip_download(blank.ctypes.data, self._tables, blank.nbytes)
        return int(blank["wrong"][0])

    def synchronize(self) -> None:
        if error := self._library.chip_synchronize():
            raise DeviceError(error.decode())

    def _failures(self, batch: Batch, reports: np.ndarray) -> list[Failure]:
        failures = []
        for product, (wrong, first) in zip(batch.products, reports[:-1], strict=True):
            if wrong:
                array = dict(
                    zip(structs.ARRAY.names or (), batch.arrays[int(first) >> 48], strict=True)
                )
                what = (
                    f"{structs.ROLES[array['role']]} {array['which']} of extents {array['extent']}"
                )
                place = np.unravel_index(int(first) & (2**48 - 1), array["extent"])
                at = [int(i) for i in place]
                text = f"{wrong} elements wrong, the first at {at} of {what}; {product.trial}"
                failures.append(Failure(product.trial.seed, text))
        wrong, first = reports[-1]
        if wrong:
            address = self.arena + int(first)
            near = ([p for p in batch.products if p.start <= address] or batch.products)[-1]
            seeds = [product.trial.seed for product in batch.products]
            text = (
                f"{wrong} bytes written outside of arrays, the first at {_place(near, address)}; "
                f"by one of seeds {seeds[0]} to {seeds[-1]}; {near.trial}"
            )
            failures.append(Failure(near.trial.seed, text, int(wrong)))
        return failures


def _place(product: Placed, address: int) -> str:
    """Returns where an address lies among a product's buffers."""
    parts = [
        f"buffer {i} {address - start:+d} of {nbytes} bytes"
        for i, (start, nbytes) in enumerate(zip(product.addresses, product.nbytes, strict=True))
    ]
    return ", ".join(parts)


class Launcher:
    """The C++ launcher, called as XLA calls it.

    Args:
      host: `ffi_host.so` by `build`.
      library: the FFI library, with its resolver.
    """

    def __init__(self, host: Path, library: ctypes.CDLL | None = None):
        self._library = library or ffi_library.library()
        self._host = ctypes.CDLL(str(host))
        for accessor in (self._library.JhgLaunchTypeId, self._library.JhgLaunchTypeInfo):
            accessor.restype = ctypes.c_void_p
        self._type = ctypes.c_void_p(self._library.JhgLaunchTypeInfo())
        self._load = ctypes.cast(self._library.JhgLaunchInstantiate, ctypes.c_void_p)
        self._run = ctypes.cast(self._library.JhgLaunchExecute, ctypes.c_void_p)
        self._text = ctypes.create_string_buffer(8192)
        self._named: dict[GemmSpec, tuple[bytes, bytes]] = {}

    def load(self, spec: GemmSpec, plan: LaunchPlan, name: str) -> ctypes.c_void_p | str:
        """Returns a loaded call, to be freed, or an error's text."""
        if spec not in self._named:
            self._named[spec] = digest_of(spec).encode(), spec.to_json().encode()
        words, state = np.array(plan.encode(), np.int64), ctypes.c_void_p()
        failed = self._host.ffi_host_load(
            self._load, *self._named[spec], name.encode(), ctypes.c_void_p(words.ctypes.data),
            ctypes.c_int64(words.size), ctypes.byref(state), self._text,
            ctypes.c_int64(len(self._text)),
        )  # fmt: skip
        return self._text.value.decode(errors="replace") if failed else state

    def free(self, state: ctypes.c_void_p) -> None:
        self._host.ffi_host_free(self._type, state)

    def __call__(self, product: Placed, stream: int | None = None) -> str | None:
        """Loads and runs the product's plan on a stream; returns an error's text."""
        state = self.load(product.trial.spec, product.plan, f"seed {product.trial.seed}")
        if isinstance(state, str):
            return state
        addresses = np.array(product.addresses, np.int64)
        nbytes = np.array(product.nbytes, np.int64)
        failed = self._host.ffi_host_run(
            self._run, state, ctypes.c_void_p(stream), ctypes.c_int64(product.operands),
            ctypes.c_int64(len(addresses) - product.operands),
            ctypes.c_void_p(addresses.ctypes.data), ctypes.c_void_p(nbytes.ctypes.data),
            self._text, ctypes.c_int64(len(self._text)),
        )  # fmt: skip
        self.free(state)
        return self._text.value.decode(errors="replace") if failed else None
