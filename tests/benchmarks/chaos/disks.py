"""Disks that can be full: a tmpfs each, in the private mount namespace of the harness, filled up by one file.

Invariant: nothing is mounted outside of that namespace; `available` says whether this process is in one.
"""

import os
import subprocess
from pathlib import Path
from typing import Final

from tests.platform.process_table import DIES_WITH_PARENT

from loraplex.platform.drills.faults.disk_full import fill, free_bytes

BALLAST: Final = "ballast"
NAMESPACE: Final = (
    *DIES_WITH_PARENT,
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
"""A command's prefix: its mounts are its own, and its processes end with it and with the process that started it."""


def namespace_command() -> tuple[str, ...]:
    """The prefix of a command that may mount; empty where this user may not make such a namespace."""
    own_user = () if os.geteuid() == 0 else ("--user", "--map-current-user", "--keep-caps")
    prefix = (*NAMESPACE, *own_user)
    try:
        done = subprocess.run((*prefix, "true"), capture_output=True, check=False)
    except FileNotFoundError:
        return ()
    return prefix if done.returncode == 0 else ()


class Disk:
    """A tmpfs of `size_bytes` mounted at `folder`."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        self._size_bytes = size_bytes

    def mount(self) -> None:
        """Mount it, for the rest of the namespace's life."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        options = f"size={self._size_bytes},mode=0711"
        subprocess.run(
            ("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)),
            check=True,
            capture_output=True,
        )

    def unmount(self) -> None:
        """Let it go, also while a file is open."""
        subprocess.run(("umount", "--lazy", str(self.folder)), check=False, capture_output=True)

    @property
    def free_bytes(self) -> int:
        return free_bytes(self.folder)

    def fill(self, leave_bytes: int) -> None:
        """Take what is free until at most `leave_bytes` are. May be repeated."""
        fill(self.folder / BALLAST, self._size_bytes, leave_bytes)

    def clear(self) -> None:
        """Make the room free again."""
        (self.folder / BALLAST).unlink(missing_ok=True)
