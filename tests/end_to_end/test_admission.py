"""Four gateways admit one tenant: clients disconnect, a gateway is killed, Valkey loses its data, and no limit is exceeded."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest
import redis
from tests.end_to_end.gateway_farm import JOURNAL_BYTES, MODEL, FarmGateway, FarmPlan, price_of
from tests.tenants.admission.gateways import limited_subjects
from tests.tenants.admission.memory_journal import MemoryJournal
from tests.tenants.billing.fixed_prices import fixed_prices

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.bench.client import CompletionRequest, StreamRecord, stream_completion
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.recovery import ship_left_behind
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.counters.counter_replies import LimitUse
from loraplex.tenants.database import Database
from loraplex.tenants.models import Quota
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.valkey import open_valkey

ROOT = Path(__file__).resolve().parents[2]
GATEWAYS = 4
WORKERS = 20
LEASE_S, HEARTBEAT_S = 2.0, 0.4
# Two clocks' readings of one moment, and a pruned lease's last beat.
SLACK_S = 0.05
# Rates of the tenant are high: after Valkey was emptied they begin at nothing, and the rest is to be tried then as well.
OF_TENANT = QuotaLimits(
    requests_per_minute=20_000,
    tokens_per_minute=600_000,
    concurrent_requests=12,
    tokens_per_day=40_000,
    budget_per_month=100_000,
)
OF_KEYS = {
    "free": QuotaLimits(),
    "requests": QuotaLimits(requests_per_minute=8),
    "tokens": QuotaLimits(tokens_per_minute=300),
    "places": QuotaLimits(concurrent_requests=2),
    "day": QuotaLimits(tokens_per_day=200),
    "money": QuotaLimits(budget_per_day=300),
}
BOUND = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "tokens_per_day",
    "budget_per_day",
)
SCRIPT = FakeScript(token_interval_s=0.01, cached_tokens=2)
# Not of open reservations: an end waits in the journal of its gateway, while another one ships what took its place.
SETTLED = """
SELECT coalesce(sum(uncached_tokens + cached_tokens + completion_tokens), 0)::bigint,
    coalesce(sum((amount_pico + 999) / 1000), 0)::bigint
FROM usage_records WHERE tenant_id = %(tenant)s AND (%(key)s::uuid IS NULL OR api_key_id = %(key)s)
"""
RECORDS = """
SELECT api_key_id, outcome, uncached_tokens + cached_tokens + completion_tokens, (amount_pico + 999) / 1000, admitted_at,
    settled_at
FROM usage_records WHERE tenant_id = %s ORDER BY admitted_at
"""


@dataclass(frozen=True)
class Subject:
    """A level with its limits; `api_key_id` None: the tenant."""

    name: str
    api_key_id: UUID | None
    limits: QuotaLimits


@dataclass
class Run:
    """Results of the load. `refusals`: how often each limit refused."""

    tenant_id: UUID
    subjects: list[Subject]
    keys: list[str]
    gateways: list[FarmGateway]
    plan: FarmPlan
    refusals: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    left: int = 0
    over: bool = False
    killed_at: datetime | None = None
    snapshots: int = 0
    recovered: set[UUID] = field(default_factory=set)
    places: list[tuple[UUID | None, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    api_key_id: UUID
    outcome: str
    tokens: int
    nano: int
    began: datetime
    ended: datetime


@contextmanager
def farm(plan: FarmPlan) -> Iterator[list[FarmGateway]]:
    command = [sys.executable, "-m", "tests.end_to_end.gateway_farm"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(plan) + b"\n")
        process.stdin.flush()
        yield msgspec.json.decode(process.stdout.readline(), type=list[FarmGateway])
    finally:
        process.kill()
        process.wait()


async def prepare(database: Database) -> tuple[UUID, list[Subject], list[str]]:
    """One tenant and a key per limit, each hit hardest by its own limit, all under the tenant's."""
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).create("hammered")
        session.add(Quota(tenant_id=tenant.id, **dict(OF_TENANT.items())))
        subjects, keys = [Subject("tenant", None, OF_TENANT)], []
        for name, limits in OF_KEYS.items():
            issued = await KeyRepository(session).create(tenant.id, name, ["inference"])
            session.add(Quota(tenant_id=tenant.id, api_key_id=issued.record.id, **dict(limits.items())))
            subjects.append(Subject(name, issued.record.id, limits))
            keys.append(issued.plaintext)
    return tenant.id, subjects, keys


async def hammer(run: Run, seed: int) -> None:
    draw = random.Random(seed)
    while not run.over:
        prompt = [draw.randrange(400) for _ in range(draw.randrange(3, 20))]
        leaves = draw.randrange(1, 6) if draw.random() < 0.3 else None
        asked = CompletionRequest(MODEL, prompt, draw.randrange(4, 25), draw.choice(run.keys), leaves)
        record = await stream_completion(draw.choice(run.gateways).url, asked)
        run.left += record.cancelled
        if record.status == 200 and record.chunks:
            api_key_id = run.subjects[run.keys.index(asked.api_key) + 1].api_key_id
            run.places.append((api_key_id, record.chunks[0][0], record.chunks[-1][0] - SLACK_S))
        run.answered += record.error is None
        if record.error is not None:
            found = re.search(r"(\w+) of the (\w+) is", record.error)
            run.refusals[f"{found[2]} {found[1]}" if found else record.error.partition(":")[0]] += 1
            await asyncio.sleep(draw.random() * 0.04)


async def watch(run: Run, connection: psycopg.AsyncConnection[Any]) -> None:
    """Read the sum of settled usage repeatedly, each time from one snapshot of the usage ledger."""
    while True:
        for subject in run.subjects:
            names = {"tenant": run.tenant_id, "key": subject.api_key_id}
            row = await (await connection.execute(SETTLED, names)).fetchone()
            assert row is not None
            check_totals(subject, *row)
            run.snapshots += 1
        await asyncio.sleep(0.05)


def check_totals(subject: Subject, tokens: int, nano: int) -> None:
    limits = subject.limits
    for limit in (limits.tokens_per_day, limits.tokens_per_month):
        assert limit is None or tokens <= limit, (subject.name, tokens)
    for limit in (limits.budget_per_day, limits.budget_per_month):
        assert limit is None or nano <= limit * 1000, (subject.name, nano)


async def disturb(run: Run, database: Database, answers: int) -> None:
    """In the course of `answers` answers one gateway is killed, its journal is shipped, and Valkey is emptied twice; it goes on
    until every limit has refused.
    """
    valkey_url = run.plan.valkey_url
    await answered(run, answers // 4)
    await kill_at_work(run)
    journals = Path(run.plan.journals)
    async with asyncio.timeout(60):
        # A killed process closes its connections before it lets its journal's lock go.
        while not run.recovered:
            run.recovered = await ship_left_behind(
                database, journals, max_bytes=JOURNAL_BYTES, lease_s=LEASE_S
            )
    with redis.Redis.from_url(valkey_url) as client:
        for share in (2, 3):
            await answered(run, answers * share // 4)
            client.flushall()
    await answered(run, answers)
    while not all(run.refusals[f"key {limit}"] for limit in BOUND):
        await asyncio.sleep(0.02)
    run.over = True


async def answered(run: Run, count: int) -> None:
    while run.answered < count:
        await asyncio.sleep(0.02)


async def kill_at_work(run: Run) -> None:
    """Kill a gateway while it answers at least one request."""
    gone = run.gateways.pop(0)
    asked = CompletionRequest(MODEL, [1, 2, 3], 400, run.keys[0])
    while True:
        record = StreamRecord(asked)
        answering = asyncio.create_task(stream_completion(gone.url, asked, record))
        while not record.chunks and not answering.done():
            await asyncio.sleep(0.005)
        if record.status == 200 and record.chunks:
            break
    os.kill(gone.pid, signal.SIGKILL)
    run.killed_at = datetime.now().astimezone()
    await answering


async def quiet(run: Run, connection: psycopg.AsyncConnection[Any]) -> None:
    """Until nothing is reserved any more: the dead gateway's leases have ended, and others have reaped them."""
    query = "SELECT count(*) FROM reservations WHERE tenant_id = %s"
    async with asyncio.timeout(LEASE_S + 60):
        while await (await connection.execute(query, [run.tenant_id])).fetchone() != (0,):
            await asyncio.sleep(0.05)


async def storm(database: Database, plan: FarmPlan, answers: int) -> tuple[Run, list[Record], list[LimitUse]]:
    tenant_id, subjects, keys = await prepare(database)
    with farm(plan) as gateways:
        run = Run(tenant_id, subjects, keys, [*gateways], plan)
        async with await as_writer(plan.database_url) as connection:
            await ready(gateways)
            watching = asyncio.create_task(watch(run, connection))
            async with asyncio.timeout(max(answers, 300)):
                workers = [hammer(run, seed) for seed in range(WORKERS)]
                await asyncio.gather(disturb(run, database, answers), *workers)
            assert not watching.done(), watching.exception()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await quiet(run, connection)
            rows = await (await connection.execute(RECORDS, [tenant_id])).fetchall()
        return run, [Record(*row) for row in rows], await counted(database, plan, tenant_id)


async def as_writer(url: str) -> psycopg.AsyncConnection[Any]:
    return await psycopg.AsyncConnection.connect(url, autocommit=True, options="-c role=app_writer")


async def ready(gateways: Sequence[FarmGateway]) -> None:
    for gateway in gateways:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            break


async def counted(database: Database, plan: FarmPlan, tenant_id: UUID) -> list[LimitUse]:
    """Usage by Valkey's counters, once the last settlement has reached them."""
    client = open_valkey(plan.valkey_url)
    admissions = QuotaAdmissionController(
        database, client, fixed_prices(price_of(plan)), uuid4(), journal=MemoryJournal()
    )
    subjects = await limited_subjects(admissions, tenant_id)
    async with asyncio.timeout(60):
        uses = await admissions.quotas(tenant_id, subjects)
        while any(use.reserved for use in uses):
            await asyncio.sleep(0.05)
            uses = await admissions.quotas(tenant_id, subjects)
    await admissions.close()
    await client.aclose()
    return uses


def check_rates(subject: Subject, records: Sequence[Record]) -> None:
    """At most L(1 + t/60) requests in any t seconds, and as many tokens from the beginning on."""
    rate = subject.limits.requests_per_minute
    for first, begin in enumerate(records if rate is not None else ()):
        for last in range(first, len(records)):
            seconds = (records[last].began - begin.began).total_seconds() + SLACK_S
            assert last - first + 1 <= int((rate or 0) * (1 + seconds / 60)), (subject.name, first, last)
    rate, spent = subject.limits.tokens_per_minute, 0
    for record in records if rate is not None else ():
        spent += record.tokens
        seconds = (record.began - records[0].began).total_seconds() + SLACK_S
        assert spent <= (rate or 0) * (1 + seconds / 60), (subject.name, spent)


def check_places(subject: Subject, run: Run) -> int:
    """The most that ran at once, as their clients saw it: a client reads what it gets somewhat later."""
    changes: list[tuple[float, int]] = []
    for api_key_id, began, ended in run.places:
        if subject.api_key_id in (None, api_key_id) and began < ended:
            changes += [(began, 1), (ended, -1)]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    limit = subject.limits.concurrent_requests
    assert limit is None or most <= limit, (subject.name, most)
    return most


def check_counters(run: Run, records: Sequence[Record], uses: Sequence[LimitUse]) -> None:
    """Check that Valkey's counters equal the usage ledger."""
    keys = {subject.api_key_id: subject.name for subject in run.subjects}
    seen = 0
    for use in uses:
        own = [each for each in records if use.level == "tenant" or each.api_key_id == use.subject_id]
        expected = {
            "concurrent_requests": 0,
            "tokens_per_day": sum(each.tokens for each in own),
            "tokens_per_month": sum(each.tokens for each in own),
            "budget_per_day": -(-sum(each.nano for each in own) // 1000),
            "budget_per_month": -(-sum(each.nano for each in own) // 1000),
        }
        if use.name in expected:
            seen += 1
            assert (use.used, use.reserved) == (expected[use.name], 0), (keys.get(use.subject_id), use)
    limited = sum(subject.limits != QuotaLimits() for subject in run.subjects)
    assert seen >= 5 * limited


def test_no_limit_is_exceeded_and_the_counters_end_equal_to_the_ledger(
    database_url: str, valkey_url: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    answers = 1000 if request.config.getoption("--full-admission") else 120
    plan = FarmPlan(
        database_url=database_url,
        valkey_url=valkey_url,
        journals=str(tmp_path),
        gateways=GATEWAYS,
        price_prompt=1_000_000,
        price_cached=500_000,
        price_completion=2_000_000,
        lease_s=LEASE_S,
        heartbeat_s=HEARTBEAT_S,
        valkey_s=1.0,
        script=SCRIPT,
    )

    async def work() -> tuple[Run, list[Record], list[LimitUse]]:
        database = Database(database_url, pool_size=2)
        try:
            return await storm(database, plan, answers)
        finally:
            await database.close()

    run, records, uses = asyncio.run(work())
    outcomes = Counter(record.outcome for record in records)
    most = {}
    for subject in run.subjects:
        own = [each for each in records if subject.api_key_id in (None, each.api_key_id)]
        check_rates(subject, own)
        check_totals(subject, sum(each.tokens for each in own), sum(each.nano for each in own))
        most[subject.name] = check_places(subject, run)
    check_counters(run, records, uses)
    print(f"\n{outcomes}, refused by {run.refusals}, most at once {most}, {run.snapshots} snapshots")
    assert run.left > 5 and run.snapshots > 20
    assert outcomes["completed"] > 10 and outcomes["aborted"] > 5 and outcomes["unknown"] > 0
    assert run.recovered == {run.tenant_id}
    assert run.refusals["tenant concurrent_requests"], run.refusals
