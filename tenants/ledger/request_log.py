"""A tenant's requests as the ledger recorded them: listed, found by either of their ids, and with the phases of each.

Invariant: a listing reads a bounded number of rows, however few of them its filters select.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import ColumnElement, Row, Select, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from loraplex.tenants.errors import PhasesNotFound, RequestNotFound
from loraplex.tenants.ids import CLOCKS_APART, uuid7_from
from loraplex.tenants.models import Adapter, ApiKey, RequestPhases, UsageRecord
from loraplex.tenants.quotas.reservation import REQUEST_ID
from loraplex.tenants.usage.records import LoggedRequest

SCANNED: Final = 10_000
"""The most rows that one page of a filtered listing reads. Measured on two busy cores: 50,000 took a second."""

SAME: Final = (
    *(
        "id",
        "digest",
        "outcome",
        "cached_tokens",
        "completion_tokens",
        "reasoning_tokens",
        "ttft_ms",
        "duration_ms",
        "amount_pico",
    ),
    *("price_version_id", "client_request_id", "system_fingerprint", "reverses_id", "reason", "adapter_id"),
    *("currency", "session"),
)
"""What a row of the ledger and the record of a request call the same."""
Found: TypeAlias = Row[UsageRecord, str | None, str | None, str | None, str | None]
"""A row of the ledger, the name of its adapter, and public id, name and kind of its key; None where their rows were erased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilters:
    """None selects all. `adapter` is a name, and `base_model` selects the requests without one. `key_id` is the public id of
    a key, or the UUID of an erased one. `session` is a label. `start` and `end`, exclusive, bound the time of admission.
    """

    adapter: str | None = None
    base_model: bool = False
    key_id: str | None = None
    outcome: str | None = None
    session: str | None = None
    start: datetime | None = None
    end: datetime | None = None
    slower_than_ms: int | None = None


@dataclass(frozen=True, slots=True)
class RequestPage:
    """`more_after`: the id that the next page follows; None if no row is left. A page may have fewer rows than asked for."""

    requests: Sequence[LoggedRequest]
    more_after: UUID | None


class RequestLog:
    """The ledger's rows of `tenant_id`, seen by one session; the newest come first."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def page(self, filters: RequestFilters, after: UUID | None, limit: int) -> RequestPage:
        """At most `limit` rows that match and are older than the row `after`, out of the next `SCANNED` rows."""
        query = self._bounded(filters)
        query = query if after is None else query.where(UsageRecord.id < after)
        return await self._page(filters, query.order_by(UsageRecord.id.desc()), limit)

    async def page_before(self, filters: RequestFilters, before: UUID, limit: int) -> RequestPage:
        """At most `limit` rows that match and are the next newer ones than the row `before`, newest first, out of the next
        `SCANNED` rows. `more_after`: the newest of them, if there are newer rows.
        """
        query = self._bounded(filters).where(UsageRecord.id > before).order_by(UsageRecord.id)
        page = await self._page(filters, query, limit, newest_first=False)
        return RequestPage(page.requests[::-1], page.more_after)

    async def get(self, request_id: str) -> LoggedRequest:
        """The row of this id, else the newest request of this `x-request-id`; corrections are found by their own ids only.

        Raises `RequestNotFound`.
        """
        found = None
        if REQUEST_ID.fullmatch(request_id):
            own = _uuid(request_id)
            found = None if own is None else await self._newest(UsageRecord.id == own)
            of_client = UsageRecord.client_request_id == request_id
            found = found or await self._newest(of_client & (UsageRecord.kind == "usage"))
        if found is None:
            raise RequestNotFound("no finished request has this id")
        return _logged(found)

    async def phases(self, request_id: str) -> dict[str, Any]:
        """The phases of a request: name -> `[start_ms, duration_ms]`, and behind them its causes if known.

        Raises `RequestNotFound`, and `PhasesNotFound` once they are deleted.
        """
        detail = await self.detail((await self.get(request_id)).id)
        if detail is None:
            raise PhasesNotFound("the phases of this request are not stored, or not any more")
        return detail.phases

    async def detail(self, record_id: UUID) -> RequestPhases | None:
        """The phases of a row and the limits that its request met; None where they are not stored, or not any more."""
        query = select(RequestPhases).where(
            RequestPhases.tenant_id == self._tenant_id, RequestPhases.id == record_id
        )
        return (await self._session.scalars(query)).one_or_none()

    async def _newest(self, condition: ColumnElement[bool]) -> Found | None:
        query = self._named(UsageRecord).where(condition).order_by(UsageRecord.id.desc()).limit(1)
        return (await self._session.execute(query)).one_or_none()

    async def _page(
        self, filters: RequestFilters, rows: Select[UsageRecord], limit: int, *, newest_first: bool = True
    ) -> RequestPage:
        """At most `limit` that match of the first `SCANNED` rows, in the order of these."""
        scanned = rows.limit(SCANNED)
        record = aliased(UsageRecord, scanned.subquery())
        query = self._named(record).where(*self._conditions(record, filters))
        query = query.order_by(record.id.desc() if newest_first else record.id).limit(limit + 1)
        found = (await self._session.execute(query)).all()
        if len(found) > limit:
            return RequestPage([*map(_logged, found[:limit])], found[limit - 1][0].id)
        last = scanned.with_only_columns(UsageRecord.id).offset(SCANNED - 1).limit(1)
        return RequestPage([*map(_logged, found)], await self._session.scalar(last))

    def _bounded(self, filters: RequestFilters) -> Select[UsageRecord]:
        """The tenant's rows, or those of a session. Ids contain a time, which bounds the rows of a range of times."""
        query = select(UsageRecord).where(UsageRecord.tenant_id == self._tenant_id)
        if filters.session is not None:
            query = query.where(UsageRecord.session == filters.session)
        if filters.start is not None:
            query = query.where(UsageRecord.id >= uuid7_from(filters.start - CLOCKS_APART))
        if filters.end is not None:
            query = query.where(UsageRecord.id < uuid7_from(filters.end + CLOCKS_APART))
        return query

    def _named(
        self, record: type[UsageRecord]
    ) -> Select[UsageRecord, str | None, str | None, str | None, str | None]:
        return (
            select(record, Adapter.name, ApiKey.key_id, ApiKey.name, ApiKey.kind)
            .outerjoin(Adapter, Adapter.id == record.adapter_id)
            .outerjoin(ApiKey, ApiKey.id == record.api_key_id)
            .where(record.tenant_id == self._tenant_id)
        )

    def _conditions(self, record: type[UsageRecord], filters: RequestFilters) -> list[ColumnElement[bool]]:
        conditions: list[ColumnElement[bool]] = []
        if filters.base_model:
            conditions.append(record.adapter_id.is_(None))
        if filters.adapter is not None:
            of_name = select(Adapter.id).where(
                Adapter.tenant_id == self._tenant_id, Adapter.name == filters.adapter
            )
            conditions.append(record.adapter_id.in_(of_name))
        if filters.key_id is not None:
            of_id = select(ApiKey.id).where(
                ApiKey.tenant_id == self._tenant_id, ApiKey.key_id == filters.key_id
            )
            conditions.append(record.api_key_id.in_(of_id) | (record.api_key_id == _uuid(filters.key_id)))
        if filters.outcome is not None:
            conditions.append(record.outcome == filters.outcome)
        if filters.start is not None:
            conditions.append(record.admitted_at >= filters.start)
        if filters.end is not None:
            conditions.append(record.admitted_at < filters.end)
        if filters.slower_than_ms is not None:
            conditions.append(record.duration_ms > filters.slower_than_ms)
        return conditions


def _logged(row: Found) -> LoggedRequest:
    record, adapter, key_id, key_name, key_kind = row
    return LoggedRequest(
        **{name: getattr(record, name) for name in SAME},
        at=record.admitted_at,
        adapter=adapter or (None if record.adapter_id is None else str(record.adapter_id)),
        version=record.adapter_version,
        key_id=key_id or str(record.api_key_id),
        key_name=key_name,
        is_listed_key=key_kind == "key",
        prompt_tokens=record.uncached_tokens + record.cached_tokens,
    )


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
