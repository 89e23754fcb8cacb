"""The answer to a usage report of either plane: one page as JSON, or the whole range as CSV.

Invariant: each page is one short transaction, so a slow reader of CSV occupies no connection of the database.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response, StreamingResponse

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.endpoint import ManagementCaller, ManagementEndpoint
from loraplex.platform.web.responses import ApiResponse, respond
from loraplex.platform.web.usage import queries as usage
from loraplex.platform.web.usage.documents import (
    BY_GROUP,
    OperatorUsageDocument,
    UsageDocument,
    UsageReportDocument,
    totals_response,
)
from loraplex.platform.web.usage.usage_query import is_csv, usage_query, with_range
from loraplex.tenants.ledger.usage_reports import (
    Dimension,
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
"""The same for the number of refused requests, which cursors of the last release lack."""
_SUMS: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "amount_pico")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportShape:
    """What the report of a plane may be grouped by, and its answer. `parameters`: those of the query, by their names.

    `tenant_of`: the tenant that the query selects; None selects all.
    """

    dimensions: tuple[Dimension, ...]
    parameters: Mapping[str, str]
    tenant_of: Callable[[Mapping[str, str]], UUID | None]
    row: type[UsageDocument]
    report: type[UsageReportDocument[Any]]
    to_response: Callable[[UsageRow], UsageDocument]


@dataclass(frozen=True, slots=True)
class _Report:
    query: UsageQuery
    currency: str
    totals: UsageSums
    refused: int
    rows: list[UsageRow]


async def answer_usage(
    endpoint: ManagementEndpoint,
    request: Request,
    caller: ManagementCaller,
    shape: ReportShape,
    currency_of: Callable[[UUID], str],
) -> Response:
    """Answer a report. Without any usage its currency is that of the tenant, or of the installation for all tenants.

    Raises `InvalidParameter`.
    """
    page = endpoint.page(request, caller, BY_GROUP, shape.parameters)
    filters = with_range(page.filters, datetime.now(UTC))
    query = usage_query(filters, shape.tenant_of(filters), shape.dimensions)
    as_csv = is_csv(filters)
    if as_csv:
        _refuse_pages(request)
    limit = usage.ROWS_AT_ONCE if as_csv else page.fetch

    async def find(session: AsyncSession) -> _Report:
        if _TOTALS in filters:
            rows = await usage_rows(session, query, page.after, limit)
            totals, refused = _read_totals(filters[_TOTALS]), int(filters.get(_REFUSED, 0))
            return _Report(query, filters["currency"], totals, refused, rows)
        rows, by_currency = await first_rows(session, query, limit)
        currency = chosen_currency(by_currency, query.currency, currency_of(query.tenant_id or NO_ID))
        refused = await refused_requests(session, query)
        return _Report(query, currency, by_currency.get(currency, UsageSums()), refused, rows)

    report = await endpoint.query(caller, find)
    if as_csv:
        return StreamingResponse(_csv(endpoint, caller, shape, report), media_type="text/csv")
    totals = {_TOTALS: _write_totals(report.totals), _REFUSED: str(report.refused)}
    kept = {**filters, "currency": report.currency, **totals}
    listing = replace(page, filters=kept).listing(report.rows, shape.to_response)
    document = shape.report(
        data=listing.data,
        totals=totals_response(report.totals, report.refused),
        currency=report.currency,
        next_cursor=listing.next_cursor,
    )
    return respond(ApiResponse(200, document))


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
    return " ".join(str(getattr(totals, name)) for name in _SUMS)


def _read_totals(text: str) -> UsageSums:
    return UsageSums(**dict(zip(_SUMS, map(int, text.split()), strict=True)))


def _refuse_pages(request: Request) -> None:
    for name in ("cursor", "limit"):
        if name in request.query_params:
            raise InvalidParameter(
                f"`{name}` does not apply to `format=csv`, which has all rows.", param=name
            )


async def _csv(
    endpoint: ManagementEndpoint, caller: ManagementCaller, shape: ReportShape, report: _Report
) -> AsyncIterator[str]:
    by_class, by_tenant = "class" in report.query.group_by, shape.row is OperatorUsageDocument
    columns = usage.csv_columns(by_class=by_class, by_tenant=by_tenant)
    yield ",".join(columns) + "\r\n"
    query = replace(report.query, currency=report.currency)
    async for rows in usage.all_rows(partial(endpoint.query, caller), query, report.rows):
        yield usage.csv_lines(columns, rows)
