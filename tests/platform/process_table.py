"""Processes as Linux lists them, for tests that must find none left, and how one ends with its parent."""

from pathlib import Path
from typing import Final

DIES_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "KILL")
"""The prefix of a command that ends with the process that started it, however that ends."""


def children(pid: int | None) -> list[int]:
    """The children of `pid`, those that have ended and were not waited for too."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether `pid` still runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def command_line(pid: int) -> bytes:
    """Empty for one that has ended."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def own_bytes(pid: int | None) -> int:
    """Resident memory of `pid` that is no file's."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
