"""Backs up an installation while it runs: journals, database, adapters, secret.

Invariant: journals are copied before the database, so each record is in one of them or in both, and restoring both is
idempotent. Adapters are copied before and after it, so those that the dump names are there. A backup has its name only once
it is whole.
"""

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec
from sqlalchemy import URL

from loraplex.adapters.storage.durable_files import sync_folder, write_private
from loraplex.adapters.storage.local_store import ADAPTERS_FOLDER, LocalAdapterStore
from loraplex.platform.backups.manifest import (
    DATABASE_FILE,
    FORMAT,
    MANIFEST_FILE,
    BackupFailed,
    FileFacts,
    Manifest,
    file_facts,
    list_files,
)
from loraplex.platform.datastores.embedded.binaries import PostgresBinaries
from loraplex.platform.datastores.postgres_tools import failure_reason, run_pg_dump
from loraplex.platform.processes.progress import Progress
from loraplex.platform.server.base_model_file import BASE_MODEL_FILE, read_base_model
from loraplex.platform.server.secret import SECRET_FILE
from loraplex.platform.startup_errors import DependencyFailed
from loraplex.tenants.errors import JournalUnavailable
from loraplex.tenants.ledger.journal.copying import copy_journals
from loraplex.tenants.ledger.journal.folder import JOURNAL_FOLDER

UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSource:
    """An installation. `address` is that of a role that reads every row, for `binaries`; `adapters_in_bucket`: the data
    directory has only copies of adapters.
    """

    data_dir: Path
    address: URL
    binaries: PostgresBinaries
    schema_revision: str
    adapters_in_bucket: bool


def back_up(source: BackupSource, target: Path, progress: Progress) -> Manifest:
    """Write a backup to the new folder `target` (0700). Raises `BackupFailed`; then `target` does not exist."""
    if target.exists():
        raise BackupFailed(f"{target} exists; a backup is written to a new folder")
    draft = target.with_name(f"{target.name}{UNFINISHED}")
    try:
        draft.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise BackupFailed(f"{draft} cannot be made: {error}") from error
    try:
        manifest = _write(source, draft, progress)
        draft.rename(target)
        sync_folder(target.parent)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackupFailed(f"the backup failed: {failure_reason(error)}") from error
    except JournalUnavailable as error:
        raise BackupFailed(f"the backup failed: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def _write(source: BackupSource, draft: Path, progress: Progress) -> Manifest:
    progress("copying journals")
    (draft / JOURNAL_FOLDER).mkdir(mode=0o700)
    journals = copy_journals(source.data_dir / JOURNAL_FOLDER, draft / JOURNAL_FOLDER)
    if not source.adapters_in_bucket:
        _copy_adapters(source.data_dir, draft, progress)
    progress("dumping the database")
    run_pg_dump(source.binaries.dump, source.address, draft / DATABASE_FILE)
    if not source.adapters_in_bucket:
        _copy_adapters(source.data_dir, draft, progress)
    for name in (SECRET_FILE, BASE_MODEL_FILE):
        with suppress(FileNotFoundError):
            write_private(draft / name, (source.data_dir / name).read_bytes())
    names = progress.tracked("hashing files", [*list_files(draft)])
    files = {name: _synced(draft / name) for name in names}
    manifest = Manifest(
        format=FORMAT,
        version=metadata.version("loraplex"),
        created_at=datetime.now(UTC),
        schema_revision=source.schema_revision,
        postgres_major=source.binaries.major,
        adapters_in_bucket=source.adapters_in_bucket,
        has_secret=(draft / SECRET_FILE).exists(),
        system_fingerprint=_system_fingerprint(source.data_dir),
        journals=journals,
        files=files,
    )
    write_private(draft / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return manifest


def _system_fingerprint(data_dir: Path) -> str | None:
    try:
        return read_base_model(data_dir).system_fingerprint
    except DependencyFailed:
        # No server has run here, or the file is damaged: then it is backed up as it is, and the next start writes it again.
        return None


def _copy_adapters(data_dir: Path, draft: Path, progress: Progress) -> None:
    """Copy the adapters that the backup does not have yet. One that is deleted meanwhile is left out."""
    store = LocalAdapterStore(data_dir / ADAPTERS_FOLDER)
    stored = [(tenant_id, digest) for tenant_id in store.tenants() for digest in store.digests(tenant_id)]
    for tenant_id, digest in progress.tracked("copying adapters", stored):
        target = draft / ADAPTERS_FOLDER / str(tenant_id) / digest
        if target.exists():
            continue
        try:
            shutil.copytree(store.location(tenant_id, digest), target, symlinks=True)
        except (FileNotFoundError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
            if store.exists(tenant_id, digest):
                raise


def _synced(path: Path) -> FileFacts:
    """Make a file survive a crash of the machine, and return its facts."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return file_facts(path)
