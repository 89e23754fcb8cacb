"""Meter events always sum to the usage of their hour, and never change."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from uuid import UUID, uuid4

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from tests.tenants.registry_records import make_tenant
from tests.tenants.usage.meters import use

from loraplex.tenants.database import Database
from loraplex.tenants.models.usage import METERS
from loraplex.tenants.usage.meter_events import (
    BATCH,
    CLOSES_AFTER,
    WINDOW,
    MeterEvent,
    MeterExports,
    closed_days,
    identifier,
    last_closed,
)

README = Path(__file__).parents[3] / "tenants" / "usage" / "README.md"
HOUR = timedelta(hours=1)
TEN = datetime(2026, 11, 23, 10, tzinfo=UTC)


async def collect(database: Database, until: datetime) -> int:
    async with database.as_operator() as session:
        exports = MeterExports(session)
        assert await exports.lock()
        return await exports.collect(until - WINDOW, until)


async def take(database: Database) -> list[MeterEvent]:
    """The unsent events, which are sent then."""
    async with database.as_operator() as session:
        exports = MeterExports(session)
        unsent = await exports.unsent()
        await exports.sent(unsent.ids)
    return [*unsent.events]


def values(events: list[MeterEvent]) -> list[tuple[str, str]]:
    return [(event.identifier.partition("-2026")[2], event.payload["value"]) for event in events]


def test_an_hour_closes_some_minutes_after_its_end() -> None:
    assert last_closed(TEN + HOUR + CLOSES_AFTER) == TEN + HOUR
    assert last_closed(TEN + HOUR + CLOSES_AFTER - timedelta(microseconds=1)) == TEN
    assert last_closed(datetime.fromisoformat("2026-11-23T11:35:00+05:30")) == TEN - 4 * HOUR


def test_the_spans_of_a_day_cover_the_window_without_gaps() -> None:
    spans = closed_days(TEN + HOUR + CLOSES_AFTER)
    assert spans[0][0] == TEN + HOUR - WINDOW and spans[-1][1] == TEN + HOUR
    assert all(end == begin for (_, end), (begin, _) in pairwise(spans))


async def test_an_hour_is_exported_once_and_what_is_late_by_its_difference(database: Database) -> None:
    tenant_id = await make_tenant(database)
    await use(database, tenant_id, TEN, (70, 30, 5))
    await use(database, tenant_id, TEN, (1, 0, 2), adapter_id=uuid4())
    await use(database, tenant_id, TEN + HOUR, (9, 9, 9))
    assert await collect(database, TEN) == 0
    assert await collect(database, TEN + HOUR) == 3 and await collect(database, TEN + HOUR) == 0
    events = await take(database)
    assert values(events) == [
        ("1123T10-cached_prompt-1", "30"),
        ("1123T10-completion-1", "7"),
        ("1123T10-prompt-1", "71"),
    ]
    first = events[0]
    assert first.event_name == "loraplex_cached_prompt_tokens" and first.timestamp == int(TEN.timestamp())
    assert first.payload == {"tenant_id": str(tenant_id), "value": "30"}
    # A late row, then a correction: each an event of its own.
    await use(database, tenant_id, TEN, (4, 0, 0))
    assert await collect(database, TEN + HOUR) == 1
    await use(database, tenant_id, TEN, (-75, 0, -7))
    assert await collect(database, TEN + 2 * HOUR) == 5
    assert values(await take(database)) == [
        ("1123T10-prompt-2", "4"),
        ("1123T10-completion-2", "-7"),
        ("1123T10-prompt-3", "-75"),
        ("1123T11-cached_prompt-1", "9"),
        ("1123T11-completion-1", "9"),
        ("1123T11-prompt-1", "9"),
    ]
    assert await take(database) == [] and await collect(database, TEN + 2 * HOUR) == 0
    await use(database, tenant_id, TEN + 2 * HOUR, (0, 0, 9), reasoning=4)
    assert await collect(database, TEN + 3 * HOUR) == 2
    assert values(await take(database)) == [("1123T12-completion-1", "5"), ("1123T12-reasoning-1", "4")]


async def test_hours_before_the_window_are_left_alone(database: Database) -> None:
    tenant_id = await make_tenant(database)
    await use(database, tenant_id, TEN - WINDOW, (1, 0, 0))
    await use(database, tenant_id, TEN - WINDOW - HOUR, (1, 0, 0))
    assert await collect(database, TEN) == 1


async def test_one_transaction_exports_at_a_time(database: Database) -> None:
    async with database.as_operator() as one, database.as_operator() as two:
        assert await MeterExports(one).lock() and not await MeterExports(two).lock()
    async with database.as_operator() as three:
        assert await MeterExports(three).lock()


def test_identifiers_fit_into_what_stripe_takes() -> None:
    longest = identifier(UUID(int=(1 << 128) - 1), TEN, "cached_prompt", 2**31 - 1)
    assert len(longest) <= 100
    assert identifier(UUID(int=0), TEN.astimezone(), "prompt", 1) == identifier(UUID(int=0), TEN, "prompt", 1)


Steps = st.lists(
    st.tuples(st.integers(0, 3), st.tuples(*(st.integers(-5, 9) for _ in range(3))), st.integers(0, 5)),
    max_size=8,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(Steps)
async def test_events_always_sum_to_the_rollups(
    database: Database, steps: list[tuple[int, tuple[int, int, int], int]]
) -> None:
    """Whatever is used in whatever hour between two exports."""
    async with database.as_operator() as session:
        await session.execute(text("DELETE FROM meter_exports"))
    tenant_id = await make_tenant(database, f"tenant-{uuid4().hex[:12]}")
    for hour, tokens, until in steps:
        await use(database, tenant_id, TEN + hour * HOUR, tokens, reasoning=tokens[2] // 2)
        await collect(database, TEN + until * HOUR)
    await collect(database, TEN + 5 * HOUR)
    async with database.as_operator() as session:
        exported = await session.execute(
            text(
                "SELECT hour, meter, sum(value)::bigint FROM meter_exports WHERE tenant_id = :id GROUP BY 1, 2"
            ),
            {"id": tenant_id},
        )
        sums = {(hour, meter): value for hour, meter, value in exported if value}
        used = await session.execute(
            text(
                "SELECT hour, sum(uncached_tokens)::bigint, sum(cached_tokens)::bigint,"
                " sum(completion_tokens - reasoning_tokens)::bigint, sum(reasoning_tokens)::bigint"
                " FROM usage_rollups WHERE tenant_id = :id GROUP BY 1"
            ),
            {"id": tenant_id},
        )
        wanted = {
            (hour, meter): value
            for hour, *classes in used
            for meter, value in zip(METERS, classes, strict=True)
            if value
        }
    assert sums == wanted


def test_every_limit_is_documented_with_its_number() -> None:
    text = README.read_text()
    for phrase in (
        f"closes {CLOSES_AFTER.seconds // 60} minutes after its end",
        f"the last {WINDOW.days} days",
        f"at most {BATCH} events",
    ):
        assert phrase in text, phrase
