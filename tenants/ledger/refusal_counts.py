"""Counts of refused requests by hour, adapter, key and error code, added to `request_rollups` from time to time.

Invariant: memory is bounded by `MAX_COUNTS`, and a refusal waits for no store. Counts are statistics: those of the last seconds
before a gateway is killed are missing, and a write whose reply is lost may count twice.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import structlog

from loraplex.tenants.errors import DatabaseUnavailable

MAX_COUNTS: Final = 10_000
REFUSED_PREFIX: Final = "refused_"
LOG = structlog.get_logger("loraplex.refusal_counts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What one count is about. `adapter_id` None: the base model, or the request was refused before its model was known.

    `code` is the code of the error that the client got.
    """

    tenant_id: UUID
    api_key_id: UUID
    adapter_id: UUID | None
    code: str

    @property
    def status(self) -> str:
        """The status in `request_rollups`."""
        return REFUSED_PREFIX + self.code


class RefusalCounts:
    """The counts of one gateway; `flush` them regularly."""

    def __init__(
        self,
        write: Callable[[Mapping[tuple[datetime, Refused], int]], Awaitable[None]],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._write = write
        self._clock = clock
        self._counts: Counter[tuple[datetime, Refused]] = Counter()
        self._uncounted = 0

    def add(self, refused: Refused) -> None:
        """Count one refusal. Beyond `MAX_COUNTS` different ones it is only counted for the log."""
        key = self._clock().replace(minute=0, second=0, microsecond=0), refused
        if key in self._counts or len(self._counts) < MAX_COUNTS:
            self._counts[key] += 1
        else:
            self._uncounted += 1

    async def flush(self) -> None:
        """Write all counts. Raises `DatabaseUnavailable`; then they are kept for the next time."""
        counts, self._counts = self._counts, Counter()
        uncounted, self._uncounted = self._uncounted, 0
        if uncounted:
            LOG.warning("refusals were not counted", requests=uncounted)
        if not counts:
            return
        try:
            await self._write(counts)
        except DatabaseUnavailable:
            self._counts.update(counts)
            raise
