"""`disk-full`: a file takes all free space of the file system that has the data directory.

Invariant: the file is allocated, not written, and is removed at the end; its size is bounded before it is made.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final
from uuid import uuid4

from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.fault import Fault, Observed
from loraplex.platform.drills.report import Promise
from loraplex.platform.drills.traffic import RequestOutcome
from loraplex.platform.drills.undo import RemoveFile

GIB: Final = 1 << 30
SMALLEST_STEP: Final = 4096
STORAGE_FULL: Final = "storage_full"


@dataclass(slots=True, kw_only=True)
class DiskFull(Fault):
    """`max_ballast_bytes`: with more free space than this the drill refuses."""

    name: ClassVar[str] = "disk-full"
    allowed_errors: ClassVar[frozenset[str]] = frozenset({STORAGE_FULL})

    max_ballast_bytes: int
    ballast: Path

    @staticmethod
    def ballast_of(data_dir: Path) -> Path:
        """A new name beside what the data directory has."""
        return data_dir / f"drill-ballast-{uuid4().hex}"

    async def check(self) -> None:
        free = free_bytes(self.ballast.parent)
        if free > self.max_ballast_bytes:
            raise DrillImpossible(
                f"{free / GIB:.1f} GiB are free where {self.ballast.parent} is: filling them needs --max-ballast "
                f"{-(-free // GIB)}"
            )

    def plan(self) -> str:
        free = free_bytes(self.ballast.parent)
        return (
            f"take all {free / GIB:.2f} GiB that are free on the file system of {self.ballast.parent} for {self.seconds:g} s, by "
            f"the file {self.ballast}. EVERY program that writes there finds the disk full. If neither this command nor its "
            "watchdog can end it: remove that file."
        )

    def undo(self) -> RemoveFile:
        return RemoveFile(str(self.ballast))

    async def begin(self) -> None:
        fill(self.ballast, self.max_ballast_bytes)

    def has_shown(self, outcomes: Sequence[RequestOutcome]) -> bool:
        return any(each.code == STORAGE_FULL for each in outcomes)

    async def promises(self, observed: Observed) -> list[Promise]:
        refused = sum(each.code == STORAGE_FULL for each in observed.outcomes)
        charged = 0 if observed.drift is None else observed.drift.refused_rows
        return [
            Promise(
                "a full disk is said before admission: 507 storage_full", refused > 0, f"{refused} refused"
            ),
            Promise("a refused request is not charged", charged == 0, f"{charged} rows of refused requests"),
        ]


def free_bytes(folder: Path) -> int:
    """The bytes that this process may still write to the file system of `folder`."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def fill(path: Path, most: int, leave: int = 0) -> int:
    """Make or extend a file that takes what is free but for `leave` bytes, at most `most` bytes; return its size.

    Raises `OSError` other than of a full disk.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size, free = os.fstat(descriptor).st_size, free_bytes(path.parent)
        most = min(most, size + max(0, free - leave)) if leave else most
        step = min(free, most)
        while step >= SMALLEST_STEP and size < most:
            step = min(step, most - size)
            try:
                os.posix_fallocate(descriptor, size, step)
                size += step
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                step //= 2
        return size
    finally:
        os.close(descriptor)
