"""Ends the PostgreSQL processes of a dead owner.

Invariant: only processes that are provably its own are signalled: they run in the cluster folder, as the servers' user, and
from the wheel's binaries or a copy of them.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from loraplex.platform.datastores.embedded.binaries import POSTGRES_WHEEL
from loraplex.platform.datastores.embedded.errors import ServiceFailed
from loraplex.platform.datastores.embedded.identity import Identity

PROGRAM = "postgres"
KILL_SECONDS = 1.0
DELETED = " (deleted)"
"""The kernel appends it to the path of an executable that was removed."""


def end_orphans(cluster: Path, identity: Identity, seconds: float = 10.0) -> None:
    """Wait until no PostgreSQL runs in `cluster`, at most `seconds`; after `KILL_SECONDS` kill the orphans of a dead owner.

    They are already shutting down, and the log recovers what they were doing. An old postmaster.pid is not used, because its
    process id may have been reused.
    Raises `ServiceFailed` while a PostgreSQL of another origin runs there: two servers would destroy the data.
    """
    begun = time.monotonic()
    while found := servers_inside(cluster):
        waited = time.monotonic() - begun
        if waited > seconds:
            raise ServiceFailed(f"the PostgreSQL processes {found} use {cluster}; end them first")
        if waited > KILL_SECONDS:
            for pid in found:
                if is_ours(pid, identity):
                    end_process(pid)
        time.sleep(0.02)


def servers_inside(cluster: Path) -> list[int]:
    """The ids of PostgreSQL processes whose working directory is `cluster`. Other programs there do not use its files."""
    return [pid for pid in processes_inside(cluster) if (path := executable(pid)) and path.name == PROGRAM]


def is_ours(pid: int, identity: Identity) -> bool:
    """Whether the process runs as the servers' user, from the wheel's binaries or a copy of them."""
    path, expected = executable(pid), identity.uid if identity.dropped else os.geteuid()
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return False
    return path is not None and POSTGRES_WHEEL in path.parts and owner == expected


def processes_inside(folder: Path) -> list[int]:
    """The ids of processes whose working directory is `folder`."""
    target = folder.resolve()
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if link(entry / "cwd") == target]


def executable(pid: int) -> Path | None:
    """The path of a process's program; None if the process has ended or belongs to another user."""
    path = link(Path(f"/proc/{pid}/exe"))
    return None if path is None else path.with_name(path.name.removesuffix(DELETED))


def link(path: Path) -> Path | None:
    try:
        return Path(os.readlink(path))
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return None


def end_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
