"""The comparison finds every way in which a ledger may differ from what clients know, and waits until it has all."""

import asyncio
from datetime import UTC, datetime
from uuid import UUID

import pytest
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle

from loraplex.platform.drills.ledger_drift import LedgerDrift, compare, measure_drift
from loraplex.platform.drills.traffic import CONNECTION_LOST, ReportedUsage, RequestOutcome
from loraplex.tenants.database import Database

USAGE = ReportedUsage(prompt=14, cached=4, completion=6)
PRICES = (3_000_001, 1, 7_000_003)
AMOUNT_PICO = 10 * PRICES[0] + 4 * PRICES[1] + 6 * PRICES[2]


def outcome(request_id: str, usage: ReportedUsage | None = USAGE, deliveries: int = 3) -> RequestOutcome:
    code = CONNECTION_LOST if usage is None else None
    return RequestOutcome(request_id, 0.0, 1.0, 200, code, usage is not None, usage, deliveries)


def row(request_id: str | None, **changes: object) -> dict[str, object]:
    tokens = {"uncached_tokens": 10, "cached_tokens": 4, "completion_tokens": 6, "reasoning_tokens": 0}
    prices = dict(zip(("price_uncached", "price_cached", "price_completion"), PRICES, strict=True))
    prices["price_reasoning"] = 9
    facts = {"client_request_id": request_id, "outcome": "completed", "amount_pico": AMOUNT_PICO}
    return {**facts, **tokens, **prices, **changes}


def figures(drift: LedgerDrift) -> tuple[int, ...]:
    return drift.drift_pico, drift.drift_tokens, drift.missing, drift.duplicated, drift.unexpected


def test_a_ledger_that_agrees_has_no_drift() -> None:
    rows = [
        row("a"),
        row("b", outcome="failed", completion_tokens=2, amount_pico=AMOUNT_PICO - 4 * PRICES[2]),
    ]
    drift = compare(rows, [outcome("a"), outcome("b", None), outcome("refused", None, 0)], 0)
    assert drift.is_zero and drift.rows == 2
    assert drift.amount_pico == 2 * AMOUNT_PICO - 4 * PRICES[2]
    assert drift.outcomes_of_rows == {"completed": 1, "failed": 1}
    assert drift.unbilled_tokens == 1


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("b")], (AMOUNT_PICO, 20, 1, 0, 0)),
        ([row("a"), row("a"), row("b")], (AMOUNT_PICO, 0, 0, 1, 0)),
        ([row("a"), row("b"), row("c"), row(None)], (2 * AMOUNT_PICO, 0, 0, 0, 2)),
        ([row("a", amount_pico=AMOUNT_PICO - 1), row("b", amount_pico=AMOUNT_PICO + 1)], (2, 0, 0, 0, 0)),
        ([row("a", uncached_tokens=11, cached_tokens=3), row("b")], (0, 2, 0, 0, 0)),
        ([row("a", reasoning_tokens=1), row("b")], (0, 2, 0, 0, 0)),
    ],
    ids=["missing", "twice", "of no request", "amounts that cancel out", "other classes", "reasoning"],
)
def test_each_difference_counts(rows: list[dict[str, object]], expected: tuple[int, ...]) -> None:
    drift = compare(rows, [outcome("a"), outcome("b")], 0)
    assert figures(drift) == expected and not drift.is_zero


def test_reasoning_is_charged_at_its_own_price() -> None:
    usage = ReportedUsage(USAGE.prompt, USAGE.cached, USAGE.completion, 2)
    charged = row("a", reasoning_tokens=2, amount_pico=AMOUNT_PICO - 2 * PRICES[2] + 2 * 9)
    assert compare([charged], [outcome("a", usage)], 0).is_zero


def test_an_unanswered_request_is_charged_at_its_own_tokens_once() -> None:
    drift = compare([row("a", amount_pico=AMOUNT_PICO + 5), row("a")], [outcome("a", None)], 0)
    assert figures(drift) == (5 + AMOUNT_PICO, 0, 0, 1, 0)


def test_what_is_still_open_is_drift() -> None:
    assert not compare([row("a")], [outcome("a")], 1).is_zero


def used(tenant: UsingTenant, request_id: str) -> Used:
    return Used(
        adapter_id=None,
        api_key_id=next(iter(tenant.keys.values())),
        at=datetime.now(UTC),
        price_version_id=tenant.version("USD"),
        client_request_id=request_id,
    )


async def test_rows_that_arrive_later_are_waited_for(database: Database, database_url: str) -> None:
    tenant = make_tenant(database_url)
    other = make_tenant(database_url)
    settle(database_url, tenant, [used(tenant, "a")])
    settle(database_url, other, [used(other, "x")])
    measuring = asyncio.create_task(measure_drift(database, tenant.id, [outcome("a"), outcome("b")], 60.0))
    await asyncio.sleep(0.5)
    assert not measuring.done()
    await asyncio.to_thread(settle, database_url, tenant, [used(tenant, "b")])
    drift = await measuring
    assert drift.is_zero and (drift.rows, drift.amount_pico) == (2, 2 * AMOUNT_PICO)


async def test_the_wait_has_an_end(database: Database) -> None:
    drift = await measure_drift(database, UUID(int=1), [outcome("a")], 0.0)
    assert drift.missing == 1 and drift.drift_tokens == 20
