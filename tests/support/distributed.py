"""Starts the processes of a distributed program on this machine, and ends them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("distributed_worker.py")


def run_processes(platform: str, count: int = 2, timeout: float = 240) -> list[dict[str, Any]]:
    """Returns what each process of `distributed_worker.py` found; fails where one fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), platform, str(port), str(count), str(index)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(count)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]
