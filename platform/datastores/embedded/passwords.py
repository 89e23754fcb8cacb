"""Passwords of the embedded servers, in files of mode 0600.

Invariant: a password file has its name only once its content is on the disk, so a crash leaves the whole password or none.
"""

import os
import secrets
from pathlib import Path


def new_password() -> str:
    return secrets.token_urlsafe(32)


def kept_password(path: Path) -> str:
    """Read the password in `path`; generate it on first use. An empty file counts as none."""
    if path.exists() and (kept := path.read_text().strip()):
        return kept
    password = new_password()
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(password)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)
    return password


def sync_folder(folder: Path) -> None:
    """Write the folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
