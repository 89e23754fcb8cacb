"""Clocks that jump: libfaketime in a process and all below it, which reads its distance to the machine's clock from a file.

Invariant: only the time of day jumps. Monotonic clocks, waits by them and the times of files stay the machine's.
"""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FAKETIME: Final = "*/faketime/libfaketimeMT.so.1"
WAITS: Final = Path(__file__).with_name("monotonic_waits.c")
COMPILER: Final = "cc"
REREAD_S: Final = 1.0
"""Seconds until every process has noticed a jump."""


def missing_for_clocks() -> str | None:
    """What keeps clocks from jumping here; None where they can."""
    if not find_faketime():
        return "libfaketime is missing"
    return None if shutil.which(COMPILER) else "a C compiler is missing"


def find_faketime() -> list[Path]:
    """The library of the Debian package `libfaketime`; empty if it is not installed."""
    return sorted(Path("/usr/lib").glob(FAKETIME))[:1]


def build_libraries(folder: Path) -> list[Path]:
    """What to load into a process with a clock, in this order. `folder` gets what is compiled."""
    waits = folder / WAITS.with_suffix(".so").name
    subprocess.run((COMPILER, "-O2", "-shared", "-fPIC", "-o", waits, WAITS), check=True)
    waits.chmod(0o755)
    return [waits, *find_faketime()]


class Clock:
    """The clock of one component, in `file`, which every user may read."""

    def __init__(self, libraries: Sequence[Path], file: Path) -> None:
        self._libraries, self._file = libraries, file
        self.jump_to(0)

    def jump_to(self, offset_s: int) -> None:
        """Set the distance to the machine's clock, in seconds."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{offset_s:+d}\n")
        new.chmod(0o644)
        new.rename(self._file)

    def is_in(self, pid: int) -> bool:
        """Whether a process has loaded what this clock needs."""
        mapped = Path(f"/proc/{pid}/maps").read_text()
        return all(str(library) in mapped for library in self._libraries)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to follow this clock."""
        return {
            "LD_PRELOAD": ":".join(map(str, self._libraries)),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": f"{REREAD_S:g}",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
            "NO_FAKE_STAT": "1",
        }

    def wrapped(self, program: Path, wrapper: Path) -> Path:
        """Write a script that runs `program` with this clock, and return it."""
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        wrapper.write_text(f'#!/bin/sh\nexec env {settings} {shlex.quote(str(program))} "$@"\n')
        wrapper.chmod(0o755)
        return wrapper
