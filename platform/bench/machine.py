"""On what a figure was measured: processor, memory, accelerator, versions and commit. Names no host and no user."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("loraplex", "torch", "transformers", "peft", "numba", "triton")
RESULTS = Path("tests", "benchmarks", "results")


def checkout_root() -> Path | None:
    """The repository this package runs from, None for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / ".git").exists() and (root / RESULTS.parent).is_dir() else None


def hardware() -> dict[str, str | int | None]:
    """Memory in bytes; `cores` are those this process may use."""
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": _gpu_model(),
    }


def available_cores() -> int:
    """Cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter and are installed."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checkout's commit, with `+changes` when tracked files differ from it."""
    root = checkout_root()
    if root is None or shutil.which("git") is None:
        return None
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if head and changed else head


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _gpu_model() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or None


def _output(*command: str) -> str | None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None
