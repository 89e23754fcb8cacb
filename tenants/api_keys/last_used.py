"""Tracks when keys were last used. Invariant: a request writes nothing; uses are kept in memory, bounded, and written by one
statement per second. A first use is stored within a second; a later time is up to a minute old.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy import text

from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.repetition import repeat

LOG: Final = structlog.get_logger("loraplex.api_keys")
FLUSH_SECONDS: Final = 1.0
MAX_KEYS: Final = 100_000
# A key locked by a change is skipped until its next use: writing times never waits and causes no deadlock. A key in steady use
# is written once a minute.
WRITE_TIMES: Final = text("""
WITH used AS (
    SELECT u.id, u.at FROM unnest(CAST(:ids AS uuid[]), CAST(:times AS timestamptz[])) AS u (id, at)
), free AS (
    SELECT k.id FROM api_keys k JOIN used USING (id)
    WHERE k.last_used_at IS NULL OR k.last_used_at < used.at - interval '1 minute'
    FOR NO KEY UPDATE OF k SKIP LOCKED
)
UPDATE api_keys k SET last_used_at = used.at FROM used JOIN free USING (id) WHERE k.id = used.id
""")


async def _write(database: Database, used: Mapping[UUID, datetime]) -> None:
    async with database.as_writer() as session:
        await session.execute(WRITE_TIMES, {"ids": [*used], "times": [*used.values()]})


class LastUsedTracker:
    """The uses since the last flush."""

    def __init__(self) -> None:
        self._used: dict[UUID, datetime] = {}

    def note(self, api_key_id: UUID, at: datetime) -> None:
        """Note a use. Beyond `MAX_KEYS` different keys between two flushes, further keys are ignored."""
        if api_key_id in self._used or len(self._used) < MAX_KEYS:
            self._used[api_key_id] = at

    async def flush(self, database: Database) -> None:
        """Write the noted uses. Raises `DatabaseUnavailable`; the uses are kept then."""
        used, self._used = self._used, {}
        if not used:
            return
        try:
            await database.bounded(partial(_write, database, used))
        except BaseException:
            self._used = dict([*used.items(), *self._used.items()][-MAX_KEYS:])
            raise

    async def run(self, database: Database, seconds: float = FLUSH_SECONDS) -> None:
        """Flushes every `seconds` until cancelled."""

        async def flush() -> None:
            await self.flush(database)

        await asyncio.sleep(seconds)
        await repeat(LOG, flush, seconds, "uses of keys are written later")


@asynccontextmanager
async def writing_use(database: Database) -> AsyncIterator[LastUsedTracker]:
    """A tracker whose uses are written while the block runs and at its end."""
    key_use = LastUsedTracker()
    writing = asyncio.create_task(key_use.run(database))
    try:
        yield key_use
    finally:
        writing.cancel()
        await asyncio.wait({writing})
        with suppress(DatabaseUnavailable):
            await key_use.flush(database)
