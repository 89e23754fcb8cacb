"""`backup.json`: what a backup contains, by which a restore checks every file before it changes anything."""

import hashlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from loraplex.platform.processes.progress import Progress
from loraplex.platform.startup_errors import StartError

MANIFEST_FILE: Final = "backup.json"
DATABASE_FILE: Final = "database.dump"
FORMAT: Final = 1


class BackupFailed(StartError):
    """A backup could not be written, or one cannot be restored. Nothing was changed."""


class FileFacts(msgspec.Struct, frozen=True):
    """Size in bytes and SHA-256 of a file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A backup. `files` has every other file by its path in the backup; `adapters_in_bucket`: it contains no adapter.

    `system_fingerprint`: of the server that ran last; None if none has, or one of an earlier release.
    """

    format: int
    version: str
    created_at: datetime
    schema_revision: str
    postgres_major: int
    adapters_in_bucket: bool
    has_secret: bool
    system_fingerprint: str | None = None
    journals: list[str]
    files: dict[str, FileFacts]

    @property
    def total_bytes(self) -> int:
        return sum(facts.bytes for facts in self.files.values())


def list_files(folder: Path) -> Iterator[str]:
    """The paths of all files of a backup but its manifest, sorted. Raises `BackupFailed` for a link or a special file."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise BackupFailed(f"{path} is neither a file nor a folder")
        if path.is_file() and path != folder / MANIFEST_FILE:
            yield path.relative_to(folder).as_posix()


def file_facts(path: Path) -> FileFacts:
    """Read a file once."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return FileFacts(path.stat().st_size, digest.hexdigest())


def read_manifest(folder: Path, progress: Progress) -> Manifest:
    """Read the manifest and check that the files are those it names. Raises `BackupFailed`."""
    file = folder / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except OSError as error:
        raise BackupFailed(f"{folder} is no backup: {file} cannot be read: {error}") from error
    except msgspec.MsgspecError as error:
        raise BackupFailed(f"{file} is damaged: {error}") from error
    if manifest.format != FORMAT:
        raise BackupFailed(f"{file} has format {manifest.format}; this version reads {FORMAT}")
    found = set(list_files(folder))
    if missing := sorted(manifest.files.keys() - found):
        raise BackupFailed(f"{folder} lacks {missing[0]}, and {len(missing) - 1} other files")
    if more := sorted(found - manifest.files.keys()):
        raise BackupFailed(f"{folder}/{more[0]} is not part of the backup")
    for name, facts in progress.tracked("checking the backup", manifest.files.items()):
        if file_facts(folder / name) != facts:
            raise BackupFailed(
                f"{folder}/{name} is damaged: its size or its SHA-256 is not that of {MANIFEST_FILE}"
            )
    return manifest
