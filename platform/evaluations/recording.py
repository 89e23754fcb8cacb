"""Recorded requests on their way from the requests of a gateway to its database.

Invariant: a recording delays and fails no request: what does not fit, or cannot be written, is dropped and counted.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

import msgspec
import structlog

from loraplex.platform.evaluations.recorded_suite import Recording
from loraplex.tenants.database import Database
from loraplex.tenants.evaluations.encrypted_contents import EncryptedContents
from loraplex.tenants.recordings.records import NewRecording
from loraplex.tenants.recordings.use_cases import keep, recording_tenants
from loraplex.tenants.repetition import attempt, repeat

EVERY_S: Final = 5.0
"""How often policies are read and recordings written: so long a change of policy takes, and so much a crash loses."""
MAX_BYTES: Final = 256 << 10
"""Of one request with its answer."""
MAX_HELD_BYTES: Final = 64 << 20
MAX_TENANT_BYTES: Final = 16 << 20
"""Of all recordings in memory, those of running requests included, and of one tenant's."""
LOG: Final = structlog.get_logger("loraplex.recording")


class EndedRequest(NamedTuple):
    """A request to record. `adapter` None: of the base model. `size`: the bytes that are held for what `read` parses."""

    id: UUID
    tenant_id: UUID
    adapter: str | None
    base_digest: str
    created_at: datetime
    size: int
    read: Callable[[], Recording]


@dataclass(slots=True)
class RecordingQueue:
    """What one gateway records. `percents`: of which tenants; `missed`: requests that were to be recorded and are not, by reason."""

    percents: Mapping[UUID, int] = field(default_factory=dict)
    missed: Counter[str] = field(default_factory=Counter)
    ended: list[EndedRequest] = field(default_factory=list)
    held: Counter[UUID] = field(default_factory=Counter)

    def hold(self, tenant_id: UUID, size: int, of: int) -> bool:
        """Take `size` more bytes for a recording that then has `of`; False, counted, where it or all would be too large."""
        own, every = self.held[tenant_id] + size, self.held.total() + size
        if of > MAX_BYTES or own > MAX_TENANT_BYTES or every > MAX_HELD_BYTES:
            self.missed["too_large" if of > MAX_BYTES else "queue_full"] += 1
            return False
        self.held[tenant_id] = own
        return True


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
        ended, self.queue.ended = self.queue.ended, []
        for each in ended:
            self.queue.held[each.tenant_id] -= each.size
        self.queue.held = +self.queue.held
        for tenant_id in {each.tenant_id for each in ended}:
            own = [each for each in ended if each.tenant_id == tenant_id]
            await attempt(LOG, self._write(tenant_id, own), "recordings lost", tenant_id=str(tenant_id))
        if self.queue.missed:
            LOG.warning("requests not recorded", **self.queue.missed)
            self.queue.missed.clear()

    async def _write(self, tenant_id: UUID, ended: Sequence[EndedRequest]) -> None:
        recordings = await asyncio.to_thread(lambda: [self._encrypted(each) for each in ended])
        async with self.database.as_operator() as session:
            await keep(session, tenant_id, recordings)

    def _encrypted(self, ended: EndedRequest) -> NewRecording:
        content = self.contents.encrypt(ended.tenant_id, ended.id, msgspec.json.encode(ended.read()))
        return NewRecording(ended.id, ended.adapter, ended.base_digest, ended.created_at, content)
