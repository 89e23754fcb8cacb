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

from loraplex.grammar.errors import GrammarError
from loraplex.platform.evaluations.recorded_suite import Recording
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.evaluations.encrypted_contents import EncryptedContents
from loraplex.tenants.recordings.records import NewRecording
from loraplex.tenants.recordings.use_cases import keep, recording_tenants
from loraplex.tenants.repetition import repeat

EVERY_S: Final = 5.0
"""How often policies are read and recordings written: so long a change of policy takes, and so much a stop loses."""
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
    held_bytes: int = 0

    def hold(self, tenant_id: UUID, size: int, of: int) -> bool:
        """Take `size` more bytes for a recording that then has `of`; False, counted, where it or all would be too large."""
        own, every = self.held[tenant_id] + size, self.held_bytes + size
        if of > MAX_BYTES or own > MAX_TENANT_BYTES or every > MAX_HELD_BYTES:
            self.missed["too_large" if of > MAX_BYTES else "queue_full"] += 1
            return False
        self.held[tenant_id], self.held_bytes = own, every
        return True

    def release(self, tenant_id: UUID, size: int) -> None:
        """Give bytes back."""
        self.held_bytes -= size
        self.held[tenant_id] -= size
        if not self.held[tenant_id]:
            del self.held[tenant_id]


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
            self.queue.release(each.tenant_id, each.size)
        for tenant_id in {each.tenant_id for each in ended}:
            own = [each for each in ended if each.tenant_id == tenant_id]
            try:
                await self._write(tenant_id, own)
            except TenantsError:
                self.queue.missed["not_written"] += len(own)
        if missed := +self.queue.missed:
            LOG.warning("requests not recorded", **missed)
            self.queue.missed.clear()

    async def _write(self, tenant_id: UUID, ended: Sequence[EndedRequest]) -> None:
        encrypted = await asyncio.to_thread(lambda: [self._encrypted(each) for each in ended])
        recordings = [each for each in encrypted if each is not None]
        self.queue.missed["unreadable"] += len(ended) - len(recordings)
        async with self.database.as_operator() as session:
            await keep(session, tenant_id, recordings)

    def _encrypted(self, ended: EndedRequest) -> NewRecording | None:
        """Return what is stored; None for an output that its own parser refuses: its client had left."""
        try:
            recording = ended.read()
        except GrammarError:
            return None
        content = self.contents.encrypt(ended.tenant_id, ended.id, msgspec.json.encode(recording))
        return NewRecording(ended.id, ended.adapter, ended.base_digest, ended.created_at, content)
