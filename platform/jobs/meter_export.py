"""Exports meter events to a file or a URL. Invariant: an event counts as sent only once it is on the disk or the receiver has
acknowledged it, and a file has each identifier once, whenever the process died.
"""

import asyncio
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from loraplex.adapters.storage.durable_files import sync_folder
from loraplex.platform.jobs.receiver_client import ReceiverClient
from loraplex.platform.observability.webhook_metrics import WebhookMetrics
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.repetition import attempt
from loraplex.tenants.usage.meter_events import BATCH, MeterEvent, MeterExports, closed_days, last_closed
from loraplex.tenants.webhooks.signature import signed_headers

POLL_S: Final = 60.0
MAX_LINE_BYTES: Final = 512
"""Longer than the line of any event."""
LOG = structlog.get_logger("loraplex.meter_export")


class NotExported(Exception):
    """The receiver did not acknowledge the events; they are sent again."""


class MeterSink(Protocol):
    """Where meter events go."""

    async def send(self, events: Sequence[MeterEvent]) -> None:
        """Send events; a repetition must change nothing. Raises `NotExported`, `OSError`."""
        ...


class MeterFile:
    """A file of JSON lines, of mode 0600, to which this process alone appends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def send(self, events: Sequence[MeterEvent]) -> None:
        await asyncio.to_thread(self._append, events)

    def _append(self, events: Sequence[MeterEvent]) -> None:
        """Append the events that the end of the file lacks. An interrupted batch is always the last thing in it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            # A write that was cancelled goes on in its thread.
            fcntl.flock(file, fcntl.LOCK_EX)
            written = _written_at_end(file.fileno())
            lines = [
                msgspec.json.encode(event) + b"\n" for event in events if event.identifier not in written
            ]
            file.seek(0, os.SEEK_END)
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._path.parent)


class MeterUrl:
    """A URL that gets `{"events": […]}`, signed as Standard Webhooks says, and knows repeated identifiers."""

    def __init__(self, client: ReceiverClient, url: str, secret: str) -> None:
        self._client = client
        self._url = url
        self._secret = secret

    async def send(self, events: Sequence[MeterEvent]) -> None:
        body = msgspec.json.encode({"events": events})
        now = int(datetime.now(UTC).timestamp())
        signed = signed_headers([self._secret], events[0].identifier, now, body)
        result = await self._client.post(self._url, {"content-type": "application/json", **signed}, body)
        if result.error is not None:
            raise NotExported(f"{result.error}, status {result.status}")


@dataclass(slots=True, kw_only=True)
class MeterExporter:
    """The export of one gateway; `run` runs until it is cancelled. One of several gateways exports at a time: the transaction
    that sends a batch has a lock, so it lasts as long as one message at most.
    """

    database: Database
    sink: MeterSink
    metrics: WebhookMetrics
    poll_s: float = POLL_S
    _collected: datetime | None = None

    async def run(self) -> None:
        retried = (TenantsError, NotExported, OSError)
        while True:
            await attempt(LOG, self._export(), "meter export failed", retried, work="meter export")
            await asyncio.sleep(self.poll_s)

    async def _export(self) -> None:
        await self.collect(datetime.now(UTC))
        while await self.send():
            continue

    async def collect(self, now: datetime) -> None:
        """Write the events of closed hours, once for each hour that closes."""
        until = last_closed(now)
        if until == self._collected:
            return
        for since, end in closed_days(now):
            async with self.database.as_operator() as session:
                exports = MeterExports(session)
                if not await exports.lock():
                    return
                await exports.collect(since, end)
        self._collected = until

    async def send(self) -> bool:
        """Send one batch. Returns whether more may be left. Raises `NotExported`, `OSError`."""
        async with self.database.as_operator() as session:
            exports = MeterExports(session)
            self.metrics.set_oldest_meter_event(await exports.oldest_s())
            if not await exports.lock():
                return False
            unsent = await exports.unsent()
            if unsent.events:
                await self.sink.send(unsent.events)
                await exports.sent(unsent.ids)
        return len(unsent.events) == BATCH


def _written_at_end(descriptor: int) -> set[str]:
    """Return the identifiers of the last lines, at least `BATCH`. An incomplete last line is cut off: its write was interrupted."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - (BATCH + 1) * MAX_LINE_BYTES)
    tail = os.pread(descriptor, size - start, start)
    whole = tail[: tail.rfind(b"\n") + 1]
    if len(whole) < len(tail):
        os.ftruncate(descriptor, start + len(whole))
    # The first one of a longer file may lack its begin.
    lines = whole.splitlines()[1 if start else 0 :]
    return {msgspec.json.decode(line, type=MeterEvent).identifier for line in lines}
