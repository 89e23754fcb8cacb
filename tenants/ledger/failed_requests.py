"""Requests that failed or were refused, one by one in `failed_requests`, and refused ones by the hour in `request_rollups`, written
from time to time.

Invariant: a flood costs neither memory nor PostgreSQL, and one of a key and code hides no other. Each minute a gateway keeps
`MAX_OF_KIND` of a key and code, the last of which counts the others, and `MAX_PER_MINUTE` of a tenant; `MAX_PENDING` of all wait to be
written, and `MAX_COUNTS` sums. Nobody waits for it: those of the last seconds before a gateway is killed are missing, and a sum whose
write is not answered may count twice.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Final, NamedTuple
from uuid import UUID

import psycopg
import structlog
from cachetools import LRUCache

from loraplex.tenants.database import first_line

MAX_OF_KIND: Final = 10
MAX_PER_MINUTE: Final = 60
MAX_PENDING: Final = 5_000
MAX_COUNTS: Final = 10_000
MAX_COUNTED: Final = 5_000
"""Tenants, and kinds of all tenants, whose minutes are counted."""
ROWS_AT_ONCE: Final = 500
REFUSED_PREFIX: Final = "refused_"
"""Before the code of an error, the status in `request_rollups`."""
LOG = structlog.get_logger("loraplex.failed_requests")


@dataclass(slots=True, kw_only=True)
class Failure:
    """A row of `failed_requests`, whose table says what each field is. `api_key_id`: None where the key was not let in, which no sum
    has.
    """

    tenant_id: UUID
    id: UUID
    at: datetime
    is_refused: bool
    request_id: str
    key_id: str
    api_key_id: UUID | None
    adapter_id: UUID | None
    model: str | None
    code: str
    status: int
    message: str
    omitted: int = 0


class Refused(NamedTuple):
    """Refused requests of one hour that are one sum. `adapter_id` None: the base model, or refused before the model was known."""

    hour: datetime
    tenant_id: UUID
    api_key_id: UUID
    adapter_id: UUID | None
    status: str


@dataclass(slots=True)
class _Minute:
    start: datetime
    kept: int = 0
    last: Failure | None = None


class FailedRequests:
    """Those of one gateway that are not written yet; `flush` them regularly."""

    def __init__(
        self,
        write: Callable[[Sequence[Failure]], Awaitable[None]],
        count: Callable[[Mapping[Refused, int]], Awaitable[None]],
    ) -> None:
        self._write, self._count = write, count
        self._sums = Counter[Refused]()
        self._pending: dict[UUID, Failure] = {}
        self._tenants: LRUCache[Hashable, _Minute] = LRUCache(MAX_COUNTED)
        self._kinds: LRUCache[Hashable, _Minute] = LRUCache(MAX_COUNTED)
        self._lost = 0

    def add(self, failure: Failure) -> None:
        """Keep a request, or count it with the last one of its key and code that was kept in its minute; sum it up if refused."""
        self._sum_up(failure)
        tenant = _minute(self._tenants, failure.tenant_id, failure.at)
        kind = _minute(self._kinds, (failure.tenant_id, failure.key_id, failure.code), failure.at)
        is_full = len(self._pending) >= MAX_PENDING
        if not is_full and kind.kept < MAX_OF_KIND and tenant.kept < MAX_PER_MINUTE:
            tenant.kept, kind.kept, kind.last = tenant.kept + 1, kind.kept + 1, failure
        elif kind.last is None or (is_full and kind.last.id not in self._pending):
            self._lost += 1
            return
        else:
            kind.last.omitted += 1
        self._pending[kind.last.id] = kind.last

    def _sum_up(self, failure: Failure) -> None:
        if not failure.is_refused or failure.api_key_id is None:
            return
        hour, status = failure.at.replace(minute=0, second=0, microsecond=0), REFUSED_PREFIX + failure.code
        refused = Refused(hour, failure.tenant_id, failure.api_key_id, failure.adapter_id, status)
        if refused in self._sums or len(self._sums) < MAX_COUNTS:
            self._sums[refused] += 1
        else:
            self._lost += 1

    async def flush(self) -> None:
        """Write all, rows `ROWS_AT_ONCE` at a time. Raises `DatabaseUnavailable`; then what is not written is kept. What PostgreSQL
        rejects is dropped.
        """
        if self._lost:
            LOG.warning("failed requests are in no list, or in no sum", requests=self._lost)
            self._lost = 0
        if sums := Counter(self._sums):
            await _unless_rejected(self._count(sums))
            self._sums -= sums
        for _ in range(0, len(self._pending), ROWS_AT_ONCE):
            some = [replace(each) for each in islice(self._pending.values(), ROWS_AT_ONCE)]
            await _unless_rejected(self._write(some))
            for each in some:
                # One that counted more others meanwhile is written once more.
                if self._pending[each.id].omitted == each.omitted:
                    del self._pending[each.id]


async def _unless_rejected(writing: Awaitable[None]) -> None:
    """Log what PostgreSQL rejects: it would reject it each time, and all others would wait behind it."""
    try:
        await writing
    except psycopg.Error as error:
        LOG.error("failed requests are dropped", reason=first_line(error))


def _minute(minutes: LRUCache[Hashable, _Minute], of: Hashable, at: datetime) -> _Minute:
    start, found = at.replace(second=0, microsecond=0), minutes.get(of)
    if found is None or found.start != start:
        found = minutes[of] = _Minute(start)
    return found
