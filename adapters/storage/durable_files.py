"""Writes files and names so that they survive a crash of the machine."""

import os
from io import BufferedWriter, FileIO
from pathlib import Path


def create_private(path: Path) -> FileIO:
    """Create a file of mode 0600 for unbuffered writing. Raises `FileExistsError`, also for a symbolic link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return FileIO(os.open(path, flags, 0o600), "wb")


def write_private(path: Path, content: bytes) -> None:
    """Write a new file of mode 0600, synced to disk. Its name is on the disk only after `sync_folder` of its folder."""
    with BufferedWriter(create_private(path)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder` to disk, after a rename for example."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
