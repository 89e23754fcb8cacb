"""Clocks that jump: libfaketime in a process and all below it, which reads its distance to the machine's clock from a file.

Invariant: only the time of day jumps. Monotonic clocks and the times of files stay the machine's.
"""

import shlex
from pathlib import Path
from typing import Final

LIBRARIES: Final = "*/faketime/libfaketimeMT.so.1"
REREAD_S: Final = 1.0
"""Seconds until every process has noticed a jump."""


def find_library() -> Path | None:
    """The library of the Debian package `libfaketime`; None if it is not installed."""
    found = sorted(Path("/usr/lib").glob(LIBRARIES))
    return found[0] if found else None


class Clock:
    """The clock of one component, in `file`, which every user may read."""

    def __init__(self, library: Path, file: Path) -> None:
        self._library, self._file = library, file
        self.jump_to(0)

    def jump_to(self, offset_s: int) -> None:
        """Set the distance to the machine's clock, in seconds."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{offset_s:+d}\n")
        new.chmod(0o644)
        new.rename(self._file)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to follow this clock."""
        return {
            "LD_PRELOAD": str(self._library),
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
