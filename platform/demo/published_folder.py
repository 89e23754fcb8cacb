"""Builds a folder once for all processes: under a file lock, in a draft folder next to it, published by one rename.

Invariant: the target does not exist or is complete, whenever and however a process dies.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.adapters.storage.durable_files import sync_folder

Build = Callable[[Path, int], Path]


def publish_once(target: Path, build: Build, on_wait: Callable[[], None]) -> Path:
    """Return `target`; build it first if it does not exist.

    `build(draft, lock)` fills the folder `draft`, which may contain files of an interrupted run, and returns the finished
    folder inside it. `lock` is a descriptor that child processes must inherit. `on_wait` is called when another process
    is building.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.draft")
    with _exclusive(target.with_name(f".{target.name}.lock"), on_wait) as lock:
        if not target.is_dir():
            draft.mkdir(exist_ok=True)
            finished = build(draft, lock)
            _flush(finished)
            finished.rename(target)
            shutil.rmtree(draft)
    return target


@contextmanager
def _exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _flush(folder: Path) -> None:
    """Sync files and names to the disk, so that a power failure after the rename leaves no empty file."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
