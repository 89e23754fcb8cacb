"""What this machine is: its hardware, versions and driver, and which compiled kernels it keeps.

Invariant: a process of its own asks, so that a driver that hangs costs no more than the wait for it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from loraplex.platform.bench.report import hardware, versions

CACHE_NAME = "loraplex-cache"


class Machine:
    """A process that finds out while its caller goes on."""

    def __init__(self, *, is_dry: bool) -> None:
        command = [sys.executable, "-m", __spec__.name, *(["--dry"] if is_dry else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def head(self, seconds: float) -> dict[str, Any] | None:
        """The hardware, versions, driver and cache of every line; None if they are not known in so many seconds."""
        try:
            text, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # Not waited for: inside a driver it may not end.
            self._process.kill()
            return None
        found: dict[str, Any] | None = json.loads(text) if self._process.returncode == 0 else None
        return found


def unknown() -> dict[str, Any]:
    """The head where the machine did not answer: its lines count for no card."""
    return {"hardware": {"gpu": "unknown"}, "versions": versions(), "driver": None, "cache": None}


def _gpu() -> str | None:
    """By torch, where the driver's own command is missing."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def _cache() -> str | None:
    """A name of Triton's cache, kept in it: kernels built into another one are not built here."""
    try:
        import triton
    except ModuleNotFoundError:
        return None
    path = Path(triton.knobs.cache.dir) / CACHE_NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid4().hex[:12])
    return path.read_text()


def main(arguments: list[str]) -> None:
    """Print the head of every line, as JSON."""
    known = hardware()
    if known["gpu"] is None and "--dry" not in arguments:
        known["gpu"] = _gpu()
    head = {"hardware": known, "versions": versions(), "driver": _driver(), "cache": _cache()}
    print(json.dumps(head))


if __name__ == "__main__":
    main(sys.argv[1:])
