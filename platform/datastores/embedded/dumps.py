"""Dumps the embedded database before its schema is migrated, to `dumps/` in the data directory.

Invariant: a dump has its final name only once it is complete and on the disk; the newest `MAX_DUMPS` are kept.
"""

import os
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import make_url

from loraplex.adapters.storage.durable_files import sync_folder
from loraplex.platform.datastores.embedded.binaries import find_postgres
from loraplex.platform.datastores.embedded.errors import DumpFailed
from loraplex.platform.datastores.embedded.postgres import cluster_major, superuser_url
from loraplex.platform.datastores.embedded.servers import SERVICES_FOLDER

LOG = structlog.get_logger("loraplex.embedded")

DUMPS_FOLDER: Final = "dumps"
SUFFIX: Final = ".dump"
UNFINISHED: Final = ".unfinished"
MAX_DUMPS: Final = 3
DUMP_SECONDS: Final = 3600.0


def dump_database(data_dir: Path, url: str, revision: str) -> Path:
    """Write the database at `url`, as of schema `revision`, to a new file of mode 0600 for pg_restore; return its path.

    Raises `DumpFailed`; then no older dump is removed.
    """
    folder = data_dir / DUMPS_FOLDER
    target = folder / f"{revision}-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}{SUFFIX}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _remove_abandoned(folder)
        _dump_to(target, data_dir / SERVICES_FOLDER, url)
    except (OSError, subprocess.SubprocessError) as error:
        raise DumpFailed(f"the database could not be dumped to {folder}: {_reason(error)}") from error
    for old in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)[:-MAX_DUMPS]:
        old.unlink(missing_ok=True)
    LOG.info("the database was dumped before its migration", file=str(target), revision=revision)
    return target


def _dump_to(target: Path, services: Path, url: str) -> None:
    unfinished = target.with_suffix(UNFINISHED)
    try:
        _run_pg_dump(services, url, unfinished)
        unfinished.replace(target)
        sync_folder(target.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left: a start that is killed again and again would fill the disk."""
    for left in folder.glob(f"*{UNFINISHED}"):
        if time.time() - left.stat().st_mtime > DUMP_SECONDS:
            left.unlink(missing_ok=True)


def _run_pg_dump(services: Path, url: str, file: Path) -> None:
    """Row-level security binds the server's role, so the superuser dumps."""
    program = find_postgres(cluster_major(services / "postgres")).dump
    address = make_url(superuser_url(services, url))
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as output:
        subprocess.run(
            [str(program), "--format=custom", "--no-password"],
            env={
                "PGHOST": str(address.query["host"]),
                "PGUSER": str(address.username),
                "PGPASSWORD": str(address.password),
                "PGDATABASE": str(address.database),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=DUMP_SECONDS,
            check=True,
        )
        os.fsync(output.fileno())


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return lines[0] if lines else f"pg_dump ended with status {error.returncode}"
    return str(error)
