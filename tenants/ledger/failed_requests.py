"""Requests that failed or were refused, one by one, written to `failed_requests` from time to time.

Invariant: a flood costs neither memory nor PostgreSQL. Each minute a gateway keeps `MAX_PER_MINUTE` of a tenant, the last of which
counts the others; the table keeps the newest `MAX_KEPT`. Nobody waits for it: those of the last seconds before a gateway is killed are
missing.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

import structlog
from cachetools import LRUCache

from loraplex.tenants.errors import DatabaseUnavailable

MAX_PER_MINUTE: Final = 60
MAX_PENDING: Final = 5_000
MAX_TENANTS: Final = 5_000
MAX_KEPT: Final = 10_000
"""The rows of a tenant: at the most of one gateway, those of three hours."""
LOG = structlog.get_logger("loraplex.failed_requests")


@dataclass(slots=True, kw_only=True)
class Failure:
    """A row of `failed_requests`, whose table says what each field is."""

    tenant_id: UUID
    id: UUID
    at: datetime
    is_refused: bool
    request_id: str
    key_id: str
    adapter_id: UUID | None
    model: str | None
    code: str
    status: int
    message: str
    omitted: int = 0


@dataclass(slots=True)
class _Minute:
    start: datetime
    kept: int = 0
    last: Failure | None = None


class FailedRequests:
    """Those of one gateway that are not written yet; `flush` them regularly."""

    def __init__(self, write: Callable[[Sequence[Failure]], Awaitable[None]]) -> None:
        self._write = write
        self._pending: dict[UUID, Failure] = {}
        self._minutes: LRUCache[UUID, _Minute] = LRUCache(MAX_TENANTS)
        self._lost = 0

    def add(self, failure: Failure) -> None:
        """Keep a request, or count it with the last one that was kept in its minute."""
        start = failure.at.replace(second=0, microsecond=0)
        minute = self._minutes.get(failure.tenant_id)
        if minute is None or minute.start != start:
            minute = self._minutes[failure.tenant_id] = _Minute(start)
        if minute.kept < MAX_PER_MINUTE and len(self._pending) < MAX_PENDING:
            minute.kept, minute.last = minute.kept + 1, failure
        elif minute.last is None:
            self._lost += 1
            return
        else:
            minute.last.omitted += 1
        self._pending[minute.last.id] = minute.last

    async def flush(self) -> None:
        """Write all. Raises `DatabaseUnavailable`; then they are kept for the next time."""
        pending, self._pending = self._pending, {}
        if self._lost:
            LOG.warning("failed requests are in no list", requests=self._lost)
            self._lost = 0
        if not pending:
            return
        try:
            await self._write([*pending.values()])
        except DatabaseUnavailable:
            self._pending = pending | self._pending
            raise
