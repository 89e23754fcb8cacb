"""Chooses the unprivileged user of the servers.

Invariant: PostgreSQL and Valkey never run as root. Only folders that loraplex created change their owner; parent folders are
never changed.
"""

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from loraplex.platform.datastores.embedded.errors import DataDirUnusable

UNPRIVILEGED_USERS = ("postgres", "nobody")


@dataclass(frozen=True)
class Identity:
    """A uid and gid to drop to; -1 keeps the caller's own."""

    uid: int = -1
    gid: int = -1

    @property
    def dropped(self) -> bool:
        return self.uid >= 0

    def may_traverse(self, path: Path) -> bool:
        """Whether this user reaches `path` through every parent folder."""
        return not self.dropped or all(self._may_search(parent) for parent in path.resolve().parents)

    def _may_search(self, folder: Path) -> bool:
        status = folder.stat()
        if status.st_uid == self.uid:
            return bool(status.st_mode & 0o100)
        if status.st_gid == self.gid:
            return bool(status.st_mode & 0o010)
        return bool(status.st_mode & 0o001)


def choose_identity(existing: Path) -> Identity:
    """For root: the owner of `existing` if an earlier run created it, else an existing unprivileged user."""
    if os.geteuid() != 0:
        return Identity()
    if existing.exists() and (status := existing.stat()).st_uid != 0:
        return Identity(status.st_uid, status.st_gid)
    for name in UNPRIVILEGED_USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Identity(entry.pw_uid, entry.pw_gid)
    raise DataDirUnusable(
        "PostgreSQL refuses to run as root and none of the users "
        f"{', '.join(UNPRIVILEGED_USERS)} exists; run loraplex as another user, or set DATABASE_URL and REDIS_URL"
    )


def own_folder(folder: Path, identity: Identity) -> None:
    """Create `folder` (mode 0700) and give it to `identity`; its parents must exist."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if identity.dropped:
            os.chown(folder, identity.uid, identity.gid)
        owner = folder.stat().st_uid
    except OSError as error:
        raise DataDirUnusable(f"{folder} cannot be created for the embedded services: {error}") from error
    expected = identity.uid if identity.dropped else os.geteuid()
    if owner != expected:
        raise DataDirUnusable(
            f"{folder} belongs to uid {owner} but must belong to uid {expected}; "
            "choose another --data-dir or run as its owner"
        )
