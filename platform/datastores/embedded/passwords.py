"""Passwords of the embedded servers, in files of mode 0600.

Invariant: a password file has its name only once its content is on the disk, so a crash leaves the whole password or none.
"""

import secrets
from pathlib import Path

from loraplex.adapters.storage.durable_files import sync_folder, write_private


def new_password() -> str:
    return secrets.token_urlsafe(32)


def kept_password(path: Path) -> str:
    """Read the password in `path`; generate it on first use. An empty file counts as none."""
    if path.exists() and (kept := path.read_text().strip()):
        return kept
    password = new_password()
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    write_private(fresh, password.encode())
    fresh.replace(path)
    sync_folder(path.parent)
    return password
