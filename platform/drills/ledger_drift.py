"""Compares the ledger with what clients know that they used.

Invariant: it only reads, as an operator, and compares once the gateways have shipped all or the time for that is over.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias
from uuid import UUID

from loraplex.platform.drills.traffic import ReportedUsage, RequestOutcome
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ledger.usage_export import exported_rows
from loraplex.tenants.periods import periods_around

POLL_S: Final = 0.25
QUIET_S: Final = 1.0
"""The ledger has all once nothing is open and no row has come for so long; a journal ships within a fraction of it."""
Row: TypeAlias = Mapping[str, Any]
"""A row of the ledger with its prices, as `exported_rows` names its columns."""


@dataclass(slots=True, kw_only=True)
class LedgerDrift:
    """How far the ledger is from what the clients know; all zero is the promise.

    `drift_pico` and `drift_tokens` sum the sizes of all differences, so that they never cancel out. `missing` counts complete
    responses without a row, `duplicated` rows beyond the first of a request, `unexpected` rows of requests that no client sent,
    `open` the reservations that were left when the time was over. No drift are `unbilled_tokens`, which clients received of
    responses that broke off, beyond those charged, and `refused_rows`, of requests that got an HTTP error.
    """

    rows: int = 0
    amount_pico: int = 0
    drift_pico: int = 0
    drift_tokens: int = 0
    missing: int = 0
    duplicated: int = 0
    unexpected: int = 0
    open: int = 0
    unbilled_tokens: int = 0
    refused_rows: int = 0
    outcomes_of_rows: dict[str, int] = field(default_factory=dict)
    """Rows by their outcome, such as `completed`."""

    @property
    def is_zero(self) -> bool:
        return self.is_exact and self.is_complete

    @property
    def is_exact(self) -> bool:
        """Whether the rows charge what responses say."""
        return not (self.drift_pico or self.drift_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether each response has one row, and nothing is open."""
        return not (self.missing or self.duplicated or self.unexpected or self.open)


async def measure_drift(
    database: Database, tenant_id: UUID, outcomes: Sequence[RequestOutcome], timeout_s: float
) -> LedgerDrift:
    """Compare the rows of a tenant, which had no other requests than these, in the months around now.

    Waits until the ledger has all, at most `timeout_s` seconds. Raises `DatabaseUnavailable` if it cannot be read by then.
    """
    deadline = time.monotonic() + timeout_s
    complete = {each.request_id for each in outcomes if each.complete}
    quiet_since, last = time.monotonic(), -1
    while True:
        now = time.monotonic()
        try:
            rows, open_requests = await _read(database, tenant_id)
        except DatabaseUnavailable:
            if now >= deadline:
                raise
            await asyncio.sleep(POLL_S)
            continue
        if len(rows) != last or open_requests:
            quiet_since, last = now, len(rows)
        arrived = complete <= {row["client_request_id"] for row in rows}
        if now >= deadline or (arrived and now - quiet_since >= QUIET_S):
            return compare(rows, outcomes, open_requests)
        await asyncio.sleep(POLL_S)


async def _read(database: Database, tenant_id: UUID) -> tuple[list[Row], int]:
    """The tenant's rows, and the number of its open reservations."""
    months = [period for period in periods_around(datetime.now(UTC)) if period.startswith("m:")]
    async with database.as_operator() as session:
        open_requests = await TenantDeletions(session).open_requests(tenant_id)
        rows = [row for month in months async for row in exported_rows(session, tenant_id, month)]
    return [row for row in rows if row["kind"] == "usage"], open_requests


def compare(rows: Sequence[Row], outcomes: Sequence[RequestOutcome], open_requests: int) -> LedgerDrift:
    """Compare rows with outcomes. A missing row is priced as the last one."""
    drift = LedgerDrift(rows=len(rows), open=open_requests)
    drift.outcomes_of_rows = dict(Counter(row["outcome"] for row in rows))
    by_request: dict[str | None, list[Row]] = defaultdict(list)
    for row in rows:
        by_request[row["client_request_id"]].append(row)
        drift.amount_pico += row["amount_pico"]
    price = _price(rows[-1]) if rows else Price()
    for outcome in outcomes:
        _compare_request(drift, outcome, by_request.pop(outcome.request_id, []), price)
    for strays in by_request.values():
        drift.unexpected += len(strays)
        drift.drift_pico += sum(row["amount_pico"] for row in strays)
    return drift


def _compare_request(
    drift: LedgerDrift, outcome: RequestOutcome, rows: Sequence[Row], missing_price: Price
) -> None:
    drift.duplicated += len(rows[1:])
    drift.drift_pico += sum(row["amount_pico"] for row in rows[1:])
    drift.refused_rows += len(rows) if outcome.status >= 400 else 0
    if not outcome.complete:
        charged = rows[0]["completion_tokens"] if rows else 0
        drift.unbilled_tokens += max(0, outcome.deliveries - charged)
    if rows:
        row = rows[0]
        expected = outcome.usage or _usage(row)
        drift.drift_pico += abs(row["amount_pico"] - _amount_pico(_price(row), expected))
        drift.drift_tokens += _apart(_usage(row), expected)
    elif outcome.usage is not None:
        drift.missing += 1
        drift.drift_pico += _amount_pico(missing_price, outcome.usage)
        drift.drift_tokens += outcome.usage.prompt + outcome.usage.completion


def _usage(row: Row) -> ReportedUsage:
    cached = row["cached_tokens"]
    prompt, completion = row["uncached_tokens"] + cached, row["completion_tokens"]
    return ReportedUsage(prompt, cached, completion, row["reasoning_tokens"])


def _price(row: Row) -> Price:
    """The price that the row names; without one it costs nothing."""
    return Price(
        prompt=row["price_uncached"] or 0,
        cached_prompt=row["price_cached"] or 0,
        completion=row["price_completion"] or 0,
        reasoning=row["price_reasoning"],
    )


def _amount_pico(price: Price, usage: ReportedUsage) -> int:
    return price.amount_pico(usage.prompt, usage.cached, usage.completion, usage.reasoning)


def _apart(one: ReportedUsage, other: ReportedUsage) -> int:
    """The tokens by which two usages differ; uncached, cached, completion and reasoning tokens each count."""
    return (
        abs((one.prompt - one.cached) - (other.prompt - other.cached))
        + abs(one.cached - other.cached)
        + abs((one.completion - one.reasoning) - (other.completion - other.reasoning))
        + abs(one.reasoning - other.reasoning)
    )
