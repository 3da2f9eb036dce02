"""Kernels that pass once over a matrix, a CTA a tile of it: what their specs have in common."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

WARPS = 8
THREADS = 32 * WARPS


@dataclass(frozen=True)
class PassSpec:
    """One kernel; all fields are compile-time constants of it."""

    KIND: ClassVar[str]  # in the JSON of a spec, which a `GemmSpec`'s has not
    threads: ClassVar[int] = THREADS
    cluster_m: ClassVar[int] = 1
    cluster_n: ClassVar[int] = 1
    cluster_k: ClassVar[int] = 1

    @property
    def smem_bytes(self) -> int:
        return 0

    def to_json(self) -> str:
        """Returns canonical JSON: the same text for equal specs."""
        named = {"kind": self.KIND, **asdict(self)}
        return json.dumps(named, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, named: dict[str, Any]) -> Self:
        return cls(**{name: value for name, value in named.items() if name != "kind"})
