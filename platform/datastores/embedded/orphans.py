"""Ends the PostgreSQL processes of a dead owner.

Invariant: only processes that are provably its own are signalled: they run in the cluster folder, as the servers' user, and
from the wheel's binaries or a copy of them.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from loraplex.platform.datastores.embedded.binaries import POSTGRES_WHEEL
from loraplex.platform.datastores.embedded.errors import ServiceFailed
from loraplex.platform.datastores.embedded.identity import Identity

PROGRAM = "postgres"
KILL_SECONDS = 1.0


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
            pids = [server.pid for server in found]
            raise ServiceFailed(f"the PostgreSQL processes {pids} use {cluster}; end them first")
        for server in found if waited > KILL_SECONDS else ():
            with suppress(psutil.Error):
                if is_ours(server, identity):
                    server.kill()
        time.sleep(0.02)


def servers_inside(cluster: Path) -> list[psutil.Process]:
    """The PostgreSQL processes whose working directory is `cluster`. Other programs there do not use its files."""
    return [each for each in processes_inside(cluster) if program_of(each).name == PROGRAM]


def is_ours(server: psutil.Process, identity: Identity) -> bool:
    """Whether the process runs as the servers' user, from the wheel's binaries or a copy of them. Raises `psutil.Error`."""
    expected = identity.uid if identity.dropped else os.geteuid()
    return POSTGRES_WHEEL in program_of(server).parts and server.uids().effective == expected


def processes_inside(folder: Path) -> list[psutil.Process]:
    """The processes whose working directory is `folder`, as far as this user may know."""
    target, found = str(folder.resolve()), list[psutil.Process]()
    # `process_iter` keeps its processes, and each of them the program that it had when it was first asked.
    for pid in psutil.pids():
        # psutil's own `cwd` does not tell a folder from one of its name that was removed.
        with suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{pid}/cwd") == target:
                found.append(psutil.Process(pid))
    return found


def program_of(process: psutil.Process) -> Path:
    """The path of a process's program, also of one that was removed; empty if the process has ended or is another user's."""
    try:
        return Path(process.exe())
    except psutil.Error:
        return Path()
