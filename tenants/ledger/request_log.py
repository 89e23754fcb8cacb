"""A tenant's requests, listed, found by either of their ids, and with their phases: those of the ledger, and between them those of
the last day that were refused.

Invariant: a listing reads a bounded number of rows, however few of them its filters select.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias, TypeVarTuple
from uuid import UUID

from sqlalchemy import ColumnElement, Row, Select, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from loraplex.tenants.errors import PhasesNotFound, RequestNotFound
from loraplex.tenants.ids import CLOCKS_APART, EPOCH, LAST_TIME, canonical_uuid, uuid7_from
from loraplex.tenants.models import OUTCOMES, Adapter, ApiKey, FailedRequest, RequestPhases, UsageRecord
from loraplex.tenants.quotas.reservation import REQUEST_ID
from loraplex.tenants.usage.records import REFUSED, LoggedRequest

Columns = TypeVarTuple("Columns")
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
SHOWN_OUTCOMES: Final = (*OUTCOMES, REFUSED)
NOTHING: Final[dict[str, Any]] = dict.fromkeys(
    ("version", "digest", "ttft_ms", "duration_ms", "price_version_id", "system_fingerprint", "session")
) | dict.fromkeys(
    ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "amount_pico"), 0
)
"""What a refused request has none of."""
Found: TypeAlias = Row[UsageRecord, str | None, str | None, str | None, str | None, FailedRequest | None]
"""A row of the ledger, the name of its adapter, and public id, name and kind of its key; None where their rows were erased. Last,
how it failed, if it did in the last day.
"""
RefusedRow: TypeAlias = Row[FailedRequest, str | None, str | None, str | None]
"""A refused request, the name of its adapter, and name and kind of its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilters:
    """None selects all. `adapter` is a name, and `base_model`, its served name, selects the requests for it. `key_id` is the public id of
    a key, or the UUID of an erased one. `session` is a label. `start` and `end`, exclusive, bound the time of admission.
    """

    adapter: str | None = None
    base_model: str | None = None
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
    """The requests of `tenant_id`, seen by one session; the newest come first."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def page(self, filters: RequestFilters, after: UUID | None, limit: int) -> RequestPage:
        """At most `limit` requests that match and are older than `after`, out of the next `SCANNED` rows of the ledger."""
        page = RequestPage([], None)
        if filters.outcome != REFUSED:
            page = await self._ledger_page(filters, after, limit)
        if filters.outcome not in (None, REFUSED) or filters.session or filters.slower_than_ms is not None:
            return page
        query = _older(self._refused(filters), FailedRequest.id, after)
        if page.more_after is not None:
            # Up to the ledger page's end, so that none is skipped.
            query = query.where(FailedRequest.id >= page.more_after)
        refused = (await self._session.execute(query.limit(limit + 1))).all()
        both = sorted([*page.requests, *map(_refused, refused)], key=lambda each: each.id, reverse=True)
        return RequestPage(both[:limit], both[limit - 1].id if len(both) > limit else page.more_after)

    async def get(self, request_id: str) -> LoggedRequest:
        """The request of this id, else the newest of this `x-request-id`; corrections are found by their own ids only.

        Raises `RequestNotFound`.
        """
        if not REQUEST_ID.fullmatch(request_id):
            raise RequestNotFound("no request has this id")
        own = canonical_uuid(request_id)
        found = None if own is None else await self._newest(UsageRecord.id == own)
        if found is not None:
            return _logged(found)
        of_client = UsageRecord.client_request_id == request_id
        found = await self._newest(of_client & (UsageRecord.kind == "usage"))
        named = (FailedRequest.request_id == request_id) | (FailedRequest.id == own)
        query = self._refused(RequestFilters()).where(named).order_by(FailedRequest.id.desc()).limit(1)
        refused = (await self._session.execute(query)).one_or_none()
        both = ([] if found is None else [_logged(found)]) + ([] if refused is None else [_refused(refused)])
        if not both:
            raise RequestNotFound(
                "no finished request has this id, and none that was refused in the last 24 hours"
            )
        return max(both, key=lambda each: each.id)

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

    async def _ledger_page(self, filters: RequestFilters, after: UUID | None, limit: int) -> RequestPage:
        scanned = _older(self._bounded(filters), UsageRecord.id, after).limit(SCANNED)
        record = aliased(UsageRecord, scanned.subquery())
        query = self._named(record).where(*self._conditions(record, filters))
        found = (await self._session.execute(query.order_by(record.id.desc()).limit(limit + 1))).all()
        if len(found) > limit:
            return RequestPage([*map(_logged, found[:limit])], found[limit - 1][0].id)
        last = scanned.with_only_columns(UsageRecord.id).offset(SCANNED - 1).limit(1)
        return RequestPage([*map(_logged, found)], await self._session.scalar(last))

    def _refused(self, filters: RequestFilters) -> Select[FailedRequest, str | None, str | None, str | None]:
        """The tenant's refused requests that match. They have no session, and took no time that is known."""
        query = (
            select(FailedRequest, Adapter.name, ApiKey.name, ApiKey.kind)
            .outerjoin(Adapter, Adapter.id == FailedRequest.adapter_id)
            .outerjoin(ApiKey, ApiKey.key_id == FailedRequest.key_id)
            .where(FailedRequest.tenant_id == self._tenant_id, FailedRequest.is_refused)
        )
        conditions = (
            (filters.base_model, FailedRequest.model == filters.base_model),
            (filters.adapter, (Adapter.name == filters.adapter) | (FailedRequest.model == filters.adapter)),
            (filters.key_id, FailedRequest.key_id == filters.key_id),
        )
        start, end = filters.start or EPOCH, filters.end or LAST_TIME
        in_range = (FailedRequest.at >= start) & (FailedRequest.at < end)
        return query.where(in_range, *(each for value, each in conditions if value is not None))

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
    ) -> Select[UsageRecord, str | None, str | None, str | None, str | None, FailedRequest | None]:
        of_row = (FailedRequest.tenant_id == record.tenant_id) & (FailedRequest.id == record.id)
        return (
            select(record, Adapter.name, ApiKey.key_id, ApiKey.name, ApiKey.kind, FailedRequest)
            .outerjoin(FailedRequest, of_row)
            .outerjoin(Adapter, Adapter.id == record.adapter_id)
            .outerjoin(ApiKey, ApiKey.id == record.api_key_id)
            .where(record.tenant_id == self._tenant_id)
        )

    def _conditions(self, record: type[UsageRecord], filters: RequestFilters) -> list[ColumnElement[bool]]:
        conditions: list[ColumnElement[bool]] = []
        if filters.base_model is not None:
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
            conditions.append(
                record.api_key_id.in_(of_id) | (record.api_key_id == canonical_uuid(filters.key_id))
            )
        if filters.outcome is not None:
            conditions.append(record.outcome == filters.outcome)
        if filters.start is not None:
            conditions.append(record.admitted_at >= filters.start)
        if filters.end is not None:
            conditions.append(record.admitted_at < filters.end)
        if filters.slower_than_ms is not None:
            conditions.append(record.duration_ms > filters.slower_than_ms)
        return conditions


def _older(query: Select[*Columns], id: InstrumentedAttribute[UUID], after: UUID | None) -> Select[*Columns]:
    """The rows of a query that are older than `after`, newest first."""
    return (query if after is None else query.where(id < after)).order_by(id.desc())


def _logged(row: Found) -> LoggedRequest:
    record, adapter, key_id, key_name, key_kind, failed = row
    return LoggedRequest(
        **{name: getattr(record, name) for name in SAME},
        at=record.admitted_at,
        adapter=adapter or (None if record.adapter_id is None else str(record.adapter_id)),
        version=record.adapter_version,
        key_id=key_id or str(record.api_key_id),
        key_name=key_name,
        is_listed_key=key_kind == "key",
        prompt_tokens=record.uncached_tokens + record.cached_tokens,
        **_error_of(failed),
    )


def _refused(row: RefusedRow) -> LoggedRequest:
    failed, adapter, key_name, key_kind = row
    return LoggedRequest(
        **NOTHING,
        **_error_of(failed),
        id=failed.id,
        at=failed.at,
        adapter=adapter,
        adapter_id=failed.adapter_id,
        key_id=failed.key_id,
        key_name=key_name,
        is_listed_key=key_kind == "key",
        outcome=REFUSED,
        client_request_id=failed.request_id,
        currency="",
        model=failed.model,
    )


def _error_of(failed: FailedRequest | None) -> dict[str, Any]:
    if failed is None:
        return {}
    error = {name: getattr(failed, name) for name in ("code", "status", "message")}
    return {**error, "omitted": failed.omitted or None}
