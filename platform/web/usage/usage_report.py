"""The answer to a usage report of either plane: one page as JSON, or the whole range as CSV.

Invariant: each page is one short transaction, so a slow reader of CSV occupies no connection of the database.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response, StreamingResponse

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.cursors import Page
from loraplex.platform.web.path_ids import filtered_tenant
from loraplex.platform.web.planes import PlaneRequest, tenant_of
from loraplex.platform.web.responses import ApiResponse, respond
from loraplex.platform.web.sorting import Position, SortOrder
from loraplex.platform.web.usage import queries as usage
from loraplex.platform.web.usage.documents import UsageDocument, UsageReportDocument, UsageTotalsDocument
from loraplex.platform.web.usage.usage_query import is_csv, usage_query, with_range
from loraplex.tenants.ledger.usage_reports import (
    Dimension,
    UsageKey,
    UsageQuery,
    UsageRow,
    UsageSums,
    first_rows,
    refused_requests,
    usage_rows,
)
from loraplex.tenants.models import NO_ID

_TOTALS: Final = "totals"
"""In a cursor: the totals of the first page, so that the others need not read the whole range again."""
_REFUSED: Final = "refused"
"""The same for the number of refused requests."""
_REASONING: Final = "reasoning"
"""The same for the sum of reasoning tokens, which cursors of the last release lack."""
_IN_TOTALS: Final = tuple(name for name in usage.SUMS if name != "reasoning_tokens")


def _write_key(key: UsageKey) -> Position:
    return (key.start.astimezone(UTC).isoformat(), *map(str, key[1:5]), key.token_class)


def _read_key(position: Position) -> UsageKey:
    start, *ids, currency, token_class = position
    tenant_id, adapter_id, api_key_id = (UUID(str(each)) for each in ids)
    at = datetime.fromisoformat(str(start))
    return UsageKey(at, tenant_id, adapter_id, api_key_id, str(currency), int(token_class))


BY_GROUP: Final[SortOrder[UsageRow, UsageKey]] = SortOrder(lambda row: row.key, _write_key, _read_key)


@dataclass(frozen=True, slots=True)
class _Report:
    """Rows of a report, and the sums of its whole range."""

    currency: str
    totals: UsageSums
    refused: int
    rows: list[UsageRow]


async def answer_usage(
    request: PlaneRequest[Any],
    kind: type[UsageDocument],
    dimensions: tuple[Dimension, ...],
    parameters: Mapping[str, str],
) -> Response:
    """Answer a report with rows of `kind`, which may be grouped by `dimensions`. `parameters`: those of the query, by their
    names; an operator's selects a tenant by `tenant_id`, or all.

    Without any usage its currency is that of the tenant, or of the installation for all tenants. Raises `InvalidParameter`.
    """
    page = request.page(BY_GROUP, parameters)
    filters = with_range(page.filters, datetime.now(UTC))
    tenant_id = tenant_of(request.caller)
    if tenant_id is None and "tenant_id" in filters:
        tenant_id = filtered_tenant(filters["tenant_id"])
    query = usage_query(filters, tenant_id, dimensions)
    default = request.dependencies.currency_of(tenant_id or NO_ID)
    if is_csv(filters):
        _refuse_pages(request.http)
        report = await request.query(_report, query, filters, None, usage.ROWS_AT_ONCE, default)
        query = replace(query, currency=report.currency)
        lines = usage.csv_download(request.query, query, kind, report.rows)
        return StreamingResponse(lines, media_type="text/csv")
    report = await request.query(_report, query, filters, page.after, page.fetch, default)
    return respond(ApiResponse(200, _document(kind, page, filters, report)))


async def _report(
    session: AsyncSession,
    query: UsageQuery,
    filters: Mapping[str, str],
    after: UsageKey | None,
    limit: int,
    default: str,
) -> _Report:
    if _TOTALS in filters:
        rows = await usage_rows(session, query, after, limit)
        totals = _read_totals(filters[_TOTALS], int(filters.get(_REASONING, 0)))
        refused = int(filters.get(_REFUSED, 0))
        return _Report(filters["currency"], totals, refused, rows)
    rows, by_currency = await first_rows(session, query, limit)
    currency = chosen_currency(by_currency, query.currency, default)
    refused = await refused_requests(session, query)
    return _Report(currency, by_currency.get(currency, UsageSums()), refused, rows)


def _document(
    kind: type[UsageDocument],
    page: Page[UsageRow, UsageKey],
    filters: Mapping[str, str],
    report: _Report,
) -> UsageReportDocument[Any]:
    """Return a page. Its cursor keeps the range, the currency and the totals of the first one."""
    kept = {
        _TOTALS: _write_totals(report.totals),
        _REASONING: str(report.totals.reasoning_tokens),
        _REFUSED: str(report.refused),
        "currency": report.currency,
    }
    return UsageReportDocument[Any](
        data=[usage.usage_document(row, kind) for row in page.cut(report.rows)],
        next_cursor=replace(page, filters={**filters, **kept}).next(report.rows),
        totals=UsageTotalsDocument(**asdict(report.totals), refused=report.refused),
        currency=report.currency,
    )


def chosen_currency(by_currency: Mapping[str, UsageSums], wanted: str | None, default: str) -> str:
    """The currency of a report: amounts of several are never added. Raises `InvalidParameter`."""
    if wanted is not None:
        return wanted
    if len(by_currency) > 1:
        raise InvalidParameter(
            f"The range has usage in {', '.join(by_currency)}: choose one with `currency`.", param="currency"
        )
    return next(iter(by_currency), default)


def _write_totals(totals: UsageSums) -> str:
    return " ".join(str(getattr(totals, name)) for name in _IN_TOTALS)


def _read_totals(text: str, reasoning_tokens: int) -> UsageSums:
    totals = dict(zip(_IN_TOTALS, map(int, text.split()), strict=True))
    return UsageSums(**totals, reasoning_tokens=reasoning_tokens)


def _refuse_pages(request: Request) -> None:
    for name in ("cursor", "limit"):
        if name in request.query_params:
            raise InvalidParameter(
                f"`{name}` does not apply to `format=csv`, which has all rows.", param=name
            )
