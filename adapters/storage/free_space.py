"""The floor of free disk space below which uploads are refused, and the errors of a full disk.

Invariant: a writer checks the floor before each write, so concurrent writers undercut it by their writes in flight at
most.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex.adapters.errors import BlobStoreUnavailable, StorageFull

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The bytes of a file system, and those of them that are free."""

    total_bytes: int
    free_bytes: int


def disk_space(place: Path) -> DiskSpace:
    """Return the space of the file system of `place`. Raises `BlobStoreUnavailable`."""
    with disk_errors():
        status = os.statvfs(place)
    return DiskSpace(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def require_free(place: Path | int, floor_bytes: int, size: int = 0) -> None:
    """Raise `StorageFull` unless `floor_bytes` stay free after `size` more bytes; a floor of 0 is not checked.

    `place` is a path or an open descriptor on the file system.
    """
    if not floor_bytes:
        return
    with disk_errors():
        status = os.statvfs(place)
    if status.f_bavail * status.f_frsize - size < floor_bytes:
        raise StorageFull("the server's disk has no room for uploads now; try again later")


@contextmanager
def disk_errors() -> Iterator[None]:
    """Convert an `OSError` of a write to `StorageFull` or `BlobStoreUnavailable`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull("the server's disk is full; try again later") from error
        raise BlobStoreUnavailable(f"this machine could not write the upload: {error.strerror}") from error
