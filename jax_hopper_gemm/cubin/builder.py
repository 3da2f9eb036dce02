"""Compiles many kernels at once, ahead of the programs that will ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..gemm.kernel_params import KernelSpec
from . import lookup
from .digest import CubinError, digest_of
from .store import Store


@dataclass(frozen=True)
class BuildReport:
    """What became of each kernel."""

    folder: Path | None  # where the kernels are; None for the user's cache
    compiled: tuple[KernelSpec, ...]  # specs compiled now
    reused: tuple[KernelSpec, ...]  # specs that were there, or that a cache had
    failures: dict[KernelSpec, str]  # why each of the others has no kernel

    def __str__(self) -> str:
        where = self.folder or "the cache"
        lines = [f"{len(self.compiled)} kernels compiled, {len(self.reused)} reused, in {where}"]
        lines += [f"FAILED {spec.name}: {why}" for spec, why in self.failures.items()]
        return "\n".join(lines)


def build(
    specs: Iterable[KernelSpec],
    jobs: int | None = None,
    progress: bool = True,
    folder: Path | None = None,
) -> BuildReport:
    """Compiles the kernels that are not there yet, each in a process of a pool.

    Processes, because CuTeDSL is not thread-safe. They are started afresh and import the main
    module again, so a script calls this under `if __name__ == "__main__":`.

    Args:
      specs: kernels; duplicates are built once.
      jobs: processes; None for one a core.
      progress: whether to draw a progress bar on stderr.
      folder: where to put the kernels, for `JAX_HOPPER_GEMM_CUBINS`; None for the user's cache.

    Returns:
      What was built and what failed; a failure does not stop the others.

    Raises:
      OSError: the folder cannot be made.
    """
    # Only here: together they take some 40 ms, and a program that runs kernels needs none.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    if folder:  # JAX_HOPPER_GEMM_CUBINS may name it before it is there
        folder.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(specs))
    workers = max(1, min(jobs or os.cpu_count() or 1, len(wanted)))
    origins: dict[KernelSpec, str] = {}
    failures: dict[KernelSpec, str] = {}
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(workers, mp_context=spawn) as pool,
        Progress(
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            console=Console(stderr=True),
            disable=not progress,
        ) as bar,
    ):
        task = bar.add_task("kernels", total=len(wanted))
        futures = {pool.submit(_build_one, spec, folder): spec for spec in wanted}
        for future in as_completed(futures):
            spec = futures[future]
            try:
                origins[spec] = future.result()
            except Exception as error:  # the compiler may even have ended its process
                failures[spec] = str(error) or repr(error)
            bar.advance(task)
    return BuildReport(
        folder,
        compiled=tuple(spec for spec in wanted if origins.get(spec) == "compiled"),
        reused=tuple(spec for spec in wanted if origins.get(spec, "compiled") != "compiled"),
        failures={spec: failures[spec] for spec in wanted if spec in failures},
    )


def _build_one(spec: KernelSpec, folder: Path | None) -> str:
    """Makes sure that the kernel is where it is wanted; returns where it came from."""
    entry = digest_of(spec), spec.to_json()
    store = Store(folder, "prebuilt") if folder else None
    if store and (there := store.read(*entry)):
        return there.origin
    compiled = lookup.get(spec)
    if store:
        store.write(entry[0], compiled.cubin, compiled.manifest)
    elif compiled.origin == "compiled" and lookup.user_cache().read(*entry) is None:
        raise CubinError(f"the cache {lookup.user_cache().folder} cannot be written")
    return compiled.origin
