"""Recorded requests on their way from the requests of a gateway to its database.

Invariant: a recording delays and fails no request: what does not fit, or cannot be written, is dropped and counted.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from random import random
from typing import Final
from uuid import UUID

import msgspec
import structlog

from loraplex.platform.evaluations.recorded_suite import Recording
from loraplex.tenants.database import Database
from loraplex.tenants.evaluations.encrypted_contents import EncryptedContents
from loraplex.tenants.ids import uuid7
from loraplex.tenants.models import RecordedRequest
from loraplex.tenants.recordings.use_cases import keep, recording_tenants
from loraplex.tenants.repetition import attempt, repeat

EVERY_S: Final = 5.0
"""How often policies are read and recordings written: so long a change of policy takes, and so much a crash loses."""
MAX_BYTES: Final = 256 << 10
"""Of one request with its answer."""
MAX_HELD_BYTES: Final = 64 << 20
"""Of all recordings in memory, those of running requests included."""
LOG: Final = structlog.get_logger("loraplex.recording")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request to record. `size`: the bytes that are held for it; `read` parses its answer."""

    tenant_id: UUID
    adapter: str | None
    version: int | None
    digest: str | None
    base_digest: str
    ended_at: datetime
    size: int
    read: Callable[[], Recording]


@dataclass(slots=True)
class RecordingQueue:
    """What one gateway records. `percents`: of which tenants; `missed`: requests that were to be recorded and are not, by reason."""

    percents: Mapping[UUID, int] = field(default_factory=dict)
    missed: Counter[str] = field(default_factory=Counter)
    _ended: list[EndedRequest] = field(default_factory=list)
    _held: int = 0

    def draws(self, tenant_id: UUID) -> bool:
        """Return whether to record this request of a tenant in `percents`."""
        return random() * 100 < self.percents[tenant_id]

    def hold(self, size: int, of: int) -> bool:
        """Take `size` more bytes for a recording that then has `of`; False, counted, where it or all would be too large."""
        reason = (
            "too_large" if of > MAX_BYTES else "queue_full" if self._held + size > MAX_HELD_BYTES else None
        )
        if reason is None:
            self._held += size
        else:
            self.missed[reason] += 1
        return reason is None

    def release(self, size: int) -> None:
        """Return the bytes of a recording."""
        self._held -= size

    def add(self, ended: EndedRequest) -> None:
        """Queue a request that has ended."""
        self._ended.append(ended)

    def take(self) -> list[EndedRequest]:
        """Return what is queued, which the caller writes or drops."""
        ended, self._ended = self._ended, []
        self.release(sum(each.size for each in ended))
        return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingWriter:
    """Writes the recordings of one gateway, encrypted."""

    database: Database
    queue: RecordingQueue
    contents: EncryptedContents

    async def run(self) -> None:
        """Repeat `step` until cancelled."""
        await repeat(LOG, self.step, EVERY_S)

    async def step(self) -> None:
        """Read which tenants record, and write what has ended. Raises `DatabaseUnavailable`."""
        async with self.database.as_operator() as session:
            self.queue.percents = await recording_tenants(session)
        ended = self.queue.take()
        for tenant_id in {each.tenant_id for each in ended}:
            own = [each for each in ended if each.tenant_id == tenant_id]
            await attempt(LOG, self._write(tenant_id, own), "recordings lost", tenant_id=str(tenant_id))
        if self.queue.missed:
            LOG.warning("requests not recorded", **self.queue.missed)
            self.queue.missed.clear()

    async def _write(self, tenant_id: UUID, ended: Sequence[EndedRequest]) -> None:
        rows = await asyncio.to_thread(lambda: [self._row(each) for each in ended])
        async with self.database.as_operator() as session:
            await keep(session, tenant_id, rows)

    def _row(self, ended: EndedRequest) -> RecordedRequest:
        row_id, content = uuid7(), msgspec.json.encode(ended.read())
        return RecordedRequest(
            id=row_id,
            tenant_id=ended.tenant_id,
            adapter=ended.adapter,
            version=ended.version,
            digest=ended.digest,
            base_digest=ended.base_digest,
            content=self.contents.encrypt(ended.tenant_id, row_id, content),
            created_at=ended.ended_at,
        )
