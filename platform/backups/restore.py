"""Restores a backup into a new installation: an empty data directory and an empty database.

Invariant: nothing is written before every file of the backup was checked, and nothing that exists is replaced. The next start
ships the journals, and rebuilds all counters from the ledger.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL

from loraplex.adapters.storage.durable_files import sync_folder
from loraplex.adapters.storage.local_store import ADAPTERS_FOLDER
from loraplex.platform.backups.manifest import DATABASE_FILE, BackupFailed, Manifest
from loraplex.platform.datastores.embedded.binaries import PostgresBinaries
from loraplex.platform.datastores.postgres_tools import failure_reason, run_pg_restore
from loraplex.platform.server.base_model_file import BASE_MODEL_FILE
from loraplex.platform.server.secret import SECRET_FILE
from loraplex.tenants.ledger.journal.folder import JOURNAL_FOLDER

RESTORED = (SECRET_FILE, BASE_MODEL_FILE, ADAPTERS_FOLDER, JOURNAL_FOLDER)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTarget:
    """A new installation. `address` is that of a role that may create everything as `owner`, the role that serves."""

    data_dir: Path
    address: URL
    owner: str
    binaries: PostgresBinaries


def require_new(data_dir: Path) -> None:
    """Raises `BackupFailed` if the data directory already has what a restore writes."""
    for name in RESTORED:
        path = data_dir / name
        if path.is_dir() and not any(path.iterdir()):
            continue
        if path.exists():
            raise BackupFailed(f"{path} exists; a backup is restored into a new data directory")


def restore(manifest: Manifest, backup: Path, target: RestoreTarget) -> None:
    """Restore the files, then the database. Raises `BackupFailed`; then both are as new as before."""
    try:
        target.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in RESTORED:
            _copy(backup / name, target.data_dir / name)
        sync_folder(target.data_dir)
        run_pg_restore(target.binaries.restore, target.address, backup / DATABASE_FILE, target.owner)
    except (OSError, subprocess.SubprocessError) as error:
        for name in RESTORED:
            _remove(target.data_dir / name)
        raise BackupFailed(f"the restore of {manifest.created_at} failed: {failure_reason(error)}") from error


def _copy(source: Path, target: Path) -> None:
    """Modes are those of a data directory: a backup's may have changed on its way, and a gateway writes its journals."""
    if source.is_dir():
        target.mkdir(exist_ok=True)
        target.chmod(0o700)
        for each in source.iterdir():
            _copy(each, target / each.name)
    elif source.exists():
        shutil.copyfile(source, target)
        target.chmod(0o600)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
