"""What a durable write to the journal takes, with 1, 16 and 128 writers, beside writing and syncing as many bytes to a file.

Invariant: journal and yardstick run in turn on the same disk, and the yardstick writes what one commit of this run wrote.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from uuid import uuid4

from tests.tenants.ledger.journal.fixtures import reservation

from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.tenants.ledger.journal.commits import JournalRecorder
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.quotas.reservation import SettledUsage

WRITERS: Final = (1, 16, 128)
MAX_BYTES: Final = 1 << 30
# The file of the yardstick is as long as the journal's log: neither writes new blocks.
YARDSTICK_BYTES: Final = 8 << 20
USED: Final = SettledUsage(outcome="completed", prompt_tokens=100, completion_tokens=10)


@dataclass(frozen=True, slots=True)
class JournalShape:
    """`writes` admissions and ends per case in each round. `folder`: on the disk to measure; None is a temporary folder."""

    writes: int = 4096
    rounds: int = 3
    folder: Path | None = None


class CommitCount(JournalRecorder):
    """Counts transactions."""

    def __init__(self) -> None:
        self.commits = 0

    def committed(self, rows: int, seconds: float) -> None:
        """Count one transaction."""
        self.commits += 1


@dataclass(slots=True)
class Measured:
    """The times of one case, in seconds, over all its rounds."""

    writes: list[float] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    commits: int = 0
    bytes_per_commit: int = 0


async def measure_journal(shape: JournalShape, progress: Callable[[str], None]) -> Report:
    """Measure each number of writers in each round, and the yardstick after it."""
    found = {writers: Measured() for writers in WRITERS}
    with TemporaryDirectory(prefix="loraplex-journal-", dir=shape.folder) as folder:
        for number in range(1, shape.rounds + 1):
            for writers, measured in found.items():
                await _write(Path(folder), writers, shape.writes, measured)
                _sync(Path(folder), measured)
                progress(f"round {number}, {writers} writers: {_ms(measured.writes, 50):.2f} ms a write")
    return _report(shape, found)


async def _write(folder: Path, writers: int, writes: int, measured: Measured) -> None:
    count = CommitCount()
    journal = await Journal.open(folder, uuid4(), max_bytes=MAX_BYTES, recorder=count)

    async def timed(write: Awaitable[object]) -> None:
        began = time.perf_counter()
        await write
        measured.writes.append(time.perf_counter() - began)

    async def write_requests() -> None:
        for _ in range(writes // (2 * writers)):
            each = reservation()
            await timed(journal.admit(each))
            await timed(journal.end(each.id, USED))

    bytes_before, began = _written_bytes(), time.perf_counter()
    await asyncio.gather(*(write_requests() for _ in range(writers)))
    measured.elapsed += time.perf_counter() - began
    measured.commits += count.commits
    measured.bytes_per_commit = (_written_bytes() - bytes_before) // count.commits
    await journal.shipped(journal.position)
    await journal.close()


def _sync(folder: Path, measured: Measured) -> None:
    """Write and sync as many bytes as a commit, a hundred times."""
    data = os.urandom(measured.bytes_per_commit)
    with Path(folder, "yardstick").open("wb", buffering=0) as file:
        file.write(bytes(YARDSTICK_BYTES))
        os.fsync(file.fileno())
        for number in range(100):
            began = time.perf_counter()
            os.pwrite(file.fileno(), data, number * len(data) % (YARDSTICK_BYTES - len(data)))
            os.fdatasync(file.fileno())
            measured.syncs.append(time.perf_counter() - began)


def _report(shape: JournalShape, found: dict[int, Measured]) -> Report:
    report = Report(
        "journal", ("writes_per_s", "write_p50_ms", "write_p99_ms", "writes_per_commit", "sync_p50_ms")
    )
    for writers, measured in found.items():
        figure = {
            "writes_per_s": round(len(measured.writes) / measured.elapsed),
            "write_p50_ms": _ms(measured.writes, 50),
            "write_p99_ms": _ms(measured.writes, 99),
            "writes_per_commit": len(measured.writes) / measured.commits,
            "commit_bytes": measured.bytes_per_commit,
            "sync_p50_ms": _ms(measured.syncs, 50),
            "sync_p99_ms": _ms(measured.syncs, 99),
        }
        shown = asdict(shape) | {"folder": None, "writers": writers}
        report.cases.append(Case(f"{writers} writers", shown, figure))
        ratio = figure["write_p50_ms"] / figure["sync_p50_ms"]
        report.ratios.append(Ratio(f"{writers} writers: a write / syncing the bytes of a commit", ratio))
    return report


def _written_bytes() -> int:
    """Bytes that this process has written."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def _ms(seconds: list[float], share: float) -> float:
    return percentile(seconds, share) * 1000
