"""Dumps the embedded database before its schema is migrated, to `dumps/` in the data directory.

Invariant: a dump has its final name only once it is complete and on the disk; the newest `MAX_DUMPS` are kept.
"""

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
from loraplex.platform.datastores.postgres_tools import TOOL_SECONDS, failure_reason, run_pg_dump

LOG = structlog.get_logger("loraplex.embedded")

DUMPS_FOLDER: Final = "dumps"
SUFFIX: Final = ".dump"
UNFINISHED: Final = ".unfinished"
MAX_DUMPS: Final = 3


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
        raise DumpFailed(f"the database could not be dumped to {folder}: {failure_reason(error)}") from error
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
        if time.time() - left.stat().st_mtime > TOOL_SECONDS:
            left.unlink(missing_ok=True)


def _run_pg_dump(services: Path, url: str, file: Path) -> None:
    """Row-level security binds the server's role, so the superuser dumps."""
    program = find_postgres(cluster_major(services / "postgres")).dump
    run_pg_dump(program, make_url(superuser_url(services, url)), file)
