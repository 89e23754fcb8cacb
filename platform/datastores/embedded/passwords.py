"""Passwords of the embedded servers, in files of mode 0600.

Invariant: a password file has its name only once its content is on the disk, so a crash leaves the whole password or none.
"""

import re
import secrets
from pathlib import Path
from typing import Final

from loraplex.adapters.storage.durable_files import sync_folder, write_private
from loraplex.platform.datastores.embedded.errors import DataDirUnusable

PASSWORD: Final = re.compile(rb"[\w-]+")
"""What `new_password` makes: it needs no quotes in an address and in a configuration."""


def new_password() -> str:
    return secrets.token_urlsafe(32)


def kept_password(path: Path) -> str:
    """Read the password in `path`; generate it on first use. An empty file counts as none. Raises `DataDirUnusable`."""
    if path.exists() and (kept := path.read_bytes().strip()):
        if PASSWORD.fullmatch(kept) is None:
            raise DataDirUnusable(f"{path} is damaged: put the old one back")
        return kept.decode()
    password = new_password()
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    write_private(fresh, password.encode())
    fresh.replace(path)
    sync_folder(path.parent)
    return password
