"""Opens untrusted files: regular files only, never through a symbolic link, never blocking on a pipe."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from loraplex.adapters.errors import FolderRejected
from loraplex.adapters.storage.durable_files import create_private

CHUNK_BYTES = 4 << 20
TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
"""No fault of the file: it opens later."""


class OpenFile(NamedTuple):
    """A descriptor for reading only, and the file's size in bytes when it was opened."""

    descriptor: int
    size: int


@contextmanager
def open_regular(path: Path, *, max_bytes: int) -> Iterator[OpenFile]:
    """Open a file until the context ends. Raises `FolderRejected`, or `OSError` where too many files are open.

    Only the last part of the path is protected against links: the caller chooses the folder.
    """
    descriptor = _open(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FolderRejected(path.name, "is not a regular file")
        if status.st_size > max_bytes:
            raise FolderRejected(path.name, f"has {status.st_size} bytes, at most {max_bytes} are allowed")
        yield OpenFile(descriptor, status.st_size)
    finally:
        os.close(descriptor)


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the whole content. Raises `FolderRejected`, or `EOFError` when the file shrinks meanwhile."""
    with open_regular(path, max_bytes=max_bytes) as (descriptor, size):
        return read_exactly(descriptor, size, 0)


def read_exactly(descriptor: int, length: int, offset: int) -> bytes:
    """Return `length` bytes at `offset`. Raises `EOFError` when the file is shorter."""
    parts = []
    while length:
        part = os.pread(descriptor, length, offset)
        if not part:
            raise EOFError(f"the file ends {length} bytes early")
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def hash_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the SHA-256 of the content, 32 bytes. Raises `FolderRejected`."""
    with open_regular(path, max_bytes=max_bytes) as (descriptor, size):
        return hash_descriptor(descriptor, size)


def hash_descriptor(descriptor: int, size: int) -> bytes:
    """Return the SHA-256 of an open file's first `size` bytes, 32 bytes. Raises `EOFError` when it is shorter."""
    return _hash_into(descriptor, size, None)


def copy_opened(source: OpenFile, destination: Path) -> bytes:
    """Copy to a new file of mode 0600, synced to disk; return the SHA-256 of what was written.

    Raises `EOFError` when the file is shorter than when it was opened.
    """
    with BufferedWriter(create_private(destination)) as target:
        digest = _hash_into(source.descriptor, source.size, target)
        target.flush()
        os.fsync(target.fileno())
    return digest


def _hash_into(descriptor: int, size: int, target: BinaryIO | None) -> bytes:
    digest = hashlib.sha256()
    for offset in range(0, size, CHUNK_BYTES):
        chunk = read_exactly(descriptor, min(CHUNK_BYTES, size - offset), offset)
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.digest()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise FolderRejected(path.name, "is missing") from error
    except OSError as error:
        if error.errno in TOO_MANY_OPEN:
            raise
        kind = "is a symbolic link" if path.is_symlink() else f"cannot be opened: {error.strerror}"
        raise FolderRejected(path.name, kind) from error
