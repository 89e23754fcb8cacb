"""Writes the minutes of a gateway's engines to PostgreSQL.

Invariant: a minute that ends while PostgreSQL is away is dropped, and missing on the page.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from loraplex.platform.observability.engine_minutes import EngineMinutes
from loraplex.tenants.database import Database
from loraplex.tenants.engine_minutes.use_cases import keep
from loraplex.tenants.repetition import repeat

SAMPLE_S: Final = 2.0
LOG = structlog.get_logger("loraplex.engine_minutes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMinuteWriter:
    """Looks at the engines of one gateway and writes each minute once it has ended."""

    database: Database
    minutes: EngineMinutes

    async def run(self) -> None:
        """Repeat `step` until cancelled."""
        await repeat(LOG, self.step, SAMPLE_S, "a minute of the engines was not written")

    async def step(self) -> None:
        """Raises `DatabaseUnavailable`."""
        ended = self.minutes.sample(datetime.now(UTC))
        if ended:
            async with self.database.as_operator() as session:
                await keep(session, ended)
