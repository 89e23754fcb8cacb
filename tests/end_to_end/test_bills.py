"""What clients received as `usage` adds up to the ledger, the rollups, the report as CSV and the lines of the bills, exactly.

Two tenants in two currencies, four adapters and the base model, prices that change under load, and a month that ends under load.
The border is no jump: from its start on, the gateway's time is ahead of the machine's, so that the month ends soon.
"""

import asyncio
import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from operator import mul
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import UUID

import httpx
import msgspec
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from tests.end_to_end.gateway_farm import MODEL
from tests.end_to_end.moved_gateway import MovedClock, moved_gateway
from tests.end_to_end.priced_load import SCRIPT, Asked, PricedLoad, Tokens
from tests.end_to_end.priced_world import CLASSES, CURRENCIES, World, change_prices, make_world
from typer.testing import CliRunner

from loraplex.platform.cli.main import main
from loraplex.platform.jobs.month_closing import MonthClosing
from loraplex.tenants.database import Database
from loraplex.tenants.models import NO_ID, UsageRecord, UsageRollup

pytestmark = pytest.mark.long

ANSWERS: Final = 2000
AFTER_BORDER: Final = ANSWERS // 4
LEAD_S: Final = 20
"""How long before the border the gateway starts."""
NOTICE: Final = timedelta(seconds=3)
"""How long before its begin a price is set: gateways read prices once a second."""
GRACE: Final = timedelta(hours=1)


@dataclass(frozen=True)
class Row:
    """A row of the ledger."""

    outcome: str
    tokens: Tokens
    amount_pico: int
    tenant_id: UUID
    adapter_id: UUID | None
    price_version_id: UUID | None
    currency: str
    at: datetime


LineKey: TypeAlias = tuple[UUID, str, UUID | None, UUID, str]
"""Tenant, month, adapter, price version, token class."""


def next_border(now: datetime) -> datetime:
    """The begin of a month that is at least a day away: partitions of the ledger exist for it."""
    later = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return (later.replace(day=1) + timedelta(days=32)).replace(day=1)


async def under_load(load: PricedLoad, client: httpx.AsyncClient, world: World, border: datetime) -> int:
    """Change prices while the month ends, and end the load when enough answers came after it. Return the answers before it."""
    running = asyncio.create_task(load.run())
    try:
        await reached(load, running, lambda: load.now() > border - timedelta(seconds=LEAD_S / 2))
        await change_prices(client, world, load.now() + NOTICE)
        await reached(load, running, lambda: load.now() >= border)
        before = load.finished
        enough = max(ANSWERS, before + AFTER_BORDER)
        await reached(load, running, lambda: load.finished >= enough)
        load.end()
        await running
    finally:
        running.cancel()
    return before


async def reached(load: PricedLoad, running: "asyncio.Task[None]", condition: Callable[[], bool]) -> None:
    while not condition():
        assert not running.done(), running.exception()
        await asyncio.sleep(0.01)


async def ledger_rows(database: Database) -> dict[str, Row]:
    """All rows by the ids of their clients, of which each has one row at most."""
    async with database.as_operator() as session:
        records = [*await session.scalars(select(UsageRecord))]
    rows = {str(record.client_request_id): row_of(record) for record in records}
    assert len(rows) == len(records), "a request has two rows"
    return rows


def row_of(record: UsageRecord) -> Row:
    return Row(
        record.outcome,
        Tokens(record.uncached_tokens, record.cached_tokens, record.completion_tokens),
        record.amount_pico,
        record.tenant_id,
        record.adapter_id,
        record.price_version_id,
        record.currency,
        record.admitted_at,
    )


def month_of(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m}"


def check_rows(world: World, load: PricedLoad, rows: Mapping[str, Row]) -> dict[LineKey, int]:
    """Every answer is charged as its client knows it, under the price at its admission; return the tokens of each line.

    Of clients that left, only the ledger knows what they used: at least what they received, at most what they asked for.
    """
    lines: Counter[LineKey] = Counter()
    for name, asked in load.requests.items():
        row = rows.get(name)
        if row is None:
            assert asked.left_in == "prefill" and asked.charged is None, (name, asked)
            continue
        assert asked.sent_at <= row.at, (name, asked, row)
        assert row.tenant_id == world.tenants[asked.tenant], (name, asked, row)
        assert row.adapter_id == world.adapters[asked.tenant, asked.model], (name, asked, row)
        if asked.charged is None:
            check_left(asked, row)
        else:
            assert (row.outcome, row.tokens) == ("completed", asked.charged), (name, asked, row)
            assert asked.charged == asked.expected, (name, asked)
            assert asked.ended_at is not None and row.at <= asked.ended_at, (name, asked, row)
        used = row.tokens if asked.charged is None else asked.charged
        card = world.price(asked.tenant, asked.model, row.at)
        assert (row.price_version_id, row.currency) == (card.id, card.currency), (name, asked, row)
        classes = (used.uncached, used.cached, used.completion)
        assert row.amount_pico == sum(map(mul, classes, card.prices)), (name, asked, row)
        for token_class, tokens in zip(CLASSES, classes, strict=True):
            lines[row.tenant_id, month_of(row.at), row.adapter_id, card.id, token_class] += tokens
    assert rows.keys() <= load.requests.keys()
    return {key: tokens for key, tokens in lines.items() if tokens}


def check_left(asked: Asked, row: Row) -> None:
    most, tokens = asked.expected, row.tokens
    assert asked.left_in is not None, (asked, row)
    assert asked.received <= tokens.completion <= most.completion, (asked, row)
    assert tokens.uncached <= most.uncached and tokens.cached <= most.cached, (asked, row)
    if asked.received:
        assert (tokens.uncached, tokens.cached) == (most.uncached, most.cached), (asked, row)


async def check_rollups(world: World, database: Database, lines: Mapping[LineKey, int]) -> int:
    """The rollups have the tokens of each line, and the amounts of all its classes; return the requests in them."""
    columns = (UsageRollup.uncached_tokens, UsageRollup.cached_tokens, UsageRollup.completion_tokens)
    tokens: Counter[LineKey] = Counter()
    pico: Counter[tuple[UUID, str, UUID | None, UUID]] = Counter()
    requests = 0
    async with database.as_operator() as session:
        for rollup in await session.scalars(select(UsageRollup)):
            adapter_id = None if rollup.adapter_id == NO_ID else rollup.adapter_id
            group = rollup.tenant_id, month_of(rollup.hour), adapter_id, rollup.price_version_id
            for token_class, column in zip(CLASSES, columns, strict=True):
                tokens[*group, token_class] += getattr(rollup, column.key)
            pico[group] += int(rollup.amount_pico)
            requests += rollup.requests
    assert {key: count for key, count in tokens.items() if count} == lines
    expected: Counter[tuple[UUID, str, UUID | None, UUID]] = Counter()
    for key, amount in amounts(world, lines).items():
        expected[key[:4]] += amount
    assert pico == expected
    return requests


def amounts(world: World, lines: Mapping[LineKey, int]) -> dict[LineKey, int]:
    """Pico-units of each line: its tokens times its price."""
    prices = {card.id: dict(zip(CLASSES, card.prices, strict=True)) for card in world.cards}
    return {key: tokens * prices[key[3]][key[4]] for key, tokens in lines.items()}


async def check_csv(url: str, world: World, lines: Mapping[LineKey, int], border: datetime) -> int:
    """Each tenant's own report of both months as CSV has the sums over prices; return its rows."""
    found: dict[tuple[UUID, str, UUID | None, str], tuple[int, int]] = {}
    for caller in world.callers:
        query = {
            "from": (border - timedelta(days=40)).isoformat(),
            "to": (border + timedelta(days=2)).isoformat(),
            "bucket": "1mo",
            "group_by": "adapter,class",
            "format": "csv",
        }
        headers = {"authorization": f"Bearer {caller.key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
            response = await client.get("/tenant/v1/usage", params=query)
        assert response.status_code == 200, response.text
        for row in csv.DictReader(io.StringIO(response.text)):
            assert row["currency"] == CURRENCIES[caller.tenant]
            month = month_of(datetime.fromisoformat(row["start"]))
            adapter_id = world.adapters[caller.tenant, row["adapter"] or MODEL]
            key = world.tenants[caller.tenant], month, adapter_id, row["token_class"]
            count = int(row["prompt_tokens"]) + int(row["completion_tokens"])
            assert found.setdefault(key, (count, int(row["amount_pico"]))) == (count, int(row["amount_pico"]))
    expected: dict[tuple[UUID, str, UUID | None, str], tuple[int, int]] = {}
    for line, pico in amounts(world, lines).items():
        key = line[0], line[1], line[2], line[4]
        before = expected.get(key, (0, 0))
        expected[key] = before[0] + lines[line], before[1] + pico
    assert found == expected
    return len(found)


async def close_months(database: Database, border: datetime) -> None:
    """The job of a gateway, at the end of each month and after its grace."""
    now = border

    async def clock(session: AsyncSession) -> datetime:
        return now

    job = MonthClosing(database=database, grace=GRACE, clock=clock)
    for end in (border, (border + timedelta(days=32)).replace(day=1)):
        for now in (end + timedelta(minutes=1), end + GRACE + timedelta(minutes=1)):
            await job.close()


async def check_bills(url: str, world: World, lines: Mapping[LineKey, int], folder: Path) -> tuple[int, int]:
    """Each tenant has a final bill of each month with exactly these lines, and its export agrees, offline; return the number of
    bills, and the rows of their exports.
    """
    found: dict[LineKey, tuple[int, int]] = {}
    bills = exported = 0
    for caller in world.callers:
        headers = {"authorization": f"Bearer {caller.key}"}
        async with httpx.AsyncClient(
            base_url=f"{url}/tenant/v1/billing", headers=headers, timeout=60
        ) as client:
            for listed in (await client.get("/invoices")).json()["data"]:
                bill = (await client.get(f"/invoices/{listed['id']}")).json()
                assert (bill["state"], bill["currency"]) == ("final", CURRENCIES[caller.tenant])
                for line in bill["lines"]:
                    key = line_key(world.tenants[caller.tenant], line)
                    assert (line["kind"], line["month"]) == ("usage", bill["month"]), line
                    assert key not in found
                    found[key] = line["tokens"], int(line["amount_pico"])
                    # Rounds half to even.
                    assert line["amount_micro"] == round(Fraction(int(line["amount_pico"]), 10**6))
                assert bill["subtotal_micro"] == sum(line["amount_micro"] for line in bill["lines"])
                bills += 1
                exported += await asyncio.to_thread(verified_rows, bill["id"], folder / bill["id"])
    assert found == {key: (lines[key], pico) for key, pico in amounts(world, lines).items()}
    return bills, exported


def line_key(tenant_id: UUID, line: Mapping[str, Any]) -> LineKey:
    adapter_id = None if line["adapter_id"] is None else UUID(line["adapter_id"])
    return tenant_id, line["month"], adapter_id, UUID(line["price_version_id"]), line["token_class"]


def command(*arguments: str) -> str:
    """The output of a command that succeeds."""
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def verified_rows(invoice_id: str, folder: Path) -> int:
    """Export a bill, verify it, and return the number of its rows."""
    command("invoice", "export", invoice_id, str(folder))
    assert "agrees in every digit" in command("invoice", "verify", str(folder))
    with (folder / "usage.csv").open() as file:
        return sum(1 for _ in csv.DictReader(file))


async def test_bills_agree_with_what_clients_received(
    database: Database, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database.url)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    world = await make_world(database)
    border = next_border(datetime.now(UTC))
    clock = MovedClock.before(border, LEAD_S)
    clock.install(monkeypatch)
    async with moved_gateway(database, valkey_url, tmp_path / "journal", SCRIPT) as url:
        load = PricedLoad(url, world.callers, clock.now)
        headers = {"authorization": f"Bearer {world.operator}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as operator:
            before = await under_load(load, operator, world, border)
    rows = await ledger_rows(database)
    lines = check_rows(world, load, rows)
    assert await check_rollups(world, database, lines) == len(rows)
    await close_months(database, border)
    async with moved_gateway(database, valkey_url, tmp_path / "journal", SCRIPT) as url:
        reported = await check_csv(url, world, lines, border)
        compared = msgspec.json.decode(await asyncio.to_thread(command, "usage", "reconcile", "--json"))
        bills, exported = await check_bills(url, world, lines, tmp_path)
    assert (bills, exported) == (4, len(rows))
    assert all(each["sums"] and not each["drift_pico"] for each in compared), compared
    assert {row.price_version_id for row in rows.values()} == {card.id for card in world.cards}
    print(f"\n{figures(load, rows, before, border)}")
    print(
        f"{len(lines)} lines of {bills} bills, {reported} rows of CSV, {exported} rows exported and verified"
    )
    print("reconcile, drift 0:", {each["compared"]: each["sums"] for each in compared})


def figures(load: PricedLoad, rows: Mapping[str, Row], before: int, border: datetime) -> str:
    left = {name: asked.left_in for name, asked in load.requests.items() if asked.left_in is not None}
    ends = Counter((where, rows[name].outcome if name in rows else "no row") for name, where in left.items())
    assert ends["stream", "aborted"] and ends["prefill", "aborted"], ends
    across = sum(row.at < border <= (load.requests[name].ended_at or border) for name, row in rows.items())
    pico: Counter[str] = Counter()
    for row in rows.values():
        pico[row.currency] += row.amount_pico
    versions = Counter(row.price_version_id for row in rows.values())
    return (
        f"{load.finished} answers, {before} before the border, {across} requests across it: {dict(load.kinds)}\n"
        f"{len(left)} left: {dict(ends)}\n{len(rows)} rows, pico-units {dict(pico)}, "
        f"by price version {sorted(versions.values())}"
    )
