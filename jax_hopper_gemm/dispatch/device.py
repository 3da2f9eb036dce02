"""What dispatch knows of a GPU: enough to choose a kernel where there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A kind of GPU.

    Attributes:
      compute_capability: major and minor; the kernels need (9, 0).
      num_sms: streaming multiprocessors.
    """

    compute_capability: tuple[int, int]
    num_sms: int

    @property
    def key(self) -> str:
        """The name of its table of measured choices: "sm90_132"."""
        major, minor = self.compute_capability
        return f"sm{major}{minor}_{self.num_sms}"


H200 = Device((9, 0), 132)  # and H100 SXM: same SMs, less memory bandwidth
