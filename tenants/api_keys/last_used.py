"""When keys were last used. Invariant: a request writes nothing; what was used is held in memory, bounded, and written by one
statement a minute, so a time is up to a minute late.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import text

from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable

FLUSH_SECONDS: Final = 60.0
MAX_KEYS: Final = 100_000
# A key that somebody is changing is left to its next use: writing times waits for nobody and locks nobody in.
WRITE_TIMES: Final = text("""
WITH used AS (
    SELECT u.id, u.at FROM unnest(CAST(:ids AS uuid[]), CAST(:times AS timestamptz[])) AS u (id, at)
), free AS (
    SELECT k.id FROM api_keys k JOIN used USING (id)
    WHERE k.last_used_at IS NULL OR k.last_used_at < used.at
    FOR NO KEY UPDATE OF k SKIP LOCKED
)
UPDATE api_keys k SET last_used_at = used.at FROM used JOIN free USING (id) WHERE k.id = used.id
""")


class LastUsedTracker:
    """The uses since the last flush."""

    def __init__(self) -> None:
        self._used: dict[UUID, datetime] = {}

    def note(self, api_key_id: UUID, at: datetime) -> None:
        """Beyond `MAX_KEYS` different keys between two flushes the further ones are not noted."""
        if api_key_id in self._used or len(self._used) < MAX_KEYS:
            self._used[api_key_id] = at

    async def flush(self, database: Database) -> None:
        """Writes what was noted. Raises `DatabaseUnavailable`; the uses are kept then."""
        used, self._used = self._used, {}
        if not used:
            return
        try:
            async with database.as_writer() as session:
                await session.execute(WRITE_TIMES, {"ids": [*used], "times": [*used.values()]})
        except BaseException:
            self._used = dict([*used.items(), *self._used.items()][-MAX_KEYS:])
            raise

    async def run(self, database: Database, seconds: float = FLUSH_SECONDS) -> None:
        """Flushes every `seconds` until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            # What was not written is in the next flush; that PostgreSQL is down is told by everything else.
            with suppress(DatabaseUnavailable):
                await self.flush(database)


@asynccontextmanager
async def writing_use(database: Database) -> AsyncIterator[LastUsedTracker]:
    """Notes uses, and writes them while it is open and at its end."""
    key_use = LastUsedTracker()
    writing = asyncio.create_task(key_use.run(database))
    try:
        yield key_use
    finally:
        writing.cancel()
        await asyncio.wait({writing})
        with suppress(DatabaseUnavailable):
            await key_use.flush(database)
